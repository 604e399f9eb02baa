"""`encoder-adapters`: images with a LoRA adapter are encoded without a graph (PR 52376)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import NEWEST, About
from vllm_graphfix.fixes._encoder_runners import (
    ENCODE,
    ENCODE_V2,
    IN_A_GRAPH,
    RUNNER,
    RUNNER_V2,
    falls_back,
    falls_back_v2,
    set_declines,
)

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MANAGER = "vllm/v1/worker/encoder_cudagraph.py"
_STATE_V2 = "vllm/v1/worker/gpu/model_states/interface.py"
_LORA_V2 = "vllm/v1/worker/gpu/mm/lora.py"
_ADAPTERS = "vllm/lora/model_manager.py"
_META = "vllm/lora/ops/triton_ops/lora_kernel_metadata.py"
_PUNICA = "vllm/lora/punica_wrapper/punica_gpu.py"
_SHRINK = "vllm/lora/ops/triton_ops/lora_shrink_op.py"
_EXPAND = "vllm/lora/ops/triton_ops/lora_expand_op.py"
_MODULE = "vllm.v1.worker.encoder_cudagraph"
_CLASS = "EncoderCudaGraphManager"
_EXECUTE = f"{_CLASS}.execute"
_LOCAL = f"{_CLASS}._execute_local"

_SORTED = (
    "sorted_indices = sorted(range(num_items), key=lambda i: per_item_out_tokens[i])",
    "sorted_indices = sorted(range(num_items), key=lambda i: per_item_total_tokens[i])",
)
_BY_PATHS = """
if self.config.enable_dual_path_graph:
    return self._execute_local_dual_path(mm_kwargs)
"""
_BY_ONE_PATH = "return self._execute_local_single_path(mm_kwargs)"
_CALLED = frozenset(
    "_find_smallest_fitting_budget_given_tokens _get_item_specs _get_per_item_out_tokens _path_fitting_budget "
    "_run_budget_graph _scatter_output_slices _select_items all append append_current_batch debug "
    "encoder_eager_forward fromkeys get_encoder_cudagraph_num_items get_path_output_tokens inference_mode len list "
    "max postprocess_encoder_output prepare_encoder_cudagraph_replay_buffers range scatter_output_slices "
    "select_encoder_cudagraph_items should_defer_item sorted sum tuple".split()
)
"""What encodes images by size calls: nothing of it is told of adapters."""
_COPIED = (
    "for key in self.config.buffer_keys:\n    ...",
    "for key, buf in graph_meta.input_buffers.items():\n    ...",
)
_CALLED_TO_REPLAY = frozenset(
    "_get_graph_set _get_item_specs copy_ get get_encoder_cudagraph_num_items get_input_modality items len "
    "padding_logic prepare_encoder_cudagraph_replay_buffers replay zero_".split()
)
_MADE = "EncoderCudaGraphManager(vllm_config=..., device=..., dtype=..., model=cast(SupportsEncoderCudaGraph, {}))"
_MADE_ONCE = (
    """
if not (self.compilation_config.cudagraph_mm_encoder and self.supports_mm_inputs):
    return None
""",
    "raw_model = self.get_model()",
    """
if not supports_encoder_cudagraph(raw_model):
    return None
""",
    f"return {_MADE.format('raw_model')}",
)
_MADE_FIRST = """
if (
    self.compilation_config.cudagraph_mm_encoder
    and self.supports_mm_inputs
    and self.encoder_cudagraph_manager is None
):
    ...
"""
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

ENCODED_WITH_ADAPTERS = Event(
    "encoder-graph-with-adapters",
    "Images came of which at least one has an adapter, in an engine with graphs of its encoder: on stock they are "
    "encoded by size, with the adapters in the order of the schedule.",
)


def diagnose(source: Source) -> Diagnosis:
    execute, replay = source.function(_MANAGER, _EXECUTE), source.function(_MANAGER, f"{_CLASS}._run_budget_graph")
    local = source.function(_MANAGER, _LOCAL)
    by_size = [source.function(_MANAGER, f"{_LOCAL}_{paths}_path") for paths in ("single", "dual")]
    encode = source.function(RUNNER, ENCODE)
    make = source.function(RUNNER, "GPUModelRunner._create_encoder_cudagraph_manager")
    capture = source.function(RUNNER, "GPUModelRunner.capture_model")
    encode_v2 = source.function(RUNNER_V2, ENCODE_V2)
    make_v2 = source.function(_STATE_V2, "ModelState.__init__")
    tell = source.function(_ADAPTERS, "LoRAModelManager._set_adapter_mapping")
    keep = source.function(_ADAPTERS, "LoRAModelManager._maybe_init_mm")
    owner = source.function(_ADAPTERS, "LoRAModelManager.__init__")
    prepare = source.function(_META, "LoRAKernelMeta.prepare_tensors")
    update = source.function(_PUNICA, "PunicaWrapperGPU.update_metadata")
    if not source.says(RUNNER, f"from {_MODULE} import"):  # 0.19 names a module that its wheel does not have
        return Diagnosis(Verdict.ABSENT, "no CUDA graphs of encoders")
    if not (execute and replay and local and encode and tell and keep and owner and prepare and update):
        return Diagnosis.unrecognised("images with adapters are encoded in a way", execute or _MANAGER)
    in_v2 = encode_v2 is not None and encode_v2.names("execute")
    refused = make and _refuses(make)
    if refused and make:
        if not in_v2 or (make_v2 and any(make_v2.only(each) for each in _refusals_v2())):
            return Diagnosis(Verdict.FIXED, "encoders that take adapters have no graphs", make.at(refused))
        return Diagnosis.unrecognised("encoders that take adapters have graphs in a way", make_v2 or make)
    if (
        _is_given_images(execute)
        and (_goes_by_size(local) or (_goes_by_paths(local) and all(each and _goes_by_size(each) for each in by_size)))
        and _replays(replay)
        and falls_back(encode)
        and _tells_first(encode)
        and (_makes(make) if make else capture and _makes_first(capture))
        and (not in_v2 or (encode_v2 and falls_back_v2(encode_v2) and make_v2 and _makes_v2(make_v2)))
        and _keeps_adapters(owner, keep, tell)
        and _tells_kernels(prepare, update)
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "images are encoded by size, and their adapters are told in the order of the schedule",
            local.where,
            "both-runners" if in_v2 else "runner-v1",
        )
    return Diagnosis.unrecognised("images with adapters are encoded in a way", local)


def _refuses(make: Function) -> ast.stmt | ast.expr | None:
    """The statement by which model runner V1 makes no graphs of an encoder that takes adapters."""
    made = make.only(_MADE_ONCE[-1])
    for condition in _WITH_ADAPTERS:
        refused = make.only(f"if {condition.format('self', 'self')}:\n    return None")
        if refused and made and make.in_one_block(refused, made):
            return refused
    return None


def _refusals_v2() -> list[str]:
    """The conditions under which model runner V2 makes graphs of an encoder that takes no adapters."""
    return [
        _MADE_V2.format(f" and not ({condition.format(config, config)})")
        for condition in _WITH_ADAPTERS
        for config in ("vllm_config", "self.vllm_config")
    ]


def _is_given_images(execute: Function) -> bool:
    """Whether the images of a step are all that is asked for, and what is returned is their embeddings."""
    return (
        execute.takes == "self, mm_kwargs"
        and execute.confines(
            "result", "result = self._execute_local(mm_kwargs)", "result = self._dp_gather(...)", "return result"
        )
        and len(execute.find("return ...")) == 1
    )


def _goes_by_size(local: Function) -> bool:
    """Whether images are sorted, and nothing is told of adapters."""
    return (
        local.takes == "self, mm_kwargs"
        and local.confines("sorted_indices", *_SORTED, "for orig_idx in sorted_indices:\n    ...")
        and any(local.always(each) for each in _SORTED)
        and local.calls() <= _CALLED
    )


def _replays(replay: Function) -> bool:
    """Whether a batch is copied into its graph, which is then replayed, and nothing is told of adapters."""
    copies = [part for each in _COPIED for part in replay.find(each)]
    parts = replay.each("if src is None:\n    continue", "graph_meta.graph.replay()", "return graph_meta.output_buffer")
    return (
        len(copies) == 1
        and len(parts) == 3
        and replay.in_one_block(*copies, *parts[1:])
        and replay.calls() <= _CALLED_TO_REPLAY
    )


def _goes_by_paths(local: Function) -> bool:
    """Whether images are encoded in one way or in another (0.24.0 to 0.26.0)."""
    parts = local.each(_BY_PATHS, _BY_ONE_PATH)
    return (
        local.takes == "self, mm_kwargs"
        and len(parts) == 2
        and local.in_one_block(*parts)
        and local.calls() == {"_execute_local_single_path", "_execute_local_dual_path"}
    )


def _tells_first(encode: Function) -> bool:
    """Whether model runner V1 tells adapters of all images before it encodes any.

    That the step of model runner V2 does so is not asked of the source.
    """
    told = encode.only("self.lora_manager.set_active_adapters(lora_requests, tower_mapping)")
    return (
        told is not None
        and all(told.lineno < part.lineno for part in encode.find(IN_A_GRAPH))
        and encode.confines(
            "lora_manager",
            "self.lora_config and self.lora_manager.supports_tower_connector_lora()",
            "self.lora_manager.set_active_adapters(lora_requests, tower_mapping)",
            "self.lora_manager.set_active_adapters(lora_requests, connector_mapping)",
        )
    )


def _makes(make: Function) -> bool:
    """Whether model runner V1 makes graphs of encoders, with nothing asked about adapters."""
    parts = make.each(*_MADE_ONCE)
    return len(parts) == len(_MADE_ONCE) and make.in_one_block(*parts) and len(make.find("return ...")) == 3


def _makes_first(capture: Function) -> bool:
    """The same up to 0.22.1, where it does so before it captures."""
    made = f"self.encoder_cudagraph_manager = {_MADE.format('raw_model')}"
    return (
        len(capture.find(_MADE_FIRST)) == 1
        and len(capture.find(f"if supports_encoder_cudagraph(raw_model):\n    {made}\n    logger.info(...)")) == 1
        and capture.confines("raw_model", "raw_model = self.get_model()", "supports_encoder_cudagraph(raw_model)", made)
    )


def _makes_v2(make: Function) -> bool:
    """The same of model runner V2."""
    made = f"cudagraph_manager = {_MADE.format('model')} if enable_encoder_cuda_graph else None"
    asked = _MADE_V2.format("")
    return make.confines("enable_encoder_cuda_graph", asked, made) and len(make.each(asked, made)) == 2


def _keeps_adapters(owner: Function, keep: Function, tell: Function) -> bool:
    """Whether the model knows who manages adapters, and which parts of it are told apart from the language model."""
    return (
        owner.always("self.model.lora_manager = self")
        and len(
            keep.each(
                "self.punica_wrapper_mapping[prefix] = tower_punica_wrapper",
                "self.punica_wrapper_mapping[prefix] = connector_punica_wrapper",
                "self.mm_mapping: MultiModelKeys = self.model.get_mm_mapping()",
            )
        )
        == 3
        and len(
            tell.each(
                "mapping.type == LoRAMappingType.TOWER and self.mm_mapping.tower_model",
                "mapping.type == LoRAMappingType.CONNECTOR and self.mm_mapping.connector",
            )
        )
        == 2
    )


def _tells_kernels(prepare: Function, update: Function) -> bool:
    """Whether kernels in a graph read what the last step was told, and the host knows if that is no adapter at all."""
    told = prepare.each(
        "self._reset()", "no_lora = torch.all(token_lora_mapping == -1)", "self.no_lora_flag_cpu[0] = no_lora"
    )
    return (
        len(told) == 3
        and prepare.in_one_block(*told)
        and told[-1] in prepare.node.body
        and prepare.confines("no_lora_flag_cpu", "self.no_lora_flag_cpu[0] = no_lora")
        and update.only("self.token_mapping_meta.prepare_tensors(self.token_lora_indices)") is not None
    )


def _encode_without_a_graph(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `EncoderCudaGraphManager.execute(self, mm_kwargs)`, which model runners call for images of one kind.

    Both take None as a sign to encode without a graph, for which the adapters have been told in the order of the
    images, but where each rank encodes some of them. All ranks are told the same adapters.
    """
    met, corrects = activity.counter(ENCODED_WITH_ADAPTERS), activity.corrects

    @functools.wraps(stock)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with_adapters = _may_have_adapters(self.model)
            if with_adapters:
                met.count += 1
        except Exception as error:
            activity.failed(error)
            with_adapters = False
        if with_adapters and corrects:
            return None
        return stock(self, *args, **kwargs)

    if corrects:
        set_declines(execute, lambda manager: _may_have_adapters(manager.model))
    return execute


def _may_have_adapters(model: Any) -> bool:
    """Whether kernels in the encoder or in what connects it may apply an adapter: with none, they end at once."""
    adapters = getattr(model, "lora_manager", None)
    if adapters is None or not getattr(adapters, "supports_tower_connector_lora", False):
        return False
    parts = adapters.mm_mapping
    wrappers = [adapters.punica_wrapper_mapping.get(prefix) for prefix in (*parts.tower_model, *parts.connector)]
    return not all(wrapper is None or _has_no_adapter(wrapper) for wrapper in wrappers)


def _has_no_adapter(wrapper: Any) -> bool:
    """Whether the kernels under *wrapper* were told that no row has an adapter. The number is the host's."""
    meta = getattr(wrapper, "token_mapping_meta", None)  # other platforms have another wrapper
    return meta is not None and bool(meta.no_lora_flag_cpu.item())


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULE, _EXECUTE, _encode_without_a_graph),)


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
        ),
        Need(adapters, lambda deployment, _: deployment.switched_on(adapters), flags=(adapters,), usual=False),
        Need(
            encoders,
            lambda deployment, _: deployment.switched_on(encoders),
            "adapters of an encoder or what connects it",
            (encoders,),
            usual=False,
        ),
        unseen("several images in one step", "of requests with an adapter, or of some with and some without"),
    )


_BOTH = ("V1", "V2")

FIX = Fix(
    number=26,
    name="encoder-adapters",
    runner=None,
    reads=(
        _MANAGER,
        RUNNER,
        RUNNER_V2,
        _STATE_V2,
        _LORA_V2,
        _ADAPTERS,
        _META,
        _PUNICA,
        _SHRINK,
        _EXPAND,
    ),
    modules=(_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(ENCODED_WITH_ADAPTERS,),
    needs=needs,
    ground="answers",
    evidence=(
        f"{_MANAGER}::{_CLASS}._capture_budget_graph",
        f"{_LORA_V2}::set_active_mm_loras",
        f"{_ADAPTERS}::LoRAModelManager.set_adapter_mapping",
        f"{_META}::LoRAKernelMeta._reset",
        f"{_META}::LoRAKernelMeta.make",
        f"{_SHRINK}::_lora_shrink",
        f"{_SHRINK}::_lora_shrink_kernel",
        f"{_EXPAND}::_lora_expand",
        f"{_EXPAND}::_lora_expand_kernel",
    ),
)

ABOUT = About(
    pr=52376,
    references=(),
    summary="images with a LoRA adapter are encoded without a graph, each with its own adapter",
    releases=f"0.20.0 - {NEWEST}",
    absent="0.14.1 - 0.19.1",
    seen="an image is described as if its request had another LoRA adapter, or none, while other images are encoded",
    first_test="`cudagraph_mm_encoder` off: gone?",
    symptom="With cudagraph_mm_encoder and adapters of an encoder or of what connects it, embeddings of images are "
    "those of another request's adapter, or of none, where several images come in one step. Nothing ends in an error.",
    cause="A model runner tells the kernels of adapters which rows have which, image by image in the order of the "
    "schedule, and then has the images encoded. With graphs they are sorted by size and replayed in batches, each of "
    "which begins at row 0, while the kernels in the graph read the rows of the whole step. If it has more rows than "
    "the graph, they also read and write beyond the graph's memory.",
    remedy="If at least one image of the step has an adapter, the graphs return nothing, and the model runner encodes "
    "as it does without graphs, in the order that it told the adapters, but with --mm-encoder-tp-mode data. Steps "
    "without adapters keep their graphs: the kernels in them end at once.",
    detect="Send several images of different sizes together, each of a request with another adapter, and one at a "
    "time: embeddings or answers differ. The counter of `observe` counts steps with an adapter, those that are right "
    "by their order among them.",
    workaround="Leave cudagraph_mm_encoder off, or --enable-tower-connector-lora.",
    removable="no release of vLLM has a remedy",
    in_caches="entries of images, and of all that comes after them in a prompt, kept under the adapter's name: "
    "computed with another adapter's encoder, or with none",
    how_sure="follows from the code; caches were not looked at",
)
