"""One engine of two ranks, in a process of its own, that says how each request has ended, for `rank_faults.py`.

    python rank_faults_engine.py DESCRIPTOR

As `engine_worker.py`, but for the orders: each ``{"prompts": …, "tokens": …}`` is answered with how each request has
ended and its tokens. An engine that does not start, or ends, answers ``{"died": …, "gone": …}``: the error, and the
moment at which no other process of it was left, in seconds of the epoch; None where one still was after `LONGEST`.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from typing import Any

LONGEST = 60.0


def serve(parent: Any, order: dict[str, Any]) -> int:
    from vllm import LLM

    try:
        llm = LLM(**order["arguments"])
    except BaseException as error:
        parent.send(time.monotonic())  # one clock for all processes of a machine
        return _tell_end(parent, error)
    parent.send(time.monotonic())
    parent.send({})
    while True:
        batch = parent.recv()
        try:
            answers = _answers(llm, **batch)
        except BaseException as error:
            return _tell_end(parent, error)
        parent.send({"answers": answers})


def _answers(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.sleep(level=0, mode="keep")  # what is in a batch decides how its sums round
    llm.enqueue(inputs, sampling, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(use_tqdm=False)
    return [[each.outputs[0].finish_reason, list(each.outputs[0].token_ids)] for each in outputs]


def _tell_end(parent: Any, error: BaseException) -> int:
    traceback.print_exc()
    until = time.monotonic() + LONGEST
    while (remaining := _others()) and time.monotonic() < until:
        time.sleep(0.1)
    gone = None if remaining else time.time()
    parent.send({"died": importlib.import_module("asked_engine").in_one_line(error), "gone": gone})
    return 1


def _others() -> list[int]:
    """Return the processes of this session, without this one and those that wait for its end to clean up."""
    import psutil

    others = []
    for process in psutil.process_iter(["status", "cmdline"]):
        try:
            mine = os.getsid(process.pid) == os.getpid() != process.pid
        except ProcessLookupError:
            continue
        words = " ".join(process.info["cmdline"] or ())
        if mine and process.info["status"] != psutil.STATUS_ZOMBIE and "resource_tracker" not in words:
            others.append(process.pid)
    return others


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
