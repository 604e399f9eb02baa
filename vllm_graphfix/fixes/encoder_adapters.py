"""`encoder-adapters`: images with a LoRA adapter are encoded without a graph (PR 52376)."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._encoder_runners import (
    ENCODE,
    ENCODE_V2,
    RUNNER,
    RUNNER_V2,
    falls_back,
    falls_back_v2,
    set_declines,
)
from vllm_graphfix.fixes._stock_path import is_called_from

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MANAGER = "vllm/v1/worker/encoder_cudagraph.py"
_STATE_V2 = "vllm/v1/worker/gpu/model_states/interface.py"
_ADAPTERS = "vllm/lora/model_manager.py"
_MAKE, _MAKE_V2 = "GPUModelRunner._create_encoder_cudagraph_manager", "ModelState.__init__"
_META = "vllm/lora/ops/triton_ops/lora_kernel_metadata.py"
_EXPAND = "vllm/lora/ops/triton_ops/lora_expand_op.py"
_MODULE = "vllm.v1.worker.encoder_cudagraph"
_CLASS = "EncoderCudaGraphManager"
_EXECUTE = f"{_CLASS}.execute"
_LOCAL = f"{_CLASS}._execute_local"

_LORA = "lora lora_manager lora_config lora_requests set_active_adapters set_adapter_mapping"
_SORTED = (
    "sorted_indices = sorted(range(num_items), key=lambda i: per_item_out_tokens[i])",
    "sorted_indices = sorted(range(num_items), key=lambda i: per_item_total_tokens[i])",
)
_MADE = (
    "return EncoderCudaGraphManager(vllm_config=..., device=..., dtype=..., "
    "model=cast(SupportsEncoderCudaGraph, raw_model))"
)
_MADE_V2 = """
enable_encoder_cuda_graph = (
    not self.model_config.enforce_eager
    and vllm_config.compilation_config.cudagraph_mm_encoder
    and supports_encoder_cudagraph(model){}
)
"""
_WITH_ADAPTERS = (
    "{}.lora_config and {}.lora_config.enable_tower_connector_lora",
    "{}.lora_config is not None and {}.lora_config.enable_tower_connector_lora",
)

_REFUSED = tuple(f"if {each.format('self', 'self')}:\n    return None" for each in _WITH_ADAPTERS)
_REFUSED_V2 = tuple(
    _MADE_V2.format(f" and not ({each.format(config, config)})")
    for each in _WITH_ADAPTERS
    for config in ("vllm_config", "self.vllm_config")
)
_CALLERS = frozenset(
    {
        ("vllm.v1.worker.gpu_model_runner", "_execute_mm_encoder"),
        ("vllm.v1.worker.gpu.mm.encoder_runner", "execute_mm_encoder"),
    }
)
"""Callers that are known to encode without a graph where `execute` returns None."""

ENCODED_WITH_ADAPTERS = Event(
    "encoder-graph-with-adapters",
    "Images came of which at least one has an adapter, in an engine with graphs of its encoder: on stock they are "
    "encoded by size, with the adapters in the order of the schedule.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the order in which graphs encode images, and if encoders with adapters have graphs at all."""
    if not source.contains_word(RUNNER, f"from {_MODULE} import"):  # 0.19 names a module that its wheel does not have
        return Diagnosis.absent("no CUDA graphs of encoders")
    local, encode = source.function(_MANAGER, _LOCAL), source.function(RUNNER, ENCODE)
    by_size = [local, *(source.function(_MANAGER, f"{_LOCAL}_{paths}_path") for paths in ("single", "dual"))]
    encode_v2, make_v2 = source.function(RUNNER_V2, ENCODE_V2), source.function(_STATE_V2, _MAKE_V2)
    in_v2 = encode_v2 is not None and encode_v2.contains_name("execute")
    runner, make = source.module(RUNNER), source.function(RUNNER, _MAKE)
    refused = [part for each in _REFUSED for part in (runner.find(each) if runner else ())]
    refused_v2 = make_v2 is not None and any(make_v2.find_unique(each) for each in _REFUSED_V2)
    if runner and make and len(refused) == 1 and refused_v2 == in_v2 and _makes_none(runner, make, refused[0]):
        return Diagnosis.fixed("encoders that take adapters have no graphs", make.at(refused[0]))
    if local is None or refused or refused_v2 or not any(each and _goes_by_size(each) for each in by_size):
        return Diagnosis.unrecognised("images with adapters are encoded in a way", local or _MANAGER)
    # Without this fallback, None in place of embeddings would be an error, or be taken for a result.
    if not (encode and falls_back(encode) and (not in_v2 or (encode_v2 and falls_back_v2(encode_v2)))):
        in_a_way = "images are encoded without a graph in a way"
        return Diagnosis.unrecognised(in_a_way, encode or RUNNER, defect_seen=True)
    return Diagnosis.affected(
        "images are encoded by size, and their adapters are told in the order of the schedule",
        local.where,
        "both-runners" if in_v2 else "runner-v1",
    )


def _makes_none(runner: Function, make: Function, refused: ast.stmt | ast.expr) -> bool:
    """Tell if *refused* stands before the only code that makes graphs, in its block."""
    made = make.find_unique(_MADE)
    return (
        made is not None and make.in_one_block(refused, made) and len(runner.find("EncoderCudaGraphManager(...)")) == 1
    )


def _goes_by_size(local: Function) -> bool:
    """Tell if images are sorted by size, and encoded in that order."""
    return any(local.always(each) for each in _SORTED) and local.used_only_in(
        "sorted_indices", *_SORTED, "for orig_idx in sorted_indices:\n    ..."
    )


def _encode_without_a_graph(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `EncoderCudaGraphManager.execute(self, mm_kwargs)`, which model runners call for images of one kind.

    Both runners encode without a graph if it returns None. The adapters are set in the order of the images for that,
    except where each rank encodes a share of them. All ranks have the same adapters, and so decide alike.
    """
    met, corrects = activity.counter(ENCODED_WITH_ADAPTERS), activity.corrects

    @functools.wraps(stock)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with_adapters = _may_have_adapters(self.model)
            if with_adapters and not is_called_from(sys._getframe(1), _CALLERS):
                activity.step_aside("encoder-adapters", f"what calls {_EXECUTE}")
                with_adapters = False
            if with_adapters:
                met.count += 1
        except Exception as error:
            activity.failed(error)
            with_adapters = False
        if with_adapters and corrects:
            return None
        return stock(self, *args, **kwargs)

    if corrects:
        set_declines(execute, _encodes_without_a_graph)
    return execute


def _encodes_without_a_graph(manager: Any) -> bool:
    """Tell an outer layer of `execute` if that returns None for *manager* in the running call."""
    return _may_have_adapters(manager.model) and is_called_from(sys._getframe(1), _CALLERS)


def _may_have_adapters(model: Any) -> bool:
    """Tell if kernels in the encoder or its connector may apply an adapter; without one, they end at once."""
    adapters = getattr(model, "lora_manager", None)
    if adapters is None or not getattr(adapters, "supports_tower_connector_lora", False):
        return False
    parts = adapters.mm_mapping
    wrappers = [adapters.punica_wrapper_mapping.get(prefix) for prefix in (*parts.tower_model, *parts.connector)]
    return not all(wrapper is None or _has_no_adapter(wrapper) for wrapper in wrappers)


def _has_no_adapter(wrapper: Any) -> bool:
    """Tell if the kernels of *wrapper* are set to no adapter in any row. The flag is on the host."""
    meta = getattr(wrapper, "token_mapping_meta", None)  # other platforms have another wrapper
    return meta is not None and bool(meta.no_lora_flag_cpu.item())


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need, on_runners, unseen

    adapters, encoders = "--enable-lora", "--enable-tower-connector-lora"
    return (
        on_runners("model runner V1, or V2 from 0.28.0 on", lambda shape: ("V1",) if shape == "runner-v1" else _BOTH),
        Need(
            "cudagraph_mm_encoder",
            lambda deployment, _: deployment.encoder_graphs(),
            "in --compilation-config",
            usual=False,
            clause="cudagraph_mm_encoder is on",
        ),
        Need(
            adapters,
            lambda deployment, _: deployment.switched_on(adapters),
            flags=(adapters,),
            usual=False,
            clause="--enable-lora is set",
        ),
        Need(
            encoders,
            lambda deployment, _: deployment.switched_on(encoders),
            "adapters of an encoder or what connects it",
            (encoders,),
            usual=False,
            clause="--enable-tower-connector-lora is set",
        ),
        unseen("several images in one step", "of requests with an adapter, or of some with and some without"),
    )


_BOTH = ("V1", "V2")

FIX = fix(
    "encoder-adapters",
    diagnose=diagnose,
    surroundings=(
        # The making of encoder graphs, and its refusal with adapters
        Slice(RUNNER, "", "enable_tower_connector_lora"),
        Slice(RUNNER, "GPUModelRunner.capture_model", "lora_config enable_tower_connector_lora"),
        Slice(_STATE_V2, _MAKE_V2, "enable_encoder_cuda_graph lora_config"),
        # Possible refusals elsewhere, or adapters in the order of the images
        Slice(_MANAGER, "", _LORA, Verdict.AFFECTED),
        Slice(_MANAGER, _LOCAL, _LORA, Verdict.AFFECTED),
        Slice(_MANAGER, _EXECUTE, "_execute_local result", Verdict.AFFECTED),
        Slice(RUNNER, ENCODE, "set_active_adapters", Verdict.AFFECTED),
        Slice(RUNNER_V2, ENCODE_V2, _LORA, Verdict.AFFECTED),
        # The data by which the fix detects a step with an adapter
        Slice(_ADAPTERS, "LoRAModelManager.__init__", "lora_manager", Verdict.AFFECTED),
        Slice(_ADAPTERS, "LoRAModelManager._maybe_init_mm", "punica_wrapper_mapping", Verdict.AFFECTED),
        Slice(_META, "LoRAKernelMeta.prepare_tensors", "no_lora_flag_cpu no_lora", Verdict.AFFECTED),
        Slice(_EXPAND, "_lora_expand", "no_lora_flag_cpu", Verdict.AFFECTED),
    ),
    recognised=(*_REFUSED, _MADE_V2.format(""), *_REFUSED_V2),
    corrections=(Patch(_MODULE, _EXECUTE, _encode_without_a_graph),),
    events=(ENCODED_WITH_ADAPTERS,),
    needs=needs,
    default_rationale="answers",
)
