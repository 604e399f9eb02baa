"""deepstack-features: images of Qwen3-VL and Qwen3-Omni in models that torch.compile traced without one.

Real: both models' `forward` and their buffers of features, their language models' `forward`, and vLLM's way of
compiling it, which traces it once and drops its guards. Stand-ins: the layers and the norm of the language models.
Dynamo's graph runs as it is, without Inductor, and without CUDA graphs, which play no part in this defect.
"""

from __future__ import annotations

import math
import os
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode

from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins
from vllm_graphfix.verify.measurement import Measurement

install_image_processor_stand_ins()

from vllm.model_executor.models import qwen3_omni_moe_thinker, qwen3_vl  # noqa: E402 - behind the stand-ins

WIDTH, LAYERS, LEVELS = 4, 3, 2
"""Size of a hidden state, layers of the language model, and those of them that add features of images."""
MOST = 16
"""Tokens of the profiling run, as many as a batch may have."""
STEPS = ((6, 6, True), (4, 4, False), (5, 8, True))
"""Tokens of each step, tokens with the padding of its graph, and if they are of an image."""
_NO_CACHE = {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_AOT_COMPILE": "0"}
_ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True)
_MODELS = (
    (qwen3_vl, qwen3_vl.Qwen3VLForConditionalGeneration, qwen3_vl.Qwen3LLMModel),
    (
        qwen3_omni_moe_thinker,
        qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerForConditionalGeneration,
        qwen3_omni_moe_thinker.Qwen3MoeLLMModel,
    ),
)


def run(*, trigger: bool = True) -> Measurement:
    """Serve steps with images and without, after a profiling run. Without *trigger*, all steps are without."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, _NO_CACHE | {"VLLM_CACHE_ROOT": cache}):
        eager, compiled = (
            hidden_states(
                CompilationConfig(mode=mode, backend="eager", cudagraph_mode=CUDAGraphMode.NONE), images=trigger
            )
            for mode in (CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE)
        )
    images = sum(image for *_, image in STEPS)
    return Measurement(
        f"hidden states of {len(STEPS)} steps, {images} of them with an image, of two compiled models",
        tuple(eager),
        tuple(compiled),
        counted={"image-features-dropped": len(_MODELS) * images if trigger else 0},
    )


def hidden_states(compilation: CompilationConfig, *, images: bool = True) -> list[float]:
    """Return the hidden states of all steps in both models; batches have padding where the models are compiled."""
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=compilation)
    states = []
    for module, kind, language_model in _MODELS:
        with mock.patch.object(module, "get_pp_group", _one_rank), set_current_vllm_config(config):
            model = _model(kind, language_model, config)
            serve(model, torch.zeros(MOST, WIDTH), MOST)
            for number, (tokens, padded, image) in enumerate(STEPS):
                rows = tokens if compilation.mode == CompilationMode.NONE else padded
                states += step(model, number, tokens, rows, image and images)
    return states


def _one_rank() -> Any:
    return _ALONE


def step(model: Any, seed: int, tokens: int, padded: int, image: bool) -> list[float]:
    """Run a step as model runners do, and return the hidden states of its tokens, without those of the padding."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.zeros(padded, WIDTH)
    inputs[:tokens] = torch.randn(tokens, WIDTH, generator=random)
    if image:
        model._set_deepstack_input_embeds(torch.randn(LEVELS, tokens, WIDTH, generator=random))
    try:
        states: list[float] = serve(model, inputs, padded)[:tokens].flatten().tolist()
    except ValueError:  # up to 0.20.1 vLLM refuses more tokens than the image has, and the engine ends
        return [math.nan] * (tokens * WIDTH)
    return states


def serve(model: Any, inputs: torch.Tensor, tokens: int) -> torch.Tensor:
    """Call vLLM's model for *inputs*, (tokens, width)."""
    with torch.inference_mode():
        states: torch.Tensor = model.forward(None, torch.arange(tokens), inputs_embeds=inputs)
    return states


def _model(kind: Any, language_model: Any, config: VllmConfig) -> Any:
    """Return a model of vLLM's class *kind* around one of *language_model*, compiled or not as *config* says."""
    model = object.__new__(kind)
    torch.nn.Module.__init__(model)
    model.deepstack_num_level, model.deepstack_input_embeds_num_tokens = LEVELS, 0
    model.deepstack_input_embeds = [torch.zeros(MOST, WIDTH) for _ in range(LEVELS)]
    model.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=WIDTH))
    model.language_model = torch.nn.Module()
    model.language_model.model = _with_stand_ins(language_model)(vllm_config=config)
    return model


def _with_stand_ins(language_model: Any) -> Any:
    """Return a class with vLLM's `forward` of *language_model*, and stand-ins for its layers."""

    @support_torch_compile(dynamic_arg_dims={"positions": -1, "inputs_embeds": 0, "deepstack_input_embeds": 0})
    class WithStandIns(language_model):  # type: ignore[misc]
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            torch.nn.Module.__init__(self)
            self.layers = torch.nn.ModuleList(LayerStandIn() for _ in range(LAYERS))
            self.start_layer, self.end_layer, self.norm = 0, LAYERS, NormStandIn()

    return WithStandIns


class LayerStandIn(torch.nn.Module):
    """Stands in for a decoder layer."""

    def forward(
        self, positions: torch.Tensor, states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass on (tokens, width) and add it to the residual."""
        residual = states if residual is None else residual + states
        return torch.tanh(states), residual


class NormStandIn(torch.nn.Module):
    """Stands in for the last norm."""

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the residual."""
        return states + residual, residual
