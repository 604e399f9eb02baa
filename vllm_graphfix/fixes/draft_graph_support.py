"""`draft-graph-support`: model runner V2 captures decodes with drafts only where the backends support it (PR 32936)."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_GRAPHS_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_ATTENTION = "vllm/v1/worker/gpu/attn_utils.py"
_BACKEND = "vllm/v1/attention/backend.py"
_FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
_TRITON_MLA = "vllm/v1/attention/backends/mla/triton_mla.py"
_BY_CLASS = "by-class"
"""The shape of a vLLM that asks the backends, one of which claims more than its builder supports."""
_ADMITS = """
if vllm_config.parallel_config.decode_context_parallel_size > 1:
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
"""
_MANAGERS = {"descriptors": "ModelCudaGraphManager", "sizes": "CudaGraphManager"}
"""The class that captures the model's graphs, by shape: the form in which it lists what to capture."""
_RESOLVED = "cudagraph_mode = self.compilation_config.resolve_cudagraph_mode_and_sizes(*...)"
_MADE = "self.cudagraph_manager = ModelCudaGraphManager(self.vllm_config, self.device, cudagraph_mode, *...)"
_SUPPORT_OF_BUILDER = "cg_support = builder.get_cudagraph_support(...)"
_LEAST = """
if cg_support.value < min_cg_support.value:
    min_cg_support = cg_support
    min_cg_attn_backend = ...
"""
_CAPTURED = "self.cudagraph_manager.capture(...)"
_HANDED_ON = ("prepare_inputs_to_capture(...)", "dict(...)")
"""Calls to which a capture passes the attention groups; one of them."""
_BUILT = "metadata = attn_metadata_builder.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)"
_CHOSEN = {
    "descriptors": ("batch_desc = self.cudagraph_manager.dispatch(num_reqs, num_toks, uniform_tok_count)",),
    "sizes": ("local_cudagraph_mode, local_cudagraph_size = self.cudagraph_manager.get_cudagraph_runtime_mode(*...)",),
}
"""The choice of a step's graph."""
_TAKEN: dict[str, dict[str, tuple[str, ...]]] = {
    "descriptors": {
        "CudaGraphManager.dispatch": ("for desc in self._candidates[num_tokens]: ...",),
        "CudaGraphManager.capture": ("descs = self._capture_descs[mode]",),
        "CudaGraphManager.needs_capture": ("return len(self._capture_descs) > 0",),
    },
    "sizes": {
        "CudaGraphManager.get_cudagraph_runtime_mode": (
            "cudagraph_mode = self.cudagraph_mode.decode_mode()",
            "cudagraph_mode = self.cudagraph_mode.mixed_mode()",
        ),
        "CudaGraphManager.get_cudagraph_size": (
            "return self.uniform_decode_cudagraph_sizes.get(num_tokens)",
            "return self.cudagraph_sizes.get(num_tokens)",
        ),
        "CudaGraphManager.capture": (
            "mixed_mode = self.cudagraph_mode.mixed_mode()",
            "if self.uniform_decode_cudagraph_sizes: ...",
        ),
    },
}
"""Uses of the attributes that the patch sets."""

_CAPTURE_STATE = "_candidates _capture_descs cudagraph_mode cudagraph_sizes uniform_decode_cudagraph_sizes attn_groups"
"""The attributes of a manager with what to capture, and its attention groups."""
_OPEN = (
    "with decode context parallelism FlashInfer on a Blackwell, and FlashMLA, claim graphs of decodes with drafts, "
    "which their builders take for prompts"
)

UNSUPPORTED_GRAPH = Event(
    "unsupported-graph",
    "A full graph was to be captured in an engine with drafts, one of whose attention backends does not support graphs "
    "of decodes of several tokens, or takes them for prompts: on stock it is replayed in each such step.",
)


def diagnose(source: Source) -> Diagnosis:
    shape = "descriptors" if source.contains_word(_GRAPHS, _MANAGERS["descriptors"]) else "sizes"
    capture = source.function(_GRAPHS, f"{_MANAGERS[shape]}.capture")
    run, init = (source.function(_RUNNER, f"GPUModelRunner.{name}") for name in ("capture_model", "__init__"))
    execute = source.function(_RUNNER, "GPUModelRunner.execute_model")
    initialize = source.function(_RUNNER, "GPUModelRunner.initialize_kv_cache")
    build = source.function(_ATTENTION, "build_attn_metadata")
    if shape == "sizes" and not source.contains_word(_GRAPHS, "uniform_decode_query_len"):
        if source.read(_GRAPHS) is None or (source.contains_word(_GRAPHS, "CudaGraphManager") and capture is not None):
            return Diagnosis.absent("model runner V2 makes no graphs for decodes with drafts")
        return Diagnosis.unrecognised("model runner V2 makes graphs in a way", _GRAPHS)
    if initialize is not None and source.contains_word(_RUNNER, "resolve_cudagraph_mode_and_sizes"):
        resolved = _is_resolved(initialize)
        if resolved and _takes_least_support(source) and _refuses_prompts(source):
            reason, open_case, shape = "the attention backends are asked what graphs they support", "", ""
            if not _admits_context_parallelism(source):
                open_case, shape = f"; open: {_OPEN}", _BY_CLASS
            return Diagnosis.fixed(reason + open_case, resolved, shape)
    elif (
        initialize is not None
        and capture is not None
        and run is not None
        and init is not None
        and execute is not None
        and build is not None
        and _captures_as_known(capture, run, initialize)
        and _takes_as_known(source, shape)
        and init.find_unique("self.cudagraph_manager = ...")
        and all(map(execute.find_unique, _CHOSEN[shape]))
        and build.find_unique(_BUILT)
        and not any(source.contains_word(path, "get_cudagraph_support") for path in (_GRAPHS, _RUNNER, _ATTENTION))
        and source.contains_word(_BACKEND, "get_cudagraph_support")
        and source.contains_word(_BACKEND, "reorder_batch_threshold")
    ):
        return Diagnosis.affected(
            "model runner V2 captures full graphs without asking the attention backends what they support",
            capture.where,
            shape,
        )
    return Diagnosis.unrecognised("model runner V2 chooses which graphs to capture in a way", initialize or _RUNNER)


def _refuses_prompts(source: Source) -> bool:
    """Tell if Triton MLA, whose builder takes decodes with drafts for prompts, is never captured with them.

    From 0.22.0 to 0.25.1 it claims such graphs, but its builder raises in the capture.
    """
    return (
        not source.contains_word(_TRITON_MLA, "UNIFORM_BATCH")
        or source.contains_word(_TRITON_MLA, "query_len_support")
        or source.contains_word(_ATTENTION, "build_for_cudagraph_capture")
    )


def _is_resolved(initialize: Function) -> str | None:
    """Return the place where the mode follows the support of the backends, if the manager is made with that mode."""
    parts = initialize.find_sequence(_RESOLVED, _MADE)
    known = initialize.find_unique("attn_cg_support.min_cg_support")
    if parts and known and initialize.assigned("cudagraph_mode") == 1:
        return initialize.at(parts[0])
    return None


def _takes_least_support(source: Source) -> bool:
    """Tell if the backends' common support is the least that one of them claims."""
    for name in ("get_attn_cg_support", "init_attn_backend"):
        function = source.function(_ATTENTION, name)
        builds = function is not None and function.find_sequence(_SUPPORT_OF_BUILDER, _LEAST)
        if function and builds and function.assigned("cg_support") == 1:
            return True
    return False


def _admits_context_parallelism(source: Source) -> bool:
    """Tell if FlashInfer, whose threshold is then 1, claims no such graphs under decode context parallelism."""
    support = source.function(_FLASHINFER, "FlashInferMetadataBuilder.get_cudagraph_support")
    return support is not None and support.always(_ADMITS)


def _captures_as_known(capture: Function, run: Function, initialize: Function) -> bool:
    """Tell if graphs are captured with the model runner's attention groups, which have no other use there."""
    return (
        "self.attn_groups" in run.arguments(_CAPTURED)
        and any("attn_groups" in capture.arguments(call) for call in _HANDED_ON)
        and capture.mentions(attn_groups=1)
        and run.find_unique("self.attn_groups") is not None
        and run.used_only_in("cudagraph_manager", _CAPTURED, "self.cudagraph_manager.needs_capture()")
        and not any(map(initialize.contains_name, ("cudagraph_manager", "cudagraph_mode")))
    )


def _takes_as_known(source: Source, shape: str) -> bool:
    methods = {name: source.function(_GRAPHS, name) for name in _TAKEN[shape]}
    return all(method and all(map(method.find, _TAKEN[shape][name])) for name, method in methods.items())


def _without_unsupported_graphs(stock: StockFunction, activity: Activity, *, shape: str) -> StockFunction:
    """Wrap the manager's `capture`, which captures all graphs of the model: drop unsupported full graphs before.

    Piecewise graphs stay, since they contain no attention. A drafter's own graphs, for one token per request, belong to
    another manager.
    """
    unsupported, corrects = activity.counter(UNSUPPORTED_GRAPH), activity.corrects

    @functools.wraps(stock)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            full = _full_graphs(self, shape)
            # Releases differ in the order of parameters, not in their names.
            groups = inspect.signature(stock).bind(self, *args, **kwargs).arguments["attn_groups"]
            if full and not _all_support_drafts(self, groups, _tokens_of_a_decode(self)):
                if corrects:
                    _leave_out_full_graphs(self, shape)
                unsupported.count += full
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return capture


def _tokens_of_a_decode(manager: Any) -> int:
    tokens = getattr(manager, "decode_query_len", None)
    return int(manager.uniform_decode_query_len if tokens is None else tokens)


def _all_support_drafts(manager: Any, groups: Any, tokens: int) -> bool:
    """Tell if each attention backend can be captured with decodes of *tokens* tokens.

    A builder that takes them for prompts cannot, whatever its class claims: under decode context parallelism most do.
    With `cudagraph_mode` FULL, decodes share their graphs with prompts, which fewer backends support.
    """
    if tokens <= 1:
        return True
    from vllm.config import set_current_vllm_config

    wanted = "ALWAYS" if manager.cudagraph_mode.mixed_mode().name == "FULL" else "UNIFORM_BATCH"
    with set_current_vllm_config(manager.vllm_config):  # FlashInfer reads there if it may use TRT-LLM's
        return all(_supports(manager, group, tokens, wanted) for of_a_cache in groups for group in of_a_cache)


def _supports(manager: Any, group: Any, tokens: int, wanted: str) -> bool:
    builder = group.get_metadata_builder(0)
    threshold = builder.reorder_batch_threshold
    if threshold is not None and threshold < tokens:
        return False
    support = builder.get_cudagraph_support(manager.vllm_config, group.kv_cache_spec)
    return bool(support.value >= type(support)[wanted].value)


def _full_graphs(manager: Any, shape: str) -> int:
    """Count the full graphs to be captured."""
    if shape == "descriptors":
        return sum(len(descs) for mode, descs in manager._capture_descs.items() if mode.name == "FULL")
    mixed = manager.cudagraph_sizes if manager.cudagraph_mode.mixed_mode().name == "FULL" else {}
    return len(set(manager.uniform_decode_cudagraph_sizes.values())) + len(set(mixed.values()))


def _leave_out_full_graphs(manager: Any, shape: str) -> None:
    """Drop all full graphs, and keep piecewise ones if the mode has them. All values are made before one is set."""
    mode = manager.cudagraph_mode
    piecewise = mode.mixed_mode().name == "PIECEWISE"
    values: dict[str, Any] = {"cudagraph_mode": mode.mixed_mode() if piecewise else type(mode).NONE}
    if shape == "descriptors":
        values["_candidates"] = [
            [desc for desc in descs if desc.cg_mode.name != "FULL"] for descs in manager._candidates
        ]
        values["_capture_descs"] = {
            mode: descs for mode, descs in manager._capture_descs.items() if mode.name != "FULL"
        }
    else:
        values |= {"uniform_decode_cudagraph_sizes": {}} | ({} if piecewise else {"cudagraph_sizes": {}})
    vars(manager).update(values)


def patches(shape: str) -> tuple[Patch, ...]:
    wrap = functools.partial(_without_unsupported_graphs, shape=shape)
    return (Patch(_GRAPHS_MODULE, f"{_MANAGERS[shape]}.capture", wrap),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need(
            "eagle, eagle3 or mtp",
            lambda deployment, _: deployment.speculator("eagle", "eagle3", "mtp"),
            clause="drafts come from eagle, eagle3 or mtp",
        ),
        needs.FULL_GRAPHS,
        Need(
            "a backend that takes drafts for prompts",
            _unsupported,
            "Triton MLA, Cutlass MLA, FlashInfer without TRT-LLM's kernels; with decode context parallelism FlashMLA, "
            "too; or chunked local attention; with cudagraph_mode FULL all but FlashAttention 3 and Triton attention",
            clause="the drafts' backend takes them for prompts",
        ),
    )


def _claims_too_much(deployment: Deployment) -> Fact:
    """Tell if an attention backend claims graphs of decodes with drafts but takes them for prompts."""
    from vllm_graphfix.deployment import Fact

    shared = deployment.shares_the_context()
    backend, missing = deployment.value("--attention-backend")
    name = (backend or "auto").upper()
    # Which releases is in docs/claims.md; Triton MLA's claim is false on one rank, too, and each ends the engine.
    if name == "TRITON_MLA" or (name == "FLASHINFER_MLA" and shared.holds is not False):
        return Fact(None, f"the row of {name} and this release in docs/claims.md")
    if shared.holds is False or missing is not None or name == "AUTO":
        return shared if shared.holds is False else Fact(None, missing or "the attention backend")
    _, major = deployment.gpu
    before_blackwell = major is not None and major < 10
    if name not in ("FLASHINFER", "FLASHMLA") or (name == "FLASHINFER" and before_blackwell):
        return Fact(False, f"--attention-backend {name[:40]!r} is asked, and does not claim more than it does")
    return shared


def _unsupported(deployment: Deployment, shape: str) -> Fact:
    """Tell if an attention backend supports no graphs of decodes with drafts."""
    from vllm_graphfix.deployment import Fact

    if shape == _BY_CLASS:
        return _claims_too_much(deployment)
    as_prompts, together = deployment.drafts_as_prompts(), deployment.prompts_in_full_graphs()
    if as_prompts.holds is False and together.holds is not False:
        reason = "whether the attention backend supports graphs of prompts (cudagraph_mode FULL)"
        return Fact(None, reason if together.holds else together.source)
    return as_prompts


FIX = fix(
    "draft-graph-support",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # The mode of the graphs, and the question to the backends
        Slice(
            _RUNNER,
            "GPUModelRunner.initialize_kv_cache",
            "ModelCudaGraphManager cudagraph_mode attn_cg_support min_cg_support",
        ),
        *(
            Slice(_ATTENTION, function, "cg_support min_cg_support", Verdict.FIXED)
            for function in ("get_attn_cg_support", "init_attn_backend")
        ),
        # The graphs that the backends claim
        Slice(_TRITON_MLA, "TritonMLABackend.get_builder_cls", only_for=Verdict.FIXED),
        *(
            Slice(
                f"vllm/v1/attention/backends/mla/{name}.py",
                "",
                "_cudagraph_support get_cudagraph_support query_len_support get_builder_cls",
                Verdict.FIXED,
            )
            for name in ("cutlass_mla", "flashmla")
        ),
        # The choice of captures and replays, and the groups
        *(
            Slice(_RUNNER, f"GPUModelRunner.{name}", names, Verdict.AFFECTED)
            for name, names in (
                ("__init__", "cudagraph_manager"),
                ("capture_model", "cudagraph_manager attn_groups"),
                ("execute_model", "cudagraph_manager"),
            )
        ),
        *(
            Slice(_GRAPHS, name, _CAPTURE_STATE, Verdict.AFFECTED)
            for name in (
                "CudaGraphManager.capture",
                "CudaGraphManager.dispatch",
                "CudaGraphManager.needs_capture",
                "CudaGraphManager.get_cudagraph_runtime_mode",
                "CudaGraphManager.get_cudagraph_size",
                "ModelCudaGraphManager.capture",
                "prepare_inputs_to_capture",
            )
        ),
        Slice(_ATTENTION, "build_attn_metadata", "attn_metadata_builder", Verdict.AFFECTED),
        # It decides on the open case of `fixed`, not on the verdict
        Slice(
            _FLASHINFER,
            "FlashInferMetadataBuilder.get_cudagraph_support",
            "decode_context_parallel_size",
            Verdict.AFFECTED,
        ),
        Slice(_BACKEND, "AttentionMetadataBuilder._init_reorder_batch_threshold", only_for=Verdict.AFFECTED),
    ),
    recognised=(_SUPPORT_OF_BUILDER, _LEAST, _RESOLVED, _MADE),
    corrections=patches,
    modules=(_GRAPHS_MODULE,),
    events=(UNSUPPORTED_GRAPH,),
    needs=needs,
    default_rationale="answers",
)
