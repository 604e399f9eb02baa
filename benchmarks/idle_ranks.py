"""What the steps of an idle data-parallel rank do to the prefix cache: `idle-rank`, with real ranks.

It runs on the installed vLLM and two GPUs.

    python benchmarks/idle_ranks.py --out FOLDER [--model mixtral]

A tiny mixture of experts, one rank on each GPU. Rank 1 answers a prompt with as many tokens as fill a block, which ends
in its prefix cache; rank 0 then generates while rank 1 has nothing to do and runs steps of its own; then rank 1 is
asked prompt and answer with a few tokens more. What it says has to be what it says where nothing was cached. Twice:
with VLLM_GRAPHFIX off, and on. The plugin has to be installed. From 0.20.0 on such a step writes to no slots of an
attention layer, and both are right.

Exit code 1 if an answer is wrong with the plugin, 2 if an engine does not come to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.models import VOCABULARY

PROMPTS, CACHED, DECODED, MORE, ANSWER, MEANWHILE = 8, 64, 4, 8, 16, 48
"""The number of prompts; of tokens of each that are cached; of these, those of its answer, so that the last slot is a
decode's; of tokens behind them; of tokens of the answer that counts; and of rank 0's tokens meanwhile."""
NOISE = 0.01
"""The noise of a log-probability between a prompt that was computed in one piece and in two: kernels round."""
TIMEOUT = 400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the logs")
    parser.add_argument("--model", default="mixtral", choices=sorted(models.MODELS))
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.engine:
        print(json.dumps(asyncio.run(answers(str(out / options.model)))), flush=True)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    models.write(options.model, out)
    result = {mode: told(options.model, out, mode) for mode in ("off", "on")}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    if any("error" in found for found in result.values()):
        return 2
    return int(result["on"]["wrong answers"] > 0)


def told(model: str, out: Path, mode: str) -> dict[str, Any]:
    """What an engine with VLLM_GRAPHFIX=*mode* has answered, compared."""
    command = [sys.executable, __file__, "--engine", "--out", str(out), "--model", model]
    environment = os.environ | {"VLLM_GRAPHFIX": mode, "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    with (out / f"{mode}.log").open("w") as log:
        try:
            done = subprocess.run(
                command, env=environment, cwd=out, stdout=subprocess.PIPE, stderr=log, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not at its end after {TIMEOUT:.0f} s"}
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}, see {mode}.log"}
    pairs = json.loads(lines[-1])
    return {
        "answers": len(pairs),
        "wrong answers": sum(not alike(*pair) for pair in pairs),
        "with other tokens": sum(one[0] != two[0] for one, two in pairs),
        "first token's log-probability apart by": max(abs(one[1][0] - two[1][0]) for one, two in pairs),
        "cached tokens": sorted({two[2] for _, two in pairs}),
    }


def alike(one: Any, two: Any) -> bool:
    """Whether two answers are the same but for rounding; a tie ends the comparison.

    Each has tokens and their log-probabilities.
    """
    for a, b, of_a, of_b in zip(one[0], two[0], one[1], two[1], strict=True):
        if abs(of_a - of_b) > NOISE:
            return False
        if a != b:
            return True
    return True


async def answers(model: str) -> list[Any]:
    """For each prompt, the answer without anything cached and the one after the idle steps, both of rank 1."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known: dict[str, Any] = {"moe_backend": "triton"} if hasattr(AsyncEngineArgs, "moe_backend") else {}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            data_parallel_size=2,
            enable_expert_parallel=True,
            enable_prefix_caching=True,
            max_model_len=1024,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.05,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
            **known,
        )
    )
    number = 0

    async def ask(prompt: list[int], salt: str, rank: int, tokens: int) -> Any:
        nonlocal number
        number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        given: Any = {"prompt_token_ids": prompt, "cache_salt": salt}
        async for output in engine.generate(given, sampling, str(number), data_parallel_rank=rank):
            last = output
        (answer,) = last.outputs
        chosen = [next(iter(each.values())).logprob for each in answer.logprobs or ()]
        return list(answer.token_ids), chosen, last.num_cached_tokens

    chance = random.Random(5)  # noqa: S311 - the same prompts in every run
    found = []
    try:
        for one in range(PROMPTS):
            prompt = chance.choices(range(1, VOCABULARY), k=CACHED - DECODED)
            answer, *_ = await ask(prompt, f"first {one}", 1, DECODED + 1)  # the last token is not computed
            whole = prompt + answer[:DECODED] + chance.choices(range(1, VOCABULARY), k=MORE)
            right = await ask(whole, f"whole {one}", 1, ANSWER)
            await ask(prompt, f"cached {one}", 1, DECODED + 1)
            await ask(prompt[::-1], f"meanwhile {one}", 0, MEANWHILE)
            found.append((right, await ask(whole, f"cached {one}", 1, ANSWER)))
    finally:
        engine.shutdown()
    return found


if __name__ == "__main__":
    sys.exit(main())
