"""A real engine whose cache blocks are marked, in this process: what the marks say, as JSON.

    python marked_engine.py MODEL PLANT [uni|mp [graphs]]

PLANT is what is done to the cache behind vLLM's back, see `PLANTS`. With ``graphs`` it is one on a GPU, with full
graphs. VLLM_ENABLE_V1_MULTIPROCESSING has to be 0.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

from aborted_engine import SMALL, VOCABULARY

SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def main(model: str, plant: str, executor: str = "uni", graphs: str = "") -> None:
    from vllm import LLM, SamplingParams

    import vllm_graphfix

    kind: dict[str, Any] = {"enforce_eager": True}
    if graphs:
        kind = {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.05,
        }
    llm = LLM(model=model, distributed_executor_backend=executor, **SMALL, **kind)
    core = llm.llm_engine.engine_core.engine_core
    chance = random.Random(7)  # noqa: S311 - the same prompts in every run

    def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
        return core.model_executor.collective_rpc(function, args=arguments)[0]

    def prompt(length: int) -> list[int]:
        return chance.choices(range(1, VOCABULARY), k=length)

    def ask(prompts: list[list[int]], tokens: int) -> list[Any]:
        sampling = SamplingParams(max_tokens=tokens, **SAMPLING)
        reported = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return [
            (each.outputs[0].finish_reason, each.outputs[0].stop_reason, each.num_cached_tokens) for each in reported
        ]

    in_worker(hurry)
    shared = prompt(80)
    for number in range(4):  # hits, blocks that are given out again, several requests at once
        ask([shared + prompt(16 + 8 * number) for _ in range(4)], 20)
    blocks = core.scheduler.kv_cache_manager.block_pool.blocks
    unused = [block.block_id for block in blocks if block.block_hash is None][-1]
    planted = in_worker(PLANTS[plant], unused)
    # Two have the shared blocks, one has none of them.
    answers = [ask([shared + prompt(24), prompt(40), shared + prompt(16 + 8 * number)], 20) for number in range(3)]
    for _ in range(3):
        core.execute_dummy_batch()
    actual = in_worker(messages)
    # Where the scheduler is, in whose process requests end; the worker's has none where that is another one.
    actual["counts"]["aborted"] = vllm_graphfix.events().get("kv-marks", {}).get("aborted", 0)
    sys.stdout.write(json.dumps(actual | {"planted": planted, "asked": answers}) + "\n")


def hurry(worker: Any) -> None:
    """The machine is slow, and every mark and look is wanted."""
    from vllm_graphfix.marks import checks

    checks._PATIENCE = 0.0
    serving = _marks()._monitor
    serving._checks.mark_budget.share = serving._checks.check_budget.share = 0.5


def messages(worker: Any) -> dict[str, Any]:
    counts, state = _marks().counts()["kv-marks"], _marks().states()["kv-marks"]
    actual = [each._asdict() for each in _marks().overwritten()]
    return {"counts": counts, "state": state.state.value, "reason": state.reason, "found": actual}


def _marks() -> Any:
    import vllm_graphfix

    return vllm_graphfix._engine_process().component("kv-marks").marks


def overwrite_finished(worker: Any, unused: int) -> Any:
    """One bit of the first block of the prefix that requests share, in one layer's cache."""
    watch = _marks()._monitor
    ledger = watch._tracker
    first = [number for number, block in ledger.marked.items() if block.place == 0]
    number = max(first, key=lambda each: len(ledger._readers.get(each, ())))
    layer = watch._checks.queue.where[number][0].layers[-1]
    layer.memory.select(layer.axis, number)[(-1,) * (layer.memory.dim() - 1)] ^= 1
    return {"block": number, "layer": layer.layer}


def overwrite_unused(worker: Any, unused: int) -> Any:
    """All of a block that no request had."""
    for layer in next(iter(_marks()._monitor._checks.groups.values())).caches:
        layer.memory.select(layer.axis, unused).fill_(5)


def nothing(worker: Any, unused: int) -> None:
    """As it is."""


PLANTS: dict[str, Callable[..., Any]] = {"nothing": nothing, "finished": overwrite_finished, "unused": overwrite_unused}

if __name__ == "__main__":
    import marked_engine  # functions of which a worker in a process of its own knows the module

    marked_engine.main(*sys.argv[1:])
