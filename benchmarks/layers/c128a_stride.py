"""c128a-stride."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.27.1"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.c128a_stride import FIX

    graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=PADDED_REQUESTS)
    builder = SimpleNamespace(
        reorder_batch_threshold=1,
        compress_ratio=128,
        c128a_max_compressed=1024,
        vllm_config=SimpleNamespace(compilation_config=graphs),
    )

    def batch(longest: int) -> Any:
        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=REQUESTS)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.full((PADDED_REQUESTS,), longest, dtype=torch.int32),
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=PADDED_REQUESTS,
            max_query_len=1,
            max_seq_len=longest,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
        )

    def builds_nothing(self: Any, cm: Any, req_id_per_token: Any) -> None: ...

    (patch,) = FIX.patches("packed-by-length")
    fixed = patch.wrap(builds_nothing, Activity(FIX.events))
    observed = patch.wrap(builds_nothing, Activity(FIX.events, corrects=False))
    functions = (builds_nothing, fixed, builds_nothing, observed)
    found = []
    for label, metadata in (("rows packed closer", batch(1000)), ("rows as in the capture", batch(1024 * 128))):
        calls = Calls(*(call(function, builder, metadata, None) for function in functions))
        found.append(compared(f"c128a-stride, {label}", "alone", calls, rounds, target=True))
    return found
