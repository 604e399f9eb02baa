"""encoder-adapters: images of requests with LoRA adapters, in graphs of an encoder.

Real: vLLM's manager of such graphs, both model runners up to the embeddings of a step's images, the selection of
adapters, and the Punica wrappers with their kernels and metadata. Stand-ins: the encoder (a tower and a connector of
one layer with adapters each), the kernels' launcher, and loaded adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper import punica_gpu
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.models import interfaces
from vllm.multimodal import inputs
from vllm.v1.worker import encoder_cudagraph
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.active_lora_count import keep_numbers_on_the_host, lora_on_the_cpu
from vllm_graphfix.verify.double.scenarios.encoder_padding import EncoderStandIn, captured, config_of
from vllm_graphfix.verify.measurement import Measurement

ADAPTERS = 2
BUDGET, IMAGES = 8, 2
"""Tokens of the graph, and images in one."""
HIDDEN, RANK = 16, 16
CPU = torch.device("cpu")
STEPS = (((5, 1), (3, 2)), ((3, 0), (4, 1), (1, 2)), ((4, 2), (2, 0)), ((2, 0), (6, 0)))
"""Tokens and adapter of each image, 0 for none, in the order of the schedule. No step has more tokens than the graph:
beyond it, the adapters' kernels would read and write memory of others."""
WITH_ADAPTERS = 3
CONNECTED = "connector"


def run(*, trigger: bool = True) -> Measurement:
    """Encode images with adapters. Without *trigger*, no image has one."""
    eager: list[float] = []
    graphed: list[float] = []
    kinds = runners()
    for kind in kinds:
        eager += _serve(kind, trigger, graphs=False)
        graphed += _serve(kind, trigger, graphs=True)
    return Measurement(
        f"embeddings of 2 or 3 images in {len(STEPS)} steps, {ADAPTERS} adapters, a graph for {BUDGET} tokens",
        tuple(eager),
        tuple(graphed),
        counted={"encoder-graph-with-adapters": WITH_ADAPTERS * len(kinds) if trigger else 0},
    )


def runners() -> list[Any]:
    """Return the model runners of this vLLM that have graphs of encoders."""
    kinds: list[Any] = [RunnerV1]
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    return [*kinds, RunnerV2] if hasattr(EncoderRunner, "has_cudagraph") else kinds


def _serve(kind: Any, trigger: bool, *, graphs: bool) -> list[float]:
    """Return the embeddings of all images, step by step."""
    numbers: list[float] = []
    with encoders_on_the_cpu():
        runner = kind(EncoderWithAdapters(), graphs=graphs)
        random = torch.Generator().manual_seed(1)
        for step in STEPS:
            images = [(image(length, random), adapter if trigger else 0) for length, adapter in step]
            numbers += torch.cat(runner.encode(images)).flatten().tolist()
    return numbers


@contextlib.contextmanager
def encoders_on_the_cpu() -> Iterator[None]:
    """Let vLLM make graphs of the encoder, the double's, and run kernels of adapters on the CPU, within the block."""
    asking: list[Any] = [interfaces]
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.model_states import interface

        asking.append(interface)
    with lora_on_the_cpu(), cpu_cuda_graphs(), contextlib.ExitStack() as stack:
        for module in asking:
            if hasattr(module, "supports_encoder_cudagraph"):
                stack.enter_context(mock.patch.object(module, "supports_encoder_cudagraph", return_value=True))
        # From 0.29 on.
        stack.enter_context(mock.patch.object(encoder_cudagraph, "current_stream", CPUStream, create=True))
        yield


def image(length: int, random: torch.Generator) -> inputs.MultiModalFeatureSpec:
    """Return an image of *length* tokens as a multi-modal feature of a request."""
    pixels = torch.randn(length, HIDDEN, generator=random).bfloat16()
    flat, batched = inputs.MultiModalFlatField(slices=[slice(length)]), inputs.MultiModalBatchedField()
    item = inputs.MultiModalKwargsItem(
        {
            "pixel_values": inputs.MultiModalFieldElem(data=pixels, field=flat),
            "lengths": inputs.MultiModalFieldElem(data=length, field=batched),
        }
    )
    place = inputs.PlaceholderRange(offset=0, length=length)
    return inputs.MultiModalFeatureSpec(data=item, modality="image", identifier=f"{id(pixels)}", mm_position=place)


class RunnerV1:
    """Model runner V1 with what encodes the images of a step, and nothing else."""

    def __init__(self, model: EncoderWithAdapters, *, graphs: bool) -> None:
        config = _config(model, graphs)
        self._runner: Any = object.__new__(GPUModelRunner)
        vars(self._runner).update(
            model=model,
            get_model=lambda: model,
            vllm_config=config,
            compilation_config=config.compilation_config,
            lora_config=model.config,
            lora_manager=model.worker,
            supports_mm_inputs=True,
            encoder_cache={},
            device=CPU,
            dtype=torch.bfloat16,
            pin_memory=False,
            observability_config=None,
            is_multimodal_pruning_enabled=False,
            requires_sequential_video_encoding=False,
            maybe_save_ec_to_connector=lambda *_: None,
        )
        self.manager = self._made(config, model, graphs)
        self._runner.encoder_cudagraph_manager = self.manager and captured(self.manager)

    def _made(self, config: Any, model: Any, graphs: bool) -> Any:
        """Return the model runner's manager of graphs; up to 0.22.1 it makes that in the middle of a capture."""
        if hasattr(self._runner, "_create_encoder_cudagraph_manager"):
            return self._runner._create_encoder_cudagraph_manager()
        return encoder_cudagraph.EncoderCudaGraphManager(config, CPU, torch.bfloat16, model) if graphs else None

    def encode(self, images: list[tuple[inputs.MultiModalFeatureSpec, int]]) -> list[torch.Tensor]:
        """Return the embeddings of *images*, each with its adapter and in a request of its own."""
        names = [f"{row}" for row in range(len(images))]
        self._runner.requests = {
            name: SimpleNamespace(mm_features=[image]) for name, (image, _) in zip(names, images, strict=True)
        }
        self._runner.input_batch = SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(names)},
            request_lora_mapping=np.array([adapter for _, adapter in images]),
            lora_id_to_lora_request={},
        )
        scheduled = SimpleNamespace(
            scheduled_encoder_inputs={name: [0] for name in names},
            ec_manager_metadata=None,
            free_encoder_mm_hashes=[],
        )
        embeddings: list[torch.Tensor] = self._runner._execute_mm_encoder(scheduled)
        return embeddings


class RunnerV2:
    """Model runner V2's calls that encode the images of a step, in its order, from 0.28.0 on."""

    def __init__(self, model: EncoderWithAdapters, *, graphs: bool) -> None:
        from vllm.v1.worker.gpu.model_states.interface import ModelState

        self._model = model
        self._cache: Any = SimpleNamespace(mm_features={}, encoder_outputs={})
        state: Any = SimpleNamespace()
        ModelState.__init__(state, _config(model, graphs), model, self._cache, CPU)
        self._runner: Any = state.encoder_runner
        self.manager = self._runner.cudagraph_manager and captured(self._runner.cudagraph_manager)

    def encode(self, images: list[tuple[inputs.MultiModalFeatureSpec, int]]) -> list[torch.Tensor]:
        """Return the embeddings of *images*, each with its adapter and in a request of its own."""
        from vllm.v1.worker.gpu.mm.lora import set_active_mm_loras

        names = [f"{row}" for row in range(len(images))]
        scheduled = {name: [0] for name in names}
        self._cache.mm_features = {name: [image] for name, (image, _) in zip(names, images, strict=True)}
        set_active_mm_loras(
            model=self._model,
            lora_manager=self._model.worker,
            encoder_cache=self._cache,
            req_id_to_index={name: row for row, name in enumerate(names)},
            lora_state=SimpleNamespace(lora_ids=np.array([adapter for _, adapter in images]), lora_requests={}),
            scheduled_encoder_inputs=scheduled,
        )
        _, mm_inputs = self._runner.prepare_mm_inputs(scheduled)
        embeddings: list[torch.Tensor] = self._runner.execute_mm_encoder(mm_inputs)
        return embeddings


def _config(model: EncoderWithAdapters, graphs: bool) -> Any:
    """Return the parts of a VllmConfig that model runners and the manager read."""
    config = config_of((BUDGET,), IMAGES)
    config.compilation_config.cudagraph_mm_encoder = graphs
    vars(config.model_config).update(
        enforce_eager=False, max_model_len=BUDGET, dtype=torch.bfloat16, get_inputs_embeds_size=lambda: HIDDEN
    )
    config.scheduler_config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=4 * BUDGET)
    config.lora_config, config.observability_config = model.config, None
    return config


def _worker(adapters: Any) -> Any:
    """Return vLLM's manager of a worker's adapters, which passes a step's adapters to *adapters* and loads none."""
    worker: Any = object.__new__(WorkerLoRAManager)
    vars(worker).update(_adapter_manager=adapters, _apply_adapters=lambda _: None)
    return worker


class EncoderWithAdapters(EncoderStandIn):
    """Stands in for an encoder: a tower and a connector of one linear layer each, under vLLM's Punica wrappers."""

    hidden = HIDDEN

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        half = partial(torch.randn, generator=random, dtype=torch.bfloat16)
        self.config = SimpleNamespace(
            max_loras=ADAPTERS, specialize_active_lora=False, max_lora_rank=RANK, enable_tower_connector_lora=True
        )
        self._parts = {"tower": _wrapper(self.config), CONNECTED: _wrapper(self.config)}
        self._weights = {
            name: (
                half(HIDDEN, HIDDEN) / HIDDEN**0.5,
                half(ADAPTERS, 1, RANK, HIDDEN) / HIDDEN**0.5,
                half(ADAPTERS, 1, HIDDEN, RANK) / RANK**0.5,
            )
            for name in self._parts
        }
        self.lora_manager: Any = object.__new__(LoRAModelManager)
        vars(self.lora_manager).update(
            supports_mm=True,
            supports_tower_connector_lora=True,
            mm_mapping=self.get_mm_mapping(),
            punica_wrapper_mapping=self._parts,
            lora_config=self.config,
            lora_index_to_id=list(range(1, ADAPTERS + 1)),
            vocab_size=8,
            _last_mapping=None,
            _last_slot_layout=None,
            _classification_head=None,
            _get_punica_wrapper=self._parts.get,
        )
        self.worker = _worker(self.lora_manager)

    def get_mm_mapping(self) -> Any:
        return SimpleNamespace(language_model=["language_model"], tower_model=["tower"], connector=[CONNECTED])

    def get_num_mm_encoder_tokens(self, count: int) -> int:
        return count

    get_num_mm_connector_tokens = get_num_mm_encoder_tokens

    def get_mm_lora_token_counts(self, *, num_mm_embeds: int, **_: Any) -> tuple[int, int]:
        return num_mm_embeds, num_mm_embeds

    def encoder_cudagraph_forward(
        self, values: dict[str, Any], buffers: dict[str, Any] | None = None, **_: Any
    ) -> torch.Tensor:
        states: torch.Tensor = values["pixel_values"].to(torch.bfloat16)
        for name, (weight, shrink, expand) in self._weights.items():
            output = states @ weight
            self._parts[name].add_lora_linear(output, states, (shrink,), (expand,), 1.0, (HIDDEN,))
            states = torch.tanh(output)
        return states

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self.encoder_eager_forward(mm_kwargs).split(mm_kwargs["lengths"]))


def _wrapper(config: Any) -> Any:
    """Return vLLM's Punica wrapper for one part of the model."""
    punica: Any = punica_gpu.PunicaWrapperGPU(4 * BUDGET, IMAGES, CPU, lora_config=config)
    keep_numbers_on_the_host(punica)
    return punica
