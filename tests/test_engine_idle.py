"""Which blocks of an engine's caches a step without work changes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graphfix.verify.engine.probes import BlocksChangedByAnIdleStep, caches_of

BLOCKS = 5


def worker_with(*caches: Any) -> Any:
    config = SimpleNamespace(num_blocks=BLOCKS)
    return SimpleNamespace(model_runner=SimpleNamespace(kv_caches=list(caches), kv_cache_config=config))


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(BLOCKS, 2, 3),
        torch.zeros(2, BLOCKS, 3),
        torch.zeros(3 * BLOCKS, 4, dtype=torch.float16),
        torch.zeros(BLOCKS, 8).as_strided((BLOCKS, 3), (8, 1)),
        torch.zeros(BLOCKS, 4, dtype=torch.uint8),
    ],
    ids=["blocks first", "keys and values first", "kernel blocks", "part of a page", "fp8"],
)
def test_blocks_are_recognised_in_every_layout_of_a_cache(cache: torch.Tensor) -> None:
    """With all that is in it, and without the null block."""
    worker = worker_with(cache)
    (before,) = [each.clone() for each in caches_of(worker)]
    axis = next(axis for axis, size in enumerate(cache.shape) if size % BLOCKS == 0)
    each = cache.shape[axis] // BLOCKS
    for changed in range(BLOCKS):
        cache.zero_()
        cache.select(axis, changed * each).fill_(1)
        (after,) = caches_of(worker)
        assert len(after) == BLOCKS - 1
        assert (before != after).any(1).tolist() == [block == changed for block in range(1, BLOCKS)]


def test_each_tensor_of_a_layers_state_is_looked_at() -> None:
    worker = worker_with([torch.zeros(BLOCKS, 2), torch.zeros(BLOCKS, 3)], torch.zeros(2, BLOCKS, 4))
    assert [tuple(each.shape) for each in caches_of(worker)] == [(4, 8), (4, 12), (4, 32)]


def test_a_number_that_stays_none_has_not_changed() -> None:
    worker = worker_with(torch.full((BLOCKS, 2), float("nan")))
    (before,), (after,) = caches_of(worker), caches_of(worker)
    assert torch.equal(before, after)


class EngineThatIdles:
    """A double of `vllm.LLM`, whose steps have work or none.

    Its step writes to the second block, as a request's does; its step without work to *idle*'s.
    """

    def __init__(self, *idle: int) -> None:
        self.cache = torch.zeros(BLOCKS, 2)
        self.idle, self.steps, self.idles = idle, 0, 0
        self.llm_engine = SimpleNamespace(
            step=self.step, engine_core=SimpleNamespace(execute_dummy_batch=self.execute_dummy_batch)
        )

    def step(self, word: str) -> str:
        self.steps += 1
        self.cache[1] += 1
        return word

    def execute_dummy_batch(self) -> None:
        self.idles += 1
        for block in self.idle:
            self.cache[block] += 1

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(worker_with(self.cache))]


@pytest.mark.parametrize(
    ("idle", "changed"), [((), 0.0), ((0,), 0.0), ((1,), 2.0), ((0, 2, 3), 4.0)], ids=["none", "null", "one", "two"]
)
def test_blocks_that_steps_without_work_change_are_counted(idle: tuple[int, ...], changed: float) -> None:
    seen: dict[str, list[float]] = {}
    saved: list[str] = []
    engine: Any = EngineThatIdles(*idle)
    BlocksChangedByAnIdleStep(seen, lambda: saved.append(json.dumps(seen))).in_the_engine(engine)
    assert seen == {"blocks-changed-by-an-idle-step": [0.0, 0.0]}
    for number in range(2 * BlocksChangedByAnIdleStep.every + 1):
        assert engine.llm_engine.step(str(number)) == str(number), "the engine's own answer"
    assert engine.idles == 2
    assert seen == {"blocks-changed-by-an-idle-step": [changed, 2.0 * (BLOCKS - 1)]}
    assert [json.loads(line) for line in saved[-1:]] == [seen]
