"""image-embeddings: images on model runner V2, in a model that torch.compile traced in a dummy batch.

Real: V2's `_dummy_run` and `execute_model`, its dummy batch and its buffer of embeddings, Qwen2-VL's `forward` and the
place where it puts embeddings of images, Qwen2's `forward`, and vLLM's way of compiling it, which traces it once and
drops its guards. Stand-ins: the layers, the norm and the token embeddings, the batch of a real step, the encoder, and
managers of graphs and of KV connectors. Dynamo's graph runs as it is, without Inductor, and without CUDA graphs, which
play no part in this defect.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.models import qwen2
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins
from vllm_graphfix.verify.double.scenarios.deepstack_features import LayerStandIn, NormStandIn
from vllm_graphfix.verify.measurement import Measurement

install_image_processor_stand_ins()

from vllm.model_executor.models import qwen2_vl  # noqa: E402 - behind the stand-ins

WIDTH, LAYERS, VOCABULARY = 4, 2, 32
MOST = 16
"""Tokens of the profiling run, as many as a batch may have."""
STEPS = ((6, range(1, 5)), (4, range(0)), (5, range(5)))
"""Tokens of each step, and which of them are placeholders of an image."""
PLACEHOLDER = 3
_CPU = torch.device("cpu")
_NO_CACHE = {"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_AOT_COMPILE": "0"}
_ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True)


def run(*, trigger: bool = True) -> Measurement:
    """Serve steps with images and without, after a profiling run. Without *trigger*, the model takes no images."""
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, _NO_CACHE | {"VLLM_CACHE_ROOT": cache}):
        eager, compiled = (
            hidden_states(
                CompilationConfig(mode=mode, backend="eager", cudagraph_mode=CUDAGraphMode.NONE), images=trigger
            )
            for mode in (CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE)
        )
    images = sum(bool(image) for _, image in STEPS) if trigger else 0
    return Measurement(
        f"hidden states of {len(STEPS)} steps on model runner V2, {images} of them with an image",
        tuple(eager),
        tuple(compiled),
        counted={"compiled-without-embeddings": int(trigger)},
    )


def hidden_states(compilation: CompilationConfig, *, images: bool = True) -> list[float]:
    """Return the hidden states of all steps, of a model that is compiled as *compilation* says."""
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=compilation)
    with (
        mock.patch.object(qwen2, "get_pp_group", _one_rank),
        mock.patch.object(model_runner, "set_forward_context", return_value=nullcontext()),
        set_current_vllm_config(config),
        torch.inference_mode(),
    ):
        served = runner(config, images=images)
        served._dummy_run(MOST)
        return [
            number
            for seed, (tokens, image) in enumerate(STEPS)
            for number in step(served, seed, tokens, image if images else range(0))
        ]


def step(served: Any, seed: int, tokens: int, image: range) -> list[float]:
    """Run a step in which the tokens of *image* are placeholders of one, and return the hidden states of all."""
    random = torch.Generator().manual_seed(seed)
    is_image = torch.zeros(tokens, dtype=torch.bool)
    is_image[image.start : image.stop] = True
    ids = torch.randint(PLACEHOLDER + 1, VOCABULARY, (tokens,), generator=random)
    embeddings = torch.randn(len(image), WIDTH, generator=random)

    def prepare_inputs(*_: Any) -> InputBatch:
        batch = _dummy(served, tokens)
        batch.input_ids.copy_(ids.masked_fill(is_image, PLACEHOLDER))
        return batch

    served.prepare_inputs = prepare_inputs
    served.get_mm_embeddings = lambda *_: ([embeddings] if image else [], is_image)
    served.execute_model(
        SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens={"0": tokens}, scheduled_encoder_inputs={}
        )
    )
    states: list[float] = served.execute_model_state[0].flatten().tolist()
    return states


def _dummy(served: Any, tokens: int) -> InputBatch:
    batch: InputBatch = InputBatch.make_dummy(
        num_reqs=1, num_tokens=tokens, input_buffers=served.input_buffers, device=_CPU
    )
    return batch


def runner(config: VllmConfig, *, images: bool) -> Any:
    """Return a runner of vLLM's class with a model that takes *images* or does not, in vLLM's current config."""
    made = object.__new__(model_runner.GPUModelRunner)
    made.vllm_config, made.parallel_config, made.device, made.max_num_reqs = config, config.parallel_config, _CPU, 4
    made.lora_config, made.uses_mrope, made.supports_mm_inputs = None, False, images
    made.input_buffers = SimpleNamespace(
        **{name: torch.zeros(MOST, dtype=torch.int32) for name in ("input_ids", "positions", "seq_lens")},
        query_start_loc=torch.zeros(MOST + 1, dtype=torch.int32),
    )
    if images:
        made.encoder_runner = object.__new__(EncoderRunner)
        made.encoder_runner.inputs_embeds = torch.zeros(MOST, WIDTH)
    made.cudagraph_manager = SimpleNamespace(get_cudagraph_size=lambda *_: None)
    made.kv_connector, made.block_tables = mock.MagicMock(), mock.MagicMock()
    for name in ("finish_requests", "free_states", "add_requests", "update_requests"):
        setattr(made, name, lambda _: None)
    made.model = _model(config)
    return made


def _one_rank() -> Any:
    return _ALONE


def _model(config: VllmConfig) -> Any:
    """Return a Qwen2-VL around a language model of stand-ins, which is compiled or not as *config* says."""
    model: Any = object.__new__(qwen2_vl.Qwen2VLForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.language_model = torch.nn.Module()
    model.language_model.model = _language_model()(vllm_config=config)
    model.language_model.embed_input_ids = model.language_model.model.embed_input_ids
    model.get_language_model = lambda: model.language_model
    return model


def _language_model() -> Any:
    """Return a class with Qwen2's `forward` and its way to embed tokens, and stand-ins for what these call."""

    @support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
    class LanguageModel(qwen2.Qwen2Model):  # type: ignore[misc]
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            torch.nn.Module.__init__(self)
            self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
            random = torch.Generator().manual_seed(VOCABULARY)
            self.embed_tokens.weight.data = torch.randn(VOCABULARY, WIDTH, generator=random)
            self.layers = torch.nn.ModuleList(LayerStandIn() for _ in range(LAYERS))
            self.start_layer, self.end_layer, self.norm, self.aux_hidden_state_layers = 0, LAYERS, NormStandIn(), ()

    return LanguageModel
