"""triton-mla-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, Row, arguments, compare, decodes, measured, wrapped
from vllm_graphfix.fixes.triton_mla_padding import FIX

RELEASE = "0.25.1"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

    from vllm_graphfix.verify.double.mla_decode import metadata_builder

    builder = metadata_builder(TritonMLAMetadataBuilder)
    zeros, counts = FIX.patches("divides-by-nothing")

    def build_nothing(
        self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False
    ) -> None: ...

    def _decode_softmax_reducev_fwd(
        logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, num_kv_splits: Any
    ) -> None: ...

    batches = {
        "triton-mla-padding, no padding": arguments(builder, 0, decodes(PADDED_REQUESTS)),
        "triton-mla-padding, padding": arguments(builder, 0, decodes(REQUESTS)),
    }
    rows = compare(FIX, counts, {"alone": build_nothing, "real": type(builder).build}, batches, rounds)
    # Its Python runs once a layer, but only in a step without a full graph; docs/performance.md has what the graph
    # costs, on a GPU.
    layer = arguments(None, None, torch.zeros(REQUESTS, 1, 1), None, None, torch.ones(REQUESTS, dtype=torch.int32), 1)
    stock = _decode_softmax_reducev_fwd
    fixed, _ = wrapped(FIX, zeros, stock)
    calls = Calls(*map(layer, (stock, fixed, stock, stock)))
    rows.append(measured("triton-mla-padding, a layer outside of a graph", "alone", calls, rounds, target=False))
    return rows
