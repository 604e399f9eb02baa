"""Rows of length 0 in latent attention: code that makes them, patterns of what clears them, and a count of batches."""

from __future__ import annotations

import functools
from typing import Any

from vllm_graphfix.fix import Activity, Event, Slice, StockFunction, Verdict, Wrap

COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
COMMON_BEFORE = "vllm/v1/attention/backends/mla/common.py"
_LENGTHS = "seq_lens seq_lens_device decode_metadata _build_decode"
LENGTHS_OF_RUNNERS = (
    Slice("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner._prepare_inputs", "seq_lens", Verdict.AFFECTED),
    Slice("vllm/v1/worker/gpu/input_batch.py", "_prepare_pos_seq_lens_kernel", "seq_lens_ptr", Verdict.AFFECTED),
)
"""The lengths that both model runners give padded rows."""
LENGTHS_OF_ROWS = (
    *LENGTHS_OF_RUNNERS,
    *(
        Slice(path, f"MLACommonMetadataBuilder.{name}", _LENGTHS, Verdict.AFFECTED)
        for path in (COMMON, COMMON_BEFORE)
        for name in ("build", "_build_decode")
    ),
)
"""The same, on to the metadata of decodes."""
OUTPUT_OF_LAYER = (
    Slice(COMMON, "MLAAttention.forward_impl", "attn_out", Verdict.AFFECTED),
    Slice(COMMON, "MLACommonImpl.forward", "attn_out", Verdict.AFFECTED),
    Slice(COMMON_BEFORE, "MLACommonImpl.forward", "attn_out", Verdict.AFFECTED),
)
"""The use that a layer makes of what its kernel leaves."""
NOT_OF_DECODES = 2 * ("if num_prefills > 0:\n    ...", "if self.impl.dcp_world_size > 1:\n    ...")
"""Statements of these functions that concern prefills, or ranks that share a context, alone; each function has up to
two."""

SUPPORT = "_cudagraph_support: ... = ..."
SUPPORT_NAMES = "_cudagraph_support get_cudagraph_support AttentionCGSupport"
NO_FULL_GRAPHS = "_cudagraph_support: ... = AttentionCGSupport.NEVER"
FULL_GRAPHS = tuple(
    f"_cudagraph_support: ... = AttentionCGSupport.{level}"
    for level in ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")
)
"""The graphs that a builder says it supports."""


def clears_empty_rows(output: str, lengths: str) -> tuple[str, ...]:
    """Patterns of statements that make zeros of the rows of *output*, (rows, heads, values), whose length is below 1.

    A product with 0 does not: NaN stays NaN. A pattern of 0 is one of 0.0 as well.
    """
    views = ("[:, None, None]", ".view(-1, 1, 1)")
    empty = [f"({lengths} {test}){view}" for test in ("< 1", "<= 0", "== 0") for view in views]
    filled = [f"({lengths} {test}){view}" for test in ("> 0", ">= 1", "!= 0") for view in views]
    return (
        *(f"{output}.masked_fill_({mask}, 0)" for mask in empty),
        *(f"{output} = {output}.masked_fill({mask}, 0)" for mask in empty),
        *(f"{output} = torch.where({mask}, 0, {output})" for mask in empty),
        *(f"{output} = torch.where({mask}, {output}, 0)" for mask in filled),
        *(f"{output}[{lengths} {test}] = 0" for test in ("< 1", "<= 0", "== 0")),
    )


def counts_empty_rows(event: Event, builder: str, module: str) -> Wrap:
    """What to put around `MLACommonMetadataBuilder.build`, which *builder*, a class of *module*, inherits.

    A replay runs no other Python of the backend. Rows of length 0 that the query starts do not show are not counted,
    since only the device knows them.
    """

    @functools.lru_cache(maxsize=64)
    def is_such_a_builder(builds: type) -> bool:
        """By name: this must not import the backend where another one is used."""
        return any(kind.__name__ == builder and kind.__module__ == module for kind in builds.__mro__)

    def _count_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
        given = activity.counter(event)

        @functools.wraps(stock)
        def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                kind: Any = type(self)
                if is_such_a_builder(kind):
                    last = common_attn_metadata.query_start_loc_cpu.numpy()[-2:]
                    if len(last) == 2 and last[0] == last[1]:
                        given.count += 1
            except Exception as error:
                activity.failed(error)
            return stock(self, common_prefix_len, common_attn_metadata, *args, **kwargs)

        return build

    return _count_empty_rows
