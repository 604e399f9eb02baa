"""draft-idx-mapping, where speculators share a base class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.23.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.draft_idx_mapping import _SPARE, FIX

    sizes = (1, 2, 4, *range(8, PADDED_REQUESTS + 1, 16), PADDED_REQUESTS)
    speculator = SimpleNamespace(
        draft_logits=torch.zeros(1),
        idx_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int32),
        decode_cudagraph_manager=SimpleNamespace(graphs=[SimpleNamespace(num_reqs=size) for size in sizes]),
    )
    setattr(speculator, _SPARE, PADDED_REQUESTS)

    def copies_nothing(self: Any, num_reqs: Any, *_: Any) -> None: ...

    (patch,) = (patch for patch in FIX.patches("all-but-dflash") if patch.observes)
    fixed = patch.wrap(copies_nothing, Activity(FIX.events))
    observed = patch.wrap(copies_nothing, Activity(FIX.events, corrects=False))
    functions = (copies_nothing, fixed, copies_nothing, observed)
    found = []
    for label, requests in (("padding", REQUESTS - 1), ("no padding", PADDED_REQUESTS)):
        calls = Calls(*(call(function, speculator, requests, None, None, None) for function in functions))
        found.append(compared(f"draft-idx-mapping, {label}", "alone", calls, rounds, target=True))
    return found
