"""Blocks that the last step of requests filled are marked before idle steps, which write there, also in a pause."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marked_steps import Scheduler, SumsStandIn, mark_all, step, watched
from vllm_graphfix.marks.last_step import LastStep
from vllm_graphfix.marks.ledger import BlockTracker
from vllm_graphfix.marks.watch import MAX_TRACKING, ChecksumMonitor

NOBODY = 1_000_000
"""One of so many requests is followed."""


def request(computed: int, *groups: list[int]) -> Any:
    """A request in model runner V1: the tokens computed before its last step, and its blocks by group."""
    return SimpleNamespace(num_computed_tokens=computed, block_ids=groups)


def runner(requests: dict[str, Any], *rows: str) -> Any:
    return SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=[*(rows or requests)]))


class Worker:
    """Its runner knows requests until it is told that they have ended."""

    def __init__(self, **requests: Any) -> None:
        self.model_runner = runner(requests)

    def execute_model(self, output: Any) -> None:
        for name in output.finished_req_ids:
            getattr(self.model_runner, "requests", {}).pop(name, None)


def pausing(every: int = NOBODY, **requests: Any) -> tuple[ChecksumMonitor, SumsStandIn, Worker]:
    marks, sums = watched(every)
    marks.every, worker = every, Worker(**requests)
    assert marks._tracker is not None
    worker.execute_model = marks._around_steps(marks._tracker, weakref.ref(worker))  # type: ignore[method-assign]
    return marks, sums, worker


def three() -> dict[str, Any]:
    """Requests in blocks of four tokens: the next token of "a" and of "b" fills one."""
    return {"a": request(7, [1, 2]), "b": request(3, [5]), "c": request(5, [6, 7])}


THEIRS = {"a": (None, 7, 1), "b": (None, 3, 1), "c": (None, 5, 1)}


@pytest.mark.parametrize("rests", [True, False])
def test_untracked_blocks_are_marked_before_an_idle_step_and_checked_after(rests: bool) -> None:
    marks, sums, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    if rests:
        marks._pause()
        marks._tracking_budget._credit = -0.001
        marks._pause_remaining -= 5  # steps of the rest
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    assert marks.counts()["marks"] == 0  # where no such step comes nothing is to be known
    marks._before(None)
    assert (marks.counts()["marks"], marks._paused, sums.seen) == (2, False, [])
    sums.changed = {0: ["layer"], 1: ["layer"]}
    for _ in range(3):
        marks._before(None)
    worker.execute_model(step(new=(("d", ([9],), 0, 3),)))
    assert len(sums.seen) == 1
    worker.execute_model(step(running={"d": (None, 3, 1)}))
    assert sorted((each.block.number, each.block.request, each.block.place) for each in marks.foreign_writes) == [
        (2, "a", 1),
        (5, "b", 0),
    ]
    assert {(each.steps, each.idle) for each in marks.foreign_writes} == {(0, 4)}
    assert marks._paused is rests  # it goes on
    if rests:
        assert marks.counts()["rested"] == 7
        assert marks._step == 1 + 7 + 4 + 1 + 1


def test_a_mark_of_the_last_step_goes_with_its_block() -> None:
    marks, sums, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    marks._before(None)
    assert marks._tracker is not None
    assert set(marks._tracker.marked) == {2, 5}
    worker.execute_model(step(new=(("d", ([5],), 0, 3),)))
    assert set(marks._tracker.marked) == {2}
    assert sums.seen  # before it is given away


def test_who_gets_a_changed_block_from_the_prefix_cache_is_ended() -> None:
    marks, sums, worker = pausing(**three())
    reported: list[Any] = []
    marks._abort = SimpleNamespace(why_not=lambda: None, deliver=lambda *values: reported.append(values))
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    marks._before(None)
    sums.changed = {0: ["layer"], 1: ["layer"]}
    worker.execute_model(step(new=(("d", ([5, 8],), 4, 3), ("e", ([9],), 0, 3))))
    worker.execute_model(step(running={"d": (None, 7, 1), "e": (None, 3, 1)}))
    ((names, blocks, _),) = reported
    assert (names, sorted(blocks)) == (("d",), [2, 5])


@pytest.mark.parametrize("rests", [True, False])
def test_with_asynchronous_scheduling_an_idle_step_comes_before_the_ends(rests: bool) -> None:
    """Then one that tells it, and more of the others; all of them are between the mark and the look."""
    marks, sums, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    if rests:
        marks._pause()
        marks._tracking_budget._credit = -0.001
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step())
    marks._before(None)
    assert marks.counts()["marks"] == 2
    sums.changed = {0: ["layer"], 1: ["layer"]}
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    for _ in range(3):
        marks._before(None)
    assert marks.counts()["marks"] == 2  # not once more, with what was written
    worker.execute_model(step(new=(("d", ([9],), 0, 3),)))
    worker.execute_model(step(running={"d": (None, 3, 1)}))
    assert sorted(each.block.number for each in marks.foreign_writes) == [2, 5]
    assert {(each.steps, each.idle) for each in marks.foreign_writes} == {(0, 1)}


def test_a_step_of_requests_makes_void_what_was_noted() -> None:
    marks, _, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    assert marks._last_step.has_filled()
    worker.execute_model(step(new=(("d", ([2],), 0, 3),)))
    assert not marks._last_step.has_filled()
    marks._before(None)
    assert marks.counts()["marks"] == 0
    marks, _, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    worker.execute_model(step(new=(("d", ([2],), 0, 3),)))
    worker.execute_model(step(finished_req_ids={"d"}))
    marks._before(None)
    assert marks.counts()["marks"] == 0


def test_a_pause_keeps_the_last_step_and_a_new_cache_does_not() -> None:
    marks, _, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    marks._tracking_budget._credit = -0.001
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    assert marks._paused
    marks._before(None)
    assert marks.counts()["marks"] == 2
    marks, _, worker = pausing(**three())
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    marks._new_cache()
    marks._before(None)
    assert (marks.counts()["marks"], marks.stopped) == (0, None)
    worker.model_runner = runner(three())
    worker.execute_model(step(running=THEIRS))
    marks._new_cache()
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    marks._before(None)
    assert (marks.counts()["marks"], marks.stopped) == (0, None)


def test_tracked_blocks_stay_and_those_of_the_last_step_are_the_newest() -> None:
    ledger = BlockTracker({0: 4}, 1)
    ledger.step(step(new=(("a", ([1, 2],), 0, 8),)))
    ledger.settle()
    mark_all(ledger)
    known = ledger.marked[2]
    ledger.adopt([known._replace(place=7), fresh := known._replace(number=9)])
    assert (ledger.marked, ledger.finished) == ({1: ledger.marked[1], 2: known}, {9: fresh})
    assert ledger.newest[-1] is fresh


def test_where_a_runner_does_not_tell_or_owes_too_much_nothing_is_marked() -> None:
    marks, _, worker = pausing(**three())
    worker.model_runner = SimpleNamespace(req_states=object())  # V2
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    marks._before(None)
    assert (marks.counts()["marks"], marks.stopped) == (0, None)
    marks, _, worker = pausing(**three())
    marks._pause()
    marks._tracking_budget._credit = -2 * MAX_TRACKING
    worker.execute_model(step(running=THEIRS))
    worker.execute_model(step(finished_req_ids={"a", "b", "c"}))
    rested = marks.counts()["rests"]
    for _ in range(20):
        marks._before(None)
    assert (marks.counts()["marks"], marks._paused, marks.counts()["rests"]) == (0, True, rested + 1)
    marks._tracking_budget._credit = 0.0
    marks._before(None)  # too late: those before may have written
    assert marks.counts()["marks"] == 0


def test_a_prompt_fills_many_blocks_and_drafts_fewer_than_were_thought() -> None:
    last = LastStep({0: 4, 2: 8}, 5, 0)
    requests = {"a": request(8, [*range(1, 21)], [], [31, 32, 0, 34, 35]), "b": request(2, [41], [], [42])}
    last.output = step(running={"b": (None, 2, 1), "a": (None, 8, 1)})
    last.output.num_scheduled_tokens = {"b": 9, "a": 60}
    last.finish(runner(requests, "a", "gone", "b"))  # in the order of the batch
    actual = [(block.group, block.number, block.place, block.end) for block in last.take()]
    assert actual == [
        *((0, 3 + at, 2 + at, 12 + 4 * at) for at in range(5)),  # no more are of use
        *((2, 32, 1, 16), (2, 34, 3, 32), (2, 35, 4, 40), (2, 42, 0, 8)),  # none that is the null block
    ]
    assert last.take() == []
    last.finish(runner(requests))
    assert last.take() == []  # what it filled is known
    drafting = LastStep({0: 4}, 5, doubt=2)
    for tokens, drafts, full in ((4, 0, 0), (5, 0, 1), (6, 2, 0), (7, 2, 1)):
        drafting.output = step(running={"b": (None, 5, tokens)})
        drafting.output.scheduled_spec_decode_tokens = {"b": [9] * drafts}
        drafting.finish(runner({"b": request(5, [41, 42, 43])}))
        assert len(drafting.take()) == full


@given(st.integers(0, 2**32))
def test_a_block_of_the_last_step_is_full_and_unmarked_on_reallocation(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same requests for the same seed
    scheduler, (marks, _, worker) = Scheduler(chance), pausing(every=3)
    ledger = marks._tracker
    assert isinstance(ledger, BlockTracker)
    marks._checks.mark_budget.allows = lambda **_: True  # type: ignore[method-assign]
    marks._checks.check_budget.allows = lambda **_: chance.random() < 0.5  # type: ignore[method-assign]
    full: set[tuple[str, int, int]] = set()
    idle = 0
    for _ in range(150):
        if idle:
            idle -= 1
            marks._before(None)
            continue
        if chance.random() < 0.1 and not marks._paused:
            marks._pause()
            marks._tracking_budget._credit = chance.choice((0.001, -0.001))
        if chance.random() < 0.1:
            output, idle = scheduler.pause(), chance.randint(0, 3)
        else:
            output = scheduler.step()
        worker.execute_model(output)
        blocks = scheduler.blocks()
        worker.model_runner = runner(
            {name: request(scheduler.before[name], numbers, [0]) for name, numbers in blocks.items()}
        )
        for name, numbers in blocks.items():
            full |= {(name, place, numbers[place]) for place in range(scheduler._computed[name] // 4)}
        fresh = output.scheduled_cached_reqs.new_block_ids
        allocated = {number for numbers in fresh for number in (numbers or [[]])[0]}
        for new in output.scheduled_new_reqs:
            allocated |= set(new.block_ids[0][new.num_computed_tokens // 4 :])
        held = ledger.marked | ledger.finished
        assert allocated.isdisjoint(held)
        assert {(block.request, block.place, number) for number, block in held.items()} <= full
    assert marks.stopped is None


@pytest.mark.parametrize("failing", ["_count", "_unwrap"])
def test_what_fails_while_the_marks_stop_does_not_come_out_in_a_step(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    marks = ChecksumMonitor()
    monkeypatch.setattr(marks, failing, fail)
    marks._guarded(fail)
    assert marks.stopped == "MemoryError: no memory"
