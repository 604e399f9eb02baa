"""mamba-all-mode: the update of a second group's block table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.16.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.mamba_all_mode import FIX

    indices = ("state_indices_tensor", "block_idx_last_scheduled_token", "block_idx_last_computed_token")

    def buffers() -> dict[str, Any]:
        return {name: torch.zeros(PADDED_REQUESTS, dtype=torch.int32) for name in indices}

    own, first = SimpleNamespace(**buffers()), buffers()
    rows = {name: first[name][:REQUESTS] for name in indices} | {"state_indices_tensor": own.state_indices_tensor}
    decodes, prefills = SimpleNamespace(num_prefills=0, **rows), SimpleNamespace(num_prefills=1, **rows)

    def returns_it(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        return metadata

    (patch,) = FIX.patches("indices-of-the-first-group")
    fixed = patch.wrap(returns_it, Activity(FIX.events))
    observed = patch.wrap(returns_it, Activity(FIX.events, corrects=False))
    functions = (returns_it, fixed, returns_it, observed)
    found = []
    for label, metadata in (("decodes", decodes), ("a prefill among them", prefills)):
        calls = Calls(*(call(function, own, metadata, None, None) for function in functions))
        found.append(compared(f"mamba-all-mode, {label}", "alone", calls, rounds, target=True))
    return found
