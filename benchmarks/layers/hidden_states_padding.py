"""hidden-states-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Row, arguments, compare
from vllm_graphfix.fixes.hidden_states_padding import FIX

RELEASE = "0.24.0"


def measure(rounds: int) -> list[Row]:
    import torch

    from vllm_graphfix.verify.trials.hidden_states_padding import BLOCK_SIZE, BLOCKS, HIDDEN_SIZE, LAYERS, proposer

    drafter = proposer(torch.zeros(BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN_SIZE), graphs=True)
    drafter._slot_mapping_buffer = torch.zeros(PADDED_REQUESTS, dtype=torch.int64)
    slots = drafter._get_slot_mapping(PADDED_REQUESTS)

    def return_slots(self: Any, num_tokens: Any, slot_mapping: Any = None) -> Any:
        return slots

    batches = {
        "hidden-states-padding, no padding": arguments(drafter, PADDED_REQUESTS, torch.arange(PADDED_REQUESTS)),
        "hidden-states-padding, padding": arguments(drafter, PADDED_REQUESTS, torch.arange(REQUESTS)),
    }
    (patch,) = (patch for patch in FIX.patches("last-slot") if patch.name.endswith("._get_slot_mapping"))
    stocks = {"alone": return_slots, "real": type(drafter)._get_slot_mapping}
    return compare(FIX, patch, stocks, batches, rounds)
