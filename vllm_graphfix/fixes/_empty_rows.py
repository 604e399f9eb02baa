"""Rows of length 0 in latent attention: code that makes them, patterns that clear them, a counter of batches."""

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
"""The lengths of padded rows in both model runners."""
LENGTHS_OF_ROWS = (
    *LENGTHS_OF_RUNNERS,
    *(
        Slice(path, f"MLACommonMetadataBuilder.{name}", _LENGTHS, Verdict.AFFECTED)
        for path in (COMMON, COMMON_BEFORE)
        for name in ("build", "_build_decode")
    ),
)
"""The same, up to the metadata of decodes."""
OUTPUT_OF_LAYER = (
    Slice(COMMON, "MLAAttention.forward_impl", "attn_out", Verdict.AFFECTED),
    Slice(COMMON, "MLACommonImpl.forward", "attn_out", Verdict.AFFECTED),
    Slice(COMMON_BEFORE, "MLACommonImpl.forward", "attn_out", Verdict.AFFECTED),
)
"""A layer's use of the output of its kernel."""
NOT_OF_DECODES = 2 * ("if num_prefills > 0:\n    ...", "if self.impl.dcp_world_size > 1:\n    ...")
"""Statements for prefills, or for ranks that share a context, alone; each function has up to two."""

SUPPORT = "_cudagraph_support: ... = ..."
SUPPORT_NAMES = "_cudagraph_support get_cudagraph_support AttentionCGSupport"
NO_FULL_GRAPHS = "_cudagraph_support: ... = AttentionCGSupport.NEVER"
FULL_GRAPHS = tuple(
    f"_cudagraph_support: ... = AttentionCGSupport.{level}"
    for level in ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")
)
"""The full graphs that a builder may claim to support."""


def clears_empty_rows(output: str, lengths: str) -> tuple[str, ...]:
    """Return patterns of statements that zero the rows of *output*, (rows, heads, values), whose length is below 1.

    A product with 0 is none: NaN stays NaN. The pattern 0 equals 0.0, too.
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
    """Make a wrapper of `MLACommonMetadataBuilder.build`, which *builder*, a class of *module*, inherits.

    A replay runs no other Python of the backend. Rows of length 0 that only the device knows are not counted.
    """

    @functools.lru_cache(maxsize=64)
    def is_such_a_builder(builds: type) -> bool:
        """Compare names: this must not import a backend that the engine does not use."""
        return any(kind.__name__ == builder and kind.__module__ == module for kind in builds.__mro__)

    def _count_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
        padded_batches = activity.counter(event)

        @functools.wraps(stock)
        def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                kind: Any = type(self)
                if is_such_a_builder(kind):
                    last = common_attn_metadata.query_start_loc_cpu.numpy()[-2:]
                    if len(last) == 2 and last[0] == last[1]:
                        padded_batches.count += 1
            except Exception as error:
                activity.failed(error)
            return stock(self, common_prefix_len, common_attn_metadata, *args, **kwargs)

        return build

    return _count_empty_rows
