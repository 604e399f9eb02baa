"""One engine in a process of its own: the tokens of a batch, or the seconds of its steps.

    python dispatch_load.py DESCRIPTOR

As `engine_worker.py`, but for what is asked: ``{"prompts": …, "tokens": …, "meanwhile": …, "times": …}``, the prompts'
token ids, how many tokens each answer has, prompts that decode before the others come, and how often all that is done;
with ``"in_turns"`` with and without the plugin's wrappers in turns ("compared"), or always without ("control"). With
``"preempted_at"`` all requests are preempted once each answer has so many tokens. The answer is what `_run` returns.
"""

from __future__ import annotations

import importlib
import itertools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import LLM

wrappers: Any = importlib.import_module("wrappers")  # beside this file, whose folder leaves the path before an engine
_NUMBERS = itertools.count()


def serve(parent: Any, order: dict[str, Any]) -> None:
    if order["plugin"]:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    import torch
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in EngineArgs.__dataclass_fields__
    }
    llm = LLM(**arguments)
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send(_told(llm, order))
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    while True:
        parent.send(_run(llm, wait, order, **parent.recv()))


def _told(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    told = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cudagraph_mode": getattr(mode, "name", str(mode)),
    }
    if order["plugin"]:
        import vllm_graphfix

        state = vllm_graphfix.states()["prefill-dispatch"]
        told["prefill-dispatch"] = f"{state.state.value}: {state.reason}"
    return told


def _run(
    llm: LLM,
    wait: Callable[[], object],
    order: dict[str, Any],
    *,
    prompts: list[list[int]],
    tokens: int,
    meanwhile: list[list[int]],
    times: int = 1,
    in_turns: str | None = None,
    preempted_at: int = 0,
) -> dict[str, Any]:
    """The last answers, the seconds of each step from the coming of the prompts on, and what the fix has taken.

    It takes graphs from steps, and counts these.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    before = _taken(order)
    answers: dict[str, list[int]] = {}

    def add(batch: list[list[int]], count: int) -> list[str]:
        names = [f"request-{next(_NUMBERS)}" for _ in batch]
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for name, prompt in zip(names, batch, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return names

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)

    asked: list[str] = []
    seconds: list[list[float]] = []

    def turn() -> float:
        others = add(meanwhile, 2 * tokens + 8)
        while not all(len(answers.get(name, ())) >= 2 for name in others):
            step()
        asked[:] = [*add(prompts, tokens), *others]
        waiting_for = preempted_at
        seconds.append([])
        while engine.has_unfinished_requests():
            wait()
            begun = time.perf_counter()
            step()
            wait()
            seconds[-1].append(time.perf_counter() - begun)
            if waiting_for and all(len(answers.get(name, ())) >= waiting_for for name in asked[: len(prompts)]):
                waiting_for = 0
                if not engine.reset_prefix_cache(reset_running_requests=True):
                    raise RuntimeError("the running requests were not preempted")
        if waiting_for:
            raise RuntimeError(f"no answer had {preempted_at} tokens: nothing was preempted")
        return sum(seconds[-1])

    if in_turns is None:
        for _ in range(times):
            turn()
    else:
        wrappers.in_turns(wrappers.Switch(), turn, times, control=in_turns == "control")
    return {
        "answers": [answers.get(name, []) for name in asked],
        "seconds": seconds,
        "taken": _taken(order) - before,
    }


def _taken(order: dict[str, Any]) -> int:
    if not order["plugin"]:
        return 0
    import vllm_graphfix

    return vllm_graphfix.events()["prefill-dispatch"]["prefill-as-decode"]


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
