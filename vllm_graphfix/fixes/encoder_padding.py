"""`encoder-padding`: graphs of encoders keep zeros in the padded rows of their attention (PR 56922, issue 57136)."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_OPERATOR = "vllm/v1/attention/ops/vit_attn_wrappers.py"
_MANAGER = "vllm/v1/worker/encoder_cudagraph.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_MODULE = "vllm.v1.worker.encoder_cudagraph"
_KERNELS = "vllm.v1.attention.backends.fa_utils"
_CLASS = "EncoderCudaGraphManager"
_CAPTURE = f"{_CLASS}._capture_budget_graph"
_FIT = f"{_CLASS}._find_smallest_fitting_budget_given_tokens"

_IMPORTED = f"from {_KERNELS} import flash_attn_varlen_func"
_LAUNCHED = "output = flash_attn_varlen_func(q, k, v, *..., cu_seqlens_q=cu_seqlens, causal=False, **kwargs)"
_ZEROS = ('kwargs["out"] = torch.zeros(...)', 'kwargs["out"] = torch.zeros_like(...)')
_WHILE_CAPTURING = (
    "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()",
    "torch.cuda.is_current_stream_capturing()",
    "current_platform.is_cuda()",
)
_ELSEWHERE = "supports_out = not current_platform.is_rocm()"
_NEW = 'kwargs["out"] = torch.empty_like(...)'
_ARGUMENTS = (
    "kwargs = {}",
    "kwargs: ... = {}",
    'kwargs["fa_version"] = fa_version',
    'kwargs["window_size"] = (-1, -1)',
    _LAUNCHED,
)

PADDED_ENCODER_GRAPH = Event(
    "padded-encoder-graph",
    "Images were encoded in a larger graph, with FlashAttention: on stock the padded rows of its output are memory as "
    "it was.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.says(_RUNNER, f"from {_MODULE} import"):  # 0.19 names a module that its wheel does not have
        return Diagnosis(Verdict.ABSENT, "no CUDA graphs of encoders")
    attend = source.function(_OPERATOR, "flash_attn_maxseqlen_wrapper")
    capture, fit = source.function(_MANAGER, _CAPTURE), source.function(_MANAGER, _FIT)
    if attend is not None and capture is not None and fit is not None:
        launched = attend.only(_LAUNCHED)
        zeroed = [part for pattern in _ZEROS for part in attend.find(pattern)]
        if launched and len(zeroed) == 1 and _is_given(attend, zeroed[0], launched):
            return Diagnosis(Verdict.FIXED, "what a graph records writes to zeros", attend.at(zeroed[0]))
        if launched and not zeroed and _leaves_rows_out(attend) and _is_captured(capture) and _fits(fit):
            return Diagnosis(
                Verdict.AFFECTED,
                "FlashAttention's output is memory as it was, and the rows that pad a graph stay so",
                attend.at(launched),
                "as-it-was",
            )
    return Diagnosis.unrecognised("encoders are captured in a way", attend or capture or _MANAGER)


def _is_given(attend: Function, zeroed: ast.stmt | ast.expr, launched: ast.stmt | ast.expr) -> bool:
    """Whether the kernel writes to what was *zeroed* just for it, at least while a graph is captured."""
    places = [zeroed, *_conditions(attend, zeroed, *_WHILE_CAPTURING)]
    if attend.only(_ELSEWHERE) and attend.assigned("supports_out") == 1:
        places += [outer for inner in places for outer in _conditions(attend, inner, "supports_out")]
    return any(attend.in_one_block(place, launched) for place in places) and attend.confines(
        "kwargs", *_ARGUMENTS, *_ZEROS, _NEW
    )


def _conditions(attend: Function, part: ast.stmt | ast.expr, *tests: str) -> list[ast.stmt | ast.expr]:
    """The `if` statements with one of these *tests* under which *part* is carried out, and nothing else."""
    found = (node for node in ast.walk(attend.node) if isinstance(node, ast.If) and node.body == [part])
    return [node for node in found if ast.unparse(node.test) in tests]


def _leaves_rows_out(attend: Function) -> bool:
    """Whether the kernel that is found in its module at each call makes its output itself, and nothing clears it."""
    return (
        attend.takes.startswith("q, k, v, batch_size, is_rocm_aiter, fa_version")
        and attend.only(_IMPORTED) is not None
        and attend.confines("kwargs", *_ARGUMENTS)
        and attend.confines("output", _LAUNCHED, "context_layer = einops.rearrange(output, *...)")
        and attend.confines("context_layer", "context_layer = einops.rearrange(...)", "return context_layer")
    )


def _is_captured(capture: Function) -> bool:
    """Whether the encoder runs twice, and the second time in a graph."""
    graphs = capture.entering("torch.cuda.graph(...)")
    calls = capture.find("self.model.encoder_cudagraph_forward(...)")
    return len(calls) == 2 and any(calls[1] in ast.walk(graph) for graph in graphs)


def _fits(fit: Function) -> bool:
    """Whether a batch's tokens are given, and the size of its graph, or None, is returned."""
    return fit.takes in ("self, total_tokens", "self, total_tokens, budgets") and len(fit.find("return budget")) == 1


def _capture_on_zeros(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `EncoderCudaGraphManager._capture_budget_graph`: FlashAttention is given zeros to write to.

    The operator looks its kernel up in `fa_utils` at each call, so that another one can stand there for as long as the
    capture takes. All others have looked it up when they were imported. The graph clears that memory in each replay.
    To count alone, the manager is marked as one whose graphs have FlashAttention.
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
    """The module in which the operator looks FlashAttention up; None on platforms other than CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends import fa_utils

    return fa_utils


def _kernel_on_zeros(kernel: StockFunction, manager: Any, activity: Activity, *, corrects: bool) -> StockFunction:
    """The kernel, called with memory of zeros where it is given none. It takes q, k and v of (tokens, heads, size)."""

    @functools.wraps(kernel)
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if "out" not in kwargs:
                manager.graphfix_flash_attention = True
                if corrects:
                    kwargs["out"] = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        except Exception as error:
            activity.failed(error)
        return kernel(q, k, v, *args, **kwargs)

    return flash_attn_varlen_func


def _count_padded_batches(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `EncoderCudaGraphManager._find_smallest_fitting_budget_given_tokens`, called once for each replay."""
    padded = activity.counter(PADDED_ENCODER_GRAPH)

    @functools.wraps(stock)
    def _find_smallest_fitting_budget_given_tokens(self: Any, total_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        budget = stock(self, total_tokens, *args, **kwargs)
        try:
            if budget is not None and budget > total_tokens and getattr(self, "graphfix_flash_attention", False):
                padded.count += 1
        except Exception as error:
            activity.failed(error)
        return budget

    return _find_smallest_fitting_budget_given_tokens


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULE, _CAPTURE, _capture_on_zeros), Patch(_MODULE, _FIT, _count_padded_batches))


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need, unseen

    return (
        Need(
            "cudagraph_mm_encoder",
            lambda deployment, _: deployment.encoder_graphs(),
            "in --compilation-config",
            usual=False,
        ),
        Need(
            "FlashAttention in the encoder",
            _attends_by_flash_attention,
            "reported of versions 3 and 4",
            ("--mm-encoder-attn-backend=",),
        ),
        unseen("images or videos", "of fewer tokens than the graph that takes them"),
    )


def _attends_by_flash_attention(deployment: Deployment, _: str) -> Fact | None:
    """The encoder's attention is FlashAttention; None where vLLM chooses, which it is on most GPUs."""
    from vllm_graphfix.deployment import Fact

    backend, missing = deployment.value("--mm-encoder-attn-backend")
    if missing is not None:
        return Fact(None, missing)
    if backend is None:
        return None
    return Fact(backend.upper() == "FLASH_ATTN", f"--mm-encoder-attn-backend {backend[:40]}")


FIX = Fix(
    number=23,
    name="encoder-padding",
    runner=None,
    reads=(_OPERATOR, _MANAGER, _RUNNER),
    modules=(_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDED_ENCODER_GRAPH,),
    needs=needs,
    ground="upstream",
    evidence=(
        f"{_OPERATOR}::vit_flash_attn_wrapper",
        f"{_MANAGER}::{_CLASS}._run_budget_graph",
        f"{_MANAGER}::{_CLASS}._execute_local",
    ),
)

ABOUT = About(
    pr=56922,
    references=("issue 57136",),
    summary="graphs of encoders keep zeros in the padded rows of their attention",
    releases="0.20.0 - 0.30.0",
    absent="0.14.1 - 0.19.1",
    seen="nonsense about some images, by their size",
    first_test="`cudagraph_mm_encoder` off: gone?",
    symptom="With cudagraph_mm_encoder, embeddings of images are NaN, and answers about them nonsense, where their "
    "tokens do not fill the graph that takes them. Other sizes are right.",
    cause="A graph of an encoder is replayed for as many tokens as it has, or fewer. FlashAttention writes the rows of "
    "images, and its output is memory as the graph's pool has it: the rows that pad the graph keep what was there, NaN "
    "among it. In the next layer they are values, and versions 3 and 4, as reported, let NaN of rows behind the last "
    "image into its own.",
    remedy="While an encoder is captured, FlashAttention is given memory of zeros to write to, which the graph clears "
    "in each replay. Without a capture everything is as before.",
    detect="Embeddings of an image are NaN, and not with cudagraph_mm_encoder off. The counter of `observe` counts "
    "batches that do not fill their graph; which of them are wrong depends on what memory holds.",
    workaround="Leave cudagraph_mm_encoder off; or --mm-encoder-attn-backend FLASHINFER.",
    removable="with vLLM 0.31.0",
    in_caches="entries of images, and of all that comes after them in a prompt: computed from wrong embeddings",
    how_sure="follows from the code; NaN embeddings were reported",
)
