"""draft-idx-mapping, where speculators share a base class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Row, arguments, compare
from vllm_graphfix.fixes.draft_idx_mapping import _SPARE, FIX

RELEASE = "0.23.0"


def measure(rounds: int) -> list[Row]:
    import torch

    sizes = (1, 2, 4, *range(8, PADDED_REQUESTS + 1, 16), PADDED_REQUESTS)
    speculator = SimpleNamespace(
        draft_logits=torch.zeros(1),
        idx_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int32),
        decode_cudagraph_manager=SimpleNamespace(graphs=[SimpleNamespace(num_reqs=size) for size in sizes]),
    )
    setattr(speculator, _SPARE, PADDED_REQUESTS)

    def copy_nothing(self: Any, num_reqs: Any, *_: Any) -> None: ...

    batches = {
        "draft-idx-mapping, padding": arguments(speculator, REQUESTS - 1, None, None, None),
        "draft-idx-mapping, no padding": arguments(speculator, PADDED_REQUESTS, None, None, None),
    }
    (patch,) = (patch for patch in FIX.patches("all-but-dflash") if patch.observes)
    return compare(FIX, patch, copy_nothing, batches, rounds)
