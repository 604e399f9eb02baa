"""`triton-mla-padding`: Triton's MLA decode leaves zeros, not 0/0, in rows of length 0 (issue 57017)."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction
from vllm_graphfix.fixes._empty_rows import (
    COMMON,
    COMMON_BEFORE,
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
from vllm_graphfix.log import logger

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKEND = "vllm/v1/attention/backends/mla/triton_mla.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.mla.triton_mla"
_KERNELS = "vllm/v1/attention/ops/triton_decode_attention.py"
_KERNELS_MODULE = "vllm.v1.attention.ops.triton_decode_attention"
_REDUCE = "_fwd_kernel_stage2"
_LAUNCH = "_decode_softmax_reducev_fwd"
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_BUILDER = "TritonMLAMetadataBuilder"
_PROGRAMS = ("cur_batch = tl.program_id(0)", "cur_head = tl.program_id(1)")
_DIVIDED = "result = acc / e_sum"
_STORED = "tl.store(o + cur_batch * stride_obs + cur_head * stride_oh + offs_d, result, mask=mask_d)"
_EMPTY = ("e_sum == 0", "e_sum <= 0", "cur_batch_seq_len == 0", "cur_batch_seq_len <= 0", "cur_batch_seq_len < 1")
_FILLED = ("e_sum > 0", "e_sum != 0", "cur_batch_seq_len > 0", "cur_batch_seq_len != 0", "cur_batch_seq_len >= 1")
"""Conditions by which a kernel may detect rows with tokens."""
_DIVISORS = (
    *(f"tl.where({empty}, 1, e_sum)" for empty in _EMPTY),
    *(f"tl.where({filled}, e_sum, 1)" for filled in _FILLED),
    *(f"tl.maximum(e_sum, 1e-{digits})" for digits in (6, 8, 10, 12, 20, 30)),
)
"""The sum where there are tokens, and never 0. Without tokens `acc` is 0."""
_GUARDED = (
    *((f"result = tl.where({empty}, 0, acc / e_sum)",) for empty in _EMPTY),
    *((f"result = tl.where({filled}, acc / e_sum, 0)",) for filled in _FILLED),
    *((f"result = acc / {divisor}",) for divisor in _DIVISORS),
    *((f"safe = {divisor}", "result = acc / safe") for divisor in _DIVISORS),
    *((f"e_sum = {divisor}", _DIVIDED) for divisor in _DIVISORS),
    *(("result = acc", f"if {filled}:\n    {_DIVIDED}") for filled in _FILLED),
)
"""Replacements of the division that leave no 0/0."""
_BY_SPECIFICATION = (
    'if getattr(kv_cache_spec, "non_causal_multi_token_decode", False):\n    return AttentionCGSupport.UNIFORM_BATCH',
    "return cls._cudagraph_support",
)
"""More graphs for a draft that is not causal (0.29.0 on), and the support for all others."""
_CALLED, _RETURNED = "decode_attention_fwd(...)", "return o, lse"
_CLEARED = (*clears_empty_rows("o", "attn_metadata.decode.seq_lens"), *clears_empty_rows("o", "seq_lens"))

PADDED_BATCH_DECODED = Event(
    "empty-rows-given", "A batch with padded rows reached Triton's MLA decode: on stock the kernel leaves NaN in them."
)
_COUNT = counts_empty_rows(PADDED_BATCH_DECODED, _BUILDER, _BACKEND_MODULE)


def diagnose(source: Source) -> Diagnosis:
    """Find the division by the sum over a row's tokens, and guards or clears for rows without any."""
    if source.read(_BACKEND) is None:
        return Diagnosis.absent("no Triton MLA")
    builder = source.function(_BACKEND, _BUILDER)
    inherited = COMMON if source.read(COMMON) is not None else COMMON_BEFORE
    if source.contains_word(inherited, "MLACommonMetadataBuilder") and not any(
        source.contains_word(path, word) for path in (_BACKEND, inherited) for word in ("AttentionCGSupport", _BUILDER)
    ):
        return Diagnosis.fixed("Triton MLA allows no full graphs, without which no row is padded", f"{_BACKEND}:1")
    forward = source.function(_BACKEND, "TritonMLAImpl.forward_mqa")
    reduce = source.function(_KERNELS, _REDUCE)
    if builder is None or forward is None or reduce is None:
        return Diagnosis.unrecognised("Triton MLA decodes in a way", _BACKEND)
    support = builder.find_unique(SUPPORT)
    allowed = builder.find(*FULL_GRAPHS, *_BY_SPECIFICATION)
    if support is not None and support in builder.find(NO_FULL_GRAPHS) and not allowed:
        return Diagnosis.fixed("Triton MLA allows no full graphs, without which no row is padded", builder.where)
    remedy = _find_guard(reduce) or _find_cleared(forward)
    if remedy is not None:
        return Diagnosis.fixed("rows of length 0 leave no 0/0", remedy)
    guards = {statement for statements in _GUARDED for statement in statements} - {_DIVIDED}
    # Programs are numbered as in the kernel of this fix; a slice does not show the numbers.
    seen = bool(reduce.find_each(*_PROGRAMS)) and reduce.always(_DIVIDED) and not reduce.find(*guards)
    if seen and not forward.find(*_CLEARED) and support in builder.find(*FULL_GRAPHS):
        return Diagnosis.affected(
            "full graphs are allowed, their padded rows have length 0, and the kernel divides by a sum over no tokens",
            reduce.at(reduce.find(_DIVIDED)[0]),
            "divides-by-nothing",
        )
    return Diagnosis.unrecognised("Triton MLA decodes in a way", forward, defect_seen=seen)


def _find_guard(reduce: Function) -> str | None:
    """Return the place where the second stage avoids 0/0 for a row without tokens, on every path."""
    for statements in _GUARDED:
        guard = reduce.find_sequence(*statements, at_once=True)
        if (
            guard
            and guard[0] in reduce.node.body
            and reduce.in_one_block(*guard, *reduce.find(_STORED))
            and len(reduce.find(_DIVIDED)) == sum(_DIVIDED in statement for statement in statements)
        ):
            return reduce.at(guard[0])
    return None


def _find_cleared(forward: Function) -> str | None:
    """Return the place where the backend clears empty rows after the kernel, on every path."""
    for pattern in _CLEARED:
        parts = forward.find_sequence(_CALLED, pattern, _RETURNED)
        if parts and parts[2] in forward.node.body:
            return forward.at(parts[1])
    return None


def _zeros_for_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_decode_softmax_reducev_fwd`, which launches the second stage: rows whose length is below 1 become zeros.

    Stock's own function runs, but launches another kernel, which contains stock's and skips it in rows without tokens.
    So a graph records as many launches as on stock, each replay uses the lengths of its own batch, and rows with tokens
    get the result of stock's kernel, NaN included. `o` is (rows, heads, values), `b_seq_len` (rows,) int32, both on the
    device.

    If Triton cannot compile that kernel, stock's runs and zeros are filled in afterwards, which writes all of `o`.
    """
    kernels: Any = None
    try:
        from vllm_graphfix.fixes import _triton_mla_reduce as kernels
    except Exception as error:
        _without_own_kernel(error)

    @functools.wraps(stock)
    def _decode_softmax_reducev_fwd(
        logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal kernels
        if kernels is not None and not _is_anothers(stock.__globals__.get(_REDUCE), kernels):
            try:
                # A copy of the function's globals, not vLLM's module: other backends launch the kernel from there.
                names = {**stock.__globals__, _REDUCE: kernels.reduce_kernel}
                launch = FunctionType(stock.__code__, names, argdefs=stock.__defaults__, closure=stock.__closure__)
                return launch(logits, q, o, lse, v_buffer, b_seq_len, *args, **kwargs)
            except Exception as error:
                # Nothing was launched, or the device is unusable, which stock's own launch below will report.
                kernels = None
                _without_own_kernel(error)
        result = stock(logits, q, o, lse, v_buffer, b_seq_len, *args, **kwargs)
        try:
            # `view` by the rows of `o` raises, before anything is written, unless there is one length per row.
            o.masked_fill_((b_seq_len < 1).view(o.shape[0], 1, 1), 0.0)
        except Exception as error:
            activity.failed(error)
        return result

    return _decode_softmax_reducev_fwd


def _is_anothers(kernel: Any, kernels: Any) -> bool:
    """Tell if *kernel*, which stock would launch, is a foreign kernel, which must run."""
    stock: Any = kernels._stock_reduce
    return type(kernel) is type(stock) and kernel is not stock


def _without_own_kernel(error: Exception) -> None:
    logger.warning(
        "graphfix: triton-mla-padding fills padded rows after vLLM's kernel, which takes longer: its own one could not "
        "be used",
        exc_info=error,
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    attention = "latent attention on GPUs before Hopper"
    shared = "such as --quantization fp8 with experts; without, no answer is wrong"
    return (
        Need(
            "Triton MLA",
            lambda deployment, _: deployment.triton_mla(),
            attention,
            clause="attention runs on Triton MLA",
        ),
        needs.FULL_GRAPHS,
        unseen("a scale or a routing that a whole batch shares", shared),
    )


FIX = fix(
    "triton-mla-padding",
    diagnose=diagnose,
    surroundings=(
        # The division, the store of its result, and the launch
        Slice(_KERNELS, _REDUCE, "e_sum acc result cur_batch_seq_len o B_Seqlen program_id"),
        Slice(_KERNELS, _LAUNCH, f"{_REDUCE} b_seq_len o"),
        *(Slice(_KERNELS, f"decode_attention_fwd{name}", "o b_seq_len") for name in ("", "_normal", "_grouped")),
        # The output, the backend's use of lengths, and the graphs that its builder allows
        Slice(_BACKEND, "TritonMLAImpl.forward_mqa", "o clamp clamp_ clamp_min clamp_min_ maximum where masked_fill"),
        Slice(_BACKEND, _BUILDER, f"{SUPPORT_NAMES} seq_lens seq_lens_device _build_decode build"),
        Slice(_BACKEND, "TritonMLABackend.get_builder_cls"),
        Slice(_BACKEND, "", "decode_attention_fwd triton_decode_attention"),
        *LENGTHS_OF_ROWS,
        *OUTPUT_OF_LAYER,
    ),
    recognised=(
        *{statement: None for statements in _GUARDED for statement in statements},
        *_CLEARED,
        NO_FULL_GRAPHS,
        *FULL_GRAPHS,
        *_BY_SPECIFICATION,
        *NOT_OF_DECODES,
        "if query_len > 1:\n    ...",
    ),
    corrections=(
        Patch(_KERNELS_MODULE, _LAUNCH, _zeros_for_empty_rows, observes=False),
        Patch(_COMMON_MODULE, "MLACommonMetadataBuilder.build", _COUNT),
    ),
    events=(PADDED_BATCH_DECODED,),
    needs=needs,
    default_rationale="answers",
)
