"""`indexer-padding`: no token of a padded row has a negative length in the sparse indexer (issue 51593).

The indexer is that of DeepSeek models.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_INDEXER_MODULE = "vllm.v1.attention.backends.mla.indexer"
_BUILDER = "DeepseekV32IndexerMetadataBuilder"
_TARGET = f"{_BUILDER}._prepare_decode_tensors"
_KERNELS = ("_prepare_uniform_decode_kernel", "PrepareUniformDecodeKernel.kernel")
_PARAMETERS = (
    "self, seq_lens, block_table, decode_lens, decode_lens_cpu, query_start_loc, num_decodes, num_decode_tokens, "
    "use_native, next_n, max_decode_len"
)
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
"""How the lengths of tokens come into the persistent buffer, and that is what is returned; by shape."""
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
_CLAMPS_IN_A_KERNEL = ("tl.maximum({}, 0)", "tl.maximum(0, {})", "max({}, 0)")
_PREPARED = "seq_lens, block_table, decode_lens, batch_size, requires_padding = self._prepare_decode_tensors(...)"

PADDED_ROWS_BELOW_ZERO = Event(
    "padded-rows-below-zero",
    "A decode batch with padded rows and draft tokens reached the sparse indexer: on stock the first tokens of those "
    "rows have negative lengths.",
)


def diagnose(source: Source) -> Diagnosis:
    prepare, build = source.function(_INDEXER, _TARGET), source.function(_INDEXER, f"{_BUILDER}.build")
    if not any(source.says(_INDEXER, word) for word in ("_prepare_decode_tensors", "decode_seq_lens_buffer")):
        return Diagnosis(Verdict.ABSENT, "no builder computes lengths for the tokens of padded rows")
    kernel = next(filter(None, (source.function(_INDEXER, name) for name in _KERNELS)), None)
    if prepare is not None and build is not None and kernel is not None:
        after = _clamp_after_preparing(build)
        if after is not None:
            return Diagnosis(Verdict.FIXED, "lengths are at least 0 once they are prepared", build.at(after))
        clamped = _clamp_at_writing(prepare)
        if clamped is not None and _gives_the_kernels_lengths(kernel, _CLAMPS_IN_A_KERNEL):
            return Diagnosis(Verdict.FIXED, "lengths of tokens are at least 0", prepare.at(clamped))
        for shape, statements in _WRITTEN.items():
            written = prepare.each(*statements)
            if (
                written
                and prepare.in_one_block(*written, at_once=True)
                and prepare.takes == _PARAMETERS
                and prepare.mentions(seq_lens=9, seq_lens_buffer=3 if shape == "view-of-a-row" else 0)
                and _returns_what_it_wrote(prepare)
                and _gives_the_kernels_lengths(kernel, ("{}",))
                and _hands_on_what_was_prepared(build)
            ):
                return Diagnosis(
                    Verdict.AFFECTED,
                    "a row of length 0 with several tokens gives negative lengths",
                    prepare.at(prepare.find(_LENGTH)[0]),
                    shape,
                )
    return Diagnosis.unrecognised("the lengths of tokens are prepared in a way", prepare or build or _INDEXER)


def _only_match(function: Function, patterns: list[str]) -> ast.stmt | ast.expr | None:
    """The part that equals one of *patterns*, if there is one and no other."""
    found = [part for pattern in patterns for part in function.find(pattern)]
    return found[0] if len(found) == 1 else None


def _gives_the_kernels_lengths(kernel: Function, forms: tuple[str, ...]) -> bool:
    """Whether the kernel of uniform batches stores its lengths in one of *forms*, and does nothing else to them."""
    lengths = [f"per_token_seq_len = {form.format(_LENGTH_IN_THE_KERNEL)}" for form in forms]
    stored = kernel.only("tl.store(decode_seq_lens_ptr + idx, per_token_seq_len)")
    return bool(_only_match(kernel, lengths) and stored and kernel.mentions(per_token_seq_len=2))


def _returns_what_it_wrote(prepare: Function) -> bool:
    """Whether a batch with several tokens in a row is returned as the start of the persistent buffer.

    This must hold on all three paths.
    """
    flat = prepare.find("return seq_lens, block_table, decode_lens, num_decode_tokens, False")
    native = prepare.find("return seq_lens, block_table, decode_lens, num_decodes, requires_padding")
    of_flat = prepare.find("seq_lens = self.decode_seq_lens_buffer[:num_decode_tokens]")
    counts = (len(flat), len(of_flat), len(native), len(prepare.find("return ...")))
    return counts == (2, 2, 1, 3)


def _clamp_at_writing(prepare: Function) -> ast.stmt | ast.expr | None:
    """What writes lengths of at least 0 where graphs read them, if that is what is returned."""
    for statements in _WRITTEN.values():
        for clamp in _CLAMPS:
            written = prepare.each(*(each.replace(f"= {_LENGTH}", f"= {clamp.format(_LENGTH)}") for each in statements))
            if written and prepare.in_one_block(*written, at_once=True) and _returns_what_it_wrote(prepare):
                return written[-2]
    return None


def _clamp_after_preparing(build: Function) -> ast.stmt | ast.expr | None:
    """What makes all lengths at least 0 right after they are prepared, if there is such a place.

    It must do so in place, where graphs read them.
    """
    prepared = build.only(_PREPARED)
    in_place = [clamp.format("seq_lens") for clamp in _CLAMPS if "_(" in clamp]
    done = _only_match(build, [form for clamp in in_place for form in (clamp, f"seq_lens = {clamp}")])
    return done if prepared and done and build.in_one_block(prepared, done, at_once=True) else None


def _hands_on_what_was_prepared(build: Function) -> bool:
    """Whether DeepGEMM's schedule and the layer's metadata are made of the lengths as prepared.

    Both must be made after the lengths are prepared.
    """
    prepared = build.only(_PREPARED)
    scheduled = build.only("get_paged_mqa_logits_metadata(...)")
    made = build.only("decode_metadata = DeepSeekV32IndexerDecodeMetadata(...)")
    names = [f"seq_lens.{name}" for name in ("clamp", "clamp_", "clamp_min", "clamp_min_", "relu", "relu_")]
    names += [f"torch.{name}" for name in ("clamp", "clamp_min", "maximum", "relu")]
    corrected = [part for name in names for part in build.find(f"{name}(...)")]
    return bool(
        prepared
        and scheduled
        and made
        and prepared.lineno < scheduled.lineno
        and build.in_one_block(prepared, made)
        and build.gives("DeepSeekV32IndexerDecodeMetadata(...)", "seq_lens=seq_lens")
        and not corrected
    )


def _lengths_from_zero(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_prepare_decode_tensors`, after which what it has written for rows with several tokens is at least 0.

    In place, on the device, in the builder's buffer: graphs recorded its address, and the schedule of DeepGEMM, the
    share of a context-parallel rank and the lengths in compressed tokens are made of it afterwards. Tokens of requests
    have lengths from 1.

    The rows of an idle rank's dummy batch are not counted: only the device knows their lengths.
    """
    padded_batches, corrects = activity.counter(PADDED_ROWS_BELOW_ZERO), activity.corrects

    @functools.wraps(stock)
    def _prepare_decode_tensors(
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
        prepared = stock(
            self,
            seq_lens,
            block_table,
            decode_lens,
            decode_lens_cpu,
            query_start_loc,
            num_decodes,
            num_decode_tokens,
            use_native,
            next_n,
            max_decode_len,
        )
        try:
            if max_decode_len > 1:
                if corrects:
                    lengths = prepared[0]
                    if lengths.data_ptr() != self.decode_seq_lens_buffer.data_ptr():
                        return prepared  # never the runner's own lengths
                    # Also without padding that the host can see: the dummy batch of an idle data-parallel rank has
                    # rows of length 0 too.
                    lengths.clamp_(min=0)
                if use_native and _has_padded_rows(decode_lens_cpu):
                    padded_batches.count += 1
        except Exception as error:
            activity.failed(error)
        return prepared

    return _prepare_decode_tensors


def _has_padded_rows(decode_lens_cpu: Any) -> bool:
    """Whether the last row schedules no token; *decode_lens_cpu* is (num_decodes,) int32 on the CPU."""
    return bool(decode_lens_cpu.numpy()[-1] == 0)


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_INDEXER_MODULE, _TARGET, _lengths_from_zero),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.SPARSE_MLA, needs.DRAFTS, needs.FULL_GRAPHS)


FIX = Fix(
    number=11,
    name="indexer-padding",
    runner=None,
    reads=(_INDEXER, _UTILS),
    modules=(_INDEXER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDED_ROWS_BELOW_ZERO,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_INDEXER}::{_BUILDER}.__init__",
        f"{_UTILS}::split_decodes_and_prefills",
    ),
)

ABOUT = About(
    pr=None,
    references=("issue 51593", "PR 51538"),
    summary="padded rows of the sparse indexer have no negative lengths",
    releases="0.20.0 - 0.27.1",
    absent="0.14.1 - 0.19.1",
    seen="the engine hangs at full GPU load while a batch drains",
    first_test="`-cc.cudagraph_mode=PIECEWISE`: gone?",
    symptom="With speculative decoding and full CUDA graphs, DeepSeek V3.2 and V4 hang while a batch drains: GPUs at "
    "full load, no token, timeouts of the executor (issue 51593).",
    cause="For each token of a decode batch, the indexer's builder subtracts the number of tokens after it from its "
    "request's length. A padded row has length 0, so its first token gets -1 with one draft token, and less with "
    "more. The top-k kernel reads lengths as unsigned: one of its blocks waits for others that have already exited.",
    remedy="Negative lengths become 0, on the device and in the buffer whose address the graph recorded, before "
    "anything is computed from them. Tokens of real requests keep their lengths.",
    detect="With draft tokens the engine hangs when the number of running requests is between two capture sizes; with "
    "PIECEWISE graphs it does not.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or --enforce-eager, or no speculative '
    "decoding.",
    removable="with vLLM 0.28.0",
    in_caches="nothing known: the engine hangs. Entries that were being written when it was killed may be truncated",
    how_sure="whether a store keeps these depends on the store",
)
