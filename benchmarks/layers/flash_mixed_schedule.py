"""flash-mixed-schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.21.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.flash_mixed_schedule import FIX

    def builder(mode: CUDAGraphMode) -> Any:
        sizes = [1, 2, 4, *range(8, 513, 8)]
        config = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
        return SimpleNamespace(aot_schedule=True, use_full_cuda_graph=True, compilation_config=config)

    lengths, schedule = torch.full((PADDED_REQUESTS,), 100, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=lengths,
        query_start_loc_cpu=lengths,
        seq_lens=lengths,
        num_reqs=REQUESTS,
        num_actual_tokens=PADDED_REQUESTS,
        max_query_len=1,
        max_seq_len=100,
        block_table_tensor=lengths,
        slot_mapping=lengths,
    )
    metadata = SimpleNamespace(scheduler_metadata=schedule, max_query_len=1)

    def makes_a_schedule(self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False) -> Any:
        return metadata

    (patch,) = FIX.patches("longest-of-the-step")
    fixed = patch.wrap(makes_a_schedule, Activity(FIX.events))
    observed = patch.wrap(makes_a_schedule, Activity(FIX.events, corrects=False))
    functions = (makes_a_schedule, fixed, makes_a_schedule, observed)
    found = []
    for label, own in (
        ("decodes, `FULL`", builder(CUDAGraphMode.FULL)),
        ("decodes, another mode", builder(CUDAGraphMode.FULL_AND_PIECEWISE)),
    ):
        calls = Calls(*(call(function, own, 0, batch) for function in functions))
        found.append(compared(f"flash-mixed-schedule, {label}", "alone", calls, rounds, target=True))
    return found
