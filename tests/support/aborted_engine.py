"""A real engine on the CPU whose decodes replay graphs, one of which is wrong once: who has ended, as JSON.

    python aborted_engine.py MODEL WRONG EXECUTOR

Real are the engine with its scheduler and model runner V1, vLLM's `CUDAGraphWrapper` and dispatcher, and the plugin,
which is registered as anywhere. A stand-in are graphs, which a CPU has not: one computes its step into the memory that
a capture would have left. In the fifth replay of a batch of three, the rows WRONG (``1``, ``0,2``, ``none``) come out
otherwise.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

VOCABULARY = 1024
LENGTHS = (40, 56, 72)
"""Of prompts, all of which end within a block of 16."""
TOKENS = 20
AT = 5
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 64,
    "seed": 0,
}
"""Arguments of a small engine."""


def main(model: str, wrong: str, executor: str = "uni") -> None:
    from vllm import LLM, SamplingParams

    import vllm_graphfix

    llm = LLM(model=model, enforce_eager=True, dtype="float32", distributed_executor_backend=executor, **SMALL)
    core = llm.llm_engine.engine_core.engine_core
    chance = random.Random(7)  # noqa: S311 - the same prompts in every run
    prompts = [chance.choices(range(1, VOCABULARY), k=length) for length in LENGTHS]

    def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
        return core.model_executor.collective_rpc(function, args=arguments)[0]

    def ask(tokens: int) -> list[Any]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        return [
            {
                "reason": each.outputs[0].finish_reason,
                "why": each.outputs[0].stop_reason,
                "tokens": list(each.outputs[0].token_ids),
                "cached": each.num_cached_tokens,
            }
            for each in outputs
        ]

    called: set[str] = set()
    sys.setprofile(partial(note, called))
    eager = ask(TOKENS)
    sys.setprofile(None)
    llm.reset_prefix_cache()
    in_worker(replay, wrong)
    result: dict[str, Any] = {"eager": eager, "asked": ask(TOKENS), "after": ask(1), "again": ask(TOKENS)}
    result |= in_worker(shadow_report) | {"called": sorted(called)}
    # Where the scheduler is, in whose process requests end; the worker's has none where that is another one.
    result["counts"]["aborted"] = vllm_graphfix.events()["shadow"]["aborted"]
    sys.stdout.write(json.dumps(result) + "\n")


def note(called: set[str], frame: FrameType, event: str, function: Any) -> None:
    """Adds the C functions that the way of a verdict to the scheduler calls in this thread, in all of its steps."""
    if event == "call" and frame.f_code.co_name == "_around_update":
        called.add("_around_update")
    if event == "c_call" and Path(frame.f_code.co_filename).name in ("abort.py", "abort_channel.py"):
        called.add(function.__qualname__)


class GraphStandIn:
    """Computes the step that is running, and puts the result where a graph would."""

    replays = 0
    """Of batches of three, of all graphs."""

    def __init__(self, run: Callable[..., Any], output: Any, wrong: list[int]) -> None:
        self._run, self._output, self._wrong = run, output, wrong

    def replay(self) -> None:
        self._output.copy_(self._run())
        if len(self._output) == len(LENGTHS):
            GraphStandIn.replays += 1
            if GraphStandIn.replays == AT:
                for row in self._wrong:
                    self._output[row].neg_()


def replay(worker: Any, wrong: str) -> None:
    """From here on decodes replay graphs."""
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    runner = getattr(worker, "worker", worker).model_runner
    config, dispatcher = runner.vllm_config.compilation_config, runner.cudagraph_dispatcher
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = list(range(1, 9)), 8
    config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
    captured: dict[str, Any] = {}

    class Wrapper(CUDAGraphWrapper):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            captured.update(args=args, kwargs=kwargs)
            return super().__call__(*args, **kwargs)

    model = runner.model
    with mock.patch.object(type(current_platform), "get_global_graph_pool", return_value=None):
        runner.model = wrapper = Wrapper(model, runner.vllm_config, CUDAGraphMode.FULL)
    rows = [] if wrong == "none" else [int(each) for each in wrong.split(",")]
    for key in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]:
        output = torch.zeros(key.num_tokens, runner.model_config.get_hidden_size(), dtype=runner.dtype)
        graph: Any = GraphStandIn(lambda: model(*captured["args"], **captured["kwargs"]), output, rows)
        wrapper.concrete_cudagraph_entries[key] = CUDAGraphEntry(key, cudagraph=graph, output=output)


def shadow_report(worker: Any) -> dict[str, Any]:
    import vllm_graphfix
    from vllm_graphfix.shadow import process

    states = vllm_graphfix.states()
    state = states["shadow"]
    return {
        "counts": process.counts()["shadow"],
        "state": state.state.value,
        "reason": state.reason,
        "replays": GraphStandIn.replays,
        "abort": states["abort"].state.value if "abort" in states else None,
    }


if __name__ == "__main__":
    import aborted_engine  # functions of which a worker in a process of its own knows the module

    aborted_engine.main(*sys.argv[1:])
