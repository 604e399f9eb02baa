"""A model in vLLM's own `CUDAGraphWrapper`, with its forward context and layer classes.

Stand-ins: the model, of a layer with a slot for each token and one with a state for each request; its metadata; the
configuration.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process

try:
    from vllm.model_executor.layers.attention.attention import Attention
except ImportError:  # before 0.16.0
    from vllm.attention.layer import Attention

WIDTH, CAPTURED, BLOCK, BLOCKS = 3, 4, 2, 12
LONGEST = 2048
EVERY_STEP = Rate(every=1)


@dataclasses.dataclass
class MetadataStandIn:
    """Attention metadata of one step: persistent buffers, and what a builder may make anew at each step."""

    state_indices_tensor: torch.Tensor
    scale: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int = 9
    max_query_len: int = 1
    lazy: Any = None
    """Set by the first forward pass that sees it, as FlashMLA's plan is."""


MetadataStandIn.__module__ = "vllm.stand_in"


class SlotsStandIn(Attention):  # type: ignore[misc]
    """Stands in for an attention layer: writes to its token's slot, and reads it back."""

    attn_backend = MLACommonBackend
    apart = 1e-6
    """By what part its results differ for each token of the number that it splits by."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.kv_cache = [torch.zeros(BLOCKS, BLOCK, WIDTH)]
        self.weight = torch.ones(1)
        self.splits_by: str | None = None
        """Its work, as FlashAttention 2 does by the longest request, and Triton's attention by the longest query."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        slots, flat = context.slot_mapping["layer.0"].clamp(min=0), self.kv_cache[0].view(-1, WIDTH)
        flat.index_copy_(0, slots, hidden)
        metadata = context.attn_metadata["layer.0"]
        metadata.lazy = metadata.lazy or "planned"
        if self.splits_by:
            hidden = hidden * (1 + self.apart * getattr(metadata, self.splits_by))  # rounds otherwise
        mixed: torch.Tensor = hidden + flat.index_select(0, slots) * metadata.scale * self.weight
        return mixed


class StateStandIn(MambaBase):  # type: ignore[misc]
    """Stands in for a Mamba layer: a state for each request, which every run of a step advances."""

    def __init__(self) -> None:
        self.kv_cache = (torch.zeros(BLOCKS, WIDTH),)

    get_state_shape = get_state_dtype = mamba_type = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = get_forward_context().attn_metadata["layer.1"].state_indices_tensor.clamp(min=0).long()
        state = self.kv_cache[0].index_select(0, rows) * 0.5 + hidden
        self.kv_cache[0].index_copy_(0, rows, state)
        return state


class ModelStandIn:
    def __init__(self) -> None:
        self.layers: dict[str, Any] = {"layer.0": SlotsStandIn(), "layer.1": StateStandIn()}
        self.eager_runs = 0
        self.least_block = torch.tensor(0)
        """The least block of the block table, in an eager run."""
        self.breaks_at: int | None = None
        self.breaks_eager: Exception | None = None
        self.random = False
        self.noise = 0.0
        self.odd_at: int | None = None
        self.held: Any = lambda: None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE:
            self.eager_runs += 1
            self.least_block = get_forward_context().attn_metadata["layer.0"].block_table.min()
            if self.eager_runs == self.breaks_at:
                raise RuntimeError("planted")
            if self.breaks_eager is not None:
                on_the_way = self.layers["layer.1"](hidden)  # it has come as far as that
                self.held = weakref.ref(on_the_way)
                raise self.breaks_eager
            if self.random:
                torch.rand(1)
            if self.eager_runs == self.odd_at:
                hidden = hidden * 1.5
            if self.noise:
                hidden = hidden * (1 + self.noise * (-1) ** self.eager_runs)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def _in_full_mode(model: ModelStandIn, config: Any) -> Any:
    return cuda_graph.CUDAGraphWrapper(model, config, CUDAGraphMode.FULL)


class Served:
    """A model in vLLM's wrapper, with the buffers of a model runner; one token a request."""

    def __init__(
        self,
        rate: Rate = EVERY_STEP,
        action: Action = Action.REPORT,
        *,
        stale: bool = False,
        splits_by: str | None = None,
        adapters: bool = False,
        pieces: bool = False,
        wrapped: Callable[[ModelStandIn, Any], Any] = _in_full_mode,
        **config: Any,
    ) -> None:
        process.start(rate, action, pieces=pieces)
        self.shadow: Any = process.SHADOW
        self.model, self.stale = ModelStandIn(), stale
        self.descriptor = BatchDescriptor(CAPTURED, has_lora=adapters)
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=self.model.layers, fast_moe_cold_start=False, static_all_moe_layers=[]
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(),
            use_cumem_cudagraph_pool=False,
        )
        vars(self.config).update(config)
        self.run = wrapped(self.model, self.config)
        self.hidden = torch.zeros(CAPTURED, WIDTH)
        self.slots = torch.full((CAPTURED,), -1)
        self.rows = torch.zeros(CAPTURED, dtype=torch.int32)
        self.scale = torch.ones(1)
        self.blocks = torch.zeros(CAPTURED, 2, dtype=torch.int32)
        self.generator = torch.Generator().manual_seed(0)
        self.metadata: dict[str, Any] = {}
        self.steps = 0
        self.model.layers["layer.0"].splits_by = splits_by
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
            self.forward(mode, LONGEST, CAPTURED)  # a warm-up, and the capture
        for layer in self.model.layers.values():
            layer.kv_cache[0].zero_()
        self.model.eager_runs = 0
        if self.shadow:
            self.shadow.schedule.count, self.shadow.schedule.due = 0, 1

    def step(self, requests: int = 3, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> torch.Tensor:
        """The output of *requests* real rows."""
        self.steps += 1
        self.hidden[:requests] = torch.randn(requests, WIDTH, generator=self.generator)
        self.hidden[requests:] = float("nan")  # what a row of padding holds is nobody's business
        self.slots.fill_(-1)[:requests] = torch.arange(requests) * 4 + 4 + self.steps % 4
        self.rows.fill_(0)[:requests] = torch.arange(1, 1 + requests)
        self.blocks.fill_(-1)[:requests] = 1
        if self.stale:
            self.scale = torch.full((1,), 1.0 + self.steps)  # a new tensor, of which the graph does not know
        else:
            self.scale.fill_(1.0 + self.steps)
        return self.forward(mode)[:requests].clone()

    def forward(self, mode: CUDAGraphMode, longest: int = 9, query: int = 1) -> torch.Tensor:
        """*longest*: tokens of the longest request; *query*: of the longest query."""
        shared = MetadataStandIn(self.rows, self.scale, self.blocks, longest, query)
        self.metadata = dict.fromkeys(self.model.layers, shared)
        self.context = create_forward_context(
            self.metadata,
            self.config,
            cudagraph_runtime_mode=mode,
            batch_descriptor=self.descriptor,
            slot_mapping=dict.fromkeys(self.model.layers, self.slots),
        )
        with override_forward_context(self.context):
            output: torch.Tensor = self.run(self.hidden)
        return output

    def caches(self) -> list[torch.Tensor]:
        """Less the null block, where padding writes."""
        return [layer.kv_cache[0][1:].clone() for layer in self.model.layers.values()]
