"""encoder-padding: images in graphs of an encoder for more tokens than they have.

Real: vLLM's manager of such graphs, and the function behind its operator of FlashAttention, which is called directly:
the double would record the operator as a whole. Stand-ins: the encoder, of two layers of attention, and the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.ops import vit_attn_wrappers
from vllm.v1.worker import encoder_cudagraph, encoder_cudagraph_defs

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

HEADS, WIDTH, LAYERS = 2, 4, 2
HIDDEN = HEADS * WIDTH
BUDGETS, IMAGES = (4, 8), 2
"""Tokens of the graphs, and images in one."""
BATCHES = ((3,), (4, 1), (2, 1))
FULL = ((4,), (5, 3), (8,))
"""Tokens of each image, one call a batch: the manager would split a larger call itself."""


def run(*, trigger: bool = True) -> Measurement:
    """Encode batches smaller than their graphs. Without *trigger*, every batch fills its graph."""
    steps = BATCHES if trigger else FULL
    with cpu_cuda_graphs(), ExitStack() as stack:
        for owner, name, value in (
            (fa_utils, "flash_attn_varlen_func", kernel_stand_in),
            (type(current_platform), "is_cuda", lambda *_: True),
            (encoder_cudagraph, "current_stream", CPUStream),  # from 0.29 on
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        encoder: Any = EncoderStandIn()
        images = [images_of(number, lengths) for number, lengths in enumerate(steps)]
        eager = [encoder.encoder_eager_forward(each) for each in images]
        config = config_of(BUDGETS, IMAGES)
        made = encoder_cudagraph.EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, encoder)
        manager = captured(made)
        graphed = [torch.cat(manager.execute(each)) for each in images]
    return Measurement(
        f"embeddings of images in {len(steps)} batches, graphs for {BUDGETS[0]} and {BUDGETS[1]} tokens",
        tuple(torch.cat(eager).flatten().tolist()),
        tuple(torch.cat(graphed).flatten().tolist()),
        counted={"padded-encoder-graph": len(steps) if trigger else 0},
    )


def images_of(number: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return images of *lengths* tokens as inputs of a model, the smallest first, as the manager sorts them."""
    pixels = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(number))
    return {"pixel_values": pixels, "lengths": sorted(lengths)}


def config_of(budgets: Sequence[int], images: int) -> Any:
    """Return the parts of a VllmConfig that a manager reads, for graphs of *budgets* tokens and *images* images."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            encoder_cudagraph_token_budgets=list(budgets),
            encoder_cudagraph_max_vision_items_per_batch=images,
            encoder_cudagraph_max_frames_per_batch=None,
        ),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(get_limit_per_prompt=lambda _: 0, mm_encoder_tp_mode="weights")
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def captured(manager: Any) -> Any:
    """Capture all graphs of vLLM's *manager*, and return it."""
    manager.capture(**supported_kwargs(manager.capture, {"graph_pool": torch.cuda.graph_pool_handle()}))
    return manager


class EncoderStandIn:
    """Stands in for an encoder of images, with the methods that vLLM calls in any release.

    Layers attend within each image. There is one token of output for each token of input.
    """

    hidden = HIDDEN
    postprocess_encoder_output = getattr(SupportsEncoderCudaGraph, "postprocess_encoder_output", None)
    """vLLM's own, from 0.22 on."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.layers = torch.randn(LAYERS, 4, HIDDEN, HIDDEN, generator=random) / HIDDEN**0.5

    def encoder_cudagraph_forward(
        self, values: dict[str, Any], buffers: dict[str, Any] | None = None, **_: Any
    ) -> torch.Tensor:
        inputs = {**values, **(buffers or {})}
        states: torch.Tensor = inputs["pixel_values"]
        for query, key, value, output in self.layers:
            q, k, v = ((states @ weight).view(1, -1, HEADS, WIDTH) for weight in (query, key, value))
            attended = vit_attn_wrappers.flash_attn_maxseqlen_wrapper(
                q, k, v, batch_size=1, is_rocm_aiter=False, fa_version=3, cu_seqlens=inputs["cu_seqlens"]
            )
            states = states + torch.tanh(attended.flatten(2)[0] @ output)
        return states

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], **_: Any) -> torch.Tensor:
        return self.encoder_cudagraph_forward(mm_kwargs, {"cu_seqlens": _starts(mm_kwargs["lengths"])})

    def get_encoder_cudagraph_config(self) -> Any:
        made = encoder_cudagraph_defs.EncoderCudaGraphConfig
        values = {
            "modalities": ["image"],
            "input_key_by_modality": {"image": "pixel_values"},
            "buffer_keys": ["pixel_values", "cu_seqlens"],
            "out_hidden_size": self.hidden,
        }
        return made(**supported_kwargs(made, values))

    def prepare_encoder_cudagraph_capture_inputs(self, token_budget: int, max_batch_size: int, *_: Any) -> Any:
        """Return one image that fills the graph."""
        return _prepared(
            encoder_cudagraph_defs.EncoderCudaGraphCaptureInputs,
            {"pixel_values": torch.zeros(token_budget, self.hidden)},
            _starts([token_budget], max_batch_size),
        )

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: dict[str, Any], max_batch_size: int, *_: Any) -> Any:
        return _prepared(
            encoder_cudagraph_defs.EncoderCudaGraphReplayBuffers,
            {"pixel_values": mm_kwargs["pixel_values"]},
            _starts(mm_kwargs["lengths"], max_batch_size),
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return "image"

    def get_encoder_cudagraph_num_items(self, mm_kwargs: dict[str, Any]) -> int:
        return len(mm_kwargs["lengths"])

    def get_encoder_cudagraph_per_item_output_tokens(self, mm_kwargs: dict[str, Any]) -> list[int]:
        lengths: list[int] = mm_kwargs["lengths"]
        return lengths

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        made = encoder_cudagraph_defs.EncoderItemSpec
        return [made(input_size=length, output_tokens=length) for length in mm_kwargs["lengths"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        parts = mm_kwargs["pixel_values"].split(mm_kwargs["lengths"])
        return {
            "pixel_values": torch.cat([parts[index] for index in indices]),
            "lengths": [mm_kwargs["lengths"][index] for index in indices],
        }


def _starts(lengths: list[int], most: int = 0) -> torch.Tensor:
    """Return the first token of each image, and the end of the last one: (images + 1,) int32.

    Padded to *most* images with empty ones, as by vLLM's models.
    """
    padded = lengths + [0] * (most - len(lengths))
    return torch.tensor([0, *padded]).cumsum(0, dtype=torch.int32)


def _prepared(made: Any, pixels: dict[str, torch.Tensor], starts: torch.Tensor) -> Any:
    """Return a *made* of inputs and further buffers: together, or apart up to 0.22."""
    if "values" in made.__dataclass_fields__:
        return made(values={**pixels, "cu_seqlens": starts})
    return made(**supported_kwargs(made, {"mm_kwargs": pixels, "buffers": {"cu_seqlens": starts}}))


def kernel_stand_in(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: torch.Tensor, softmax_scale: Any = None, out: Any = None, **_: Any
) -> torch.Tensor:
    out = torch.empty_like(q) if out is None else out
    operation, _library = _attention_stand_in()
    operation(q, k, v, cu_seqlens_q, out)
    attended: torch.Tensor = out
    return attended


@functools.cache
def _attention_stand_in() -> tuple[Any, object]:
    """Define attention within each image as an operation, which writes the rows of images alone.

    It assumes, as upstream's report supports, that a kernel of FlashAttention 3 or 4 multiplies whole tiles of values
    and gives those behind the end of an image the weight 0: 0 times NaN is NaN. Here a tile holds all rows to the end.
    """
    library = torch.library.Library("vllm_graphfix_encoder", "FRAGMENT")
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor(a!) out) -> ()")

    def kernel(q: Any, k: Any, v: Any, starts: Any, out: Any) -> None:
        bounds = starts.tolist()
        for first, last in pairwise(bounds):
            scores = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last]) / WIDTH**0.5
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:last])
            out[first:last] = attended + 0.0 * v[last:].sum(0)

    library.impl("attend", kernel, "CPU")
    library.impl("attend", lambda *_: None, "Meta")
    return torch.ops.vllm_graphfix_encoder.attend, library  # the operation ends with its library
