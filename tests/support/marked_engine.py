"""A real engine on the CPU whose cache blocks are marked, in this process: what the marks say, as JSON.

    python marked_engine.py MODEL PLANT

PLANT is what is done to the cache behind vLLM's back, see `PLANTS`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any

VOCABULARY = 1024
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


def main(model: str, plant: str) -> None:
    import vllm_graphfix.marks.watch as watch
    from vllm import LLM, SamplingParams

    watch.SHARE = 1.0  # the machine is slow, and every mark and look is wanted
    watch._PATIENCE = 0.0
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        block_size=16,
        enable_prefix_caching=True,
        num_gpu_blocks_override=64,
        seed=0,
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    chance = random.Random(7)

    def ask(prompts: list[list[int]], tokens: int) -> None:
        llm.generate([{"prompt_token_ids": each} for each in prompts], SamplingParams(max_tokens=tokens, **SAMPLING))

    shared = chance.choices(range(1, VOCABULARY), k=80)
    for number in range(6):
        ask([shared + chance.choices(range(1, VOCABULARY), k=16 + 8 * number) for _ in range(4)], 20)
    PLANTS[plant](worker)
    for number in range(6):
        ask([shared + chance.choices(range(1, VOCABULARY), k=16 + 8 * number) for _ in range(4)], 20)
    worker.execute_dummy_batch()
    worker.execute_dummy_batch()
    import vllm_graphfix

    (counts,), (state,) = vllm_graphfix._engine_process().marks.counts().values(), vllm_graphfix._engine_process().marks.states().values()
    found = [each._asdict() for each in vllm_graphfix._engine_process().marks.overwritten()]
    print(json.dumps({"counts": counts, "state": state.state.value, "reason": state.reason, "found": found}))
    del worker, llm
    gc.collect()


def _overwrite(worker: Any) -> None:
    """One number of one finished block, in one layer's cache."""
    import vllm_graphfix

    marks = vllm_graphfix._engine_process().marks._watch
    number = next(block for block, (batch, at) in marks._where.items() if at in batch.alive)
    layer = marks._where[number][0].layers[-1]
    layer.memory.select(layer.axis, number).flatten()[:1]  # a view of it, or a copy: not to be written to
    layer.memory.select(layer.axis, number)[(-1,) * (layer.memory.dim() - 1)] ^= 1
    print(json.dumps({"block": number, "layer": layer.layer}))


def _overwrite_free(worker: Any) -> None:
    """All that no request ever had."""
    for layer in next(iter(_groups().values())).caches:
        layer.memory.select(layer.axis, 63).fill_(5)


def _groups() -> Any:
    import vllm_graphfix

    return vllm_graphfix._engine_process().marks._watch._groups


PLANTS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda worker: None,
    "finished": _overwrite,
    "free": _overwrite_free,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
