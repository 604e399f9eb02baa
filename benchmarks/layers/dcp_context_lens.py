"""dcp-context-lens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.19.1"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.dcp_context_lens import FIX

    def builder(ranks: int) -> Any:
        return SimpleNamespace(
            dcp_world_size=ranks,
            use_full_cuda_graph=True,
            max_cudagraph_size=PADDED_REQUESTS,
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=PADDED_REQUESTS)),
        )

    metadata = SimpleNamespace(num_actual_tokens=REQUESTS, dcp_context_kv_lens=None)
    lengths = torch.full((REQUESTS,), 100, dtype=torch.int32)

    def makes_lengths(self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False) -> Any:
        metadata.dcp_context_kv_lens = lengths
        return metadata

    (patch,) = FIX.patches("new-lengths")
    fixed = patch.wrap(makes_lengths, Activity(FIX.events))
    observed = patch.wrap(makes_lengths, Activity(FIX.events, corrects=False))
    functions = (makes_lengths, fixed, makes_lengths, observed)
    found = []
    for label, own in (("two ranks share the context", builder(2)), ("no rank shares it", builder(1))):
        calls = Calls(*(call(function, own, 0, None) for function in functions))
        found.append(compared(f"dcp-context-lens, {label}", "alone", calls, rounds, target=True))
    return found
