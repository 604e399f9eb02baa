"""triton-mla-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.25.1"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.triton_mla_padding import FIX
    from vllm_graphfix.verify.double.mla_decode import metadata_builder

    builder = metadata_builder(TritonMLAMetadataBuilder)
    real = type(builder).build
    zeros, counts = FIX.patches("divides-by-nothing")
    active, observing = Activity(FIX.events), Activity(FIX.events, corrects=False)

    def builds_nothing(
        self: Any, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False
    ) -> None: ...

    def batch(requests: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=(torch.arange(PADDED_REQUESTS) < requests).int() * 100,
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=PADDED_REQUESTS,
            max_query_len=1,
            max_seq_len=100,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
        )

    found = []
    for around, stock in (("alone", builds_nothing), ("real", real)):
        fixed, observed = counts.wrap(stock, active), counts.wrap(stock, observing)
        for label, metadata in (("no padding", batch(PADDED_REQUESTS)), ("padding", batch(REQUESTS))):
            calls = Calls(*(call(function, builder, 0, metadata) for function in (stock, fixed, stock, observed)))
            found.append(compared(f"triton-mla-padding, {label}", around, calls, rounds, target=True))

    def _decode_softmax_reducev_fwd(
        logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, num_kv_splits: Any
    ) -> None: ...

    # Its Python runs in a step without a full graph alone, once a layer; in a graph there is none of it.
    # docs/performance.md has what the graph costs, on a GPU.
    given = (None, None, torch.zeros(REQUESTS, 1, 1), None, None, torch.ones(REQUESTS, dtype=torch.int32), 1)
    fixed = zeros.wrap(_decode_softmax_reducev_fwd, active)
    functions = (_decode_softmax_reducev_fwd, fixed, *[_decode_softmax_reducev_fwd] * 2)
    calls = Calls(*(call(function, *given) for function in functions))
    found.append(compared("triton-mla-padding, a layer outside of a graph", "alone", calls, rounds, target=False))
    return found
