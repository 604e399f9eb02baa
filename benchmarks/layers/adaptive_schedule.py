"""adaptive-schedule, around a function that does nothing: vLLM's own prepares a step with kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, Batch, Row, arguments, compare
from vllm_graphfix.fixes.adaptive_schedule import FIX

RELEASE = "0.33.0"
_LONGEST = 8


def measure(rounds: int) -> list[Row]:
    import numpy as np
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    scheduled = np.ones(PADDED_REQUESTS, dtype=np.int32)

    def step(captured: int | None, longest: int | None) -> Batch:
        rows = PADDED_REQUESTS * _LONGEST, PADDED_REQUESTS
        graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, *rows, max_query_len=captured)
        batch = SimpleNamespace(longest=longest, num_scheduled_tokens=scheduled)
        return arguments(None, None, batch, graph, 0)

    def prepare_nothing(self: Any, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, loras: Any) -> Any:
        batch_req_state.max_query_len = batch_req_state.longest  # anew in each step: the fix writes to it
        return batch_req_state

    batches = {
        "adaptive-schedule, without adaptive verification": step(None, None),
        "adaptive-schedule, some request has all its drafts": step(_LONGEST, _LONGEST),
        "adaptive-schedule, no request has": step(_LONGEST, _LONGEST - 1),
        "adaptive-schedule, no request has any": step(_LONGEST, None),
    }
    (patch,) = FIX.patches("longest-of-the-step")
    return compare(FIX, patch, prepare_nothing, batches, rounds)
