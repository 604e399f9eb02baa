"""`vllm-graphfix fleet`: what is made of the records of engines, and how it is said."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fleets import OTHER_ENGINE, SILENT_AFTER, Start, failed, keeping, only, ranks, text
from records import AN_HOUR, ENGINE, elsewhere, eventually, leave, needs_root, of, record
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.marks.process import NONE_MARKED
from vllm_graphfix.records import (
    AgreementReport,
    Decided,
    FixReport,
    Identity,
    Rank,
    Record,
    own_folder,
    touch_outdated,
)

pytestmark = pytest.mark.usefixtures("alone")


def test_an_engine_whose_ranks_agree_is_in_order(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), *ranks(two))
    engine = only(tmp_path)
    assert (engine.status, engine.wrong, engine.notes) == ("in order", (), ())
    assert (engine.expected, engine.agreeing) == (2, 2)
    assert [engine.name_of(member) for member in engine.members][1:] == ["rank 0", "rank 1"]
    assert engine.counts("capture-state") == {"state-consumed": 24}
    assert look(tmp_path).exit_code == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    (failed("failed"), "capture-state is failed on rank 1: the reason"),
    (failed("conflict"), "capture-state is conflict on rank 1: the reason"),
    (failed("incompatible"), "capture-state is incompatible on rank 1: the reason"),
    (failed("off"), "capture-state differs: active on rank 0; off on rank 1"),
    ({"vllm": "0.22.0"}, "vLLM differs: 0.21.0 on rank 0, front-end "),
    ({"graphfix": "0.2.0"}, "vllm-graphfix differs: 0.1.0 on rank 0, front-end "),
    ({"decision": Decided(False, 9000, 25.0, "on", True)}, "in the rollout differs: yes on rank 0, front-end "),
    (
        {
            "agreement": AgreementReport(
                "a-token", 2, 1, "capture-state is 'active' on rank 0 (a); 'off' on rank 1 (b)."
            )
        },
        "the ranks do not agree. capture-state is 'active' on rank 0 (a); 'off' on rank 1 (b).",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[sentence[:45] for _, sentence in WRONG])
def test_what_is_wrong_in_an_engine_names_the_ranks_and_is_exit_1(
    tmp_path: Path, two: tuple[Identity, Identity], changes: dict[str, Any], sentence: str
) -> None:
    leave(tmp_path, record(), *ranks(two, **changes))
    engine = only(tmp_path)
    assert engine.status == "not in order"
    assert any(what.startswith(sentence) for what in engine.wrong), engine.wrong
    assert look(tmp_path).exit_code == 1


def test_an_engine_with_a_value_that_means_nothing_is_not_in_order(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    """However much its ranks agree: whoever set that value wanted something else."""
    wrong: dict[str, Any] = {
        "misconfigured": {"VLLM_GRAPHFIX": "observ"},
        "decision": Decided(True, None, None, "off", True),
    }
    leave(tmp_path, record(**wrong), *ranks(two)[:1], *ranks(two, **wrong))
    engine = only(tmp_path)
    assert engine.misconfigured == {"VLLM_GRAPHFIX": "observ"}
    (message,) = [each for each in engine.wrong if "misconfigured" in each]
    assert message.startswith(
        "misconfigured: VLLM_GRAPHFIX=observ means nothing: what it is for is off, or at its default"
    )
    assert look(tmp_path).exit_code == 1
    assert message.split(":")[1].strip() in text(tmp_path)


@pytest.mark.parametrize("state", ["off", "not-in-canary", "observing", "not-needed"])
def test_an_engine_that_does_as_it_is_set_up_is_in_order(
    tmp_path: Path, two: tuple[Identity, Identity], state: str
) -> None:
    first, second = ranks(two, **failed(state))
    leave(tmp_path, record(), first._replace(fixes=second.fixes), second)
    assert look(tmp_path).exit_code == 0


def test_a_rank_that_does_not_run_what_a_fix_concerns_differs_from_nothing(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    leave(tmp_path, record(), *ranks(two, **failed("waiting")))
    assert look(tmp_path).exit_code == 0
    assert "active (rank 0)" in text(tmp_path)
    assert "waiting (rank 1)" in text(tmp_path)


def test_a_rank_that_was_killed_in_a_live_engine_is_exit_1(tmp_path: Path, start: Start) -> None:
    one, other = start(), start()
    leave(tmp_path, record(), *ranks((of(one.pid), of(other.pid))))
    assert look(tmp_path).exit_code == 0
    other.kill()
    other.wait()
    engine = only(tmp_path)
    assert engine.wrong == ("dead: rank 1",)
    assert look(tmp_path).exit_code == 1


def test_a_rank_that_is_silent_in_a_live_engine_is_exit_1(tmp_path: Path) -> None:
    leave(tmp_path, record(), record(elsewhere(1), 0, 2))
    leave(tmp_path, record(elsewhere(2), 1, 2), age=75.0)
    assert only(tmp_path).wrong == ("not heard from for 75 s: rank 1",)
    assert look(tmp_path).exit_code == 1


def test_a_rank_that_lives_and_cannot_write_its_record_is_exit_1(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    written = time.time() - 600
    first, second = ranks(two)
    leave(tmp_path, record(), first, second._replace(written=written))
    assert look(tmp_path).exit_code == 0
    touch_outdated(tmp_path, second)
    engine = only(tmp_path)
    assert (engine.status, look(tmp_path).exit_code) == ("not in order", 1)
    assert engine.wrong[0].startswith("record not written for 10 min: rank 1. What has changed there since")
    processes = as_json(look(tmp_path))["engines"][0]["processes"]
    assert [(each["liveness"], each["outdated"]) for each in processes] == [("alive", False)] * 2 + [("alive", True)]
    leave(tmp_path, second._replace(written=time.time()))
    assert look(tmp_path).exit_code == 0


@pytest.mark.parametrize(("code", "exit_code"), [("cannot-abort", 1), ("undelivered", 1), ("graph-left-out", 0)])
def test_an_active_detector_that_does_not_do_all_shows(
    tmp_path: Path, two: tuple[Identity, Identity], code: str, exit_code: int
) -> None:
    limited = {"shadow": FixReport("on", "active", "one reason", code)}
    leave(tmp_path, record(), *ranks(two, fixes=limited))
    engine = only(tmp_path)
    lines = [line for line in (*engine.wrong, *engine.notes) if line.startswith("shadow is limited on rank")]
    assert (len(lines), look(tmp_path).exit_code) == (1, exit_code)
    assert lines[0].endswith(": one reason")


def test_an_engine_that_serves_no_metrics_is_noted(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    for serves, noted in ((True, 0), (False, 1)):
        leave(tmp_path, record(written=time.time() - 600, serves_metrics=serves), *ranks(two))
        engine = only(tmp_path)
        assert (sum("no process of it serves graphfix_*" in note for note in engine.notes), engine.wrong) == (noted, ())


def test_a_rank_that_does_not_come_out_of_a_step_is_exit_1(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    """It has a heartbeat, which is a thread."""
    began = time.time() - 600
    leave(tmp_path, record(), *ranks(two, in_step_since=began))
    engine = only(tmp_path)
    assert (engine.status, look(tmp_path).exit_code) == ("not in order", 1)
    assert engine.wrong[0].startswith("in one step for 10 min: rank 1. Its heartbeat goes on")
    processes = as_json(look(tmp_path))["engines"][0]["processes"]
    assert [(each["liveness"], each["in_step_since"]) for each in processes] == [("alive", None)] * 2 + [
        ("alive", began)
    ]


@pytest.mark.parametrize(
    ("lifted", "wording"),
    [
        (0, "; graphs no longer replayed: 2."),
        (1, "; graphs no longer replayed: 1; graphs replayed again, wrong or not, after they had been taken out: 1."),
        (2, "; graphs replayed again, wrong or not, after they had been taken out: 2."),
    ],
)
def test_a_graph_that_is_replayed_again_is_not_among_those_that_are_not(
    tmp_path: Path, lifted: int, wording: str
) -> None:
    shadow = {"checks": 9, "mismatches": 4, "quarantined-graphs": 2, "quarantines-given-up": lifted}
    leave(tmp_path, record(rank=0, events={"shadow": shadow}))
    assert (
        only(tmp_path)
        .wrong[0]
        .startswith(f"the shadow check found wrong CUDA graph replays, 4 in 9 checks{wording} `vllm-graphfix report`")
    )


HANGS = "What exists and is not heard from hangs, is stopped (SIGSTOP), or cannot write its record"


def test_a_rank_that_is_stopped_is_exit_1_until_it_goes_on(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENT_AFTER, 1.5)
    leave(tmp_path, record())
    _, one = [keeping(start, tmp_path, record(rank=rank, world_size=2)) for rank in range(2)]
    assert (only(tmp_path).status, look(tmp_path).exit_code) == ("in order", 0)
    one.send_signal(signal.SIGSTOP)
    assert eventually(lambda: look(tmp_path).exit_code == 1)
    engine = only(tmp_path)
    assert (engine.status, len(engine.wrong)) == ("not in order", 1)
    assert re.fullmatch(rf"not heard from for [12] s: rank 1\. {re.escape(HANGS)}", engine.wrong[0])
    processes = as_json(look(tmp_path))["engines"][0]["processes"]
    assert [each["liveness"] for each in processes] == ["alive", "alive", "silent"]
    one.send_signal(signal.SIGCONT)
    assert eventually(lambda: look(tmp_path).exit_code == 0)
    assert only(tmp_path).status == "in order"


def test_an_engine_that_is_stopped_as_a_whole_is_exit_1_and_ended_when_it_is_killed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SILENT_AFTER, 1.0)
    records = (record(kept=True), record(rank=0))
    processes = [keeping(start, tmp_path, one) for one in records]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not only(tmp_path).live)
    engine = only(tmp_path)
    assert (engine.status, look(tmp_path).exit_code) == ("silent", 1)
    assert HANGS in engine.wrong[0]
    for process, expected in zip(processes, (("silent", 1), ("ended", 3)), strict=True):
        process.kill()
        process.wait()
        assert (only(tmp_path).status, look(tmp_path).exit_code) == expected


def test_an_engine_elsewhere_that_is_not_heard_of_any_more_is_no_fault_here(tmp_path: Path) -> None:
    """A machine that was switched off removes no record."""
    leave(tmp_path, record(elsewhere(1), kept=True), record(elsewhere(2), rank=0, kept=True), age=75.0)
    assert (only(tmp_path).status, only(tmp_path).wrong, look(tmp_path).exit_code) == ("silent", (), 3)


FRONT_END = record(elsewhere(1))
CORE = record(elsewhere(2), kept=True, role="engine-core")
WORKERS = [record(elsewhere(3 + n), kept=True, role="worker") for n in range(2)]
RANKS = [record(elsewhere(3 + n), n, 2, kept=True) for n in range(2)]


def starting(*records: Record) -> tuple[Record, ...]:
    return tuple(one._replace(starting=True) for one in records)


STARTING: dict[str, tuple[Record, ...]] = {
    "the front-end alone": (FRONT_END,),
    "an engine core that imports its model": (FRONT_END, *starting(CORE)),
    "workers that load it": (FRONT_END, *starting(CORE, *WORKERS)),
    "a rank that has reported": (FRONT_END, *starting(CORE, WORKERS[0], RANKS[1])),
    "a rank that nobody was compared with": (FRONT_END, *starting(CORE, WORKERS[0], RANKS[1]._replace(agreement=None))),
    "ranks that capture": (FRONT_END, *starting(CORE, *RANKS)),
    "an engine core that is about to serve": (FRONT_END, *starting(CORE), *RANKS),
    "workers of a node without an engine core": (FRONT_END, *starting(*WORKERS)),
    "an engine in its user's program": starting(FRONT_END._replace(kept=True)),
    "the second replica": (
        *(FRONT_END, CORE._replace(rank=Rank(0, 0, 1, 0), agreement=AgreementReport("a-token", 1, 1, None))),
        *starting(CORE._replace(pid=3)),
    ),
}


@pytest.mark.parametrize("records", STARTING.values(), ids=STARTING)
def test_an_engine_that_starts_is_no_fault_and_exit_4(tmp_path: Path, records: tuple[Record, ...]) -> None:
    leave(tmp_path, *records)
    engine = only(tmp_path)
    assert (engine.status, engine.wrong, look(tmp_path).exit_code) == ("starting", (), 4)
    assert any(note.startswith("starting for ") for note in engine.notes)
    assert f"engine {ENGINE}  starting" in text(tmp_path)


def test_what_starts_is_named_with_the_time_that_it_takes(tmp_path: Path) -> None:
    leave(tmp_path, FRONT_END, *(one._replace(written=time.time() - 400) for one in starting(CORE, *WORKERS)))
    assert only(tmp_path).notes == ("starting for 7 min: engine-core 2 on node-b",)
    report = as_json(look(tmp_path))
    assert [each["starting"] for each in report["engines"][0]["processes"]] == [False, True, False, False]
    assert (report["engines"][0]["status"], report["exit_code"]) == ("starting", 4)


@pytest.mark.parametrize("who", [1, 2], ids=["the engine core", "a worker"])
def test_a_process_that_is_silent_while_it_starts_is_exit_1(tmp_path: Path, who: int) -> None:
    records = [FRONT_END, *starting(CORE, *WORKERS)]
    leave(tmp_path, *records)
    leave(tmp_path, records[who], age=75.0)
    engine = only(tmp_path)
    assert (engine.status, look(tmp_path).exit_code) == ("not in order", 1)
    assert engine.wrong[0].startswith("not heard from for 75 s: ")


def test_a_process_that_died_or_failed_while_it_started_is_exit_1(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, FRONT_END, *starting(CORE, WORKERS[0]._replace(**failed("failed"))))
    assert only(tmp_path).wrong[0] == "capture-state is failed on worker 3 on node-b: the reason"
    process = start()
    leave(tmp_path, *starting(WORKERS[0], WORKERS[1]._replace(**of(process.pid)._asdict())))
    process.kill()
    process.wait()
    assert only(tmp_path).wrong[0].startswith("dead: worker ")


def test_workers_that_never_come_to_a_capture_do_not_start_for_ever(tmp_path: Path) -> None:
    """Another platform's workers have other functions than those that are wrapped.

    Their engine core knows that all is up.
    """
    leave(tmp_path, FRONT_END, CORE, *starting(*WORKERS))
    assert only(tmp_path).wrong[0].startswith("no rank has reported")


def test_a_fleet_of_which_one_engine_starts_is_exit_4_unless_another_is_not_in_order(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0), *(one._replace(engine=OTHER_ENGINE) for one in starting(CORE, *WORKERS)))
    assert [engine.status for engine in look(tmp_path).engines] == ["in order", "starting"]
    assert look(tmp_path).exit_code == 4
    leave(tmp_path, record(rank=0, **failed("failed")))
    assert look(tmp_path).exit_code == 1


def test_an_engine_that_was_killed_as_a_whole_has_ended_and_is_not_wrong(tmp_path: Path, start: Start) -> None:
    processes = start(), start()
    leave(tmp_path, *ranks((of(processes[0].pid), of(processes[1].pid))))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    engine = only(tmp_path)
    assert (engine.status, engine.live, engine.wrong) == ("ended", False, ())
    assert look(tmp_path).exit_code == 3  # none runs: `until vllm-graphfix fleet` goes on waiting
    leave(tmp_path, record(engine=OTHER_ENGINE, rank=0))
    assert look(tmp_path).exit_code == 0
    (tmp_path / own_folder(tmp_path) / record(engine=OTHER_ENGINE).file_name).unlink()
    assert f"engine {ENGINE}  ended" in text(tmp_path)
    assert "dead: ranks 0-1, last heard from 0 s ago" in text(tmp_path)


@pytest.mark.parametrize(("age", "code"), [(0.0, 1), (AN_HOUR - 10, 1), (AN_HOUR + 10, 3)])
def test_an_engine_that_was_stopped_by_us_is_exit_1_for_an_hour(
    tmp_path: Path, start: Start, age: float, code: int
) -> None:
    process = start()
    leave(tmp_path, record(of(process.pid), rank=0, problem="the ranks of this engine do not agree"), age=age)
    process.kill()
    process.wait()
    assert only(tmp_path).status == "stopped"
    assert look(tmp_path).exit_code == code
    assert "according to rank 0: the ranks of this engine do not agree" in text(tmp_path)


def test_ranks_that_agreed_on_machines_that_are_not_seen_are_a_note_and_not_wrong(tmp_path: Path) -> None:
    leave(tmp_path, record(), *(record(elsewhere(rank), rank, 8) for rank in range(4)))
    engine = only(tmp_path)
    assert engine.notes == (
        (
            "ranks 4-7 run on machines whose records are not here: put VLLM_GRAPHFIX_STATUS_DIR on shared storage "
            "to see them; they agreed with the others at start-up"
        ),
    )
    assert look(tmp_path).exit_code == 0


def test_ranks_that_could_not_be_checked_are_exit_1(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    why = "whether its ranks agree is not known (AttributeError: no store)"
    leave(tmp_path, record(), *(each._replace(agreement=None, unchecked=why) for each in ranks(two)))
    assert only(tmp_path).wrong == (f"not checked, ranks 0-1: {why}",)
    assert look(tmp_path).exit_code == 1


def test_a_worker_that_could_not_be_checked_before_it_knew_its_rank_is_exit_1(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    why = "whether its ranks agree is not known (AttributeError: no parallel_config)"
    first, second = ranks(two)
    leave(tmp_path, record(), first, second._replace(rank=None, role="worker", agreement=None, unchecked=why))
    assert f"not checked, worker {second.pid} on {second.host}: {why}" in only(tmp_path).wrong
    assert look(tmp_path).exit_code == 1


def test_ranks_that_are_missing_before_they_agreed_are_exit_1(tmp_path: Path, two: tuple[Identity, Identity]) -> None:
    leave(tmp_path, record(), ranks(two)[1]._replace(agreement=None))
    engine = only(tmp_path)
    assert engine.wrong[0].startswith("no record of rank 0: starting, without the plugin, or on machines")
    assert engine.notes == ("not compared with the others: rank 1",)
    assert look(tmp_path).exit_code == 1


def test_ranks_of_this_host_without_a_record_are_exit_1_also_if_the_others_agreed(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    front = record(ranks_here=2)
    leave(tmp_path, front, ranks(two)[0])
    engine = only(tmp_path)
    assert (engine.wrong[0].partition(":")[0], engine.notes) == ("no record of rank 1", ())
    assert look(tmp_path).exit_code == 1
    leave(tmp_path, ranks(two)[0]._replace(rank=Rank(0, 0, 1, 0), agreement=AgreementReport("a", 1, 1, None)))
    (wrong,) = only(tmp_path).wrong  # of a data-parallel rank nobody but the front-end knows
    assert wrong.startswith("no record of 1 of the ranks that its front-end has started on its own host")
    for changes in ({"ranks_here": 1}, {"written": time.time()}):  # the others elsewhere; or still to come
        leave(tmp_path, front._replace(**changes), ranks(two)[0])
        assert (only(tmp_path).wrong, look(tmp_path).exit_code) == ((), 0)
    leave(tmp_path, front, *ranks(two))
    assert look(tmp_path).exit_code == 0


def test_an_engine_no_rank_of_which_has_reported_is_exit_1(tmp_path: Path) -> None:
    leave(tmp_path, record(), age=121.0)
    assert only(tmp_path).wrong[0].startswith("no rank has reported: they are starting, or run on machines")
    assert look(tmp_path).exit_code == 1


def test_a_program_that_makes_one_engine_after_the_other_is_in_order(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    """Its record of the first engine lives as long as it does."""
    process, rank = two
    leave(tmp_path, record(process), record(process, engine=OTHER_ENGINE, written=1763740001.0))
    leave(tmp_path, record(rank, rank=0, engine=OTHER_ENGINE))
    (engine,) = look(tmp_path).engines
    assert (engine.name, engine.wrong) == (OTHER_ENGINE, ())


@needs_root
def test_a_record_of_another_user_makes_no_engine_of_this_one_an_abandoned_one(tmp_path: Path) -> None:
    mine = record(written=time.time())
    leave(tmp_path, mine._replace(engine=OTHER_ENGINE, written=time.time() + 60))
    theirs = own_folder(tmp_path).rename(tmp_path / "vllm-graphfix-12345")
    for path in (*theirs.iterdir(), theirs):
        os.chown(path, 12345, 12345)
    leave(tmp_path, mine)
    assert [(engine.name, engine.live) for engine in look(tmp_path).engines] == [(ENGINE, True), (OTHER_ENGINE, False)]


def test_a_program_that_has_two_engines_at_once_shows_both(
    tmp_path: Path, start: Start, two: tuple[Identity, Identity]
) -> None:
    process, rank = two
    leave(tmp_path, record(process), record(process, engine=OTHER_ENGINE, written=1763740001.0))
    leave(tmp_path, record(rank, rank=0), record(of(start().pid), rank=0, engine=OTHER_ENGINE))
    assert [engine.wrong for engine in look(tmp_path).engines] == [(), ()]


def test_nodes_that_started_on_their_own_are_joined_by_the_leader(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1, "node-a")), record(elsewhere(2, "node-a"), 0, 2, leader=ENGINE))
    leave(tmp_path, record(elsewhere(1, "node-b"), engine=OTHER_ENGINE))
    leave(tmp_path, record(elsewhere(2, "node-b"), 1, 2, engine=OTHER_ENGINE, leader=ENGINE))
    engine = only(tmp_path)
    assert (engine.name, engine.status, len(engine.members)) == (ENGINE, "in order", 4)
    assert set(engine.values_of("host")) == {"node-a", "node-b"}


def test_leaders_that_name_each_other_are_two_engines(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0, leader=OTHER_ENGINE))
    leave(tmp_path, record(elsewhere(2), 0, engine=OTHER_ENGINE, leader=ENGINE))
    assert [engine.name for engine in look(tmp_path).engines] == [ENGINE, OTHER_ENGINE]


@needs_root
def test_records_of_another_user_do_not_join_an_engine(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0))
    mine = own_folder(tmp_path)
    theirs = tmp_path / "vllm-graphfix-12345"
    mine.rename(theirs)
    for path in (*theirs.iterdir(), theirs):
        os.chown(path, 12345, 12345)
    leave(tmp_path, record(elsewhere(2), 0))
    assert [len(engine.members) for engine in look(tmp_path).engines] == [1, 1]


@pytest.mark.parametrize("compared", [True, False])
def test_worlds_of_data_parallelism_are_counted_each_for_itself(tmp_path: Path, compared: bool) -> None:
    for replica in range(2):
        for rank in range(2):
            leave(
                tmp_path,
                record(
                    elsewhere(10 * replica + rank),
                    rank,
                    2,
                    agreement=AgreementReport(f"token-{replica}", 2, 2, None) if compared else None,
                )._replace(rank=Rank(rank, rank, 2, replica)),
            )
    engine = only(tmp_path)
    assert (engine.expected, engine.agreeing, engine.wrong) == (4, 4 if compared else None, ())
    if compared:
        assert engine.several(engine.members) == "ranks 0-1 of DP 0, ranks 0-1 of DP 1"


def test_one_world_over_all_data_parallel_replicas_is_one(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, record(elsewhere(rank), rank, 4)._replace(rank=Rank(rank, rank % 2, 4, rank // 2)))
    engine = only(tmp_path)
    assert (engine.expected, engine.agreeing, engine.wrong) == (4, 4, ())
    assert engine.several(engine.members) == "ranks 0-3"


def test_a_world_of_any_claimed_size_is_printed_in_time(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0, 2**62, agreement=None))
    started = time.monotonic()
    assert "no record of ranks 1-1024:" in text(tmp_path)
    assert time.monotonic() - started < 5.0


def test_the_output_on_a_terminal_is_text_and_no_markup(tmp_path: Path) -> None:
    hostile = "[bold]x[/nothing] [link=http://x]"
    leave(tmp_path, record(rank=0, model=hostile, problem=hostile, vllm=hostile, **failed("failed")))
    assert text(tmp_path).count(hostile) >= 3


def unreadable(one: Record, content: str, base: Path) -> None:
    leave(base, one)
    (own_folder(base) / one.file_name).write_text(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"schema": 1', "it is not JSON (JSONDecodeError)"),
        ('{"schema": 2}', "it has schema 2, but this vllm-graphfix knows only 1: use a newer version"),
        ("x" * (64 * 1024 + 1), "it has 65537 bytes; a record has at most 65536"),
    ],
    ids=["cut short", "a newer one", "too large"],
)
def test_a_rank_whose_record_cannot_be_read_is_exit_1_and_not_elsewhere(
    content: str, why: str, tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    first, second = ranks(two)
    leave(tmp_path, record(), first)
    unreadable(second, content, tmp_path)
    engine, place = only(tmp_path), own_folder(tmp_path) / second.file_name
    assert engine.wrong == (
        f"the state of process {second.pid} on {second.host} is not known: its record {place} cannot be read ({why})",
        "no record of rank 1 can be read",
    )
    assert (engine.status, engine.notes, look(tmp_path).exit_code) == ("not in order", (), 1)
    assert as_json(look(tmp_path))["engines"][0]["ranks"]["unreadable"] == [
        {"host": second.host, "pid": second.pid, "file": str(place), "why": why}
    ]


def test_an_unreadable_record_stands_for_no_other_rank_that_is_elsewhere(tmp_path: Path) -> None:
    leave(tmp_path, *(record(elsewhere(rank), rank, 8) for rank in range(4)))
    unreadable(record(elsewhere(4), 4, 8), "", tmp_path)
    engine = only(tmp_path)
    assert [what.split(":")[0] for what in engine.wrong] == ["the state of process 4 on node-b is not known"]
    assert "ranks 4-7 run on machines whose records are not here" in engine.notes[0]


def test_an_unreadable_record_of_an_ended_process_or_another_engine_is_no_fault(
    tmp_path: Path, two: tuple[Identity, Identity]
) -> None:
    leave(tmp_path, *ranks(two))
    unreadable(record(two[0]._replace(pid=2**22 + 1), 2, 3), "", tmp_path)
    assert (only(tmp_path).wrong, look(tmp_path).exit_code) == ((), 0)
    unreadable(record(engine=OTHER_ENGINE), "", tmp_path)
    assert only(tmp_path).wrong == ()


def test_files_that_are_no_records_are_named_and_change_nothing(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    (own_folder(tmp_path) / "x.json").touch()
    assert "x.json: its name is not a record's" in text(tmp_path)
    assert look(tmp_path).exit_code == 0


def of_fixes(**states: str) -> dict[str, Any]:
    """Changes of a record: each fix in that state, because of its mode, and with an event that did not happen."""
    return {
        "fixes": {name.replace("_", "-"): FixReport("auto", state, "the reason") for name, state in states.items()},
        "events": {name.replace("_", "-"): {f"event-of-{name}": 0} for name in states},
    }


def test_events_are_printed_of_the_fixes_that_count_them(tmp_path: Path) -> None:
    leave(
        tmp_path, record(rank=0, **of_fixes(first="active", second="observing", third="not-needed", fourth="waiting"))
    )
    assert re.findall(r"event-of-(\w+) 0", text(tmp_path)) == ["first", "second"]


def test_an_event_that_happened_is_printed_whatever_became_of_its_fix(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, fixes={"capture-state": FixReport("auto", "failed", "the reason")}))
    assert "state-consumed 12" in text(tmp_path)


@pytest.mark.parametrize(
    ("states", "noted"),
    [
        (("active", "active"), True),
        (("active", "failed"), True),
        (("active", "active, some"), False),
        (("failed", "failed"), False),
    ],
)
def test_marks_that_have_marked_nothing_are_worth_knowing(
    tmp_path: Path, two: tuple[Identity, Identity], states: tuple[str, str], noted: bool
) -> None:
    """Of an engine, of which one rank may have no requests."""
    for rank, each in zip(ranks(two), states, strict=True):
        state, _, some = each.partition(", ")
        report = FixReport("auto", state, f"of one of 16 requests{'' if some else f'; {NONE_MARKED}'}")
        leave(tmp_path, rank._replace(fixes={"kv-marks": report}))
    notes = [note for note in only(tmp_path).notes if "cache block" in note]
    assert notes == [f"no cache block is watched: {NONE_MARKED}. docs/kv-marks.md says what is not marked"] * noted


def test_fixes_with_the_same_report_share_a_row(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0, **of_fixes(first="off", second="off", third="not-needed")))
    assert text(tmp_path).count("the reason") == 2
    assert all(name in text(tmp_path) for name in ("first", "second", "third"))


def test_a_rollout_is_named_where_there_is_one(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    assert "in the rollout of 25 % (bucket 1234 of 10,000)" in text(tmp_path)
    leave(tmp_path, record(rank=0, decision=Decided(True, None, None, "on", True)))
    assert "rollout" not in text(tmp_path)
    leave(tmp_path, record(rank=0, decision=Decided(False, 1234, None, "on", True)))  # the percentage is none
    assert "not in the rollout" in text(tmp_path)


def test_a_process_that_writes_once_is_not_called_silent(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, record(), age=500.0)
    leave(tmp_path, record(of(start().pid), 0))
    assert "min ago" not in text(tmp_path)
    assert "0 s ago" in text(tmp_path)
