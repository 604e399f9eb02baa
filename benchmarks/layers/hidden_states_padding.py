"""hidden-states-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.24.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.hidden_states_padding import FIX
    from vllm_graphfix.verify.trials.hidden_states_padding import BLOCK_SIZE, BLOCKS, HIDDEN_SIZE, LAYERS, proposer

    drafter = proposer(torch.zeros(BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN_SIZE), graphs=True)
    drafter._slot_mapping_buffer = torch.zeros(PADDED_REQUESTS, dtype=torch.int64)
    given_anyhow = drafter._get_slot_mapping(PADDED_REQUESTS)
    (patch,) = (patch for patch in FIX.patches("last-slot") if patch.name.endswith("._get_slot_mapping"))

    def gives(self: Any, num_tokens: Any, slot_mapping: Any = None) -> Any:
        return given_anyhow

    found = []
    for around, stock in (("alone", gives), ("real", type(drafter)._get_slot_mapping)):
        fixed = patch.wrap(stock, Activity(FIX.events))
        observed = patch.wrap(stock, Activity(FIX.events, corrects=False))
        for label, tokens in (("no padding", PADDED_REQUESTS), ("padding", REQUESTS)):
            given = (drafter, PADDED_REQUESTS, torch.arange(tokens))
            calls = Calls(*(call(function, *given) for function in (stock, fixed, stock, observed)))
            found.append(compared(f"hidden-states-padding, {label}", around, calls, rounds, target=True))
    return found
