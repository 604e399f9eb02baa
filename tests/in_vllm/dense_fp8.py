"""Batches for `FlashMLAMetadataBuilder._build_decode`, and vLLM's own builder to give them to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mla import flashmla

from vllm_graphfix.verify.double.scenarios.flashmla_fp8 import MAX_BLOCKS, _metadata_builder

if TYPE_CHECKING:
    import pytest

DECODE_PARAMETERS = (
    "block_table_tensor",
    "seq_lens_device",
    "max_seq_len",
    "query_start_loc_cpu",
    "query_start_loc_device",
    "num_decode_tokens",
    "dcp_tot_seq_lens_device",
)


def builder(*, full_graphs: bool = True, fp8: bool = True) -> Any:
    made = _metadata_builder(full_graphs)
    made.is_fp8_kvcache = fp8
    return made


class Batch:
    """A decode batch as model runner V1 pads it: length 0 and block ids of -1 in rows that schedule no token."""

    def __init__(self, scheduled: list[int], lengths: list[int]) -> None:
        rows = len(scheduled)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.arange(1, rows * MAX_BLOCKS + 1, dtype=torch.int32).view(rows, MAX_BLOCKS)
        for row, tokens in enumerate(scheduled):
            if not tokens:
                self.table[row] = -1
        self.starts = torch.tensor([0, *scheduled]).cumsum(0).int()
        self.total_lengths = self.lengths.clone()
        self.values = (self.table.clone(), self.lengths.clone())
        self._versions = self._count_writes()

    def arguments(self) -> dict[str, Any]:
        starts = self.starts
        values = (self.table, self.lengths, 256, starts, starts.clone(), int(starts[-1]), self.total_lengths)
        return dict(zip(DECODE_PARAMETERS, values, strict=True))

    def was_written(self) -> bool:
        """Return whether anything wrote to one of the runner's tensors, be it the same values."""
        return self._count_writes() != self._versions

    def _count_writes(self) -> list[int]:
        return [t._version for t in (self.table, self.lengths, self.starts, self.total_lengths)]


class Planner:
    """Watches vLLM's call of the dense fp8 planner: lengths that it was given, plans that it returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[list[int]] = []
        self.plans: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stock = flashmla.get_mla_metadata_dense_fp8
        monkeypatch.setattr(flashmla, "get_mla_metadata_dense_fp8", self._plan)

    def _plan(self, cache_seqlens: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.lengths.append(cache_seqlens.tolist())
        self.plans.append(self._stock(cache_seqlens, *args))
        return self.plans[-1]
