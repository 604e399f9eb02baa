"""`draft-non-causal`: DFlash's drafts run without a full graph where FlashInfer plans each step anew (PR 48167)."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_FOLDER = "vllm/v1/worker/gpu/spec_decode"
_PACKAGE, _BASE = f"{_FOLDER}/__init__.py", f"{_FOLDER}/speculator.py"
_SPECULATOR, _GRAPHS = (f"{_FOLDER}/dflash/{name}.py" for name in ("speculator", "cudagraph"))
_GRAPHS_MODULE = "vllm.v1.worker.gpu.spec_decode.dflash.cudagraph"
_MANAGERS = "vllm/v1/worker/gpu/cudagraph_utils.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
_FLASHINFER_MODULE, _BUILDER = "vllm.v1.attention.backends.flashinfer", "FlashInferMetadataBuilder"
_OWN_MODE = """
if {}:
    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
else:
    cudagraph_mode = CUDAGraphMode.NONE
"""
_WANTED = "cudagraph_mode.decode_mode() == CUDAGraphMode.FULL"
_AS_WANTED = _OWN_MODE.format(_WANTED)
_AS_SUPPORTED = (
    f"wants_full = {_WANTED}",
    "supports_full = self.attn_cg_support.min_cg_support.value >= AttentionCGSupport.UNIFORM_BATCH.value",
    _OWN_MODE.format("wants_full and supports_full"),
)
_MADE = "self.query_cudagraph_manager = DFlashCudaGraphManager(self.vllm_config, self.device, cudagraph_mode, *...)"
_MADE_CAUSAL = "DFlashCudaGraphManager(*..., causal=self.dflash_causal)"
_SUPPORT_OF_DRAFT = """
self.attn_groups, self.attn_cg_support, _ = init_attn_backend(kv_cache_config, self.attn_vllm_config, *...)
"""
_NON_CAUSAL = "replace(self.vllm_config.attention_config, use_non_causal=self.requires_non_causal)"
_CLAIM = "AttentionCGSupport.UNIFORM_BATCH"
_CAUSAL_CLAIMS = (
    "has_trtllm_support and not vllm_config.attention_config.use_non_causal",
    "has_trtllm_support and (is_sm12x or not vllm_config.attention_config.use_non_causal)",
    "has_uniform_batch_support and (not use_non_causal or is_xqa_arch)",
    "kv_specs and not vllm_config.attention_config.use_non_causal",
)
"""Conditions of a claim of graphs for several tokens, each without attention that the builder gives to prefills."""
_AS_PREFILLS = (
    "num_decodes = 0",
    "num_prefills = num_reqs",
    "num_decode_tokens = 0",
    "num_prefill_tokens = num_actual_tokens",
)
_PLANS = """
self._noncausal_prefill_wrapper = BatchPrefillWithPagedKVCacheWrapper(
    self._get_workspace_buffer(), get_kv_cache_layout(), backend="auto"
)
"""
"""Without `use_cuda_graph`, so that each `plan` copies to new memory of the device."""
_TAKEN = {
    "CudaGraphManager.dispatch": "for desc in self._candidates[key]: ...",
    "CudaGraphManager.capture": "descs = self._capture_descs[mode]",
}
"""Uses of the attributes that the patch sets."""

GRAPH_OF_A_PLAN = Event(
    "graph-of-a-plan",
    "A full graph of drafts was to be captured with FlashInfer's prefill for attention that is not causal: on stock "
    "each replay attends by the plan of the capture.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the mode of DFlash's graphs, and the graphs that FlashInfer claims for attention that is not causal."""
    if source.read(_GRAPHS) is None and not source.contains_word(_PACKAGE, "DFlashSpeculator"):
        return Diagnosis.absent("model runner V2 has no DFlash")
    choose = source.function(_SPECULATOR, "DFlashSpeculator.init_cudagraph_manager")
    support = source.function(_FLASHINFER, f"{_BUILDER}.get_cudagraph_support")
    if choose is not None and support is not None:
        chosen = choose.find_sequence(_AS_WANTED, _MADE)
        supported = choose.find_sequence(*_AS_SUPPORTED, _MADE)
        if supported and _looks_up_support(source) and _claims_only_causal(support):
            return Diagnosis.fixed("the draft's attention is asked what graphs it supports", choose.at(supported[1]))
        asks_its_attention = any(
            source.contains_word(path, word)
            for path in (_SPECULATOR, _GRAPHS, _BASE)
            for word in ("attn_cg_support", "get_cudagraph_support")
        )
        if (
            chosen
            and not asks_its_attention
            and _claims_any(support)
            and _plans(source)
            and _captures_as_known(source, choose)
        ):
            return Diagnosis.affected(
                "DFlash captures full graphs without asking its attention, and FlashInfer plans such steps on the host",
                choose.at(chosen[0]),
                "unasked",
            )
    return Diagnosis.unrecognised("DFlash chooses which graphs to capture in a way", choose or _SPECULATOR)


def _looks_up_support(source: Source) -> bool:
    """Tell if the draft's attention is asked for graphs with its own kind of attention."""
    attention = source.function(_BASE, "DraftModelSpeculator.set_attn")
    config = source.function(_SPECULATOR, "DFlashSpeculator.attn_vllm_config")
    return bool(attention and config and attention.always(_SUPPORT_OF_DRAFT) and config.find_unique(_NON_CAUSAL))


def _claims_only_causal(support: Function) -> bool:
    claims = support.find(_CLAIM)
    return bool(claims) and len(claims) == len(support.find(*_CAUSAL_CLAIMS))


def _claims_any(support: Function) -> bool:
    return support.find_unique(_CLAIM) is not None and not support.contains_name("use_non_causal")


def _plans(source: Source) -> bool:
    """Tell if FlashInfer takes attention that is not causal for prefills, and plans them in new memory."""
    build = source.function(_FLASHINFER, f"{_BUILDER}.build")
    wrapper = source.function(_FLASHINFER, f"{_BUILDER}._get_prefill_wrapper")
    return bool(build and wrapper and build.find_sequence(*_AS_PREFILLS, at_once=True) and wrapper.find_unique(_PLANS))


def _captures_as_known(source: Source, choose: Function) -> bool:
    made = source.function(_GRAPHS, "DFlashCudaGraphManager.__init__")
    capture = source.function(_GRAPHS, "DFlashCudaGraphManager.capture")
    run = source.function(_SPECULATOR, "DFlashSpeculator.capture")
    uses = [(source.function(_MANAGERS, name), use) for name, use in _TAKEN.items()]
    return bool(
        choose.find_unique(_MADE_CAUSAL)
        and made
        and made.always("self.causal = causal")
        and capture
        and "attn_groups" in capture.parameters
        and run
        and "self.attn_groups" in run.arguments("self.query_cudagraph_manager.capture(...)")
        and all(method and method.find_unique(use) for method, use in uses)
    )


def _without_graphs_of_plans(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `capture` of DFlash's manager, whose graphs are full ones: drop them if they were to replay a plan."""
    planned, corrects = activity.counter(GRAPH_OF_A_PLAN), activity.corrects

    @functools.wraps(stock)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            full = sum(map(len, self._capture_descs.values()))
            groups = inspect.signature(stock).bind(self, *args, **kwargs).arguments["attn_groups"]
            if full and not self.causal and any(map(_is_flashinfers, itertools.chain(*groups))):
                if corrects:
                    mode = type(self.cudagraph_mode).NONE
                    vars(self).update(cudagraph_mode=mode, _candidates={}, _capture_descs={})
                planned.count += full
        except Exception as error:
            activity.failed(error)
        return stock(self, *args, **kwargs)

    return capture


def _is_flashinfers(group: Any) -> bool:
    """Tell if the metadata of an attention group are built by FlashInfer's builder, or a subclass."""
    classes = type(group.get_metadata_builder(0)).__mro__
    return any((each.__module__, each.__qualname__) == (_FLASHINFER_MODULE, _BUILDER) for each in classes)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need(
            "dflash or dspark",
            lambda deployment, _: deployment.speculator("dflash", "dspark"),
            clause="drafts come from dflash or dspark",
        ),
        needs.FULL_GRAPHS,
        Need(
            "drafts on FlashInfer",
            _drafts_on_flashinfer,
            "with TRT-LLM's kernels, as by default on a B200",
            clause="drafts run on FlashInfer",
        ),
    )


def _drafts_on_flashinfer(deployment: Deployment, _: str) -> Fact:
    """Tell if the draft's attention is FlashInfer's, on a GPU on which that claims graphs of several tokens."""
    from vllm_graphfix.deployment import Fact

    value, missing = deployment.value("--speculative-config")
    major = deployment.gpu[1]
    if missing is not None:
        return Fact(None, missing)
    try:
        backend = json.loads(value or "{}").get("attention_backend")
    except (ValueError, AttributeError, RecursionError):
        return Fact(None, "a JSON object for --speculative-config")
    if isinstance(backend, str) and backend.upper() != "FLASHINFER":
        return Fact(False, f"the draft's attention_backend is {backend.upper()[:40]!r}")
    if major is None:
        return Fact(None, "the name of the GPU that serves (--gpu NAME)")
    if major != 10:
        return Fact(False, "FlashInfer claims such graphs on a Blackwell of compute capability 10 alone")
    if backend is None:
        return Fact(None, "the draft's attention backend that vLLM logs when it starts (FlashInfer comes first here)")
    return Fact(True, "the draft's attention_backend is FLASHINFER")


FIX = fix(
    "draft-non-causal",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # The mode of DFlash's graphs, from the model runner on
        Slice(_RUNNER, "GPUModelRunner.initialize_kv_cache", "speculator"),
        Slice(_SPECULATOR, "DFlashSpeculator.init_cudagraph_manager"),
        Slice(_SPECULATOR, "DFlashSpeculator.attn_vllm_config"),
        Slice(_BASE, "DraftModelSpeculator.set_attn", "attn_groups attn_cg_support attn_vllm_config"),
        *(
            Slice(f"{_FOLDER}/dspark/speculator.py", f"DSparkSpeculator.{method}")
            for method in ("init_cudagraph_manager", "capture", "propose", "set_attn", "attn_vllm_config")
        ),
        # The graphs that FlashInfer claims, and what it plans
        Slice(_FLASHINFER, f"{_BUILDER}.get_cudagraph_support", "use_non_causal is_xqa_arch is_sm12x return"),
        Slice(_FLASHINFER, f"{_BUILDER}.build", "route_decode", Verdict.FIXED),
        Slice(_FLASHINFER, f"{_BUILDER}.build", "causal", Verdict.AFFECTED),
        Slice(_FLASHINFER, f"{_BUILDER}._get_prefill_wrapper", only_for=Verdict.AFFECTED),
        # The choice of captures and replays
        Slice(_SPECULATOR, "DFlashSpeculator", "query_cudagraph_manager dflash_causal attn_groups", Verdict.AFFECTED),
        Slice(_GRAPHS, "DFlashCudaGraphManager", "causal attn_groups _capture_descs _candidates", Verdict.AFFECTED),
        *(
            Slice(_MANAGERS, f"CudaGraphManager.{name}", "_candidates _capture_descs", Verdict.AFFECTED)
            for name in ("capture", "dispatch")
        ),
    ),
    recognised=(_AS_WANTED, *_AS_SUPPORTED, _MADE, _SUPPORT_OF_DRAFT, *_CAUSAL_CLAIMS, *_AS_PREFILLS, _PLANS),
    corrections=(Patch(_GRAPHS_MODULE, "DFlashCudaGraphManager.capture", _without_graphs_of_plans),),
    modules=(_GRAPHS_MODULE,),
    events=(GRAPH_OF_A_PLAN,),
    needs=needs,
)
