"""mamba-all-mode: the update of a second group's block table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Batch, Row, arguments, compare
from vllm_graphfix.fixes.mamba_all_mode import FIX

RELEASE = "0.16.0"
_INDICES = ("state_indices_tensor", "block_idx_last_scheduled_token", "block_idx_last_computed_token")


def measure(rounds: int) -> list[Row]:
    import torch

    def buffers() -> dict[str, Any]:
        return {name: torch.zeros(PADDED_REQUESTS, dtype=torch.int32) for name in _INDICES}

    own, first = SimpleNamespace(**buffers()), buffers()
    rows = {name: first[name][:REQUESTS] for name in _INDICES} | {"state_indices_tensor": own.state_indices_tensor}

    def batch(prefills: int) -> Batch:
        return arguments(own, SimpleNamespace(num_prefills=prefills, **rows), None, None)

    def return_metadata(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        return metadata

    batches = {"mamba-all-mode, decodes": batch(0), "mamba-all-mode, a prefill among them": batch(1)}
    (patch,) = FIX.patches("indices-of-the-first-group")
    return compare(FIX, patch, return_metadata, batches, rounds)
