"""Tracking blocks stays within its share of the host's time: beyond that it pauses, and no mark is wrong."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marked_steps import Scheduler, SumsStandIn, decodes, step, watched
from vllm_graphfix.fix import Code, State
from vllm_graphfix.marks.checks import IDLE_SHARE
from vllm_graphfix.marks.ledger import BlockTracker
from vllm_graphfix.marks.process import Marks
from vllm_graphfix.marks.watch import _MAX_DEFERRED, _PAUSE_STEPS, MAX_TRACKING, TRACKING, ChecksumMonitor


class Clock:
    """Time that goes on where it is asked for, as if all of ours took it, and where it is told."""

    def __init__(self) -> None:
        self.now, self.asking = 100.0, 0.0

    def __call__(self) -> float:
        self.now += self.asking
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("vllm_graphfix.marks.watch.time.perf_counter", made)
    return made


class Worker:
    """Takes *seconds* of its *clock* for a step."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.ran = 0

    def execute_model(self, scheduler_output: Any) -> None:
        self._clock.now += self._seconds
        self.ran += 1


def resting_at_times(every: int = 2) -> tuple[ChecksumMonitor, SumsStandIn]:
    marks, sums = watched()
    marks.every = every  # all are followed, as the ledger of a stand-in has it
    return marks, sums


def rests(marks: ChecksumMonitor) -> bool:
    return marks._paused


def served(marks: ChecksumMonitor, worker: Worker) -> Callable[[Any], Any]:
    assert marks._tracker is not None
    return marks._around_steps(marks._tracker, weakref.ref(worker))


def requests(count: int, every: int) -> Any:
    """Yield the outputs of a scheduler for one request at a time, each of which decodes *every* tokens."""
    name, number = "", 0
    for at in range(count):
        if at % every == 0:
            ended, name, number = {name} - {""}, f"r{at}", at // every % 50 * 9 + 1
            yield step(new=((name, ([number, number + 1, number + 2],), 0, 9),), finished_req_ids=ended)
        else:
            yield step(running={name: (([number + 3],) if at % every == 3 else None, 8 + at % every, 1)})


def test_following_takes_its_share_of_the_time_and_goes_on_again_and_again(clock: Clock) -> None:
    marks, _ = resting_at_times()
    worker, began = Worker(clock, 0.005), clock.now
    execute_model = served(marks, worker)
    clock.asking = 30e-6  # so that a step that is followed takes some hundred microseconds: 2 % of the time and more
    followed = 0
    for output in requests(60_000, 7):
        execute_model(output)
        followed += not marks._paused
    counts = marks.counts()
    spent = marks.seconds() - marks._checks.mark_budget.spent - marks._checks.check_budget.spent
    assert spent <= TRACKING * (clock.now - began) + 2 * MAX_TRACKING + 0.001
    assert counts["rests"] > 3
    assert counts["marks"] > 20
    assert 0.01 < followed / worker.ran < 0.2
    assert worker.ran == 60_000
    assert marks._tracker is not None
    not_counted_yet = marks._pause_length - marks._pause_remaining + marks._allowed - marks._tracker.may_defer
    assert marks._step + not_counted_yet == 60_000


def test_in_a_pause_only_the_clock_is_read_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    marks, _ = resting_at_times()
    worker, calls = Worker(clock, 0.001), []
    execute_model = served(marks, worker)
    execute_model(step(new=(("a", ([1, 2, 3],), 0, 9),)))
    marks._tracking_budget._credit = -0.001
    before = marks._before

    def asks(output: Any) -> None:
        calls.append(worker.ran)
        before(output)

    monkeypatch.setattr(marks, "_before", asks)
    try_defer = Mock(return_value=False)
    monkeypatch.setattr(marks._tracker, "try_defer", try_defer)
    for computed in range(9, 9 + 3 * _PAUSE_STEPS):
        execute_model(step(running={"a": (None, computed, 1)}))
    assert rests(marks)
    assert calls == [1, 2 + _PAUSE_STEPS, 3 + 2 * _PAUSE_STEPS]
    assert try_defer.call_count == 2 * len(calls)  # by the wrapper, and by what that calls
    clock.now += 2 * MAX_TRACKING / TRACKING
    for computed in range(2000, 2000 + _PAUSE_STEPS):
        execute_model(step(running={"a": (None, computed, 1)}))
    assert not rests(marks)
    assert marks._step > 3 * _PAUSE_STEPS


def test_who_marks_all_requests_does_not_rest(clock: Clock) -> None:
    marks, _ = resting_at_times(every=1)
    execute_model = served(marks, worker := Worker(clock, 0.001))
    clock.asking = 100e-6
    for output in requests(3000, 7):
        execute_model(output)
    assert marks._tracking_budget.spent > 10 * MAX_TRACKING
    assert (marks.counts()["rests"], worker.ran) == (0, 3000)


def test_what_came_of_a_look_is_read_before_a_rest() -> None:
    marks, sums = resting_at_times()
    marks._before(step(new=(("a", ([1, 2],), 0, 8),)))
    marks._before(None)  # marks them
    sums.changed = {0: ["layer"]}
    decodes(marks, 8, 1)
    assert sums.checks
    marks._tracking_budget._credit = -0.001
    sums.results = list  # type: ignore[method-assign]  # the device takes its time
    for at in range(9, 12):
        decodes(marks, at, 1)
    assert not rests(marks)
    seen = len(sums.seen)
    del sums.results
    decodes(marks, 12, 1)
    assert rests(marks)
    assert marks.counts()["changed"] == 1
    assert len(sums.seen) == seen == 1


def test_what_steps_without_work_may_have_written_is_looked_at_before_a_rest() -> None:
    marks, sums = resting_at_times()
    marks._before(step(new=(("a", (list(range(1, 9)),), 0, 32),)))
    marks._tracking_budget._credit = -0.001
    marks._checks.check_budget._credit = -0.02  # nor may a look in turn be made
    for _ in range(9):
        marks._before(None)
    assert not rests(marks)
    assert (marks.counts()["marks"], sums.seen) == (8, [])
    decodes(marks, 32, 1)
    assert not rests(marks)
    looked = len(sums.seen)
    assert looked == 4  # two blocks a batch, in a stand-in
    decodes(marks, 33, 1)
    assert rests(marks)
    marks, sums = resting_at_times()
    marks._before(step(new=(("a", (list(range(1, 9)),), 0, 32),)))
    marks._before(None)
    marks._tracking_budget._credit = -2 * MAX_TRACKING  # it owes too much to wait for that
    for _ in range(3):
        marks._before(None)
    assert not rests(marks)  # in the steps themselves nothing is followed that could cost anything
    decodes(marks, 32, 1)
    assert rests(marks)


def test_a_rank_that_has_no_work_most_of_the_time_is_followed_again_and_again(clock: Clock) -> None:
    """In most steps without work nothing is asked, so that what following may cost is there for steps of requests."""
    marks, _ = resting_at_times()
    worker, made, reads = Worker(clock, 0.005), 0, 0
    execute_model = served(marks, worker)
    clock.asking = 30e-6
    outputs = requests(60 * 400, 7)
    for _ in range(60):
        before = marks.counts()["marks"]
        for output in islice(outputs, 400):
            execute_model(output)
        made += marks.counts()["marks"] > before
        for _ in range(1600):
            began = clock.now
            marks._before(None)
            reads += clock.now > began
            clock.now += 0.005
    assert 4 < marks.counts()["rests"] < 60
    assert made > 20
    assert reads < 60 * 1600 / 20
    assert marks._step == 60 * 2000 - (marks._pause_length - marks._pause_remaining)
    assert marks._tracking_budget.spent <= (TRACKING + IDLE_SHARE / 2) * (clock.now - 100) + 2 * MAX_TRACKING


def test_waiting_checks_do_not_read_the_clock_in_each_idle_step(clock: Clock) -> None:
    """Or that would use up what following may cost, and all would be forgotten before it was looked at."""
    marks, sums = resting_at_times()
    marks._before(step(new=(("a", (list(range(1, 9)),), 0, 32),)))
    marks._before(None)
    assert marks.counts()["marks"] == 8
    marks._checks.check_budget._credit = -0.025  # 5 s without work pay that
    clock.asking, seen, reads = 30e-6, len(sums.seen), 0
    for _ in range(2000):
        clock.now += 0.005
        began = clock.now
        marks._before(None)
        reads += clock.now > began
    assert len(sums.seen) >= seen + 4  # two blocks a batch, in a stand-in
    assert reads < 200
    assert marks.counts()["rests"] == 0


def test_steps_of_a_rest_are_counted() -> None:
    marks, _ = resting_at_times()
    marks._tracking_budget._credit = -0.001
    decodes(marks, 8, 1)
    assert rests(marks)
    marks._pause_remaining -= 5  # the wrapper does
    marks._before(None)
    decodes(marks, 9, 1)
    assert (marks.counts()["rests"], marks.counts()["rested"], marks._step) == (1, 6, 8)


def test_after_a_pause_foreign_writes_to_new_requests_are_reported(clock: Clock) -> None:
    marks, sums = resting_at_times()
    marks._before(step(new=(("a", ([1, 2, 3],), 0, 12),)))
    marks._tracking_budget._credit = -0.001
    decodes(marks, 12, 1 + _MAX_DEFERRED)
    assert rests(marks)
    clock.now += 2 * MAX_TRACKING / TRACKING
    marks._pause_remaining = 0
    decodes(marks, 30, 1)
    assert not rests(marks)
    marks._before(step(new=(("b", ([5, 6],), 0, 8),), running={"a": (None, 31, 1)}))
    sums.changed = {0: ["layer"]}
    for at in range(3):
        marks._before(None if at < 2 else step(running={"b": (None, 8, 1)}))
    marks._before(step(running={"b": (None, 9, 1)}))
    assert [(each.block.number, each.block.request) for each in marks.foreign_writes] == [(6, "b")]
    assert marks.foreign_writes[0].before >= 3


@given(st.integers(0, 2**32))
def test_a_reallocated_block_is_unmarked_whenever_there_was_a_pause(seed: int) -> None:
    """Nor is one of a request that began before the rest ended: of it nothing is known."""
    chance = random.Random(seed)  # noqa: S311 - the same requests for the same seed
    scheduler, (marks, _) = Scheduler(chance), resting_at_times()
    ledger = marks._tracker
    assert isinstance(ledger, BlockTracker)
    known: set[str] = set()
    marks._checks.mark_budget.allows = lambda **_: True  # type: ignore[method-assign]
    marks._checks.check_budget.allows = lambda **_: chance.random() < 0.5  # type: ignore[method-assign]
    tired, saved_up = False, True

    def allows(*, debt: bool = False) -> bool:
        return not tired or (debt and not saved_up)

    marks._tracking_budget.allows = allows  # type: ignore[method-assign]
    marks._tracking_budget.is_full = lambda: saved_up  # type: ignore[method-assign]
    for _ in range(150):
        tired, saved_up = chance.random() < 0.1, chance.random() < 0.2
        output = None if chance.random() < 0.05 else scheduler.step()
        if not marks._paused:
            known |= {new.req_id for new in output.scheduled_new_reqs} if output else set()
        marks._pause_remaining = min(marks._pause_remaining, 0)  # each step asks whether the rest is over
        marks._pause_length = 0
        marks._before(output)
        if marks._paused:
            known.clear()
            assert not any((ledger._tracked, ledger.marked, ledger.finished, marks._checks.queue.where))
            continue
        if output is None:
            continue
        known |= {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        fresh = {
            number
            for blocks in output.scheduled_cached_reqs.new_block_ids
            if blocks is not None
            for number in blocks[0]
        }
        for new in output.scheduled_new_reqs:
            fresh |= set(new.block_ids[0][new.num_computed_tokens // 4 :])
        held = ledger.marked.keys() | ledger.finished.keys()
        assert fresh.isdisjoint(held)
        assert {block.request for block in ledger._tracked.values()} <= known
    assert marks.stopped is None


def test_the_state_says_if_nothing_is_marked() -> None:
    marks = Marks(lambda: None)
    marks.start(16)
    marks._monitor, _ = watched()

    def reason() -> str:
        return marks.states()["kv-marks"].reason

    decodes(marks._monitor, 8, 1)
    marks._monitor._step = 10_000
    assert reason() == (
        "the finished cache blocks of one of 16 requests are marked; action: report; in more than 10,000 steps none "
        "has been marked yet"
    )
    assert marks.states()["kv-marks"].code is Code.NOTHING_MARKED
    marks._monitor._count("marks", 1)
    assert marks.states()["kv-marks"].code is Code.NONE
    assert reason().endswith("action: report")


@pytest.mark.parametrize(
    ("field", "state", "code"),
    [
        ("refused", State.INCOMPATIBLE, Code.ENGINE),
        ("stopped", State.FAILED, Code.ERROR),
        ("cannot_abort", State.ACTIVE, Code.CANNOT_ABORT),
    ],
)
def test_each_way_not_to_mark_or_not_to_act_has_a_state_and_a_code(field: str, state: State, code: Code) -> None:
    marks = Marks(lambda: None)
    marks.start(16)
    marks._monitor, _ = watched()
    setattr(marks._monitor, field, "as planned")
    actual = marks.states()["kv-marks"]
    assert (actual.state, actual.code) == (state, code)
