"""mamba-padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.21.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.mamba_padding import FIX

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, get_mamba_chunk_size=lambda: 256),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=PADDED_REQUESTS),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=PADDED_REQUESTS
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    spec = MambaSpec(block_size=4096, shapes=((2,),), dtypes=(torch.float32,))
    group = AttentionGroup(Mamba2AttentionBackend, ["layer"], spec, 0)
    group.create_metadata_builders(config, torch.device("cpu"))
    builder = group.get_metadata_builder()

    def batch(requests: int, *, stale_row: bool) -> Any:
        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
        is_prefilling = torch.zeros(PADDED_REQUESTS, dtype=torch.bool)
        is_prefilling[-1] = stale_row
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=(torch.arange(PADDED_REQUESTS) < requests).int() * 100,
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=requests,
            max_query_len=1,
            max_seq_len=100,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
            is_prefilling=is_prefilling,
        )

    def does_nothing(self: Any, common_attn_metadata: Any, *, num_accepted_tokens: Any = None) -> None: ...

    stale = "mamba-padding, padding that reads as prefilling"
    right = batch(REQUESTS, stale_row=False)
    batches = {
        "mamba-padding, no padding": batch(PADDED_REQUESTS, stale_row=False),
        "mamba-padding, no padding, a request that is prefilling": batch(PADDED_REQUESTS, stale_row=True),
        "mamba-padding, padding that does not read as prefilling": right,
        stale: batch(REQUESTS, stale_row=True),
    }
    (patch,) = FIX.patches("prefilling-over-padding")
    real = BaseMambaAttentionMetadataBuilder._compute_common_metadata
    found = []
    for around, stock in (("alone", does_nothing), ("real", real)):
        fixed = patch.wrap(stock, Activity(FIX.events))
        observed = patch.wrap(stock, Activity(FIX.events, corrects=False))
        for label, metadata in batches.items():
            if around == "real" and metadata.is_prefilling.any() and label != stale:
                continue  # what a prefill adds needs pinned memory, and would hide the fix
            # Of stale padding stock makes a prefill, which takes longer: the decode that it is is the stricter measure.
            # Observed it is a prefill, and around vLLM's own function not measured for the same reason.
            seen = right if label == stale and around == "real" else metadata
            calls = Calls(
                call(stock, builder, right if label == stale else metadata),
                call(fixed, builder, metadata),
                call(stock, builder, seen),
                call(observed, builder, seen),
            )
            found.append(compared(label, around, calls, rounds, target=True))
    return found
