"""`encoder-padding`: graphs of encoders keep zeros in the padded rows of their attention (PR 56922, issue 57136)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import correct_result, fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_OPERATOR = "vllm/v1/attention/ops/vit_attn_wrappers.py"
_MANAGER = "vllm/v1/worker/encoder_cudagraph.py"
_LAYER = "vllm/model_executor/layers/attention/mm_encoder_attention.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_MODULE = "vllm.v1.worker.encoder_cudagraph"
_HAS_FLASH_ATTENTION = "graphfix_flash_attention"
"""The attribute of a manager whose graphs contain FlashAttention."""
_CLASS = "EncoderCudaGraphManager"
_CAPTURE = f"{_CLASS}._capture_budget_graph"
_FIT = f"{_CLASS}._find_smallest_fitting_budget_given_tokens"
_ATTEND = "flash_attn_maxseqlen_wrapper"

_LAUNCHED = "output = flash_attn_varlen_func(q, k, v, *..., cu_seqlens_q=cu_seqlens, causal=False, **kwargs)"
_IN_ANY_CASE = ('kwargs["out"] = torch.zeros(...)', 'kwargs["out"] = torch.zeros_like(...)')
_WHILE_CAPTURING = tuple(
    f"if {test}:\n    {zeros}{otherwise}"
    for zeros in _IN_ANY_CASE
    for test in (
        "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()",
        "torch.cuda.is_current_stream_capturing()",
        "current_platform.is_cuda()",
    )
    for otherwise in ("", '\nelse:\n    kwargs["out"] = torch.empty_like(...)')
)
_ZEROED = (*_IN_ANY_CASE, *_WHILE_CAPTURING)
_WHERE_SUPPORTED = tuple("if supports_out:\n    " + zeroed.replace("\n", "\n    ") for zeroed in _ZEROED)
_ARGUMENTS = ("kwargs = {}", "kwargs: ... = {}", 'kwargs["window_size"] = (-1, -1)')
"""Other arguments of the kernel, which are not its output."""
_SUPPORTED = "supports_out = not current_platform.is_rocm()"
_FITTED = tuple(
    f"for budget in {budgets}:\n    if budget >= total_tokens:\n        return budget"
    for budgets in ("self.token_budgets", "budgets")
)
"""The choice of the smallest graph that fits a batch, among all or those of its kind."""

PADDED_ENCODER_GRAPH = Event(
    "padded-encoder-graph",
    "Images were encoded in a larger graph, with FlashAttention: on stock the padded rows of its output are memory as "
    "it was.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the memory that FlashAttention writes to in the capture of an encoder."""
    if not source.contains_word(_RUNNER, f"from {_MODULE} import"):  # 0.19 names a module that its wheel does not have
        return Diagnosis.absent("no CUDA graphs of encoders")
    attend = source.function(_OPERATOR, _ATTEND)
    launched = attend and attend.find_unique(_LAUNCHED)
    if attend is not None and launched is not None:
        is_supported = attend.always(_SUPPORTED) and attend.assigned("supports_out") == 1
        remedies = (*_ZEROED, *_WHERE_SUPPORTED) if is_supported else _ZEROED
        # On every path: in the function's own block, before the launch.
        zeroed = [part for part in attend.find(*remedies) if attend.in_one_block(part, launched)]
        outputs = attend.find('kwargs["out"]')
        if len(zeroed) == 1 and attend.assigned("kwargs") == 1 and all(part in ast.walk(zeroed[0]) for part in outputs):
            zeros = attend.find(*_IN_ANY_CASE)
            return Diagnosis.fixed("what a graph records writes to zeros", attend.at(zeros[0]))
        if not outputs:
            return Diagnosis.affected(
                "FlashAttention's output is memory as it was, and the rows that pad a graph stay so",
                attend.at(launched),
                "as-it-was",
            )
    return Diagnosis.unrecognised("encoders are captured in a way", attend or _MANAGER)


def _capture_on_zeros(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `EncoderCudaGraphManager._capture_budget_graph`: FlashAttention gets zeros as output.

    The operator looks up its kernel in `fa_utils` at each call, so it can be replaced there during the capture; other
    users have imported it by name. The graph clears that memory in each replay. To count alone, the manager is marked
    as one whose graphs contain FlashAttention.
    """
    corrects = activity.corrects

    @functools.wraps(stock)
    def _capture_budget_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels = kernel = None
        try:
            kernels = _module_of_kernels()
            if kernels is not None:
                kernel = kernels.flash_attn_varlen_func
                kernels.flash_attn_varlen_func = _kernel_on_zeros(kernel, self, activity, corrects=corrects)
        except Exception as error:
            activity.failed(error)
        try:
            return stock(self, *args, **kwargs)
        finally:
            if kernels is not None and kernel is not None:
                kernels.flash_attn_varlen_func = kernel

    return _capture_budget_graph


def _module_of_kernels() -> Any | None:
    """Return the module in which the operator looks up FlashAttention; None on platforms other than CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends import fa_utils

    return fa_utils


def _kernel_on_zeros(kernel: StockFunction, manager: Any, activity: Activity, *, corrects: bool) -> StockFunction:
    """Wrap the *kernel*: without an output it gets zeros. `q`, `k` and `v` are (tokens, heads, size)."""

    @functools.wraps(kernel)
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if "out" not in kwargs:
                setattr(manager, _HAS_FLASH_ATTENTION, True)
                if corrects:
                    kwargs["out"] = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        except Exception as error:
            activity.failed(error)
        return kernel(q, k, v, *args, **kwargs)

    return flash_attn_varlen_func


@correct_result(_MODULE, _FIT, PADDED_ENCODER_GRAPH)
def count_padded_batches(
    budget: int | None, self: Any, total_tokens: int, *args: Any, **kwargs: Any
) -> Callable[[], None] | None:
    """Count each replay of a graph with FlashAttention that the batch does not fill; nothing remains to correct."""
    if budget is None or budget <= total_tokens or not getattr(self, _HAS_FLASH_ATTENTION, False):
        return None
    return _correct_nothing


def _correct_nothing() -> None:
    """Do nothing: the graph was captured on zeros."""


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need, unseen

    return (
        Need(
            "cudagraph_mm_encoder",
            lambda deployment, _: deployment.encoder_graphs(),
            "in --compilation-config",
            usual=False,
            clause="cudagraph_mm_encoder is on",
        ),
        Need(
            "FlashAttention in the encoder",
            _attends_by_flash_attention,
            "reported of versions 3 and 4",
            ("--mm-encoder-attn-backend=",),
            clause="the encoder runs on FlashAttention",
        ),
        unseen("images or videos", "of fewer tokens than the graph that takes them"),
    )


def _attends_by_flash_attention(deployment: Deployment, _: str) -> Fact | None:
    """Tell if the encoder's attention is FlashAttention; None where vLLM chooses, on most GPUs FlashAttention."""
    from vllm_graphfix.deployment import Fact

    backend, missing = deployment.value("--mm-encoder-attn-backend")
    if missing is not None:
        return Fact(None, missing)
    if backend is None:
        return None
    return Fact(backend.upper() == "FLASH_ATTN", f"--mm-encoder-attn-backend {backend[:40]}")


FIX = fix(
    "encoder-padding",
    diagnose=diagnose,
    surroundings=(
        # The output of the kernel, and every other use of it
        Slice(_OPERATOR, _ATTEND, "kwargs output flash_attn_varlen_func context_layer"),
        Slice(_OPERATOR, "vit_flash_attn_wrapper", _ATTEND),
        Slice(_LAYER, "MMEncoderAttention._forward_fa", "vit_flash_attn_wrapper flash_attn_varlen_func output"),
        Slice(_MANAGER, _CAPTURE, "fa_utils flash_attn_varlen_func zeros", Verdict.AFFECTED),
        # Replays for fewer tokens than the graph has, and the rows that are taken
        Slice(_RUNNER, "GPUModelRunner._execute_mm_encoder", "encoder_cudagraph_manager", Verdict.AFFECTED),
        Slice(_MANAGER, _FIT, "budget total_tokens", Verdict.AFFECTED),
        Slice(_MANAGER, f"{_CLASS}._run_budget_graph", "output_buffer", Verdict.AFFECTED),
    ),
    recognised=(*_ARGUMENTS, *_ZEROED, *_WHERE_SUPPORTED, *_FITTED),
    # A model may call the kernel directly, past the wrappers that clear its output.
    distant_code="flash_attn_varlen_func",
    corrections=(Patch(_MODULE, _CAPTURE, _capture_on_zeros, leading=1), count_padded_batches),
    events=(PADDED_ENCODER_GRAPH,),
    needs=needs,
    default_rationale="upstream",
)
