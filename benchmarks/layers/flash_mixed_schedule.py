"""flash-mixed-schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import REQUESTS, Row, arguments, compare, decodes
from vllm_graphfix.fixes.flash_mixed_schedule import FIX

RELEASE = "0.21.0"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.config import CUDAGraphMode

    batch = decodes(REQUESTS, num_reqs=REQUESTS)
    metadata = SimpleNamespace(scheduler_metadata=torch.zeros(1, dtype=torch.int32), max_query_len=1)

    def builder(mode: CUDAGraphMode) -> Any:
        sizes = [1, 2, 4, *range(8, 513, 8)]
        config = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
        return SimpleNamespace(aot_schedule=True, use_full_cuda_graph=True, compilation_config=config)

    def make_schedule(self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False) -> Any:
        return metadata

    batches = {
        "flash-mixed-schedule, decodes, `FULL`": arguments(builder(CUDAGraphMode.FULL), 0, batch),
        "flash-mixed-schedule, decodes, another mode": arguments(builder(CUDAGraphMode.FULL_AND_PIECEWISE), 0, batch),
    }
    (patch,) = FIX.patches("longest-of-the-step")
    return compare(FIX, patch, make_schedule, batches, rounds)
