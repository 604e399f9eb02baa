"""indexer-padding."""

from __future__ import annotations

from typing import Any

from measuring.calls import PADDED_REQUESTS, REQUESTS, Batch, Row, arguments, compare
from vllm_graphfix.fixes.indexer_padding import FIX

RELEASE = "0.27.1"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    from vllm_graphfix.verify.double.scenarios.indexer_padding import builder

    own = builder(1, requests=PADDED_REQUESTS, tokens=2 * PADDED_REQUESTS)
    lengths = own.decode_seq_lens_buffer[: 2 * PADDED_REQUESTS].view(PADDED_REQUESTS, 2)

    def return_lengths(
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

    def batch(requests: int, tokens: int) -> Batch:
        scheduled = (torch.arange(PADDED_REQUESTS) < requests).int() * tokens
        keywords = {
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
        return arguments(own, **keywords)

    batches = {
        "indexer-padding, a draft's decodes": batch(REQUESTS, 1),
        "indexer-padding, no padding": batch(PADDED_REQUESTS, 2),
        "indexer-padding, padding": batch(REQUESTS, 2),
    }
    (patch,) = FIX.patches("view-of-a-row")
    stocks = {"alone": return_lengths, "real": DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors}
    return compare(FIX, patch, stocks, batches, rounds)
