"""`encoder-input-norm`: images are normalised on the device before graphs of the encoder get them (PR 55370)."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._encoder_images import (
    IMAGE_NAMES,
    MANAGED,
    MANAGER,
    MANAGER_CLASS,
    MODELS,
    QWEN2_VL,
    VISION,
    encodes_as_batched,
    normalises_itself,
    normalises_without_graphs,
    only_passes_images_on,
)
from vllm_graphfix.fixes._encoder_runners import (
    ENCODE,
    ENCODE_V2,
    IN_A_GRAPH,
    RUNNER,
    RUNNER_V2,
    declines,
    falls_back,
    falls_back_v2,
)
from vllm_graphfix.fixes._stock_path import find_override, is_called_from
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from types import FrameType

    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_MODULE = "vllm.v1.worker.encoder_cudagraph"
_EXECUTE = f"{MANAGER_CLASS}.execute"

_PIXELS = ("pixel_values", "pixel_values_videos")
"""The keywords with images and videos, as bytes of (patches, channels x frames x pixels)."""
_ARCHITECTURES = frozenset(
    {"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "JinaVLForRanking"}
)
"""Architectures of the two classes, and of a subclass that inherits all of this and makes the normalisation."""

_MANAGER_METHODS = tuple(dict.fromkeys(name for name, *_ in MANAGED if name != "execute"))
_MODEL_METHODS = (
    "_get_grid_thw_by_modality",
    "_get_pixel_values_by_modality",
    "_parse_and_validate_image_input",
    "_parse_and_validate_multimodal_inputs",
    "_parse_and_validate_video_input",
    "_process_image_input",
    "_process_video_input",
    "embed_multimodal",
    "encoder_cudagraph_forward",
    "encoder_eager_forward",
    "get_encoder_cudagraph_config",
    "get_encoder_cudagraph_item_specs",
    "get_input_modality",
    "prepare_encoder_cudagraph_capture_inputs",
    "prepare_encoder_cudagraph_replay_buffers",
    "select_encoder_cudagraph_items",
)
"""Methods of a model on the way of images to its encoder, with graphs and without."""
_CALLERS = tuple(
    (module_name(path), name.rpartition(".")[2]) for path, name in ((RUNNER, ENCODE), (RUNNER_V2, ENCODE_V2))
)
"""The two functions that pass the manager the same images that they would pass the model."""


IMAGES_NOT_NORMALISED = Event(
    "images-not-normalised",
    "Images or videos came in an engine with graphs of its encoder, of a model that normalises them on the device: on "
    "stock the encoder is given their bytes as they are, in a graph or, where they are too large for one, without.",
)


def diagnose(source: Source) -> Diagnosis:
    if not source.contains_word(RUNNER, f"from {_MODULE} import"):  # 0.19 names a module that its wheel does not have
        return Diagnosis.absent("no CUDA graphs of encoders")
    made = [model.method(source, "__init__") for model in MODELS]
    if all(made) and not any(source.contains_word(model.path, "input_norm") for model in MODELS):
        return Diagnosis.absent("images are normalised before a model is given them")
    fixed = [normalises_itself(source, model) for model in MODELS]
    if all(fixed):
        return Diagnosis.fixed("the encoder itself normalises images, in graphs, too", fixed[0] or "")
    execute = source.function(MANAGER, _EXECUTE)
    normalise = source.function(VISION, "FusedInputNorm.forward")
    encode, encode_v2 = source.function(RUNNER, ENCODE), source.function(RUNNER_V2, ENCODE_V2)
    if (
        execute
        and execute.signature == "self, mm_kwargs"
        and execute.find_unique("return result") is not None
        and not execute.contains_name("input_norm")
        and normalise
        and normalise.signature == "self, grid_thw, visual_dtype"
        and not source.contains_word(MANAGER, "input_norm")
        and only_passes_images_on(source)
        and encode
        and encodes_as_batched(encode, IN_A_GRAPH, "model.embed_multimodal(**mm_kwargs_batch)")
        and encode_v2
        and encodes_as_batched(
            encode_v2, "cg_manager.execute(mm_kwargs_batch)", "self.model.embed_multimodal(**mm_kwargs_batch)"
        )
        and all(normalises_without_graphs(source, model) for model in MODELS)
    ):
        return Diagnosis.affected(
            "images are normalised where a model encodes them without graphs alone",
            (MODELS[0].method(source, "prepare_encoder_cudagraph_replay_buffers") or execute).where,
            "bytes-fall-back" if falls_back(encode) and falls_back_v2(encode_v2) else "bytes",
        )
    return Diagnosis.unrecognised("images are normalised on the device in a way", next(filter(None, made), QWEN2_VL))


def _normalise_first(stock: StockFunction, activity: Activity, *, way_back: bool) -> StockFunction:
    """Wrap `EncoderCudaGraphManager.execute(self, mm_kwargs)`, which model runners call for images of one kind.

    All encoding, in graphs or in batches too large for them, on every rank, takes the images from there. The caller's
    images stay unchanged: if this returns None, the model encodes them and normalises them itself. With a *way_back*
    to the model, that is the fallback where normalising fails here; but not for lack of memory, which the model would
    need as well, and fail where stock continues.
    """
    met, corrects = activity.counter(IMAGES_NOT_NORMALISED), activity.corrects
    foreign: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()  # by manager, decided once

    def may_be_normalised_elsewhere(manager: Any, images: list[Any], caller: FrameType) -> bool:
        if manager not in foreign:
            foreign[manager] = _foreign_code(manager)
        code = foreign[manager]
        # Bytes are never normalised, floats may be: some image processors convert bytes to floats.
        if code is None and any(image.is_floating_point() for image in images):
            code = None if is_called_from(caller, _CALLERS) else f"{caller.f_code.co_filename}:{caller.f_code.co_name}"
        if code is not None:
            activity.step_aside("encoder-input-norm", code)
        return code is not None

    @functools.wraps(stock)
    def execute(self: Any, mm_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        images = mm_kwargs
        try:
            normalise = _normalisation(self.model)
            raw = [name for name in _PIXELS if name in mm_kwargs] if normalise is not None else []
            if (
                raw
                and normalise is not None
                and not declines(stock, self)
                and not may_be_normalised_elsewhere(self, [mm_kwargs[name] for name in raw], sys._getframe(1))
            ):
                met.count += 1
                if corrects:
                    dtype = self.model.visual.dtype
                    images = {**mm_kwargs, **{name: normalise(mm_kwargs[name], dtype) for name in raw}}
        except Exception as error:
            activity.failed(error)
            if corrects and way_back and _can_go_back(self, error):
                return None
            images = mm_kwargs
        return stock(self, images, *args, **kwargs)

    return execute


def _foreign_code(manager: Any) -> str | None:
    """Name foreign code between the manager's `execute` and the embedding of images; None if there is none."""
    from torch.nn import Module

    model, visual = manager.model, manager.model.visual
    override = find_override(manager, _MODULE, MANAGER_CLASS, _MANAGER_METHODS)
    for each in MODELS:
        # By name, since the class may have been replaced under its name.
        if any((kind.__module__, kind.__qualname__) == (each.module, each.name) for kind in type(model).__mro__):
            return (
                override
                or find_override(model, each.module, each.name, _MODEL_METHODS)
                or find_override(visual, each.module, each.encoder, ("forward",))
                or (None if type(visual).__call__ is Module.__call__ else f"{type(visual).__qualname__}.__call__")
                or next(map(_hook_name, filter(_is_foreign_hook, visual._forward_pre_hooks.values())), None)
            )
    return override or f"{type(model).__module__}.{type(model).__qualname__}"


def _hook_name(hook: Any) -> str:
    return f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _is_foreign_hook(hook: Any) -> bool:
    """Tell if *hook* is not one of vLLM's, which trace layers."""
    return not str(getattr(hook, "__module__", "")).startswith("vllm.")


def _can_go_back(manager: Any, error: Exception) -> bool:
    """Tell if the model may encode instead: memory is not short, and no other rank waits in its graph."""
    try:
        import torch

        alone = manager.vllm_config.parallel_config.tensor_parallel_size == 1
        return bool(alone and not isinstance(error, torch.OutOfMemoryError))
    except Exception:  # a manager of another shape: go on as stock does
        return False


def _normalisation(model: Any) -> Any | None:
    """Return the normalisation of *model*; None if images are normalised already, or not outside the encoder."""
    from vllm.model_executor.models.vision import FusedInputNorm

    # A subclass of one of the two may not have made it.
    norm = getattr(model, "input_norm", None)
    return norm if isinstance(norm, FusedInputNorm) and not norm.is_identity else None


def patches(shape: str) -> tuple[Patch, ...]:
    wrap = functools.partial(_normalise_first, way_back=shape == "bytes-fall-back")
    return (Patch(_MODULE, _EXECUTE, wrap),)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment.needs import Need

    return (
        Need(
            "Qwen2-VL or Qwen2.5-VL", _serves_such_a_model, "JinaVL, too", clause="the model is Qwen2-VL or Qwen2.5-VL"
        ),
        Need(
            "cudagraph_mm_encoder",
            lambda deployment, _: deployment.encoder_graphs(),
            "in --compilation-config",
            usual=False,
            clause="cudagraph_mm_encoder is on",
        ),
        Need(
            "images normalised on the device",
            _normalises_on_the_device,
            "as by default, but with vLLM's front-end in Rust",
            (_OFF,),
            clause="images are normalised on the device",
        ),
    )


_OFF = "--no-mm-device-do-normalize"


def _serves_such_a_model(deployment: Deployment, _: str) -> Fact:
    """Tell if the model is one of those that normalise images on the device."""
    is_one = "Qwen2-VL, Qwen2.5-VL or JinaVL"
    return deployment.has_architecture(_ARCHITECTURES, is_one, "neither Qwen2-VL nor Qwen2.5-VL")


def _normalises_on_the_device(deployment: Deployment, _: str) -> Fact:
    """Tell if the normalisation is not left to the host."""
    from vllm_graphfix.deployment import Fact

    off = deployment.switched_on(_OFF)
    if deployment.setting("VLLM_USE_RUST_FRONTEND"):
        return Fact(False, "VLLM_USE_RUST_FRONTEND leaves it to the host")
    return Fact(None if off.holds is None else not off.holds, off.source)


FIX = fix(
    "encoder-input-norm",
    diagnose=diagnose,
    surroundings=(
        # The code that normalises: encoder, model, or its callers
        *(
            part
            for model in MODELS
            for part in (
                Slice(model.path, f"{model.encoder}.forward", "input_norm patch_embed"),
                *(
                    Slice(model.path, f"{model.name}.{name}", "input_norm")
                    for name in ("_process_image_input", "_process_video_input")
                ),
                *(
                    Slice(model.path, f"{model.name}.{name}", f"input_norm {IMAGE_NAMES}")
                    for name in ("encoder_cudagraph_forward", "encoder_eager_forward")
                ),
                Slice(model.path, f"{model.name}.__init__", "input_norm", Verdict.AFFECTED),
                *(
                    Slice(model.path, f"{model.name}.{name}", IMAGE_NAMES, Verdict.AFFECTED)
                    for name in (
                        "_get_pixel_values_by_modality",
                        "get_encoder_cudagraph_config",
                        "select_encoder_cudagraph_items",
                        "prepare_encoder_cudagraph_replay_buffers",
                    )
                ),
            )
        ),
        # The way of the images to and through the manager
        *(
            Slice(
                MANAGER,
                f"{MANAGER_CLASS}.{name}",
                "mm_kwargs local_mm_kwargs batch_mm_kwargs replay src",
                Verdict.AFFECTED,
            )
            for name in ("execute", "_dp_shard", "_select_items", "_execute_local", "_run_budget_graph")
        ),
        Slice(RUNNER, ENCODE, "mm_kwargs_batch cudagraph_output encoder_cudagraph_manager", Verdict.AFFECTED),
        Slice(RUNNER_V2, ENCODE_V2, "mm_kwargs_batch cudagraph_output cg_manager", Verdict.AFFECTED),
        Slice(MANAGER, "", "input_norm", Verdict.AFFECTED),
        Slice(VISION, "FusedInputNorm.forward", only_for=Verdict.AFFECTED),
        Slice(VISION, "FusedInputNorm.from_model_config", only_for=Verdict.AFFECTED),
    ),
    corrections=patches,
    modules=(_MODULE,),
    events=(IMAGES_NOT_NORMALISED,),
    needs=needs,
    default_rationale="answers",
)
