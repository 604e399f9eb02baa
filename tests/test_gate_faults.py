"""A call fails at the gate of one rank of two, around a double of a worker: nobody hangs, and who stops says why."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import distributed_c10d

from gate_doubles import process_double, worker_of
from ranks import STAGE, report
from records import eventually
from vllm_graphfix import ranks
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.engine import capture_gate, gate_reports, own_report, rank_agreement, rank_report
from vllm_graphfix.engine.capture_gate import STOPS, GraphfixError
from vllm_graphfix.engine.gate_reports import PROFILING, WARM_UP
from vllm_graphfix.engine.process import EngineProcess
from vllm_graphfix.engine.rank_agreement import Agreement, compare, publish
from vllm_graphfix.engine.role import Role
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.ranks import StoreLostError, host_in
from vllm_graphfix.records import read
from vllm_graphfix.settings.environment import STATUS_DIR


class Faults:
    """One fault in what the plugin asks of the store or the system; *number* None is a fault of each call."""

    def __init__(self, rank: int, operation: str, number: int | None, error: Exception) -> None:
        self.rank, self.operation, self.number, self.error = rank, operation, number, error
        self.calls = 0
        self.fired = False
        self.here = threading.local()

    def around(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if operation == self.operation and getattr(self.here, "rank", None) == self.rank:
                self.calls += 1
                if self.number in (None, self.calls):
                    self.fired = True
                    raise self.error
            return call(*args, **kwargs)

        called.__name__ = operation
        return called


STORE = ("add", "set", "wait", "check", "multi_get", "get")
SYSTEM = ("host_name", "urandom", "monotonic", "states")


class FailingStore:
    """A real store, with faults."""

    def __init__(self, store: Any, faults: Faults) -> None:
        for operation in STORE:
            setattr(self, operation, faults.around(operation, getattr(store, operation)))
        if hasattr(store, "underlying_store"):
            self.underlying_store = FailingStore(store.underlying_store, faults)


def gate_of_two(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    *,
    master: str = "auto",
    differ: bool = False,
    ended: float = 20.0,
    timeout: str = "3",
) -> dict[int, str]:
    """Take two ranks from profiling to the last gate; return the outcome of each.

    Where one stops, the engine ends the other.
    """
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=5))
    real, barrier, outcomes = distributed_c10d.PrefixStore, threading.Barrier(2), dict[int, str]()

    def run(rank: int) -> None:
        faults.here.rank = rank
        environment = {"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": timeout}
        environment |= {} if master == "auto" else {"VLLM_GRAPHFIX": master}
        me = process_double(environment)
        state = State.OFF if differ and rank == 1 else State.ACTIVE
        states_double = {fix.name: FixState(fix.name, Mode.AUTO, None, state, "") for fix in FIXES}
        vars(me.manager)["states"] = faults.around("states", lambda **_: states_double)
        worker_double = worker_of(rank)
        try:
            guarded(me.gate.reports.publish_report, "profiling")
            barrier.wait()
            me.gate.before_capture(worker_double, PROFILING)
            barrier.wait()
            me.gate.before_capture(worker_double, WARM_UP)
            barrier.wait()
            outcomes[rank] = "starts"
        except GraphfixError as error:
            outcomes[rank] = str(error)
            barrier.abort()
        except threading.BrokenBarrierError:
            outcomes[rank] = "is ended"

    with monkeypatch.context() as patched:
        patched.setattr(distributed_c10d, "_get_default_store", lambda: shared)
        patched.setattr(distributed_c10d, "PrefixStore", lambda name, store: FailingStore(real(name, store), faults))
        # Its calls are made in a thread of their own, which is no rank's here; `test_agreement.py` has its bound.
        patched.setattr(ranks, "BoundedStore", lambda store, *_: store)
        for module in (capture_gate, gate_reports):
            patched.setattr(module, "world", lambda: (faults.here.rank, 2))
        patched.setattr(own_report, "host_name", faults.around("host_name", lambda: f"node-{faults.here.rank}"))
        patched.setattr(rank_report, "os", SimpleNamespace(urandom=faults.around("urandom", os.urandom)))
        patched.setattr(rank_agreement, "time", SimpleNamespace(monotonic=faults.around("monotonic", time.monotonic)))
        patched.setattr(rank_agreement, "_LAST_READERS", 0.1)
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ended)
    return outcomes


def sweep(rank: int, operation: str) -> Iterator[Faults]:
    """Each call to *operation* that *rank* makes, failing in three ways."""
    for number in itertools.count(1):
        faults = [
            Faults(rank, operation, number, error)
            for error in (OSError(errno.EMFILE, "injected"), RuntimeError("injected"), MemoryError("injected"))
        ]
        yield from faults
        if not any(fault.fired for fault in faults):
            return


@pytest.mark.parametrize("master", ["auto", "strict"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("operation", [*STORE, *SYSTEM])
def test_where_one_call_fails_on_one_rank_nobody_hangs_and_who_stops_says_why(
    operation: str, rank: int, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are alike start, or stop for what failed; ranks that are not never start."""
    fired = 0
    for differ in (False, True):
        for faults in sweep(rank, operation):
            outcomes = gate_of_two(monkeypatch, faults, master=master, differ=differ)
            fired += faults.fired
            stopped = [message for message in outcomes.values() if message.startswith(STOPS)]
            assert len(outcomes) == 2, (outcomes, faults.calls)
            assert stopped if differ else stopped or set(outcomes.values()) == {"starts"}
            hosts = [f"node-{each}" for each in (0, 1)]
            if operation == "host_name" and faults.fired:
                hosts[rank] = "an unknown host"
            fault = f"is not known on rank {rank} (node-{rank}): {type(faults.error).__name__}: "
            difference = f"capture-state is 'active' on rank 0 ({hosts[0]}); 'off' on rank 1 ({hosts[1]})."
            own = f"CUDA graphs: whether its ranks agree is not known ({type(faults.error).__name__}: "
            for message in stopped:
                assert fault in message or (differ and difference in message) or (own in message and master == "strict")
                assert "No report within" not in message
    assert fired


def test_what_no_two_ranks_have_to_agree_about_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in ("host_name", "urandom"):
        faults = Faults(1, operation, None, OSError(errno.EMFILE, "injected"))
        assert gate_of_two(monkeypatch, faults) == {0: "starts", 1: "starts"}
        assert faults.fired


def test_a_rank_that_cannot_tell_its_states_stops_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report is there before anybody waits."""
    faults = Faults(1, "states", None, OSError(errno.EMFILE, "injected"))
    started = time.monotonic()
    outcomes = gate_of_two(monkeypatch, faults)
    assert time.monotonic() - started < 5
    expected = "Which fixes are active is not known on rank 1 (node-1): OSError: [Errno 24] injected. Give all"
    stopped = [message for message in outcomes.values() if message != "is ended"]
    assert stopped
    assert all(expected in message for message in stopped)


def test_where_a_rank_cannot_leave_a_word_the_others_name_that_among_the_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = gate_of_two(monkeypatch, Faults(1, "set", None, RuntimeError("injected")), timeout="1")
    assert "No report within 1 s: rank 1 on an unknown host." in outcomes[0]
    assert "or it failed before it could report (see that process's log)" in outcomes[0]
    assert outcomes[1] == "is ended"


def test_an_unknown_host_hides_no_difference() -> None:
    store, mine = HashStore(), report()
    failing = FailingStore(PrefixStore("", store), faults := Faults(0, "check", None, OSError("injected")))
    faults.here.rank = 0
    place = publish(store, STAGE, 0, mine)
    host = partial(host_in, failing, world_size=2)
    agreement = compare(store, place, 0, 2, mine, lambda text: None, host_of=host, timeout=0.2)
    assert faults.fired
    assert (agreement.difference or "").startswith("No report within 0 s: rank 1 on an unknown host.")


MODES: dict[str, tuple[dict[str, str], bool]] = {
    "strict": ({"VLLM_GRAPHFIX": "strict"}, True),
    "on": ({"VLLM_GRAPHFIX_MAMBA_PADDING": "on"}, True),
    "auto": ({}, False),
    "off": ({"VLLM_GRAPHFIX": "off", "VLLM_GRAPHFIX_MAMBA_PADDING": "on"}, False),
    "an empty percentage": ({"VLLM_GRAPHFIX": "strict", "VLLM_GRAPHFIX_ROLLOUT": ""}, False),
}
"""An environment, and whether it insists on a fix."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise AttributeError("injected")


def break_step(step: str, me: EngineProcess, worker: Any, patch: pytest.MonkeyPatch) -> None:
    """Lets one *step* of the gate of *me* fail around the start of *worker*."""
    if step in ("compilation_config", "parallel_config"):
        delattr(worker.vllm_config, step)
    elif step == "report":
        patch.setattr(me.gate.reports, "report", fail)
    else:
        for module in (capture_gate, gate_reports, rank_agreement):
            if hasattr(module, step):
                patch.setattr(module, step, fail)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is rank 0 of two that agree wherever they are compared."""
    agreed = Agreement("0" * 16, None, 2, 2, None, all_off=False)
    for module in (capture_gate, gate_reports):
        monkeypatch.setattr(module, "world", lambda: (0, 2))
    monkeypatch.setattr(gate_reports, "common_store", lambda limit: HashStore())
    monkeypatch.setattr(rank_agreement, "compare", lambda *args, **kwargs: agreed)
    return monkeypatch


STEPS = ["compilation_config", "parallel_config", "world", "report", "common_store", "publish", "compare"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", STEPS)
def test_a_gate_that_fails_stops_who_insists_and_else_says_so_in_the_record(
    step: str, mode: str, alike: pytest.MonkeyPatch
) -> None:
    environment, insists = MODES[mode]
    me, worker = process_double(environment), worker_of(0)
    break_step(step, me, worker, alike)
    guarded(me.gate.reports.publish_report, "profiling")
    record: Any = me.gate.status_record
    if insists:
        for stage in (PROFILING, WARM_UP):
            with pytest.raises(GraphfixError, match=rf"^{STOPS} before it .*\(AttributeError: .*=off on all nodes\."):
                me.gate.before_capture(worker, stage)
            assert record.problem is not None
        return
    me.gate.before_capture(worker, WARM_UP)
    assert record.problem is None
    assert me.gate.has_graphs, "what watches graphs must not miss them"
    assert "AttributeError: " in record.unchecked if mode == "auto" else record.unchecked is None


@pytest.mark.parametrize("insists", [False, True])
def test_a_report_that_could_not_even_be_begun_is_an_error_of_the_gate(
    insists: bool, alike: pytest.MonkeyPatch
) -> None:
    """The rank went on without a comparison, as one that has nothing to compare, while the others waited for it."""
    me, worker = process_double({"VLLM_GRAPHFIX": "strict"} if insists else {}), worker_of(0)
    guarded(me.gate.reports.publish_report, "profiling")
    me.gate.before_capture(worker, PROFILING)
    alike.setattr(me.gate.reports, "publish_report", fail)
    record: Any = me.gate.status_record
    if insists:
        with pytest.raises(GraphfixError, match="AttributeError: injected"):
            me.gate.before_capture(worker, WARM_UP)
    else:
        me.gate.before_capture(worker, WARM_UP)
        assert "AttributeError: injected" in record.unchecked


def test_an_error_beside_a_lost_store_ends_no_engine_that_requires_nothing(alike: pytest.MonkeyPatch) -> None:
    me, worker = process_double({}), worker_of(0)

    def lose(limit: float) -> Any:
        alike.setattr(me.gate.reports, "report", fail)
        raise StoreLostError

    alike.setattr(gate_reports, "common_store", lose)
    me.gate.before_capture(worker, WARM_UP)
    record: Any = me.gate.status_record
    assert (record.problem, "AttributeError: injected" in record.unchecked) == (None, True)


def test_a_lost_store_is_waited_for_once(alike: pytest.MonkeyPatch) -> None:
    """Each wait may take ten minutes."""
    me, waits = process_double({}), list[float]()

    def lose(limit: float) -> Any:
        waits.append(limit)
        raise StoreLostError

    alike.setattr(gate_reports, "common_store", lose)
    guarded(me.gate.reports.publish_report, "profiling")
    with pytest.raises(GraphfixError, match=STOPS):
        me.gate.before_capture(worker_of(0), PROFILING)
    assert waits == [600]


@pytest.mark.parametrize("step", ["parallel_config", "world", "compare"])
def test_fleet_calls_an_engine_with_a_gate_that_failed_not_in_order(
    step: str, alike: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the error has kept the rank from knowing which it is."""
    me, worker = process_double({STATUS_DIR: str(tmp_path)}), worker_of(0)
    me.role, me.gate.status_record = Role.WORKER, me.status_record
    break_step(step, me, worker, alike)
    me.gate.before_capture(worker, WARM_UP)
    me.status_record.flush()
    seen = look(tmp_path)
    me.status_record._reporter_here().close()
    assert seen.exit_code == 1
    assert any(
        why.startswith("not checked, ") and "AttributeError: " in why for each in seen.engines for why in each.wrong
    )


@pytest.mark.usefixtures("alike")
def test_a_front_end_that_runs_the_model_itself_is_heard_of_from_the_gate_on(tmp_path: Path) -> None:
    me, worker = process_double({STATUS_DIR: str(tmp_path)}), worker_of(0)
    me.gate.status_record = me.status_record
    me.gate.before_capture(worker, WARM_UP)
    recorded = eventually(lambda: any(one.record.kept and one.record.rank for one in read(tmp_path).found))
    me.status_record._reporter_here().close()
    assert recorded


@pytest.mark.parametrize("step", [step for step in STEPS if step != "compilation_config"])
def test_a_gate_that_fails_stops_no_engine_without_graphs(step: str, alike: pytest.MonkeyPatch) -> None:
    me, worker = process_double({"VLLM_GRAPHFIX": "strict"}), worker_of(0)
    worker.vllm_config.model_config.enforce_eager = True
    break_step(step, me, worker, alike)
    me.gate.before_capture(worker, WARM_UP)
    record: Any = me.gate.status_record
    assert (record.problem, record.unchecked) == (None, None)


def test_a_rank_that_could_not_compare_at_first_is_checked_once_it_has_compared(alike: pytest.MonkeyPatch) -> None:
    me, worker = process_double({}), worker_of(0)
    record: Any = me.gate.status_record
    with alike.context() as patch:
        break_step("compare", me, worker, patch)
        me.gate.before_capture(worker, WARM_UP)
    assert record.unchecked
    me.gate.after_capture(worker)
    assert record.unchecked is None


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_another_rank_that_goes_on_unchecked_counts_as_one_s_own(
    mode: str, alike: pytest.MonkeyPatch
) -> None:
    environment, insists = MODES[mode]
    me, worker = process_double(environment), worker_of(0)
    other = Agreement("0" * 16, None, 2, 1, None, all_off=False, unchecked={1: "OSError: injected"})
    alike.setattr(rank_agreement, "compare", lambda *args, **kwargs: other)
    if insists:
        with pytest.raises(GraphfixError, match=rf"^{STOPS} before it .*rank 1: OSError: injected"):
            me.gate.before_capture(worker, WARM_UP)
        return
    me.gate.before_capture(worker, WARM_UP)
    record: Any = me.gate.status_record
    assert "rank 1: OSError: injected" in record.unchecked if mode == "auto" else record.unchecked is None
    assert (me.gate.reports.post_capture_group is not None) == (mode == "auto")


@pytest.mark.parametrize("stage", ["start", "warm-up"])
def test_nobody_waits_for_a_rank_that_says_that_it_has_no_report(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "_SLICE", 0.05)
    store, mine = HashStore(), report()
    place = publish(store, stage, 0, mine)
    rank_agreement.publish_unchecked(store, stage, 1, "OSError: injected\n")
    agreement = compare(store, place, 0, 2, mine, lambda text: None, timeout=600)
    assert (agreement.difference, agreement.agreeing) == (None, 1)
    assert agreement.unchecked == {1: "OSError: injected "}


@pytest.mark.parametrize("mode", MODES)
def test_where_nobody_knows_what_failed_in_a_capture_who_insists_stops(mode: str, alike: pytest.MonkeyPatch) -> None:
    environment, insists = MODES[mode]
    me, worker = process_double(environment), worker_of(0)
    for module in (capture_gate, gate_reports):
        alike.setattr(module, "world", lambda: (0, 1))
    me.gate.before_capture(worker, WARM_UP)
    vars(me)["stop_recording_failures"] = fail
    record: Any = me.gate.status_record
    if insists:
        with pytest.raises(GraphfixError, match=rf"^{STOPS} before it serves: .*=off on all nodes\."):
            me.gate.after_capture(worker)
    else:
        me.gate.after_capture(worker)
        assert "AttributeError: injected" in record.unchecked if mode == "auto" else record.unchecked is None


def test_a_node_that_cannot_leave_its_later_report_still_follows_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the followers in rank 0's record its front-end knows which files to read: that rank's states and findings."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setattr(rank_agreement, "_SLICE", 0.1)
    monkeypatch.setattr(rank_agreement, "_LAST_READERS", 0.1)
    for module in (capture_gate, gate_reports):
        monkeypatch.setattr(module, "world", lambda: (0, 2))
    monkeypatch.setattr(gate_reports, "common_store", lambda *_: store)
    me, worker = process_double({"VLLM_GRAPHFIX_AGREEMENT_TIMEOUT": "5"}), worker_of(0)
    states_double = {fix.name: FixState(fix.name, Mode.AUTO, None, State.ACTIVE, "") for fix in FIXES}
    vars(me.manager)["states"] = lambda **_: states_double
    record: Any = me.gate.status_record
    other = me.gate.reports.report()._replace(host="node-b", engine="b" * 16)
    me.gate.reports.publish_report("profiling")
    publish(store, "profiling", 1, other)
    me.gate.before_capture(worker, PROFILING)
    assert (record.agreement.agreeing, record.agreement.followers) == (2, ("b" * 16,))
    rank_agreement.publish_unchecked(store, "warm-up", 1, "OSError: no store")
    me.gate.before_capture(worker, WARM_UP)
    assert "rank 1: OSError: no store" in record.unchecked
    assert record.agreement.followers == ("b" * 16,)
    publish(store, "captured", 1, other._replace(engine="c" * 16))
    me.gate.after_capture(worker)
    assert record.agreement.followers == ("b" * 16, "c" * 16)
