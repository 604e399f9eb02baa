"""dcp-context-lens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Row, arguments, compare
from vllm_graphfix.fixes.dcp_context_lens import FIX

RELEASE = "0.19.1"


def measure(rounds: int) -> list[Row]:
    import torch

    def builder(ranks: int) -> Any:
        return SimpleNamespace(
            dcp_world_size=ranks,
            use_full_cuda_graph=True,
            max_cudagraph_size=PADDED_REQUESTS,
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=PADDED_REQUESTS)),
        )

    metadata = SimpleNamespace(num_actual_tokens=REQUESTS, dcp_context_kv_lens=None)
    lengths = torch.full((REQUESTS,), 100, dtype=torch.int32)

    def make_lengths(self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False) -> Any:
        metadata.dcp_context_kv_lens = lengths
        return metadata

    batches = {
        "dcp-context-lens, two ranks share the context": arguments(builder(2), 0, None),
        "dcp-context-lens, no rank shares it": arguments(builder(1), 0, None),
    }
    (patch,) = FIX.patches("new-lengths")
    return compare(FIX, patch, make_lengths, batches, rounds)
