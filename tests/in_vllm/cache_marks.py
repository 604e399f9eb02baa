"""Marks in the cache on vLLM's own worker, batch and block tables: what a step without work does to finished blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from vllm_graphfix.marks.watch import _MAX_DEFERRED, ChecksumMonitor
from vllm_graphfix.shadow.affected_requests import requests_of_rows
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.idle_runner import ATTENTION, BLOCKS, DRAFT, PAGE, PROMPT, WIDTH, prefilled_request
from vllm_graphfix.verify.double.scenarios.idle_rank import _DraftingRank, _Rank
from vllm_graphfix.verify.double.unpinned import unpinned

BOTH = ("first", "second")
STOCK = os.environ.get("VLLM_GRAPHFIX_IDLE_RANK") == "off"


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with unpinned(), cpu_cuda_graphs():
        yield


def layer(memory: torch.Tensor) -> Any:
    """An attention layer; its backend knows no shape of caches, as from 0.29 on."""
    return SimpleNamespace(kv_cache=memory.view(-1, PAGE, WIDTH), get_attn_backend=lambda: object)


def marked(rank: Any, abort: Any = None, every: int = 1) -> ChecksumMonitor:
    """The marks of *rank*, which has caches of the layers that its groups name."""
    config, cache = rank.runner.vllm_config, rank.cache
    layers = {ATTENTION: layer(cache.keys), DRAFT: layer(cache.drafts)}
    config.compilation_config.static_forward_context = layers
    config.parallel_config.pipeline_parallel_size = 1
    groups = [KVCacheGroupSpec(names, spec) for _, names, spec in rank.groups()]
    rank.runner.kv_cache_config = KVCacheConfig(len(cache.keys) // PAGE, [], groups)
    rank.worker.vllm_config = config
    watch = ChecksumMonitor()
    watch.start(every, abort)
    watch.on_captured(rank.worker)
    assert watch.stopped is watch.refused is None
    return watch


def scheduled(rank: Any, new: tuple[str, ...] = (), running: tuple[str, ...] = ()) -> SchedulerOutput:
    """Return the output of a scheduler for a step of one token a request."""
    groups = len(rank.groups())
    cached: dict[str, Any] = {
        "req_ids": list(running),
        "resumed_req_ids": set(),
        "new_token_ids": [],
        "all_token_ids": {},
        "new_block_ids": [None] * len(running),
        "num_computed_tokens": [rank.computed[name] for name in running],
        "num_output_tokens": [1] * len(running),
    }
    fresh = []
    for name in new:
        state, keys = BLOCKS[name]
        values = {
            "req_id": name,
            "prompt_token_ids": [0] * PROMPT,
            "mm_features": [],
            "sampling_params": None,
            "pooling_params": None,
            "block_ids": ([state], keys)[2 - groups :],
            "num_computed_tokens": PROMPT,
            "lora_request": None,
        }
        fresh.append(NewRequestData(**values))
    output = {
        "scheduled_new_reqs": fresh,
        "scheduled_cached_reqs": CachedRequestData(**cached),
        "num_scheduled_tokens": dict.fromkeys((*new, *running), 1),
        "total_num_scheduled_tokens": len(new) + len(running),
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "num_common_prefix_blocks": [],
        "finished_req_ids": set(),
        "free_encoder_mm_hashes": [],
        # With a recurrent group, what is allocated of others (`Scheduler._get_new_block_ids_to_zero`, from 0.17 on).
        "new_block_ids_to_zero": [number for name in new for number in BLOCKS[name][1]] if groups > 1 else None,
    }
    return SchedulerOutput(**supported_kwargs(SchedulerOutput, output))


def decode_and_idle(rank: Any, *, spent: bool = False) -> ChecksumMonitor:
    """A step that fills a block of each request, and steps without work; *spent* is what marks may cost."""
    if isinstance(rank, _Rank) and not isinstance(rank, _DraftingRank):
        rank.capture()
    watch = marked(rank)
    if spent:
        watch._checks.mark_budget._credit = watch._checks.check_budget._credit = -0.02
    watch._before(scheduled(rank, new=BOTH))
    rank.cache.hidden.copy_(torch.arange(rank.cache.hidden.numel()).view_as(rank.cache.hidden))
    rank.step(BOTH)  # the fourth token: the first block of each is full
    rank.cache.hidden.fill_(7.0)  # of no request
    for _ in range(3):
        rank.idle()
    look_and_read(watch, rank)
    return watch


def look_and_read(watch: ChecksumMonitor, rank: Any) -> None:
    """Steps, in which a block is looked at, and what came of it is read, no later than in the last one."""
    for _ in range(2 + _MAX_DEFERRED):
        watch._before(scheduled(rank, running=BOTH))


@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("kind", [_Rank, _DraftingRank])
def test_a_step_without_work_that_writes_to_a_finished_block_is_named(kind: Any, spent: bool) -> None:
    """`idle-rank`: which blocks it writes to is a matter of release; with the fix none.

    What it may write to is marked before it and looked at after it, also when sums of other steps have used up what
    they may cost: a mark that is made later is one of what the step has left, and a look may be one of another block.
    """
    watch = decode_and_idle(kind(), spent=spent)
    counts = watch.counts()
    full = {BLOCKS[name][1][0] for name in BOTH}
    assert counts["marks"] == len(full)
    assert counts["looks"] >= len(full)
    assert watch.stopped is None
    writes = os.environ["WRITES"].split(",")
    if not STOCK or kind.__name__.strip("_") not in writes:
        assert counts["changed"] == 0
        return
    assert {each.block.number for each in watch.foreign_writes} <= full
    assert watch.foreign_writes
    first = watch.foreign_writes[0]
    assert (first.steps <= 1, first.idle >= 1) == (True, True)
    assert "without work" in first.sentence()


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("kind", [_Rank, _DraftingRank])
def test_what_the_last_step_filled_is_marked_whether_its_request_is_followed_or_not(kind: Any, rests: bool) -> None:
    """Neither is, since but one of a thousand is, and the marks rest."""
    rank = kind()
    if isinstance(rank, _Rank) and not isinstance(rank, _DraftingRank):
        rank.capture()
    watch = marked(rank, every=1000)
    watch._before(output := scheduled(rank, new=BOTH))
    if rests:
        watch._pause()
    watch._last_step.output = output
    rank.runner.requests = {name: prefilled_request(name, len(rank.groups())) for name in BOTH}
    rank.cache.hidden.copy_(torch.arange(rank.cache.hidden.numel()).view_as(rank.cache.hidden))
    rank.step(BOTH)  # the fourth token: the first block of each is full
    watch._last_step.finish(rank.runner)
    rank.cache.hidden.fill_(7.0)  # of no request
    for _ in range(3):
        rank.idle()
    for _ in range(2):  # steps that only tell of who has ended
        watch._before(scheduled(rank))
    full = {BLOCKS[name][1][0] for name in BOTH}
    assert (watch.stopped, watch.counts()["marks"]) == (None, len(full))
    assert watch.counts()["looks"] >= len(full)
    writes = STOCK and kind.__name__.strip("_") in os.environ["WRITES"].split(",")
    assert bool(watch.foreign_writes) == writes
    assert {each.block.number for each in watch.foreign_writes} <= full
    assert not any(each.steps for each in watch.foreign_writes)


def overwritten(abort: Any) -> ChecksumMonitor:
    """The marks of two requests, of which the first's finished block was overwritten."""
    rank = _DraftingRank()
    watch = marked(rank, abort)
    watch._before(scheduled(rank, new=BOTH))
    rank.step(BOTH)
    watch._tracker.settle()  # type: ignore[union-attr]
    watch._before(None)
    rank.cache.keys[BLOCKS["first"][1][0] * PAGE] += 1.0
    look_and_read(watch, rank)
    assert [each.block.number for each in watch.foreign_writes] == [BLOCKS["first"][1][0]]
    assert watch.stopped is None
    return watch


def test_of_two_requests_the_one_whose_block_was_overwritten_is_ended() -> None:
    ended: list[Any] = []
    overwritten(SimpleNamespace(why_not=lambda: None, deliver=lambda *values: ended.append(values)))
    ((names, blocks, why),) = ended
    assert (names, blocks) == (("first",), [BLOCKS["first"][1][0]])
    assert "has changed although it was finished" in why
    assert "of its request), in" in why


def test_a_verdict_that_does_not_reach_the_scheduler_is_reported() -> None:
    def deliver(*_: Any) -> None:
        raise OSError("there is no room")

    refused = overwritten(SimpleNamespace(why_not=lambda: "there is nobody", deliver=deliver))
    assert refused.cannot_abort == "there is nobody"
    failed = overwritten(SimpleNamespace(why_not=lambda: None, deliver=deliver))
    assert failed.cannot_abort == "there is no room"


def test_a_recurrent_state_is_not_marked_and_the_worker_is_stock_again_afterwards() -> None:
    rank = _Rank()
    watch = marked(rank)
    assert set(watch._checks.groups) == {1}
    assert "execute_model" in vars(rank.worker)
    watch.start(None)
    assert not {"execute_model", "execute_dummy_batch", "sleep"} & vars(rank.worker).keys()


def test_what_goes_wrong_ends_the_marks_with_one_warning_and_the_step_runs(caplog: pytest.LogCaptureFixture) -> None:
    rank = _DraftingRank()
    watch = marked(rank)
    watch._tracker.step = lambda output: 1 / 0  # type: ignore[method-assign, union-attr]
    watch._guarded(watch._before, scheduled(rank, new=BOTH))
    rank.idle()
    assert watch.stopped == "ZeroDivisionError: division by zero"
    assert watch.counts()["failures"] == 1
    assert "execute_model" not in vars(rank.worker)


RUNNER = """
def execute_model(self, scheduler_output, look):
    {assign}
    return look()
"""


@pytest.mark.parametrize("module", ["vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"])
def test_the_requests_of_wrong_rows_are_those_of_the_step_that_runs(module: str) -> None:
    """The caller is a double of the model runner's; `test_kv_marks` has it that releases have these names there."""
    v2 = module.endswith("gpu.model_runner")
    made: dict[str, Any] = {"__name__": module}
    exec(RUNNER.format(assign="input_batch = self.input_batch" if v2 else "pass"), made)  # noqa: S102
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["c", "a", "b"]))
    output = SimpleNamespace(num_scheduled_tokens={"a": 2, "b": 1, "c": 1})

    def actual(wrong: list[bool]) -> list[str]:
        named: list[str] = made["execute_model"](runner, output, lambda: requests_of_rows(wrong))
        return named

    assert actual([False, False, True, False]) == ["a"]
    assert actual([True, False, False, True]) == ["c", "b"]
    assert actual([True]) == ["a", "b", "c"]  # not the rows of this step
    with pytest.raises(LookupError):
        requests_of_rows([True])
