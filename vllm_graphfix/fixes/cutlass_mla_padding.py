"""`cutlass-mla-padding`: Cutlass MLA's decode leaves zeros, not old memory, in rows of length 0 (PR 37442)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction
from vllm_graphfix.fixes._empty_rows import (
    COMMON,
    FULL_GRAPHS,
    LENGTHS_OF_ROWS,
    NO_FULL_GRAPHS,
    NOT_OF_DECODES,
    OUTPUT_OF_LAYER,
    SUPPORT,
    SUPPORT_NAMES,
    clears_empty_rows,
    counts_empty_rows,
)

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/mla/cutlass_mla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.cutlass_mla"
_KERNELS = "vllm/_custom_ops.py"
_KERNELS_MODULE = "vllm._custom_ops"
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_COMMON_BEFORE_MODULE = "vllm.v1.attention.backends.mla.common"
_BUILDER = "CutlassMLAMetadataBuilder"
_LAUNCH = "sm100_cutlass_mla_decode"
_CALLED = (
    f"ops.{_LAUNCH}(out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, "
    "num_kv_splits)"
)
_RETURNED = "return out, lse"
_FRESH = "out = q_nope.new_empty((B_q, MAX_HEADS, D_latent), dtype=dtype)"
_ZEROS = "out = q_nope.new_zeros((B_q, MAX_HEADS, D_latent), dtype=dtype)"
_ZEROS_AT_FIRST = (
    (
        "if self._decode_out is None or self._decode_out.shape[0] < B_q or self._decode_out.dtype != dtype:\n"
        f"    self._decode_{_ZEROS}"
    ),
    "out = self._decode_out[:B_q]",
)
"""Upstream's correction of 0.18.0 - 0.19.1."""
_CLEARED = clears_empty_rows("out", "seq_lens")

PADDED_BATCH_DECODED = Event(
    "rows-left-as-they-were",
    "A batch with padded rows reached Cutlass MLA's decode: on stock these rows are as their memory was before, which "
    "may hold NaN.",
)
_COUNT = counts_empty_rows(PADDED_BATCH_DECODED, _BUILDER, _BACKEND_MODULE)


def diagnose(source: Source) -> Diagnosis:
    """Find the memory that the kernel writes to, and the code that zeroes the rows that it skips."""
    if source.read(_BACKEND) is None:
        return Diagnosis.absent("no Cutlass MLA")
    builder = source.function(_BACKEND, _BUILDER)
    decode = source.function(_BACKEND, f"CutlassMLAImpl._{_LAUNCH}")
    if builder is None or decode is None:
        return Diagnosis.unrecognised("Cutlass MLA decodes in a way", decode or _BACKEND)
    support = builder.find_unique(SUPPORT)
    if support is not None and support in builder.find(NO_FULL_GRAPHS):
        return Diagnosis.fixed("Cutlass MLA allows no full graphs, without which no row is padded", builder.where)
    zeros = _find_zeros(decode)
    if zeros is not None:
        return Diagnosis.fixed("rows that the kernel leaves out are zeros, or what a request left", decode.at(zeros))
    fresh = _first_of_sequence(decode, _FRESH, _CALLED, _RETURNED)
    if (
        fresh is not None
        and support in builder.find(*FULL_GRAPHS)
        and not decode.find(_ZEROS, *_ZEROS_AT_FIRST, *_CLEARED)
    ):
        return Diagnosis.affected(
            "full graphs are allowed, their padded rows have length 0, and the kernel is given memory as it is",
            decode.at(fresh),
            "fresh-output" if source.contains_word(COMMON, "MLACommonMetadataBuilder") else "fresh-output-of-old",
        )
    return Diagnosis.unrecognised("Cutlass MLA decodes in a way", decode, defect_seen=fresh is not None)


def _find_zeros(decode: Function) -> ast.stmt | ast.expr | None:
    """Return the statement that allocates zeros for the kernel, or clears empty rows after it, on every path."""
    if not decode.find(_FRESH):
        if _first_of_sequence(decode, _ZEROS, _CALLED, _RETURNED):
            return decode.find_unique(_ZEROS)
        if _first_of_sequence(decode, *_ZEROS_AT_FIRST, _CALLED, _RETURNED):
            return decode.find_unique(f"self._decode_{_ZEROS}")
    clears = (pattern for pattern in _CLEARED if _first_of_sequence(decode, _FRESH, _CALLED, pattern, _RETURNED))
    return next(map(decode.find_unique, clears), None)


def _first_of_sequence(decode: Function, *patterns: str) -> ast.stmt | ast.expr | None:
    """Return the first of the statements that equal *patterns* if they run in this order on every path."""
    parts = decode.find_sequence(*patterns)
    return parts[0] if parts and parts[0] in decode.node.body else None


def _zeros_for_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `sm100_cutlass_mla_decode`, which launches the kernel: rows whose length is below 1 become zeros.

    `out` is (rows, heads, values), `lse` (rows, heads) or empty where not requested, `seq_lens` (rows,) int32, all on
    the device. The log-sum-exp of these rows becomes -inf, which the merge of ranks takes as "no tokens". A graph
    records both operations, and each replay uses the lengths of its own batch.
    """

    @functools.wraps(stock)
    def sm100_cutlass_mla_decode(
        out: Any, lse: Any, q_nope: Any, q_pe: Any, kv_c_and_k_pe_cache: Any, seq_lens: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = stock(out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, *args, **kwargs)
        try:
            # `view` by the rows of `out` raises, before anything is written, unless there is one length per row.
            empty = (seq_lens < 1).view(out.shape[0], 1)
            if lse.numel():
                lse.masked_fill_(empty, float("-inf"))
            out.masked_fill_(empty.unsqueeze(2), 0.0)
        except Exception as error:
            activity.failed(error)
        return result

    return sm100_cutlass_mla_decode


def patches(shape: str) -> tuple[Patch, ...]:
    common = _COMMON_MODULE if shape == "fresh-output" else _COMMON_BEFORE_MODULE
    return (
        Patch(_KERNELS_MODULE, _LAUNCH, _zeros_for_empty_rows, observes=False),
        Patch(common, "MLACommonMetadataBuilder.build", _COUNT),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    attention = "latent attention on a Blackwell of compute capability 10"
    return (
        Need(
            "Cutlass MLA",
            lambda deployment, _: deployment.cutlass_mla(),
            attention,
            clause="attention runs on Cutlass MLA",
        ),
        needs.FULL_GRAPHS,
        unseen("a scale or a routing that a whole batch shares", "such as NVFP4 with experts"),
    )


FIX = fix(
    "cutlass-mla-padding",
    diagnose=diagnose,
    surroundings=(
        # The memory from its allocation to the layer, and the builder's use of lengths
        Slice(_BACKEND, "CutlassMLAImpl", f"out _decode_out o seq_lens _{_LAUNCH}"),
        Slice(_BACKEND, _BUILDER, f"{SUPPORT_NAMES} seq_lens seq_lens_device _build_decode build"),
        Slice(_BACKEND, "CutlassMLABackend.get_impl_cls"),
        Slice(_KERNELS, _LAUNCH, "out seq_lens"),
        *LENGTHS_OF_ROWS,
        *OUTPUT_OF_LAYER,
    ),
    recognised=(_FRESH, _ZEROS, *_ZEROS_AT_FIRST, *_CLEARED, NO_FULL_GRAPHS, *FULL_GRAPHS, *NOT_OF_DECODES),
    corrections=patches,
    modules=(_KERNELS_MODULE, _COMMON_MODULE, _COMMON_BEFORE_MODULE),
    events=(PADDED_BATCH_DECODED,),
    needs=needs,
)
