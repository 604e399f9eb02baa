"""ubatch-max-seq-len."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, Calls, call, compared

RELEASE = "0.20.2"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.ubatch_max_seq_len import FIX

    lengths = torch.arange(1, PADDED_REQUESTS + 1, dtype=torch.int32)
    batch = SimpleNamespace(max_seq_len=PADDED_REQUESTS, seq_lens_cpu_upper_bound=lengths)

    def found(ubatch_slice: Any, attn_metadata: Any) -> Any:
        return ubatch_slice

    (patch,) = FIX.patches("ubatch-utils")
    fixed = patch.wrap(found, Activity(FIX.events))
    observed = patch.wrap(found, Activity(FIX.events, corrects=False))
    functions = (found, fixed, found, observed)
    results = []
    for label, longest in (("has the longest request", PADDED_REQUESTS), ("has shorter ones", PADDED_REQUESTS // 2)):
        calls = Calls(*(call(function, SimpleNamespace(max_seq_len=longest), batch) for function in functions))
        results.append(compared(f"ubatch-max-seq-len, a half that {label}", "alone", calls, rounds, target=True))
    return results
