"""ubatch-max-seq-len."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, Row, arguments, compare
from vllm_graphfix.fixes.ubatch_max_seq_len import FIX

RELEASE = "0.20.2"


def measure(rounds: int) -> list[Row]:
    import torch

    lengths = torch.arange(1, PADDED_REQUESTS + 1, dtype=torch.int32)
    batch = SimpleNamespace(max_seq_len=PADDED_REQUESTS, seq_lens_cpu_upper_bound=lengths)

    def return_half(ubatch_slice: Any, attn_metadata: Any) -> Any:
        return ubatch_slice

    batches = {
        f"ubatch-max-seq-len, a half that {label}": arguments(SimpleNamespace(max_seq_len=longest), batch)
        for label, longest in (("has the longest request", PADDED_REQUESTS), ("has shorter ones", PADDED_REQUESTS // 2))
    }
    (patch,) = FIX.patches("ubatch-utils")
    return compare(FIX, patch, return_half, batches, rounds)
