"""indexer-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Calls, call, compared

RELEASE = "0.27.1"


def measure(rounds: int) -> list[tuple[object, ...]]:
    import torch
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.indexer_padding import FIX
    from vllm_graphfix.verify.double.scenarios.indexer_padding import builder

    own = builder(1, requests=PADDED_REQUESTS, tokens=2 * PADDED_REQUESTS)
    lengths = own.decode_seq_lens_buffer[: 2 * PADDED_REQUESTS].view(PADDED_REQUESTS, 2)

    def does_nothing(
        self: Any,
        seq_lens: Any,
        block_table: Any,
        decode_lens: Any,
        decode_lens_cpu: Any,
        query_start_loc: Any,
        num_decodes: Any,
        num_decode_tokens: Any,
        use_native: Any,
        next_n: Any,
        max_decode_len: Any,
    ) -> Any:
        return (lengths,)

    def arguments(requests: int, tokens: int) -> dict[str, Any]:
        scheduled = (torch.arange(PADDED_REQUESTS) < requests).int() * tokens
        return {
            "seq_lens": scheduled * 50,
            "block_table": torch.zeros(PADDED_REQUESTS, 3, dtype=torch.int32),
            "decode_lens": scheduled,
            "decode_lens_cpu": scheduled,
            "query_start_loc": scheduled.cumsum(0, dtype=torch.int32) - scheduled,
            "num_decodes": PADDED_REQUESTS,
            "num_decode_tokens": PADDED_REQUESTS * tokens,
            "use_native": True,
            "next_n": 2,
            "max_decode_len": tokens,
        }

    batches = {
        "indexer-padding, a draft's decodes": arguments(REQUESTS, 1),
        "indexer-padding, no padding": arguments(PADDED_REQUESTS, 2),
        "indexer-padding, padding": arguments(REQUESTS, 2),
    }
    (patch,) = FIX.patches("view-of-a-row")
    found = []
    for around, stock in (
        ("alone", does_nothing),
        ("real", DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors),
    ):
        fixed = patch.wrap(stock, Activity(FIX.events))
        observed = patch.wrap(stock, Activity(FIX.events, corrects=False))
        functions = (stock, fixed, stock, observed)
        for label, given in batches.items():
            calls = Calls(*(call(function, own, **given) for function in functions))
            found.append(compared(label, around, calls, rounds, target=True))
    return found
