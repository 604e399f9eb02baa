"""`triton-mla-padding`: rows of length 0 leave zeros, not 0/0, in Triton's MLA decode (issue 57017)."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About
from vllm_graphfix.fixes._empty_rows import counts_empty_rows
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
_COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_COMMON_BEFORE = "vllm/v1/attention/backends/mla/common.py"
_UTILS = "vllm/v1/attention/backends/utils.py"
_BUILDER = "TritonMLAMetadataBuilder"
_PARAMETERS = (
    "q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size, "
    "logit_cap, k_scale, v_scale, is_mla"
)
_LAUNCH_PARAMETERS = "logits, q, o, lse, v_buffer, b_seq_len, num_kv_splits"
_REDUCE_PARAMETERS = (
    "Mid_O, o, lse, B_Seqlen, stride_mid_ob, stride_mid_oh, stride_mid_os, stride_obs, stride_oh, stride_lse_bs, "
    "NUM_KV_SPLITS, BLOCK_DV, Lv, OUTPUT_FP16"
)
_FULL = ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")
_EMPTY = ("e_sum == 0", "e_sum <= 0", "cur_batch_seq_len == 0", "cur_batch_seq_len <= 0", "cur_batch_seq_len < 1")
_FILLED = ("e_sum > 0", "e_sum != 0", "cur_batch_seq_len > 0", "cur_batch_seq_len != 0", "cur_batch_seq_len >= 1")
"""How a kernel may ask whether a row has tokens."""

EMPTY_ROWS_GIVEN = Event(
    "empty-rows-given",
    "A batch with padded rows reached Triton's MLA decode: on stock the kernel leaves NaN in them.",
)
_COUNT = counts_empty_rows(EMPTY_ROWS_GIVEN, _BUILDER, _BACKEND_MODULE)


def diagnose(source: Source) -> Diagnosis:
    if source.read(_BACKEND) is None:
        return Diagnosis(Verdict.ABSENT, "no Triton MLA")
    builder = source.function(_BACKEND, _BUILDER)
    inherited = _COMMON if source.read(_COMMON) is not None else _COMMON_BEFORE
    if source.says(inherited, "MLACommonMetadataBuilder") and not any(
        source.says(path, word) for path in (_BACKEND, inherited) for word in ("AttentionCGSupport", _BUILDER)
    ):
        return Diagnosis(
            Verdict.FIXED, "Triton MLA allows no full graphs, without which no row is padded", f"{_BACKEND}:1"
        )
    forward = source.function(_BACKEND, "TritonMLAImpl.forward_mqa")
    reduce = source.function(_KERNELS, _REDUCE)
    launch = source.function(_KERNELS, _LAUNCH)
    decode = source.function(_KERNELS, "decode_attention_fwd")
    build = source.function(_COMMON, "MLACommonMetadataBuilder.build")
    if builder is None or forward is None or reduce is None or decode is None or build is None:
        return Diagnosis.unrecognised("Triton MLA decodes in a way", _BACKEND)
    allowed = any(builder.find(f"AttentionCGSupport.{name}") for name in _FULL)
    if not allowed and builder.find("AttentionCGSupport.NEVER"):
        return Diagnosis(
            Verdict.FIXED, "Triton MLA allows no full graphs, without which no row is padded", builder.where
        )
    remedy = _guard(reduce) or _zeroed(forward)
    if remedy is not None:
        return Diagnosis(Verdict.FIXED, "rows of length 0 leave no 0/0", remedy)
    division = reduce.only("result = acc / e_sum")
    called = forward.only("decode_attention_fwd(...)")
    returned = forward.only("return o, lse")
    if (
        division is not None
        and len(reduce.find("... / ...")) == 1
        and not reduce.find("return")
        and reduce.mentions(acc=4, e_sum=5, e_max=5, result=4, cur_batch_seq_len=3)
        and _is_launched_as_known(reduce, launch)
        and decode.takes == _PARAMETERS
        and decode.mentions(o=2, b_seq_len=2)
        and called is not None
        and returned is not None
        and [getattr(given, "id", "") for given in getattr(called, "args", ())][3:5] == ["o", "lse"]
        and forward.in_one_block(called, returned, at_once=True)
        and forward.mentions(o=3, lse=3)
        and build.takes == "self, common_prefix_len, common_attn_metadata, fast_build"
        and not _builds_otherwise(source)
        and allowed
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "full graphs are allowed, their padded rows have length 0, and the kernel divides by a sum over no tokens",
            reduce.at(division),
            "divides-by-nothing",
        )
    return Diagnosis.unrecognised("Triton MLA decodes in a way", forward)


def _guard(reduce: Function) -> str | None:
    """Where the second stage sees to it that a row without tokens is not 0/0, or None."""
    if reduce.find("acc / e_sum"):
        right = [f"tl.where({empty}, 0, {value})" for empty in _EMPTY for value in ("acc / e_sum", "result")]
        right += [f"tl.where({filled}, {value}, 0)" for filled in _FILLED for value in ("acc / e_sum", "result")]
        right += [f"e_sum = tl.where({empty}, ..., e_sum)" for empty in _EMPTY]
        right += [f"e_sum = tl.where({filled}, e_sum, ...)" for filled in _FILLED]
        right.append("e_sum = tl.maximum(e_sum, ...)")
        for asked in (*_EMPTY, *_FILLED):
            right += [f"if {asked}:\n    ...", f"if {asked}:\n    ...\nelse:\n    ..."]
    else:
        right = [f"tl.where({empty}, ..., e_sum)" for empty in _EMPTY]
        right += [f"tl.where({filled}, e_sum, ...)" for filled in _FILLED]
        right += ["tl.maximum(e_sum, ...)", "acc / (e_sum + ...)"]
    found = next((found for pattern in right for found in reduce.find(pattern)), None)
    return None if found is None else reduce.at(found)


def _zeroed(forward: Function) -> str | None:
    """Where the backend itself clears what the kernel leaves in some rows, or None."""
    called = forward.only("decode_attention_fwd(...)")
    cleared = (
        "o.masked_fill_(..., 0)",
        "o = o.masked_fill(..., 0)",
        "o = torch.where(..., 0, o)",
        "o = torch.where(..., o, 0)",
        "o[...] = 0",
    )
    for found in (found for pattern in cleared for found in forward.find(pattern)):
        if called is not None and forward.in_one_block(called, found):
            return forward.at(found)
    return None


def _is_launched_as_known(reduce: Function, launch: Function | None) -> bool:
    """Whether a program of the second stage is for one row and head, told apart as the kernel of this fix does it."""
    return (
        reduce.takes == _REDUCE_PARAMETERS
        and reduce.only("cur_batch = tl.program_id(0)") is not None
        and reduce.only("cur_head = tl.program_id(1)") is not None
        and reduce.only("tl.load(B_Seqlen + cur_batch)") is not None
        and reduce.only("o + cur_batch * stride_obs + cur_head * stride_oh + offs_d") is not None
        and reduce.only("lse + cur_batch * stride_lse_bs + cur_head") is not None
        and len(reduce.find("tl.store(...)")) == 2
        and launch is not None
        and launch.takes == _LAUNCH_PARAMETERS
        and len(launch.find(f"{_REDUCE}[grid](logits, o, lse, b_seq_len, *...)")) == 1
        and launch.mentions(**{_REDUCE: 1})
    )


def _builds_otherwise(source: Source) -> bool:
    """Whether Triton's builder makes its decode metadata itself: lengths may then be others."""
    return any(source.function(_BACKEND, f"{_BUILDER}.{name}") for name in ("build", "_build_decode"))


def _zeros_for_empty_rows(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_decode_softmax_reducev_fwd`, which launches the second stage: rows whose length is below 1 become zeros.

    Stock's own function runs, and finds another kernel under the name that it launches: one that has stock's compiled
    in, and leaves that out where the row has no tokens. So a graph records as many launches as on stock, each replay
    goes by the lengths of its own batch, and rows with tokens keep what stock's kernel leaves, a NaN included.

    Where Triton cannot compile it, stock's kernel runs and zeros are filled in afterwards, which writes all of `o`.
    `o` is (rows, heads, values), `b_seq_len` (rows,) int32, both on the device.
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
        if kernels is not None:
            try:
                # Not by setting the name in vLLM's module: other backends launch the kernel that they find there.
                names = {**stock.__globals__, _REDUCE: kernels.reduce_kernel}
                launch = FunctionType(stock.__code__, names, argdefs=stock.__defaults__, closure=stock.__closure__)
                return launch(logits, q, o, lse, v_buffer, b_seq_len, *args, **kwargs)
            except Exception as error:
                # Nothing was launched, or nothing can be any more: then stock's own launch says so below.
                kernels = None
                _without_own_kernel(error)
        result = stock(logits, q, o, lse, v_buffer, b_seq_len, *args, **kwargs)
        try:
            # By the number of rows, so that other than one length a row is an error here, and nothing is written.
            o.masked_fill_((b_seq_len < 1).view(o.shape[0], 1, 1), 0.0)
        except Exception as error:
            activity.failed(error)
        return result

    return _decode_softmax_reducev_fwd


def _without_own_kernel(error: Exception) -> None:
    logger.warning(
        "graphfix: triton-mla-padding fills padded rows after vLLM's kernel, which takes longer: its own one could not "
        "be used",
        exc_info=error,
    )


def patches(shape: str) -> tuple[Patch, ...]:
    return (
        Patch(_KERNELS_MODULE, _LAUNCH, _zeros_for_empty_rows, observes=False),
        Patch(_COMMON_MODULE, "MLACommonMetadataBuilder.build", _COUNT),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    attention = "latent attention on GPUs before Hopper"
    shared = "such as --quantization fp8 with experts; without, no answer is wrong"
    return (
        Need("Triton MLA", lambda deployment, _: deployment.triton_mla(), attention),
        needs.FULL_GRAPHS,
        unseen("a scale or a routing that a whole batch shares", shared),
    )


FIX = Fix(
    number=10,
    name="triton-mla-padding",
    runner=None,
    reads=(_BACKEND, _KERNELS, _COMMON, _COMMON_BEFORE, _UTILS),
    modules=(_KERNELS_MODULE, _COMMON_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(EMPTY_ROWS_GIVEN,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_BACKEND}::TritonMLAImpl.forward_mqa",
        f"{_BACKEND}::_compute_num_kv_splits",
        *(
            f"{_KERNELS}::{name}"
            for name in ("decode_attention_fwd", "decode_attention_fwd_grouped", "_decode_softmax_reducev_fwd")
        ),
        *(f"{_COMMON}::MLACommonMetadataBuilder.{name}" for name in ("build", "_build_decode")),
        f"{_UTILS}::split_decodes_and_prefills",
    ),
)

ABOUT = About(
    pr=None,
    references=("issue 57017", "PR 57094", "PR 42885"),
    summary="padded rows of Triton MLA are zeros, not NaN",
    releases=f"0.22.0 - {NEWEST}",
    seen="NaN in all answers of a batch, at sizes between two capture sizes",
    first_test="`--enforce-eager`: gone?",
    symptom="Wrong answers, or NaN logits, of every request of a batch whose size lies between two capture sizes "
    "(issue 57017: DeepSeek-V2-Lite with --quantization fp8, from three requests on).",
    cause="Since 0.22.0 Triton MLA decodes in full graphs, whose padded rows have length 0. The kernel divides their "
    "sum over no tokens by 0. Code that quantises activations with one scale for the whole batch, as online fp8 MoE "
    "does, then gets a scale by which other rows are NaN or zeros.",
    remedy="The second stage of the kernel runs inside one that leaves it out in rows of length 0 and writes zeros "
    "there: no launch more than on stock. Rows with tokens get the kernel's output; the log-sum-exp of padded rows is "
    "-inf, as on stock.",
    detect="Wrong output, or NaN log-probabilities, only at batch sizes between two capture sizes; with "
    "--enforce-eager both are right.",
    workaround='--compilation-config \'{"cudagraph_mode": "NONE"}\', or --enforce-eager.',
    removable=f"not yet: no release up to {NEWEST} has a remedy",
    in_caches="NaN in entries of generated tokens of whole batches, if the NaN of a padded row reached real rows "
    "(online fp8 with one scale, mixture of experts); otherwise nothing",
    how_sure="the kernel's NaN was shown; that it spreads was shown for one model",
)
