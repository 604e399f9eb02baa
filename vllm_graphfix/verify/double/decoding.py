"""A decode step of vLLM's model runner V2 with the fewest parts.

Real: metadata builder and attention implementation of FlashMLA, forward context, input buffers, block tables, model
state, configuration of compilation. Stand-ins: the model (random weights, random KV cache), the rest of the
configuration. Install the FlashMLA stand-ins before importing this module: vLLM looks for the kernels on import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLAImpl,
    FlashMLAMetadata,
    FlashMLAMetadataBuilder,
)
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG
from vllm_graphfix.verify.measurement import Measurement

try:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
except ImportError:  # before 0.17 the model runner calls build_attn_metadata itself
    DefaultModelState = None

DEVICE = torch.device("cpu")
MAX_REQUESTS, MAX_TOKENS, MAX_LENGTH, BLOCK_SIZE = 4, 16, 64, 4
HEADS, HEAD_WIDTH, VALUE_WIDTH, HIDDEN, VOCABULARY = 2, 8, 6, 8, 32


@dataclass(frozen=True)
class Step:
    """One decode step of *query_tokens* tokens a request, after which the KV cache holds *lengths* tokens of each."""

    lengths: tuple[int, ...]
    query_tokens: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.lengths) * self.query_tokens


class AttentionStandIn(torch.nn.Module):
    """An MLA attention layer in decode: vLLM's FlashMLAImpl between random projections, on a full random KV cache."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.query = torch.randn(HIDDEN, HEADS * HEAD_WIDTH)
        self.output = torch.randn(HEADS * VALUE_WIDTH, HIDDEN) / 4
        self.kv_cache = torch.randn(MAX_REQUESTS * MAX_LENGTH // BLOCK_SIZE, BLOCK_SIZE, HEAD_WIDTH)
        implementation: Any = object.__new__(FlashMLAImpl)
        implementation.kv_cache_dtype, implementation.kv_lora_rank, implementation.scale = "auto", VALUE_WIDTH, 0.5
        decode = getattr(implementation, "forward_mqa", None)  # called _forward_decode before 0.16
        self.decode: Callable[..., Any] = decode or implementation._forward_decode

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # as vLLM's layers do where attention is left out of a capture
            return torch.zeros_like(hidden_states)
        query = (hidden_states @ self.query).view(-1, HEADS, HEAD_WIDTH)
        attended, _ = self.decode(query, self.kv_cache, metadata[self.name], self)
        return torch.tanh(attended.flatten(1) @ self.output)


def attention_without_a_plan() -> AbstractContextManager[object]:
    """Make layers read no metadata within the block, so that no plan is made when one is needed first."""
    return mock.patch.object(AttentionStandIn, "forward", lambda self, hidden_states: hidden_states.tanh())


class ModelStandIn(torch.nn.Module):
    """Embeds tokens and positions, and attends once in each layer. Equal names and `seed` give equal weights."""

    def __init__(self, layer_names: Sequence[str], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.embedding = torch.randn(VOCABULARY, HIDDEN)
            self.layers = torch.nn.ModuleList(AttentionStandIn(name) for name in layer_names)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        intermediate_tensors: None = None,
    ) -> torch.Tensor:
        states = self.embedding[input_ids.long()] + positions[:, None] / MAX_LENGTH
        if hidden_states is not None:
            states = states + hidden_states
        for layer in self.layers:
            states = states + layer(states)
        return states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.embedding.T


def configuration(mode: CUDAGraphMode, sizes: Sequence[int], speculative_tokens: int = 0) -> Any:
    """Return the part of a VllmConfig that captures read, with capture *sizes* in tokens."""
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=list(sizes))
    compilation.max_cudagraph_capture_size = max(sizes)
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        # MLA metadata accepts the widths of its models only; the stand-in kernels take any, and get a smaller one
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, get_head_size=lambda: 576),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, tensor_parallel_size=1, is_moe_model=False, use_sequence_parallel_moe=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK_SIZE),
        kernel_config=KERNEL_CONFIG,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=speculative_tokens, uses_dynamic_speculative_decoding=lambda: False
        )
        if speculative_tokens
        else None,
    )


class RunnerStandIn:
    """Stands in for vLLM's GPUModelRunner (V2): persistent buffers, and the metadata built before a step."""

    def __init__(self, config: Any, layer_names: Sequence[str]) -> None:
        self.config, self.layer_names = config, list(layer_names)
        self.input_buffers = InputBuffers(max_num_reqs=MAX_REQUESTS, max_num_tokens=MAX_TOKENS, device=DEVICE)
        self.block_tables = _block_tables()
        self.builder = flashmla_builder(config)
        spec = SimpleNamespace(block_size=BLOCK_SIZE)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=self.layer_names, kv_cache_spec=spec)]
        )
        group = AttentionGroup(FlashMLABackend, self.layer_names, spec, 0)
        group.metadata_builders = [self.builder]
        self.attn_groups = [[group]]
        self.model_state: Any = None
        if DefaultModelState is not None:
            self.model_state = object.__new__(DefaultModelState)
            vars(self.model_state).update(
                max_model_len=MAX_LENGTH, supports_mm_inputs=False, uses_mrope=False, rope_state=None
            )

    def capture_inputs(self) -> dict[str, Any]:
        """Return what the model runner passes to a capture, by parameter name."""
        inputs = {
            "input_buffers": self.input_buffers,
            "block_tables": self.block_tables,
            "kv_cache_config": self.kv_cache_config,
        }
        if self.model_state is None:
            return inputs | {"attn_metadata_builders": [self.builder]}
        return inputs | {"model_state": self.model_state, "attn_groups": self.attn_groups}

    def prepare(self, step: Step, padded_requests: int | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Write the step's inputs into the persistent buffers, padded if for a full graph, and build the metadata.

        Returns the attention metadata and the slot mapping of each layer.
        """
        requests, buffers = len(step.lengths), self.input_buffers
        padded = padded_requests or requests
        extra = (DEVICE,) if "device" in inspect.signature(InputBatch.make_dummy).parameters else ()
        batch = InputBatch.make_dummy(requests, step.num_tokens, buffers, *extra)
        buffers.seq_lens[:requests] = torch.tensor(step.lengths)
        ends = torch.tensor(step.lengths).repeat_interleave(step.query_tokens)
        buffers.positions[: step.num_tokens] = ends
        buffers.input_ids[: step.num_tokens] = (7 * ends + 3 * torch.arange(step.num_tokens)) % VOCABULARY
        for table in self.block_tables.input_block_tables:
            table[:] = torch.arange(table.numel()).view_as(table)
        batch.seq_lens = buffers.seq_lens[:padded]
        batch.query_start_loc = buffers.query_start_loc[: padded + 1]
        batch.query_start_loc_np = batch.query_start_loc.numpy().copy()
        batch.num_reqs_after_padding = padded
        batch.num_tokens_after_padding = padded * step.query_tokens
        batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
        tables = tuple(table[:padded] for table in self.block_tables.input_block_tables)
        slots = self.block_tables.slot_mappings[:, : batch.num_tokens_after_padding]
        by_layer = attn_utils.build_slot_mappings_by_layer(slots, self.kv_cache_config)
        if self.model_state is None:
            metadata = attn_utils.build_attn_metadata(
                [self.builder],
                padded,
                batch.num_tokens_after_padding,
                batch.query_start_loc,
                torch.from_numpy(batch.query_start_loc_np),
                buffers.seq_lens,
                MAX_LENGTH,
                tables,
                slots,
                self.kv_cache_config,
            )
        else:
            full = CUDAGraphMode.FULL if padded_requests else CUDAGraphMode.NONE
            mode = (full,) if "cudagraph_mode" in inspect.signature(self.model_state.prepare_attn).parameters else ()
            metadata = self.model_state.prepare_attn(
                batch, *mode, tables, slots, self.attn_groups, self.kv_cache_config
            )
        return metadata, by_layer

    @torch.inference_mode()
    def run_eagerly(self, model: ModelStandIn, step: Step) -> torch.Tensor:
        """Return the model's output (tokens, hidden) without graphs."""
        metadata, slots = self.prepare(step)
        return self.forward(model, step.num_tokens, metadata, slots)

    def forward(
        self, model: ModelStandIn, num_tokens: int, metadata: Any, slot_mapping: Any, **model_inputs: torch.Tensor
    ) -> torch.Tensor:
        with set_forward_context(metadata, self.config, num_tokens=num_tokens, slot_mapping=slot_mapping):
            output: torch.Tensor = model(**self.model_inputs(num_tokens), **model_inputs)
        return output

    def model_inputs(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the inputs of the target model, views of the persistent buffers."""
        buffers = self.input_buffers
        return {"input_ids": buffers.input_ids[:num_tokens], "positions": buffers.positions[:num_tokens]}


def flashmla_builder(config: Any) -> Any:
    """Make vLLM's FlashMLA metadata builder with what `build` reads for decodes: no prefill workspace."""
    builder: Any = object.__new__(FlashMLAMetadataBuilder)
    vars(builder).update(
        device=DEVICE,
        vllm_config=config,
        model_config=config.model_config,
        compilation_config=config.compilation_config,
        metadata_cls=FlashMLAMetadata,
        num_heads=HEADS,
        num_q_heads=HEADS,
        dcp_world_size=1,
        is_fp8_kvcache=False,
        cg_buf_tile_scheduler_metadata=None,
        cg_buf_num_splits=None,
        _use_fi_prefill=False,
        use_pcp=False,
    )
    return builder


def measure(
    numbers: str,
    eagerly: Callable[[], list[torch.Tensor]],
    graphed: Callable[[], list[torch.Tensor]],
    counted: Mapping[str, int],
) -> Measurement:
    """Compute the same tensors eagerly and in graphs; an error of the graphs is part of the result."""
    reference = _floats(eagerly())
    try:
        return Measurement(numbers, reference, _floats(graphed()), counted=counted)
    except Exception as e:  # whatever vLLM runs into is what a user would see
        return Measurement(numbers, reference, (), f"{type(e).__name__}: {e}".splitlines()[0])


def _floats(tensors: list[torch.Tensor]) -> tuple[float, ...]:
    return tuple(value for tensor in tensors for value in tensor.flatten().tolist())


def _block_tables() -> Any:
    """Make vLLM's block tables without the staging buffers, which need a GPU."""
    tables: Any = object.__new__(BlockTables)
    shape = (MAX_REQUESTS, MAX_LENGTH // BLOCK_SIZE)
    tables.input_block_tables = [torch.zeros(shape, dtype=torch.int32)]
    tables.slot_mappings = torch.zeros(1, MAX_TOKENS, dtype=torch.int64)
    tables.num_kv_cache_groups, tables.cp_size = 1, 1
    return tables
