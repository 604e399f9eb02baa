"""Which blocks of the KV cache are finished, by what a worker is told of each step, at once or some steps later."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marked_steps import Scheduler, decodes, known, ledger_with_a_prompt, mark_all, step, watched
from vllm_graphfix.marks.ledger import BlockTracker
from vllm_graphfix.marks.watch import _MAX_DEFERRED


def test_a_block_is_finished_once_the_step_that_fills_it_has_run() -> None:
    ledger = ledger_with_a_prompt()
    assert not ledger.finished
    ledger.step(step(running={"a": (None, 9, 3)}))
    assert mark_all(ledger) == {1, 2}
    ledger.settle()
    assert mark_all(ledger) == {1, 2, 3}


@given(st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 3))
def test_what_is_known_of_steps_that_wait_is_in_the_end_what_it_would_be_at_once(
    seed: int, most: int, every: int
) -> None:
    """And no block that is marked is given away in a step that waits."""
    scheduler = Scheduler(random.Random(seed))  # noqa: S311 - the same requests for the same seed
    at_once, later = BlockTracker({0: 4}, every), BlockTracker({0: 4}, every)
    for _ in range(120):
        output = scheduler.step()
        dropped = list(at_once.step(output))
        if later.try_defer(output):
            assert dropped == []
            continue
        assert list(later.step(output)) == dropped
        assert later.allow_deferring(most) == most
        if seed % 2:
            at_once.settle()
            later.settle()
        assert known(later) == known(at_once)
        assert mark_all(at_once) == mark_all(later)
    at_once.settle()
    later.settle()
    assert known(later) == known(at_once)


def test_a_step_in_which_drafts_may_be_refused_does_not_wait() -> None:
    output = step(running={"a": (None, 9, 1)})
    for ledger, waits in ((ledger_with_a_prompt(), True), (ledger_with_a_prompt(slack=3, doubt=2), False)):
        assert ledger.allow_deferring(1) == waits
        assert ledger.try_defer(output) == waits
        assert not ledger.try_defer(output)  # no more than were allowed


def test_a_step_that_zeroes_or_copies_to_a_block_that_is_followed_does_not_wait() -> None:
    ledger, running = ledger_with_a_prompt(), {"a": (None, 9, 1)}
    ledger.allow_deferring(9)
    assert ledger.try_defer(step(running=running, new_block_ids_to_zero=[9]))
    assert not ledger.try_defer(step(running=running, new_block_ids_to_zero=[9, 2]))
    copied = [SimpleNamespace(dst_block_id=2)]
    assert not ledger.try_defer(step(running=running, kv_cache_block_copies=copied))


@given(st.integers(0, 2**32))
def test_a_rank_whose_steps_wait_knows_what_one_knows_that_follows_each_at_once(seed: int) -> None:
    """With the steps of a rank without work in between; nothing is marked, since that depends on the time."""
    chance = random.Random(seed)  # noqa: S311 - the same requests for the same seed
    scheduler = Scheduler(chance)
    outputs = [None if chance.random() < 0.03 else scheduler.step() for _ in range(80)] + [None]
    ranks = []
    for most in (0, _MAX_DEFERRED):
        marks, _ = watched()
        for budget in (marks._checks.mark_budget, marks._checks.check_budget):
            budget.allows = lambda **_: False  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm_graphfix.marks.watch._MAX_DEFERRED", most)
            patch.setattr("vllm_graphfix.marks.checks.BATCH", 10_000)  # or some would be passed over, sooner or later
            for output in outputs:
                marks._before(output)
        assert marks._tracker is not None
        ranks.append((known(marks._tracker), marks._step, list(marks._idle), marks._counts))
    assert ranks[0] == ranks[1]
    assert ranks[0][1] == len(outputs)


def test_what_came_of_a_look_is_read_before_the_next_step() -> None:
    """Whoever has the block is ended before it has an answer; so no step waits while one is under way."""
    marks, sums = watched()
    marks._before(step(new=(("a", ([1, 2],), 0, 8),)))
    marks._checks.check_budget.allows = lambda **_: False  # type: ignore[method-assign]
    marks._before(None)  # marks them
    decodes(marks, 8, 1)
    decodes(marks, 9, 5)
    assert marks._tracker is not None
    assert len(marks._tracker.deferred) == 1 + 5  # the one that was followed, too: nobody has told how far it got
    sums.changed = {0: ["layer"]}
    marks._checks.check_budget.allows = lambda **_: True  # type: ignore[method-assign]
    decodes(marks, 14, _MAX_DEFERRED + 1 - 5)  # the last of them is followed, with those that wait, and looks
    assert (len(sums.seen), marks.foreign_writes) == (1, [])
    decodes(marks, 25, 1)
    ((before, after, ran, idle),) = [(each.before, each.after, each.steps, each.idle) for each in marks.foreign_writes]
    assert (before, after, ran, idle) == (1, 18, 16, 1)
    assert marks._step == 20


def test_of_steps_that_wait_one_is_timed_for_all() -> None:
    marks, _ = watched()
    for budget in (marks._checks.mark_budget, marks._checks.check_budget):
        budget.allows = lambda **_: False  # type: ignore[method-assign]
    marks._before(step(new=(("a", ([1, 2, 3],), 0, 9),)))
    decodes(marks, 9, 1)
    marks._seconds_each, before = 100.0, marks._seconds
    assert marks._tracker is not None
    for _ in range(4):
        assert marks._tracker.try_defer(step(running={"a": (None, 10, 1)}))
    assert 400 <= marks.seconds() - before < 500
    decodes(marks, 14, 1)
    marks._before(None)
    assert 400 < marks._seconds - before < 500
    assert marks._step == 8
    decodes(marks, 15, 2)
    marks._seconds_each, before = 100.0, marks._seconds
    for _ in range(4):
        assert marks._tracker.try_defer(step(running={"a": (None, 17, 1)}))
    marks._before(None)
    assert 400 < marks._seconds - before < 500


def test_a_request_that_comes_back_at_the_beginning_had_got_as_far_as_it_had() -> None:
    """Nobody has to say that its blocks were taken."""
    ledger = ledger_with_a_prompt()
    ledger.allow_deferring(1)
    assert ledger.try_defer(step(running={"a": (None, 9, 3)}))
    ledger.step(step(running={"a": (([5, 6],), 0, 8)}, resumed=("a",)))
    assert mark_all(ledger) == {1, 2, 3}


def test_a_request_that_goes_on_after_its_end_is_not_tracked() -> None:
    ledger = ledger_with_a_prompt()
    assert ledger.step(step(running={"a": (([4],), 12, 1)}, finished_req_ids={"a"})) == []
    assert 4 not in ledger._tracked


def test_steps_that_wait_are_of_the_cache_that_is_gone_after_a_sleep() -> None:
    marks, _ = watched()
    marks._before(step(new=(("a", ([1, 2, 3],), 0, 9),)))
    decodes(marks, 9, 2)
    marks._clear()
    marks._before(step(new=(("b", ([1, 2, 3],), 0, 12),)))
    assert marks._tracker is not None
    assert not marks._tracker.finished
    assert marks._step == 2


def test_the_last_block_of_a_request_that_has_ended_is_finished_too_if_it_is_full() -> None:
    ledger = ledger_with_a_prompt()
    ledger.step(step(running={"a": (None, 9, 3)}))
    ledger.step(step(finished_req_ids={"a"}))
    assert mark_all(ledger) == {1, 2, 3}
    ledger = ledger_with_a_prompt()
    ledger.step(step(finished_req_ids={"a"}))
    assert mark_all(ledger) == {1, 2}


@pytest.mark.parametrize(
    "anew",
    [
        step(new=(("b", ([2, 5],), 0, 8),)),
        step(running={"a": (([2],), 9, 4)}),
        step(running={"a": (([7, 2, 8],), 0, 9)}, resumed=("a",)),
        step(new_block_ids_to_zero=[2]),
        step(kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=2)]),
    ],
    ids=["new", "running", "resumed", "zeroed", "copied"],
)
def test_a_block_that_is_allocated_anew_is_marked_no_more(anew: Any) -> None:
    ledger = ledger_with_a_prompt()
    ledger.settle()
    assert mark_all(ledger) == {1, 2}
    assert [block.number for block in ledger.step(anew)] == [2]
    assert set(ledger.marked) == {1}


def test_blocks_zeroed_in_the_step_of_their_allocation_are_tracked() -> None:
    """As all are of models with recurrent layers."""
    ledger = BlockTracker({0: 4}, 1)
    ledger.step(step(new=(("a", ([1, 2], [9]), 0, 7),), new_block_ids_to_zero=[1, 2]))
    ledger.step(step(running={"a": (([3], []), 7, 5)}, new_block_ids_to_zero=[3]))
    ledger.settle()
    assert mark_all(ledger) == {1, 2, 3}
    output = step(new=(("b", ([2, 5], [8]), 0, 8),), finished_req_ids={"a"}, new_block_ids_to_zero=[2, 5])
    assert [block.number for block in ledger.step(output)] == [2]
    ledger.settle()
    assert mark_all(ledger) == {1, 2, 3, 5}
    assert ledger.marked[2].request == "b"


def test_a_hit_in_the_prefix_cache_stays_marked_and_its_readers_are_known() -> None:
    ledger = ledger_with_a_prompt()
    ledger.settle()
    mark_all(ledger)
    assert ledger.users(ledger.marked[1]) == ["a"]
    assert ledger.step(step(new=(("b", ([1, 2, 9],), 8, 3),), finished_req_ids={"a"})) == []
    assert ledger.users(ledger.marked[1]) == ["b"]
    # One that came to another place without a word was given away in between.
    (dropped,) = ledger.step(step(new=(("c", ([2, 6],), 4, 3),)))
    assert dropped.number == 2


def test_rewritten_groups_and_the_null_block_are_not_tracked() -> None:
    ledger = BlockTracker({1: 4}, 1)
    ledger.step(step(new=(("a", ([1, 2], [0, 3]), 0, 8),)))
    ledger.settle()
    assert mark_all(ledger) == {3}
    (dropped,) = ledger.step(step(new=(("b", ([3], [4]), 4, 1),)))  # whatever it says is computed
    assert dropped.number == 3


def test_tokens_of_drafts_that_may_be_refused_are_not_finished() -> None:
    ledger = ledger_with_a_prompt(slack=4, doubt=2)
    ledger.step(step(running={"a": (None, 9, 3)}))
    assert mark_all(ledger) == {1}  # up to 9 - 4
    ledger.step(step(running={"a": (([4],), 10, 3)}))  # two of three were refused
    assert mark_all(ledger) == {1}
    ledger.settle()  # all steps have run: up to 10 + 1 - 2
    assert mark_all(ledger) == {1, 2}
    ledger.step(step(running={"a": (None, 14, 3)}))
    ledger.step(step(finished_req_ids={"a"}))
    assert mark_all(ledger) == {1, 2, 3}
    ledger = ledger_with_a_prompt(slack=4, doubt=2)
    ledger.step(step(running={"a": (None, 12, 3)}))
    ledger.step(step(finished_req_ids={"a"}))
    assert mark_all(ledger) == {1, 2}  # up to 12 + 1 - 2
    ledger = ledger_with_a_prompt(slack=4)
    ledger.settle()  # a prompt has no drafts
    assert mark_all(ledger) == {1, 2}


def test_of_many_requests_the_fraction_is_followed() -> None:
    ledger = BlockTracker({0: 4}, 16)
    for number in range(33):
        first = 1 + 33 * number
        ledger.step(step(new=((f"{number}", (list(range(first, first + 33)),), 0, 33 * 4),)))
    ledger.settle()
    assert len(mark_all(ledger)) == 2 * 33
    assert {block.request for block in ledger.marked.values()} == {"15", "31"}
    ledger.clear()
    assert not ledger.marked
    assert ledger.step(step(running={"15": (([999],), 132, 1)})) == []  # it was there before


def test_what_the_last_step_of_requests_filled_is_known_until_the_next_one() -> None:
    ledger = ledger_with_a_prompt()
    ledger.step(step(finished_req_ids={"a"}))  # of no request: it tells who has ended
    assert [block.number for block in ledger.newest] == [1, 2]
    ledger.settle()
    assert [block.number for block in ledger.newest] == [1, 2]
    ledger.step(step(new=(("b", ([5],), 0, 4),)))
    assert ledger.newest == []
    ledger.settle()
    assert [block.number for block in ledger.newest] == [5]


def test_requests_that_have_ended_are_no_readers_for_long() -> None:
    ledger = ledger_with_a_prompt()
    ledger.settle()
    mark_all(ledger)
    before: set[str] = {"a"}
    for number in range(500):
        name = f"reader-{number}"
        ledger.step(step(new=((name, ([1, 2, 100 + number],), 8, 3),), finished_req_ids=before))
        before = {name}
    assert ledger.users(ledger.marked[1]) == ["reader-499"]
    assert len(ledger._readers[1]) < 100
