"""encoder-input-norm: images as bytes, which Qwen2-VL and Qwen2.5-VL normalise on the device, in graphs of the encoder.

Real: vLLM's manager of such graphs, both models' functions for it, their encoders' `forward` and patch embedding, and
their `FusedInputNorm`. Stand-ins: the merger behind the encoder, and the tables of rotary embeddings. The encoders have
no blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.v1.worker import encoder_cudagraph

from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins
from vllm_graphfix.verify.double.scenarios.encoder_padding import captured, config_of
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement

install_image_processor_stand_ins()

from vllm.model_executor.models import qwen2_5_vl, qwen2_vl  # noqa: E402 - behind the stand-ins

MEAN, DEVIATION, SCALE = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), 1 / 255
"""Mean and deviation of each channel, and scale of a byte, from the configuration of such a checkpoint."""
PATCH, WIDTH = 2, 8
BUDGETS, IMAGES = (4, 8), 2
"""Tokens of the graphs, each of four patches, and images in one."""
STEPS = (
    ("image", [(1, 4, 4)]),
    ("image", [(1, 4, 8), (1, 4, 4)]),
    ("image", [(1, 8, 12)]),
    ("video", [(2, 4, 4)]),
)
"""Frames, and patches high and wide, of each image: 4 tokens, 8 and 4, 24 (more than any graph has), and 8."""


def run(*, trigger: bool = True) -> Measurement:
    """Encode images as bytes. Without *trigger*, they are normalised before the model gets them."""
    eager: list[float] = []
    graphed: list[float] = []
    with models_on_the_cpu():
        for model in (qwen2_vl_model(trigger), qwen2_5_vl_model(trigger)):
            manager = captured_manager(model)
            for number, (kind, grids) in enumerate(STEPS):
                inputs = images(kind, grids, number)
                eager += torch.cat(list(model.embed_multimodal(**inputs))).flatten().tolist()
                embeddings = manager.execute(inputs)
                # As both model runners do if the manager has no graph for the images.
                graphed += (
                    torch.cat(list(model.embed_multimodal(**inputs) if embeddings is None else embeddings))
                    .flatten()
                    .tolist()
                )
    return Measurement(
        f"embeddings of images and a video in {len(STEPS)} steps, two models, graphs for {BUDGETS[0]} and {BUDGETS[1]} "
        "tokens",
        tuple(eager),
        tuple(graphed),
        counted={"images-not-normalised": 2 * len(STEPS) if trigger else 0},
    )


@contextlib.contextmanager
def models_on_the_cpu() -> Iterator[None]:
    """Configure vLLM's layers for a CPU, and make graphs the double's, within the block."""
    with (
        cpu_cuda_graphs(),
        unpinned(),
        mock.patch.object(encoder_cudagraph, "current_stream", CPUStream, create=True),  # from 0.29 on
        set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))),
        torch.inference_mode(),
    ):
        yield


def captured_manager(model: Any) -> Any:
    """Return vLLM's manager of *model*, with captured graphs."""
    return captured(encoder_cudagraph.EncoderCudaGraphManager(_config(), torch.device("cpu"), torch.float32, model))


def _config() -> Any:
    config = config_of(BUDGETS, IMAGES)
    config.model_config.multimodal_config.get_limit_per_prompt = lambda _: 1
    config.compilation_config.encoder_cudagraph_max_frames_per_batch = 4
    return config


def images(kind: str, grids: list[tuple[int, int, int]], seed: int) -> dict[str, torch.Tensor]:
    """Return images or a video of *grids* as inputs of a model: bytes, (patches, channels x frames x pixels)."""
    patches = sum(frames * high * wide for frames, high, wide in grids)
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (patches, 3 * 2 * PATCH**2), generator=random, dtype=torch.uint8)
    name = "pixel_values" if kind == "image" else "pixel_values_videos"
    return {name: pixels, f"{kind}_grid_thw": torch.tensor(grids)}


def qwen2_vl_model(normalises: bool) -> Any:
    """Return vLLM's Qwen2-VL with what encodes images, and nothing else."""
    embed = qwen2_vl.Qwen2VisionPatchEmbed(patch_size=PATCH, temporal_patch_size=2, in_channels=3, embed_dim=WIDTH)
    tower = _bare(qwen2_vl.Qwen2VisionTransformer, embed)
    return _model(qwen2_vl.Qwen2VLForConditionalGeneration, tower, normalises)


def qwen2_5_vl_model(normalises: bool) -> Any:
    """Return vLLM's Qwen2.5-VL with what encodes images; its windows hold two by two tokens."""
    embed = qwen2_5_vl.Qwen2_5_VisionPatchEmbed(
        patch_size=PATCH, temporal_patch_size=2, in_channels=3, hidden_size=WIDTH
    )
    tower = _bare(qwen2_5_vl.Qwen2_5_VisionTransformer, embed)
    vars(tower).update(
        hidden_size=WIDTH,
        patch_size=PATCH,
        window_size=4 * PATCH,
        spatial_merge_unit=4,
        tp_size=1,
        fp8_padded_hidden_size=None,
        _rope_by_thw_cache={},
    )
    return _model(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, tower, normalises)


def _bare(kind: Any, embed: torch.nn.Module) -> Any:
    """Return an encoder with an embedding of patches and no blocks."""
    tower = _module(kind)
    with torch.no_grad():
        for number, weight in enumerate(embed.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) / 8)
    tower.patch_embed, tower.blocks, tower.merger = embed, torch.nn.ModuleList(), MergerStandIn()
    tower.rotary_pos_emb = SimpleNamespace(get_cos_sin=lambda size: (torch.zeros(size, 1), torch.zeros(size, 1)))
    tower.spatial_merge_size, tower.out_hidden_size, tower.attn_backend = 2, WIDTH, None
    return tower


def _model(kind: Any, tower: Any, normalises: bool) -> Any:
    model = _module(kind)
    model.visual, model.use_data_parallel, model.is_multimodal_pruning_enabled = tower, False, False
    norm = qwen2_vl.FusedInputNorm(MEAN, DEVIATION, SCALE) if normalises else qwen2_vl.FusedInputNorm.identity()
    model.input_norm = tower.input_norm = norm  # vLLM reads one or the other, from 0.30 on
    model.get_max_frames_per_video = lambda: 4
    model.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    return model


def _module(kind: Any) -> Any:
    """Return a module of class *kind* without what its `__init__` makes."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


class MergerStandIn(torch.nn.Module):
    """Stands in for the merger, which makes a token of four patches."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Merge (patches, …, width) to (tokens, width)."""
        return torch.tanh(states.reshape(-1, 4, WIDTH).sum(1))
