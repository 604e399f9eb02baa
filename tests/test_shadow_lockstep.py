"""Data-parallel ranks that share experts come to know alike who takes part, and nobody is asked who may not come.

Real are the check, and a store of torch.distributed's; stand-ins are the ranks, which are in one process and take their
steps in turns, and the agreement, in which nobody waits and all that is asked is written down.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore

from vllm_graphfix.settings.shadow_rate import NEVER, Action, Rate
from vllm_graphfix.shadow import coordinator, lockstep, process, ranks, runner_v2, watchdog
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.lockstep import DataParallelCoordinator, Shape


class RankStandIn:
    """One of two ranks, whose check begins with it."""

    def __init__(self, store: Any, rank: int, find: Callable[[], Any] | None = None) -> None:
        """*find* returns the store, as long as the check begins."""
        self.refused: list[str] = []
        self.calls: list[tuple[int, bool]] = []
        """The steps in which it has asked the other one, and whether it has said that its check is over."""
        shadow: Any = Shadow(Rate(every=1), Action.REPORT, self.refused.append)

        def of_this_rank(first: int) -> DataParallelCoordinator:
            made = DataParallelCoordinator(rank, [0, 1], first, find or (lambda: store))
            made._folder = "lockstep/1"
            return made

        with mock.patch.object(lockstep, "of_this_rank", of_this_rank):
            shadow.start_in_lockstep()
        shadow.lockstep._store = lambda: store
        self.shadow = shadow

    def steps(self, number: int = 1) -> None:
        for _ in range(number):
            self.shadow.schedule.count += 1
            if self.shadow.schedule.count >= self.shadow.schedule.due:
                with mock.patch.object(ranks, "all_reduce_max", self._largest):
                    self.shadow.all_ranks_replay(Shape(8, uniform=True))

    def _largest(self, over: float, *values: float) -> tuple[float, ...]:
        self.calls.append((self.shadow.schedule.count, bool(over)))
        return (over, *values)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_a_rank_that_is_steps_ahead_of_another_one_comes_to_the_same(store: Any) -> None:
    ahead, behind = RankStandIn(store, 0), RankStandIn(store, 1)
    ahead.steps(3)
    behind.steps(3)
    for rank in (ahead, behind):
        assert (rank.shadow.lockstep.all_take_part, rank.refused, rank.calls) == (True, [], [(2, False), (3, False)])


def test_if_one_rank_has_looked_before_another_has_joined_nobody_checks(store: Any) -> None:
    early = RankStandIn(store, 0)
    early.steps(3)
    late = RankStandIn(store, 1)
    late.steps(3)
    for rank in (early, late):
        assert rank.refused == ["rank 1 of the ranks that share experts takes no part in it"]
        assert (rank.calls, rank.shadow.schedule.due) == ([], NEVER)


def broken() -> Any:
    raise TimeoutError("planted")


def test_a_rank_whose_key_arrives_late_says_that_its_check_is_over(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others see the word, and wait for the rank."""
    answers = threading.Event()
    monkeypatch.setattr(coordinator, "_STORE_TIMEOUT", 0.05)
    late = RankStandIn(store, 0, lambda: (answers.wait(), store)[1])
    monkeypatch.undo()
    assert late.shadow.stopped == "TimeoutError: no answer for 0 s"
    answers.set()
    other = RankStandIn(store, 1)
    store.wait(["shadow/lockstep/1/0"])
    for rank in (late, other):
        rank.steps(3)
    assert (late.calls, late.shadow.schedule.due) == ([(2, True)], NEVER)
    assert other.calls[0] == (2, False)


def test_a_rank_whose_word_never_came_keeps_nobody_waiting(store: Any) -> None:
    silent, other = RankStandIn(store, 0, broken), RankStandIn(store, 1)
    for rank in (silent, other):
        rank.steps(3)
        assert (rank.calls, rank.shadow.schedule.due) == ([], NEVER)
    assert silent.shadow.stopped == "TimeoutError: planted"


def be_silent(rank: RankStandIn, store: Any, times: int) -> None:
    """The store of *rank* does not answer so many times from now on."""
    remaining = itertools.count(times, -1)
    rank.shadow.lockstep._store = lambda: broken() if next(remaining) > 0 else store


@pytest.mark.parametrize(("fails", "calls"), [(1, [(2, True)]), (2, [])])
def test_a_rank_that_could_not_look_looks_again_where_the_others_may_wait_for_it(
    store: Any, fails: int, calls: list[tuple[int, bool]]
) -> None:
    rank, other = RankStandIn(store, 0), RankStandIn(store, 1)
    be_silent(rank, store, fails)
    other.steps(2)
    rank.steps(4)
    assert (rank.calls, rank.shadow.schedule.due, rank.shadow.stopped) == (calls, NEVER, "TimeoutError: planted")


def test_a_rank_alone_that_could_not_look_waits_for_nobody(store: Any) -> None:
    rank = RankStandIn(store, 0)
    be_silent(rank, store, 1)
    rank.steps(4)
    assert (rank.calls, rank.shadow.schedule.due) == ([], NEVER)


# -- how long ranks are waited for


@pytest.mark.parametrize(("timeout", "seconds"), [("600", 600.0), ("1", 15.0), ("much", 300.0)])
def test_a_rank_may_take_as_long_to_come_to_a_step_as_vllm_lets_it(
    timeout: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Envs:
        @property
        def VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS(self) -> int:  # noqa: N802
            return int(timeout)

    envs = Envs()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))
    assert watchdog.LIMIT == 15.0
    assert ranks.step_timeout() == seconds


# -- model runner V2


class ModelCudaGraphManager:
    """Stands in for vLLM's: it has its name."""


@pytest.fixture
def in_step() -> Iterator[Any]:
    process.start(Rate(every=1), Action.REPORT)
    shadow: Any = process.SHADOW
    shadow.lockstep = SimpleNamespace(common_shape=None, all_take_part=True, first=2)
    yield shadow
    process.start(Rate(), Action.REPORT)


def agreement() -> Callable[..., Any]:
    def stock(cudagraph_manager: Any, desired_batch_desc: Any) -> Any:
        return desired_batch_desc, None

    wrapped: Callable[..., Any] = runner_v2._count_common_steps(stock, None)  # type: ignore[arg-type]
    return wrapped


def test_the_agreement_of_a_batch_may_be_called_with_names(in_step: Any) -> None:
    called = agreement()
    assert called(cudagraph_manager=ModelCudaGraphManager(), desired_batch_desc="a batch") == ("a batch", None)
    assert in_step.schedule.count == 1
    assert called(cudagraph_manager=None, desired_batch_desc=1) == (1, None)
    assert in_step.schedule.count == 1


@pytest.mark.parametrize("breaks", ["tick", "all_reduce_max"])
def test_what_fails_there_turns_the_check_off_and_serving_goes_on(in_step: Any, breaks: str) -> None:
    in_step.schedule.timed = True
    in_step.schedule.count = 1
    broken = in_step.schedule if breaks == "tick" else ranks
    with mock.patch.object(broken, breaks, side_effect=ValueError("planted")):
        assert agreement()(ModelCudaGraphManager(), "a batch") == ("a batch", None)
    assert in_step.stopped is not None
