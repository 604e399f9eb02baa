"""`indexer-padding`: tokens of padded rows have no negative length in DeepSeek's sparse indexer (issue 51593)."""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._empty_rows import LENGTHS_OF_RUNNERS
from vllm_graphfix.fixes._premises import AS_BUILT, BUILDERS_STAY

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_LAYER = "vllm/model_executor/layers/sparse_attn_indexer.py"
_INDEXER_MODULE = "vllm.v1.attention.backends.mla.indexer"
_BUILDER = "DeepseekV32IndexerMetadataBuilder"
_TARGET = f"{_BUILDER}._prepare_decode_tensors"
_KERNELS = ("_prepare_uniform_decode_kernel", "PrepareUniformDecodeKernel.kernel")
_LENGTH = "seq_lens.unsqueeze(1) - max_decode_len + 1 + self.offsets_buffer[:max_decode_len]"
_LENGTH_IN_THE_KERNEL = "seq_len - max_decode_len + local_idx + 1"
_WRITTEN = {
    "rows-of-a-table": (
        f"self.decode_seq_lens_buffer[:num_decodes, :max_decode_len] = {_LENGTH}",
        "seq_lens = self.decode_seq_lens_buffer[:num_decodes, :max_decode_len]",
    ),
    "view-of-a-row": (
        (
            "seq_lens_buffer = self.decode_seq_lens_buffer[:num_decodes * max_decode_len].view(num_decodes, "
            "max_decode_len)"
        ),
        f"seq_lens_buffer[:] = {_LENGTH}",
        "seq_lens = seq_lens_buffer",
    ),
}
"""The writes of tokens' lengths to the persistent buffer, which is returned; by shape."""
_CLAMPS = (
    "({}).clamp_(min=0)",
    "({}).clamp_(0)",
    "({}).clamp_min_(0)",
    "({}).clamp(min=0)",
    "({}).clamp(0)",
    "({}).clamp_min(0)",
    "torch.clamp({}, min=0)",
    "torch.clamp_min({}, 0)",
)
_CLAMPED = tuple(
    tuple(statement.replace(f"= {_LENGTH}", f"= {clamp.format(_LENGTH)}") for statement in statements)
    for statements in _WRITTEN.values()
    for clamp in _CLAMPS
)
_CLAMPED_LATER = tuple(
    f"{assigned}{clamp.format('seq_lens')}" for clamp in _CLAMPS if "_(" in clamp for assigned in ("", "seq_lens = ")
)
"""Clamps in place, where graphs read the lengths."""
_WRITTEN_IN_THE_KERNEL = f"per_token_seq_len = {_LENGTH_IN_THE_KERNEL}"
_CLAMPED_IN_THE_KERNEL = tuple(
    f"per_token_seq_len = {clamp.format(_LENGTH_IN_THE_KERNEL)}"
    for clamp in ("tl.maximum({}, 0)", "tl.maximum(0, {})", "max({}, 0)")
)
_OTHER_PATHS = (
    "if num_prefills > 0:\n    ...",
    "if num_tokens == 0:\n    ...",
    "if dcp_local_seq_lens is not None:\n    ...",
    "if self.compress_ratio > 1:\n    ...",
    "compressed_seq_lens = seq_lens",
)
"""Statements of the builder for prefills, empty batches, ranks that share a context, or compression, alone."""
_PREPARED = "seq_lens, block_table, decode_lens, batch_size, requires_padding = self._prepare_decode_tensors(...)"

PADDED_ROWS_BELOW_ZERO = Event(
    "padded-rows-below-zero",
    "A decode batch with padded rows and draft tokens reached the sparse indexer: on stock the first tokens of those "
    "rows have negative lengths.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the two ways by which lengths of tokens are written, and the clamps to at least 0."""
    prepare, build = source.function(_INDEXER, _TARGET), source.function(_INDEXER, f"{_BUILDER}.build")
    if not any(source.contains_word(_INDEXER, word) for word in ("_prepare_decode_tensors", "decode_seq_lens_buffer")):
        return Diagnosis.absent("no builder computes lengths for the tokens of padded rows")
    kernel = next(filter(None, (source.function(_INDEXER, name) for name in _KERNELS)), None)
    if prepare is None or build is None or kernel is None:
        return Diagnosis.unrecognised("the lengths of tokens are prepared in a way", prepare or build or _INDEXER)
    # At once, so that nothing changes the lengths in between.
    prepared, clamps = build.find(_PREPARED), build.find(*_CLAMPED_LATER)
    if len(prepared) == len(clamps) == 1 and build.in_one_block(*prepared, *clamps, at_once=True):
        return Diagnosis.fixed("lengths are at least 0 once they are prepared", build.at(clamps[0]))
    if not clamps and any(map(kernel.find_unique, _CLAMPED_IN_THE_KERNEL)) and not kernel.find(_WRITTEN_IN_THE_KERNEL):
        written = next(filter(None, (_find_written(prepare, statements) for statements in _CLAMPED)), None)
        if written is not None:
            return Diagnosis.fixed("lengths of tokens are at least 0", prepare.at(written[-2]))
    if not clamps and kernel.find_unique(_WRITTEN_IN_THE_KERNEL) and not kernel.find(*_CLAMPED_IN_THE_KERNEL):
        for shape, statements in _WRITTEN.items():
            if _find_written(prepare, statements):
                return Diagnosis.affected(
                    "a row of length 0 with several tokens gives negative lengths",
                    prepare.at(prepare.find(_LENGTH)[0]),
                    shape,
                )
    return Diagnosis.unrecognised("the lengths of tokens are prepared in a way", prepare)


def _find_written(prepare: Function, statements: tuple[str, ...]) -> list[ast.stmt | ast.expr]:
    """Return the *statements* that write lengths where graphs read them, if nothing stands between them."""
    return prepare.find_sequence(*statements, at_once=True)


def _lengths_from_zero(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_prepare_decode_tensors`, whose lengths for rows with several tokens are then at least 0.

    In place, on the device: graphs recorded the address of the builder's buffer, and DeepGEMM's schedule, the share of
    a context-parallel rank and the lengths in compressed tokens are derived from it afterwards. Tokens of requests have
    lengths from 1, so clamping twice is harmless. The rows of an idle rank's dummy batch are not counted: only the
    device knows their lengths.
    """
    padded_batches, corrects = activity.counter(PADDED_ROWS_BELOW_ZERO), activity.corrects

    @functools.wraps(stock)
    def _prepare_decode_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = stock(self, *args, **kwargs)
        try:
            if _clamp(self.decode_seq_lens_buffer if corrects else None, prepared, *args, **kwargs):
                padded_batches.count += 1
        except Exception as error:
            activity.failed(error)
        return prepared

    return _prepare_decode_tensors


def _clamp(
    buffer: Any,
    prepared: Any,
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
) -> bool:
    """Clamp the *prepared* lengths in *buffer*, if there is one; return True if the host knows of padding.

    `decode_lens_cpu` is (num_decodes,) int32 on the CPU.
    """
    if max_decode_len <= 1:
        return False
    if buffer is not None:
        lengths = prepared[0]
        if lengths.data_ptr() != buffer.data_ptr():
            return False  # never the runner's own lengths
        # Also without padding that the host knows: an idle data-parallel rank's dummy batch has rows of length 0, too.
        lengths.clamp_(min=0)
    return bool(use_native and decode_lens_cpu.numpy()[-1] == 0)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.SPARSE_MLA, needs.DRAFTS, needs.FULL_GRAPHS)


FIX = fix(
    "indexer-padding",
    diagnose=diagnose,
    surroundings=(
        Slice(_INDEXER, _TARGET, "seq_lens seq_lens_buffer decode_seq_lens_buffer"),
        *(Slice(_INDEXER, name, "per_token_seq_len seq_len") for name in _KERNELS),
        Slice(_INDEXER, f"{_BUILDER}.build", "seq_lens _prepare_decode_tensors"),
        *(Slice(_INDEXER, f"Deepseek{model}IndexerBackend.get_builder_cls") for model in ("V32", "V4", "V41")),
        # The lengths of padded rows, and possible remedies in the layer before the kernels
        *LENGTHS_OF_RUNNERS,
        # Not `clamp` or `maximum`, by which kernels of this file scale queries
        Slice(
            _LAYER, "", "clamp_ clamp_min clamp_min_ min relu relu_ where masked_fill masked_fill_", Verdict.AFFECTED
        ),
        Slice(_LAYER, "", "seq_lens", Verdict.FIXED),
        *BUILDERS_STAY,
    ),
    recognised=(
        *chain.from_iterable(_WRITTEN.values()),
        *chain.from_iterable(_CLAMPED),
        *_CLAMPED_LATER,
        _WRITTEN_IN_THE_KERNEL,
        *_CLAMPED_IN_THE_KERNEL,
        *(3 * _OTHER_PATHS),
    ),
    distant_code=AS_BUILT,
    corrections=(Patch(_INDEXER_MODULE, _TARGET, _lengths_from_zero),),
    events=(PADDED_ROWS_BELOW_ZERO,),
    needs=needs,
    default_rationale="answers",
)
