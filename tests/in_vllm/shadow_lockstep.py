"""The shadow check of two data-parallel ranks that share experts: they check the same steps, or none does.

Real are the processes, vLLM's own groups over gloo with their collectives, its `CUDAGraphWrapper` and, on model runner
V2, its `ModelCudaGraphManager` and the function by which ranks agree on a batch. Stand-ins: the model, each of whose
layers ends in a sum over both ranks; graphs, which are the CPU double's; and the model runners' methods, of which there
are the names that the check looks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import shadow_ranks
import shadow_v2
import torch
import wrapped_model
from shadow_ranks import (
    Ended,
    Say,
    SummedStandIn,
    be_killed,
    be_slow,
    be_stopped,
    check_clean_stop,
    check_never_wrong,
    group_of,
    raise_in_a_layer,
    run_out_of_memory,
)
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu import dp_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from wrapped_model import CAPTURED, EVERY_STEP, Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process, watchdog
from vllm_graphfix.shadow.lockstep import shape_of

LIMIT, LATE = 1.5, 2.0
"""Seconds."""
BUSY, IDLE, PROMPTS = "requests", "a dummy batch", "prompts, which no graph has"
METHODS = """
def execute_model(self, scheduler_output, step):
    return step()

def _dummy_run(self, step):
    return step()
"""
RUNNER: dict[str, Any] = {"__name__": "vllm.v1.worker.gpu_model_runner"}
exec(METHODS, RUNNER)  # noqa: S102


def data_parallel(rank: int, run: Callable[[], None]) -> None:
    """Calls *run* with one rank in each tensor-parallel group, and one group of experts for both."""
    groups = {
        "_TP": group_of(rank, [[0], [1]], "tp"),
        "_DP": group_of(rank, [[0, 1]], "dp"),
        "_EP": group_of(rank, [[0, 1]], "ep"),
    }
    SharedStandIn.rank = rank
    with (
        mock.patch.multiple(parallel_state, **groups),
        mock.patch.object(dp_utils, "get_dp_group", return_value=groups["_DP"]),
    ):
        run()


def two_ranks(scenario: Callable[[int, Say], None], **more: Any) -> list[Ended]:
    return shadow_ranks.two_ranks(scenario, run=data_parallel, **more)


class SharedStandIn(SummedStandIn):
    """A model of two ranks, each of which has an expert: all rows come to it, and go back to whose they are."""

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        experts = parallel_state.get_ep_group()
        rows = torch.cat([hidden if rank == self.rank else torch.zeros_like(hidden) for rank in range(2)])
        answered = experts.all_reduce(experts.all_reduce(rows) * (0.25 + self.rank))
        mine: torch.Tensor = answered[self.rank * len(hidden) : (self.rank + 1) * len(hidden)]
        return mine


def parallel_config(**more: Any) -> Any:
    arguments = {"data_parallel_size": 2, "is_moe_model": True, "all2all_backend": "allgather_reducescatter"}
    return SimpleNamespace(**{**arguments, "pipeline_parallel_size": 1, "use_sequence_parallel_moe": False, **more})


def begin(served: Any) -> None:
    process.on_captured(SimpleNamespace(vllm_config=served.config))


def made(rate: Rate, action: Action = Action.REPORT, **more: Any) -> Served:
    with mock.patch.object(wrapped_model, "ModelStandIn", SharedStandIn):
        served = Served(rate, action, parallel_config=parallel_config(), **more)
    if rate:
        begin(served)
    return served


def step(served: Served, kind: str) -> torch.Tensor:
    if kind == IDLE:
        output: torch.Tensor = RUNNER["_dummy_run"](None, lambda: served.step(0))
        return output
    output = SimpleNamespace(num_scheduled_tokens={})  # type: ignore[assignment]
    mode = CUDAGraphMode.FULL if kind == BUSY else CUDAGraphMode.NONE
    return RUNNER["execute_model"](None, output, lambda: served.step(3, mode))  # type: ignore[no-any-return]


def steps_of(rank: int, steps: list[tuple[str, str]]) -> list[str]:
    return [each[rank] for each in steps]


BOTH = [(BUSY, BUSY)]
STEPS = [*BOTH * 3, (BUSY, IDLE), (IDLE, BUSY), (PROMPTS, PROMPTS), (BUSY, PROMPTS), *BOTH * 4, (IDLE, IDLE)]
"""Of both ranks. The first is not checked: in it they look who is there. Where only one replays, which vLLM
should not do, none checks, and two steps later they ask again."""
CHECKED = [2, 3, 4, 5, 9, 10, 11, 12]


def test_both_ranks_check_the_same_steps_and_those_without_requests_take_part() -> None:
    def scenario(rank: int, say: Say) -> None:
        unwatched, watched = made(Rate()), made(EVERY_STEP)
        for kind in steps_of(rank, STEPS):
            before = step(unwatched, kind)
            say(bool(torch.equal(step(watched, kind), before)))
        for mine, right in zip(watched.caches(), unwatched.caches(), strict=True):
            say(bool(torch.equal(mine, right)))
        shadow = watched.shadow
        say(list(shadow.results.steps), shadow.results.checks, shadow.results.mismatches, shadow.stopped)

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.code for each in ended] == [0, 0], ended
    assert [each.messages[-1] for each in ended] == [[CHECKED, len(CHECKED), 0, None]] * 2, ended


def quarantine(rank: int, say: Say, right: Any, watched: Any, run: Callable[[Any, str], Any], *kinds: Any) -> None:
    """Compare each step of *watched* with that of *right*, whose graphs are not wrong, and say what was noticed."""
    for _ in range(3):
        run(right, BUSY), run(watched, BUSY)
    for mine, correct in zip(watched.model.layers.values(), right.model.layers.values(), strict=True):
        mine.kv_cache[0].copy_(correct.kv_cache[0])
    runs = watched.model.eager_runs
    for kind in steps_of(rank, [*kinds]):
        before = run(right, kind)
        say(bool(torch.equal(run(watched, kind), before)))
    results = watched.shadow.results
    here = [each.here for each in results.first_mismatches]
    say(results.mismatches, here, len(results.quarantined), watched.shadow.stopped, watched.model.eager_runs - runs)


def test_a_wrong_graph_of_one_rank_is_quarantined_on_both() -> None:
    def scenario(rank: int, say: Say) -> None:
        right, watched = made(Rate()), made(EVERY_STEP, Action.QUARANTINE, stale=rank == 0)
        quarantine(rank, say, right, watched, step, (BUSY, IDLE), (BUSY, BUSY), (PROMPTS, PROMPTS), (BUSY, BUSY))

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.messages[-1] for each in ended] == [[2, [rank == 0] * 2, 1, None, 4] for rank in range(2)], ended


def with_fault(fault: Callable[[], None], place: int, idle: bool) -> Callable[[int, Say], None]:
    def scenario(rank: int, say: Say) -> None:
        unwatched, watched = made(Rate()), made(EVERY_STEP)
        steps = [*BOTH, *[(BUSY, IDLE if idle else BUSY)] * 5]
        right = [step(unwatched, kind) for kind in steps_of(rank, steps)]
        if rank == shadow_ranks.FAULTY:
            vars(watched.model).update(fault=fault, place=place)
        for kind, expected in zip(steps_of(rank, steps), right, strict=True):
            say(bool(torch.equal(step(watched, kind), expected)))
        say(watched.shadow.results.checks, watched.shadow.stopped, process.REFUSED)

    return scenario


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (run_out_of_memory, "it waits for another rank of its group"),
        (be_stopped, "another rank of the group may have failed, and 3 s were not enough"),
        (be_killed, "the ranks of its group cannot agree any more"),
    ],
    ids=lambda arguments: getattr(arguments, "__name__", ""),
)
def test_a_rank_that_fails_within_a_pass_or_is_gone_ends_the_other_one(
    fault: Callable[[], None], message: str, idle: bool
) -> None:
    check_clean_stop(two_ranks(with_fault(fault, 1, idle)), message)


def test_a_slow_rank_is_waited_for() -> None:
    ended = two_ranks(with_fault(be_slow, 1, idle=True))
    check_never_wrong(ended)
    assert [each.messages[-1] for each in ended] == [[5, None, None]] * 2


def test_a_rank_that_fails_behind_its_last_collective_turns_the_check_off_on_both() -> None:
    ended = two_ranks(with_fault(raise_in_a_layer, 2, idle=False))
    check_never_wrong(ended)
    for each in ended:
        assert (each.code, each.messages[-1][0], each.log.count("the shadow check is now off")) == (0, 1, 1), ended


def of_one(meddle: Callable[[Any, int], None], begin_with: Rate = EVERY_STEP) -> list[Ended]:
    """Ranks, one of which is meddled with after each step; what each says of a step, and how its check stands."""

    def scenario(rank: int, say: Say) -> None:
        faulty = rank == shadow_ranks.FAULTY
        unwatched, watched = made(Rate()), made(begin_with if faulty else EVERY_STEP)
        for number in range(6):
            before = step(unwatched, BUSY)
            say(bool(torch.equal(step(watched, BUSY), before)))
            if faulty and watched.shadow is not None:
                meddle(watched.shadow, number)
        shadow = watched.shadow
        say(shadow and shadow.results.checks, shadow and shadow.stopped, process.REFUSED)

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.code for each in ended] == [0, 0], ended
    return ended


def test_a_rank_whose_check_is_over_for_a_reason_of_its_own_tells_the_other_one() -> None:
    def fail(shadow: Any, number: int) -> None:
        if number == 2:
            shadow.stop(RuntimeError("planted"))

    ended = of_one(fail)
    assert [each.messages[-1] for each in ended] == [
        [2, "it failed on another rank of the same group", None],
        [2, "RuntimeError: planted", None],
    ], ended
    for each in ended:
        assert each.log.count("the shadow check is now off") == 1, ended


def test_where_one_rank_does_not_take_part_nobody_waits_for_it() -> None:
    ended = of_one(lambda *_: None, Rate())
    assert ended[0].messages[-1] == [0, None, "rank 1 of the ranks that share experts takes no part in it"], ended


def test_a_rank_without_room_leaves_the_step_out_on_both() -> None:
    def meddle(shadow: Any, number: int) -> None:
        if number == 1:
            shadow._memory_for = lambda key: lambda copies: "planted"

    ended = of_one(meddle)
    assert [each.messages[-1] for each in ended] == [[1, None, None]] * 2, ended


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"all2all_backend": "deepep_low_latency"}, "exchange tokens by deepep_low_latency"),
        ({"pipeline_parallel_size": 2}, "in a pipeline"),
        ({"enable_fault_tolerance": True}, "may be replaced"),
        ({"enable_eplb": True}, "load of experts"),
        ({"moe_backend": "deep_gemm_mega_moe"}, "experts of deep_gemm_mega_moe exchange tokens themselves"),
    ],
)
def test_engines_that_were_not_examined_are_refused(arguments: dict[str, Any], reason: str) -> None:
    process.start(EVERY_STEP, Action.REPORT)
    config = SimpleNamespace(
        parallel_config=parallel_config(**arguments),
        cache_config=SimpleNamespace(),
        kernel_config=SimpleNamespace(**arguments),
    )
    process.on_captured(SimpleNamespace(vllm_config=config))
    assert reason in (process.REFUSED or "")
    process.start(Rate(), Action.REPORT)


# -- model runner V2


class ServedV2(shadow_v2.Served):
    """The same on vLLM's manager; a step begins with vLLM's own agreement of the ranks on its batch."""

    def __init__(self, rank: int, rate: Rate, action: Action = Action.REPORT, *, stale: bool = False) -> None:
        self.rank = rank
        with mock.patch.object(shadow_v2, "ModelStandIn", SharedStandIn):
            super().__init__(rate, action, stale=stale)
        self.config.parallel_config = parallel_config(data_parallel_rank=rank)
        self.manager.dispatch = lambda *_, **__: self.desc
        process.SHADOW = self.shadow
        if rate:
            process.on_captured(SimpleNamespace(vllm_config=self.config, use_v2_model_runner=True))

    def common_step(self, kind: str) -> torch.Tensor:
        process.SHADOW = self.shadow
        eager = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=CAPTURED, num_reqs=CAPTURED)
        agreed, *_ = dp_utils.sync_cudagraph_and_dp_padding(
            self.manager, self.desc if kind != PROMPTS else eager, CAPTURED, CAPTURED, None, 2, self.rank
        )
        if agreed.cg_mode == CUDAGraphMode.FULL:
            return self.step(3 if kind == BUSY else 1, dummy_run=kind == IDLE)
        with set_forward_context(
            self.metadata(), self.config, slot_mapping=self.by_layer(), num_tokens=CAPTURED, num_tokens_across_dp=FOUR
        ):
            return self.model(self.hidden)[:1].clone()


FOUR = torch.tensor([CAPTURED, CAPTURED], dtype=torch.int32)
"""Rows on each rank."""
STEPS_V2 = [*BOTH * 2, (BUSY, IDLE), (IDLE, BUSY), (PROMPTS, BUSY), *BOTH * 3]
CHECKED_V2 = [2, 3, 4, 6, 7, 8]


def test_on_v2_they_check_the_steps_that_vllm_agrees_that_all_replay() -> None:
    def scenario(rank: int, say: Say) -> None:
        unwatched, watched = ServedV2(rank, Rate()), ServedV2(rank, EVERY_STEP)
        for kind in steps_of(rank, STEPS_V2):
            before = unwatched.common_step(kind)
            say(bool(torch.equal(watched.common_step(kind), before)))
        shadow = watched.shadow
        say(list(shadow.results.steps), shadow.results.checks, shadow.results.mismatches, shadow.stopped)

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.messages[-1] for each in ended] == [[CHECKED_V2, len(CHECKED_V2), 0, None]] * 2, ended


def test_a_rank_that_is_late_is_waited_for_as_long_as_nothing_is_queued() -> None:
    """It may compile, load an adapter, or encode images: before the ranks ask each other, or before the model runs."""

    def scenario(rank: int, say: Say) -> None:
        unwatched, watched = ServedV2(rank, Rate()), ServedV2(rank, EVERY_STEP, Action.QUARANTINE)
        watchdog.LIMIT = LIMIT
        step, faulty = watched.step, rank == shadow_ranks.FAULTY

        def after(seconds: float, what: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                time.sleep(seconds)
                return what(*args, **kwargs)

            return called

        for number in range(5):
            before = unwatched.common_step(BUSY)
            # vLLM's own agreement asks for it when all ranks are there, and right before ours.
            watched.manager.dispatch = after(LATE * (faulty and number == 2), lambda *_, **__: watched.desc)
            vars(watched).update(step=after(LATE * (faulty and number > 2), step))
            if number == 4:
                watched.shadow.quarantined.add((id(watched.manager), shape_of(watched.desc)))
            say(bool(torch.equal(watched.common_step(BUSY), before)))
        say(watched.shadow.results.checks, watched.shadow.stopped)

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.messages[-1] for each in ended] == [[3, None]] * 2, ended


def test_on_v2_a_wrong_graph_of_one_rank_is_quarantined_on_both() -> None:
    def scenario(rank: int, say: Say) -> None:
        right, watched = ServedV2(rank, Rate()), ServedV2(rank, EVERY_STEP, Action.QUARANTINE, stale=rank == 0)
        quarantine(rank, say, right, watched, ServedV2.common_step, (BUSY, IDLE), (BUSY, BUSY), (IDLE, BUSY))

    ended = two_ranks(scenario)
    check_never_wrong(ended)
    assert [each.messages[-1] for each in ended] == [[2, [rank == 0] * 2, 1, None, 3] for rank in range(2)], ended
