"""c128a-stride."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Batch, Row, arguments, compare, decodes
from vllm_graphfix.fixes.c128a_stride import FIX

RELEASE = "0.27.1"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.config import CUDAGraphMode

    graphs = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=PADDED_REQUESTS)
    builder = SimpleNamespace(
        reorder_batch_threshold=1,
        compress_ratio=128,
        c128a_max_compressed=1024,
        vllm_config=SimpleNamespace(compilation_config=graphs),
    )

    def batch(longest: int) -> Batch:
        lengths = torch.full((PADDED_REQUESTS,), longest, dtype=torch.int32)
        return arguments(builder, decodes(REQUESTS, seq_lens=lengths, max_seq_len=longest), None)

    def build_nothing(self: Any, cm: Any, req_id_per_token: Any) -> None: ...

    batches = {
        "c128a-stride, rows packed closer": batch(1000),
        "c128a-stride, rows as in the capture": batch(1024 * 128),
    }
    (patch,) = FIX.patches("packed-by-length")
    return compare(FIX, patch, build_nothing, batches, rounds)
