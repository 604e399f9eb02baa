"""Ranks find out that they disagree before they capture a graph, by a store with a timeout. Real stores."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from ranks import STAGE, compared, report
from vllm_graphfix.engine import own_report, rank_agreement, rank_report
from vllm_graphfix.engine.process import EngineProcess
from vllm_graphfix.engine.rank_agreement import compare, publish, publish_end
from vllm_graphfix.engine.rank_report import RankReport
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.ranks import BoundedStore, StoreLostError
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.decision import decide


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait looks for ends on other ranks more often, and a store that this process holds outlives its readers."""
    monkeypatch.setattr(rank_agreement, "_SLICE", 0.2)
    monkeypatch.setattr(rank_agreement, "_LAST_READERS", 0.1)


def test_ranks_that_say_the_same_agree() -> None:
    reports = {rank: report(f"node-{rank // 2}") for rank in range(4)}
    agreements, warnings = compared(reports, 4)
    for rank in reports:
        assert (agreements[rank].world_size, agreements[rank].agreeing, agreements[rank].difference) == (4, 4, None)
        assert (agreements[rank].group, agreements[rank].leader) == (reports[0].token, reports[0].engine)
    assert warnings == []


def test_nodes_that_started_on_their_own_agree_although_each_has_its_own_engine() -> None:
    agreements, _ = compared({0: report(engine="a" * 16), 1: report("node-b", engine="b" * 16)}, 2)
    assert {each.difference for each in agreements.values()} == {None}
    assert {each.leader for each in agreements.values()} == {"a" * 16}
    # Its front-end knows by them which files to read.
    assert (agreements[0].followers, agreements[1].followers) == (("b" * 16,), ())


def test_rank_0_knows_the_engines_of_ranks_that_differ_too() -> None:
    agreements, _ = compared({0: report(engine="a" * 16), 1: report("node-b", engine="b" * 16, master="off")}, 2)
    assert agreements[0].difference is not None
    assert (agreements[0].followers, agreements[1].followers) == (("b" * 16,), ())


def test_a_rank_of_another_build_that_leaves_no_engine_is_not_waited_for() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=3600))
    place, _ = (publish(store, STAGE, rank, report()) for rank in (0, 1))
    assert store.delete_key(f"{place}/engine/1")
    agreement = compare(store, place, 0, 2, report(), print, timeout=60.0)
    assert (agreement.agreeing, agreement.followers) == (2, ())


def test_what_is_too_large_for_a_report_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(json, "loads", decoded.append)
    assert RankReport.decode(b" " * 2**21 + b"{}") is None
    assert decoded == []


def test_the_largest_report_is_read() -> None:
    texts = {f"{number:064}": "\N{GOTHIC LETTER AHSA}" * 255 for number in range(64)}
    graphs = [(f"{number:064}", f"{'g' * 80} PIECEWISE {number:09}") for number in range(rank_report.MOST_GRAPHS)]
    largest = report(modes=texts, states=texts, reasons=texts, failed=texts, graphs=graphs)
    assert RankReport.decode(largest.encode()) == largest


def test_code_that_a_rank_does_not_run_differs_from_nothing() -> None:
    """A drafter is on the last stage of a pipeline only; elsewhere its fix waits for an import that never comes."""
    states = {"mamba-padding": "active", "capture-state": "waiting"}
    agreements, _ = compared({0: report(states=states), 1: report()}, 2)
    assert agreements[1].difference is None
    assert agreements[0].agreeing == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"canary": False}, "in the rollout is 'yes' on ranks 0-1, 3 (node-a); 'no' on rank 2 (node-b)."),
        ({"master": "off"}, "VLLM_GRAPHFIX is 'on' on ranks 0-1, 3 (node-a); 'off' on rank 2 (node-b)."),
        ({"graphfix": "0.2.0"}, "vllm-graphfix is '0.1.0' on ranks 0-1, 3 (node-a); '0.2.0' on rank 2 (node-b)."),
        ({"vllm": "0.20.0"}, "vLLM is '0.21.0' on ranks 0-1, 3 (node-a); '0.20.0' on rank 2 (node-b)."),
        (
            {"modes": {"mamba-padding": "off", "capture-state": "auto"}},
            "the mode of mamba-padding is 'auto' on ranks 0-1, 3 (node-a); 'off' on rank 2 (node-b).",
        ),
        (
            {"states": {"mamba-padding": "failed", "capture-state": "active"}},
            "mamba-padding is 'active' on ranks 0-1, 3 (node-a); 'failed' on rank 2 (node-b).",
        ),
    ],
)
def test_a_difference_names_what_differs_and_the_ranks_with_their_hosts(changed: dict[str, Any], what: str) -> None:
    reports = {rank: report() for rank in (0, 1, 3)} | {2: report("node-b", **changed)}
    agreements, _ = compared(reports, 4)
    assert {each.difference for each in agreements.values()} == {what}
    assert {each.agreeing for each in agreements.values()} == {3}


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        (
            "SHADOW",
            "1/100",
            "the mode of shadow is 'off, report' on rank 0 (node-a); '1/100, report' on rank 1 (node-a).",
        ),
        (
            "SHADOW_GRAPHS",
            "all",
            "the mode of shadow is 'off, report' on rank 0 (node-a); 'off, report, all graphs' on rank 1 (node-a).",
        ),
        ("ADDRESSES", "off", "the mode of addresses is 'report' on rank 0 (node-a); 'off' on rank 1 (node-a)."),
        (
            "KV_MARKS",
            "1/8",
            "the mode of kv-marks is 'off, report' on rank 0 (node-a); '1/8, report' on rank 1 (node-a).",
        ),
        (
            "KV_MARKS_ACTION",
            "abort",
            "the mode of kv-marks is 'off, report' on rank 0 (node-a); 'off, abort' on rank 1 (node-a).",
        ),
    ],
)
def test_ranks_that_decide_differently_about_a_detector_differ(
    variable: str, value: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_report, "host_name", lambda: "node-a")
    reports = {}
    for rank, environment in enumerate(({}, {f"VLLM_GRAPHFIX_{variable}": value})):
        me = EngineProcess(FIXES, environment)
        me.decision = decide(settings.read(environment, tuple(fix.name for fix in FIXES)), "0.21.0")
        monkeypatch.setitem(vars(me.manager), "states", dict)
        report_of_rank = own_report.own_report(me)
        assert report_of_rank is not None
        reports[rank] = report_of_rank
    agreements, _ = compared(reports, 2)
    assert {each.difference for each in agreements.values()} == {what}


@pytest.mark.parametrize("silent", [0, 3], ids=["rank 0", "another rank"])
def test_a_rank_without_the_plugin_is_named_after_a_time_and_nobody_hangs(silent: int) -> None:
    reports = {rank: report() for rank in range(4) if rank != silent}
    started = time.monotonic()
    agreements, _ = compared(reports, 4, timeout=2.0)
    assert time.monotonic() - started < 25
    for each in agreements.values():
        assert each.difference is not None
        host = "10.0.0.3" if silent == 3 else "an unknown host"
        assert each.difference.startswith(f"No report within 2 s: rank {silent} on {host}.")
        assert "VLLM_PLUGINS" in each.difference
        assert "or it failed before it could report" in each.difference
        assert each.agreeing == 3


def test_a_rank_that_is_late_is_waited_for_and_named_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "WARN_AFTER", 0.2)
    monkeypatch.setattr(RankReport, "compared", slow_on_rank_1(RankReport.compared))
    agreements, warnings = compared({0: report(), 1: report("late")}, 2)
    assert agreements[0].difference is None
    assert any("more for rank 1 to report" in warning for warning in warnings)


def slow_on_rank_1(real: Callable[[RankReport], dict[str, str]]) -> Callable[[RankReport], dict[str, str]]:
    def compared(self: RankReport) -> dict[str, str]:
        if self.host == "late":
            time.sleep(1.0)
        return real(self)

    return compared


def test_ranks_that_are_all_switched_off_say_so() -> None:
    agreements, _ = compared({0: report(master="off", off=True), 1: report(master="off", off=True)}, 3, timeout=0.5)
    assert all(each.all_off and each.difference is not None for each in agreements.values())
    agreements, _ = compared({0: report(master="off", off=True), 1: report()}, 2)
    assert not any(each.all_off for each in agreements.values())


def test_a_word_is_there_for_whoever_compares_later() -> None:
    """While memory is measured some ranks compare and others do not: none waits for one that has spoken and gone on."""
    store = HashStore()
    publish(store, STAGE, 1, report())
    mine = report()
    agreement = compare(store, publish(store, STAGE, 0, mine), 0, 2, mine, lambda text: None, timeout=1.0)
    assert agreement.difference is None


def test_ranks_that_join_later_are_compared_in_the_store_that_they_share() -> None:
    """This happens when vLLM scales expert parallelism up: groups are made anew, and with them the store."""
    old, new = report(), report("node-b")
    publish(HashStore(), STAGE, 0, old)
    shared = HashStore()
    places = {publish(shared, STAGE, 0, old), publish(shared, STAGE, 1, new)}
    assert len(places) == 1
    assert compare(shared, places.pop(), 0, 2, old, lambda text: None, timeout=1.0).difference is None


def test_a_rank_s_words_are_counted_in_the_store() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = HashStore(), TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for store in stores:
        mine = PrefixStore("vllm_graphfix", store)
        assert [publish(mine, STAGE, rank, report()) for rank in (0, 0, 1, 0)] == [f"{STAGE}-{n}" for n in (1, 2, 1, 3)]


def test_a_word_of_another_version_is_a_difference_and_no_crash() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    mine = report()
    place = publish(store, STAGE, 0, mine)
    store.set(f"{place}/1", "another digest")
    store.set(f"{place}/word/1", json.dumps({"something": "else"}))
    agreement = compare(store, place, 0, 2, mine, lambda text: None, timeout=1.0)
    assert agreement.difference == "Another version of vllm-graphfix reported for rank 1."
    assert agreement.agreeing == 1


def test_a_digest_without_a_word_is_a_difference_and_is_not_waited_for() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    mine = report()
    place = publish(store, STAGE, 0, mine)
    store.set(f"{place}/1", "a digest")
    started = time.monotonic()
    agreement = compare(store, place, 0, 2, mine, lambda text: None, timeout=1.0)
    assert time.monotonic() - started < 4
    assert agreement.difference == "Another version of vllm-graphfix reported for rank 1."


def test_ranks_that_cannot_tell_their_states_do_not_agree_though_they_say_the_same() -> None:
    agreements, _ = compared({rank: report(states={}, fault="OSError: no files.") for rank in (0, 1)}, 2)
    what = "Which fixes are active is not known on ranks 0-1 (node-a): OSError: no files."
    assert {(each.difference, each.agreeing) for each in agreements.values()} == {(what, 0)}


def test_a_rank_that_cannot_tell_its_states_differs_from_ranks_that_can() -> None:
    agreements, _ = compared({0: report(), 1: report("node-b", states={}, fault="OSError: no files")}, 2)
    what = "Which fixes are active is not known on rank 1 (node-b): OSError: no files."
    assert {(each.difference, each.agreeing) for each in agreements.values()} == {(what, 1)}


def test_a_fix_that_failed_on_some_ranks_is_named_with_the_reason() -> None:
    reasons = {"mamba-padding": "OSError: no files", "capture-state": "OSError: no files"}
    failed = report("node-b", states=dict.fromkeys(reasons, "failed"), reasons=reasons)
    agreements, _ = compared({0: report(), 1: failed, 2: failed}, 3)
    assert agreements[0].difference is not None
    assert agreements[0].difference.endswith(
        "'failed' on ranks 1-2 (node-b). "
        "The reason on ranks 1-2 (node-b) for capture-state, mamba-padding: OSError: no files."
    )
    assert {each.difference for each in agreements.values()} == {agreements[0].difference}


def test_a_reason_is_no_difference() -> None:
    states = {"mamba-padding": "failed", "capture-state": "active"}
    reports = {
        rank: report(states=states, reasons={"mamba-padding": f"OSError: /proc/{rank}", "capture-state": ""})
        for rank in (0, 1)
    }
    agreements, _ = compared(reports, 2)
    assert {each.difference for each in agreements.values()} == {None}


def test_where_the_capture_of_one_rank_has_ended_nobody_waits_for_one_that_hangs() -> None:
    """Another rank hangs in a collective with it, and vLLM tells of the error once this rank has come back."""
    store: Any = HashStore()
    mine, its = report(), report(ended=True)
    place = publish(store, "captured", 0, mine)
    publish_end(store, publish(store, "captured", 1, its))
    begun = time.monotonic()
    agreement = compare(store, place, 0, 3, mine, lambda text: None, timeout=60.0)
    assert time.monotonic() - begun < 30
    assert agreement.failing[1].ended


class StoppedStoreDouble:
    """In place of the store of a host that was cut off: `get` waits until the test ends."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.calls = 0

    def get(self, key: str) -> bytes:
        self.calls += 1
        self.ends.wait()
        return b""


def test_a_call_of_a_store_that_does_not_answer_ends_and_no_further_one_waits() -> None:
    """The lost call holds the store's lock, so that another one could only wait as well."""
    stopped = StoppedStoreDouble()
    store = BoundedStore(stopped, 0.01)
    for _ in range(2):
        with pytest.raises(StoreLostError, match="the host of rank 0"):
            store.get("key")
    stopped.ends.set()
    assert stopped.calls == 1


def test_a_store_that_answers_is_as_it_is_without_the_bound() -> None:
    store = BoundedStore(PrefixStore("prefix", HashStore()), 60.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert not store.check(["another"])
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        store.wait(["another"], timedelta(milliseconds=10))
    assert store.underlying_store.get("prefix/key") == b"value"
