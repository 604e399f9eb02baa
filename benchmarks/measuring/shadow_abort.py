"""One engine, in a process of its own, that says how each request has ended and what it found in the prefix cache.

    python shadow_abort.py DESCRIPTOR

As `shadow_load.py`, but for what is asked: each ``{"prompts": …, "tokens": …}``, where *tokens* has the length of each
answer, is answered with what `_asked` returns.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def serve(parent: Any, order: dict[str, Any]) -> None:
    if order["plugin"]:
        import vllm_graphfix

        vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    arguments = dict(order["arguments"])
    arguments |= {
        name: value for name, value in order["where_known"].items() if name in EngineArgs.__dataclass_fields__
    }
    llm = LLM(**arguments)
    parent.send(time.monotonic())  # one clock for all processes of a machine
    parent.send({})
    while True:
        parent.send(_asked(llm, plugin=order["plugin"], **parent.recv()))


def _asked(llm: LLM, prompts: list[list[int]], tokens: list[int], *, plugin: bool) -> dict[str, Any]:
    """The end of each request, in order, and what the rank has counted so far."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in tokens
    ]
    told = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    requests = [
        {
            "reason": each.outputs[0].finish_reason,
            "why": each.outputs[0].stop_reason,
            "tokens": list(each.outputs[0].token_ids),
            "cached": each.num_cached_tokens,
        }
        for each in told
    ]
    return {"requests": requests, "rank": llm.collective_rpc(_counted)[0] if plugin else None}


def _counted(_: Any) -> dict[str, Any]:
    import vllm_graphfix
    from vllm_graphfix.shadow import process

    shadow = process.SHADOW
    if shadow is None:
        return {}
    return {
        "checks": shadow.results.checks,
        "mismatches": shadow.results.mismatches,
        "aborted": vllm_graphfix.events()[process.NAME]["aborted"],
        "stopped": shadow.stopped,
        "refused": process.REFUSED,
        "cannot abort": shadow.cannot_abort,
    }


if __name__ == "__main__":
    importlib.import_module("asked_engine").begin(serve)
