"""mamba-padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Row, arguments, decodes, measured, wrapped
from vllm_graphfix.fixes.mamba_padding import FIX

RELEASE = "0.21.0"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.utils import AttentionGroup

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
        is_prefilling = torch.zeros(PADDED_REQUESTS, dtype=torch.bool)
        is_prefilling[-1] = stale_row
        return decodes(requests, num_actual_tokens=requests, is_prefilling=is_prefilling)

    def do_nothing(self: Any, common_attn_metadata: Any, *, num_accepted_tokens: Any = None) -> None: ...

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
    rows = []
    for around, stock in (("alone", do_nothing), ("real", real)):
        fixed, observed = wrapped(FIX, patch, stock)
        for label, metadata in batches.items():
            if around == "real" and metadata.is_prefilling.any() and label != stale:
                continue  # what a prefill adds needs pinned memory, and would hide the fix
            # Of stale padding stock makes a prefill, which takes longer: the decode that it is is the stricter measure.
            # Observed it is a prefill, and around vLLM's own function not measured for the same reason.
            seen = right if label == stale and around == "real" else metadata
            calls = Calls(
                arguments(builder, right if label == stale else metadata)(stock),
                arguments(builder, metadata)(fixed),
                arguments(builder, seen)(stock),
                arguments(builder, seen)(observed),
            )
            rows.append(measured(label, around, calls, rounds))
    return rows
