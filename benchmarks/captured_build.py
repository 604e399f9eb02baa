"""Full graphs that hold the build of attention metadata, and the watch for bypassed fixes, on one GPU.

    python benchmarks/captured_build.py FOLDER

FOLDER gets a tiny Llama. Two engines of the installed vLLM (0.33.0; model runner V2, FlashAttention, full graphs of
mixed batches), each in a process of its own, answer prompts with `flash-mixed-schedule` on and VLLM_GRAPHFIX_BYPASS:
one is stock, the other one is edited as upstream means to do it (57632): builders run inside the capture, and not
before a replay. A line of JSON for each: calls of `build` before replays, the state of the fix, and its reason. Exit
code 1 unless the fix is `active` in the first, `bypassed` in the second, and both answer alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_graphfix.verify.engine import models

FIX, MODEL = "flash-mixed-schedule", "llama"
_HEARTBEATS = 25.0
"""Seconds in which the watch judges, after the last answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", nargs="?", choices=("stock", "edited"), help="answer as this one, for this script")
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(_answers(options.folder, edited=options.engine == "edited")))
        return 0
    models.write(MODEL, options.folder)
    environment = os.environ | {
        "VLLM_GRAPHFIX": "on",
        "VLLM_GRAPHFIX_BYPASS": "report",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the states of the fixes are this process's
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "HF_HUB_OFFLINE": "1",
    }
    results = {}
    for name in ("stock", "edited"):
        with (options.folder / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [sys.executable, __file__, str(options.folder), name],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=True,
            )
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({"engine": name} | {key: value for key, value in results[name].items() if key != "answers"}))
    states = [results[name]["state"] for name in results]
    return int(states != ["active", "bypassed"] or results["stock"]["answers"] != results["edited"]["answers"])


def _answers(folder: Path, *, edited: bool) -> dict[str, Any]:
    import vllm_graphfix

    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM, SamplingParams

    builds = _edit() if edited else _counted()
    llm = LLM(
        model=str(folder / MODEL),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.05,
        attention_config={"backend": "FLASH_ATTN"},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
        },
    )
    builds.clear()
    prompts: Any = [{"prompt_token_ids": list(range(2, 30 + 20 * number))} for number in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    deadline = time.monotonic() + _HEARTBEATS
    while (state := vllm_graphfix.states()[FIX]).state.value == "active" and time.monotonic() < deadline:
        time.sleep(0.5)
    return {
        "builds before replays": len(builds),
        "state": state.state.value,
        "reason": state.reason,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
    }


def _counted() -> list[str]:
    """Return a list that grows with each build."""
    from vllm.v1.worker.gpu.model_states import default

    stock, builds = default.build_attn_metadata, []

    def build_attn_metadata(*args: Any, **kwargs: Any) -> Any:
        builds.append("build")
        return stock(*args, **kwargs)

    default.build_attn_metadata = build_attn_metadata
    return builds


def _edit() -> list[str]:
    """Make full graphs hold the build of their metadata, and replays go without; return a list as `_counted`."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.model_states import default

    builds = _counted()
    counted, stock_context = default.build_attn_metadata, cudagraph_utils.set_forward_context
    stock_prepare = default.DefaultModelState.prepare_attn
    again: dict[int, Any] = {}
    """By the id of a capture's metadata: these, which keep their id so, and a function that builds them again."""

    def build_attn_metadata(*args: Any, **kwargs: Any) -> Any:
        metadata = counted(*args, **kwargs)
        if kwargs.get("for_cudagraph_capture"):
            again[id(metadata)] = metadata, lambda: counted(*args, **kwargs)
        return metadata

    def set_forward_context(metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and id(metadata) in again:
            metadata.update(again[id(metadata)][1]())
        return stock_context(metadata, *args, **kwargs)

    def prepare_attn(self: Any, batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if mode == CUDAGraphMode.FULL and not kwargs.get("for_capture"):
            return {}
        return stock_prepare(self, batch, mode, *args, **kwargs)

    default.build_attn_metadata = build_attn_metadata
    default.DefaultModelState.prepare_attn = prepare_attn
    cudagraph_utils.set_forward_context = set_forward_context
    return builds


if __name__ == "__main__":
    sys.exit(main())
