"""An engine in a process of its own that decodes on request, and waits on a pipe meanwhile.

    python engine_worker.py DESCRIPTOR

DESCRIPTOR is this end of a `multiprocessing.Pipe`. The first message is the order, an `engine_process.Order`, and is
answered with the moment at which the engine was ready and then with `_facts`. After that each
``{"batch": …, "tokens": …}`` is answered with the seconds of its decode steps, and each
``{"in_turns": BATCH, "steps": …, "control": …}`` with the seconds of each step, with and without the plugin's wrappers
(`wrappers.py`). An error is the last answer: ``{"error": …}``.

Imports nothing of the plugin unless the order has it: a stock engine must not pay for it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
import random
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

wrappers: Any = importlib.import_module("wrappers")  # now: `begin` takes this folder off the path
SEED = 7
PROMPT = 100
"""Tokens of each prompt: the largest batch is prefilled in one step."""
TURN = 129
"""Tokens of each answer whose single steps are timed."""
RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}


def serve(parent: Any, order: dict[str, Any]) -> None:
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: without its parent the engine must not hold the GPU's memory
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if order["plugin"]:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM

    captures = _time_captures(RUNNERS[order["runner"]])
    llm = LLM(**order["arguments"])
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send(_facts(llm, order, captures))
    prompts = _prompts(llm, order["largest_batch"])
    while True:
        request = parent.recv()
        if "in_turns" in request:
            parent.send(_in_turns(llm, prompts[: request["in_turns"]], request["steps"], control=request["control"]))
            continue
        parent.send(_decode(llm, prompts[: request["batch"]], request["tokens"]))


def _time_captures(module: str) -> list[float]:
    """Return a list that gets the seconds of each call of `capture_model`, which no fix wraps."""
    seconds: list[float] = []
    runner = importlib.import_module(module).GPUModelRunner
    stock = runner.capture_model

    @functools.wraps(stock)
    def capture_model(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        returned = stock(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return returned

    runner.capture_model = capture_model
    return seconds


def _facts(llm: LLM, order: dict[str, Any], captures: list[float]) -> dict[str, Any]:
    import torch
    import vllm

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    compilation = llm.llm_engine.vllm_config.compilation_config
    cuda = torch.cuda.is_available()
    facts = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "compilation_mode": getattr(compilation.mode, "name", str(compilation.mode)),
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in used),
        "capture_seconds": sum(captures) if captures else None,
        "reserved_bytes": torch.cuda.memory_reserved() if cuda else None,
        "active": [],
        "graphfix": None,
    }
    if order["plugin"]:
        import vllm_graphfix

        facts["graphfix"] = vllm_graphfix.__version__
        facts["active"] = [name for name, state in vllm_graphfix.states().items() if state.state.value == "active"]
    return facts


def _prompts(llm: LLM, largest_batch: int) -> list[dict[str, list[int]]]:
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every process
    vocabulary = range(1, llm.llm_engine.model_config.get_vocab_size())
    return [{"prompt_token_ids": chance.choices(vocabulary, k=PROMPT)} for _ in range(largest_batch)]


def _decode(llm: LLM, prompts: Any, tokens: int) -> float:
    """Return the seconds from the first token of all *prompts* to their last: *tokens* - 1 steps of the batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    # By the engine's own clock, which it reads once a step.
    times = [output.metrics for output in outputs]
    return float(max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times))


def _in_turns(llm: LLM, prompts: Any, count: int, *, control: bool) -> list[float]:
    """Return the seconds of *count* decode steps of all *prompts*, or a few more, in the order of `wrappers.ORDER`."""
    import torch
    from vllm import SamplingParams

    wait: Any = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    switch = wrappers.Switch()
    engine: Any = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=TURN, ignore_eos=True, detokenize=False)
    seconds: list[float] = []

    def step() -> float:
        wait()
        begun = time.perf_counter()
        outputs = engine.step()
        wait()
        ended.extend(output for output in outputs if output.finished)
        return time.perf_counter() - begun

    while len(seconds) < count:
        names = [f"turn-{len(seconds)}-{number}" for number in range(len(prompts))]
        ended: list[Any] = []
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, sampling)
        for _ in range(4):  # prefills, and first decodes, which warm caches up
            step()
        before = len(seconds)
        while not ended:
            seconds += wrappers.in_turns(switch, step, len(wrappers.ORDER), control=control)
        # If requests ended within the last four steps, the batch was smaller in some of them.
        del seconds[max(before, len(seconds) - len(wrappers.ORDER)) :]
        if len(seconds) == before:
            raise RuntimeError(f"answers of {TURN} tokens end within {len(wrappers.ORDER)} steps")
        engine.abort_request([name for name in names if name not in {output.request_id for output in ended}])
        while engine.has_unfinished_requests():
            engine.step()
    return seconds


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
