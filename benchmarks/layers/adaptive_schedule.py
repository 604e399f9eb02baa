"""adaptive-schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, Calls, call, compared

RELEASE = "0.33.0"
_LONGEST = 8


def measure(rounds: int) -> list[tuple[object, ...]]:
    """Around a function that does nothing: vLLM's own prepares a step with kernels."""
    import numpy as np
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.adaptive_schedule import FIX

    def graph(longest: int | None) -> Any:
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL, PADDED_REQUESTS * _LONGEST, PADDED_REQUESTS, max_query_len=longest
        )

    def prepares_nothing(self: Any, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, loras: Any) -> Any:
        batch_req_state.max_query_len = batch_req_state.said  # anew in each step
        return batch_req_state

    (patch,) = FIX.patches("longest-of-the-step")
    fixed = patch.wrap(prepares_nothing, Activity(FIX.events))
    observed = patch.wrap(prepares_nothing, Activity(FIX.events, corrects=False))
    functions = (prepares_nothing, fixed, prepares_nothing, observed)
    scheduled, found = np.ones(PADDED_REQUESTS, dtype=np.int32), []
    for label, longest, said in (
        ("without adaptive verification", None, None),
        ("some request has all its drafts", _LONGEST, _LONGEST),
        ("no request has", _LONGEST, _LONGEST - 1),
        ("no request has any", _LONGEST, None),
    ):
        batch = SimpleNamespace(said=said, num_scheduled_tokens=scheduled)
        calls = Calls(*(call(function, None, None, batch, graph(longest), 0) for function in functions))
        found.append(compared(f"adaptive-schedule, {label}", "alone", calls, rounds, target=True))
    return found
