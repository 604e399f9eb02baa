"""A model runner V1 that runs the step of an idle rank on the CPU, and an Eagle drafter for it.

Real: batch, block tables, buffers, metadata builders, and vLLM's functions that prepare and run such a step. Stand-ins:
the model's layers and their caches, and a backend whose metadata are the slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG, cached_request, input_batch, supported_kwargs

MAX_MODEL_LEN = 16
MAX_TOKENS = 16
REQUESTS = 2
PAGE = 4
WIDTH = 2
MIXER, ATTENTION, DRAFT = "model.layers.0.mixer", "model.layers.1.self_attn", "draft.layers.0.self_attn"
BLOCKS = {"first": (1, [2, 3, 4, 5]), "second": (6, [7, 8, 9, 10])}
"""Blocks of each request: that of its state, and those of its keys."""
SPARE = 1 + max(block for _, keys in BLOCKS.values() for block in keys)
"""A block that no request ever has."""
PROMPT = 3
CPU = torch.device("cpu")


class CacheStandIn:
    """Stands in for the layers and their kernels: a state for each block, keys and a draft's keys for each slot."""

    def __init__(self) -> None:
        blocks = SPARE + 1
        self.states = torch.zeros(blocks, WIDTH)
        self.keys, self.drafts = torch.zeros(blocks * PAGE, WIDTH), torch.zeros(blocks * PAGE, WIDTH)
        self.hidden = torch.zeros(MAX_TOKENS, WIDTH)
        self.graph: Any = None
        self.output = torch.zeros(0, WIDTH)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Run the target model, in its graph if vLLM's forward context says so."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
            self.graph.replay()
            return self.output
        return self.layers(context.attn_metadata, getattr(context, "slot_mapping", {}))

    def layers(self, metadata: Any, slots: Any) -> torch.Tensor:
        """Write to *slots*, or to those of the metadata; as in vLLM from 0.15 on, only attention runs without them."""
        slots_of_layer = slots.get(ATTENTION) if slots else None
        if slots_of_layer is None and metadata:
            slots_of_layer = metadata[ATTENTION].slot_mapping
        if slots_of_layer is not None:
            write_slots(self.keys, slots_of_layer, self.hidden)
        return self._decode(metadata[MIXER]) if metadata and MIXER in metadata else self.hidden[:REQUESTS].clone()

    def draft(self, **inputs: Any) -> None:
        slots = getattr(get_forward_context(), "slot_mapping", {}).get(DRAFT)
        if slots is not None:
            write_slots(self.drafts, slots, self.hidden)

    def blocks(self) -> list[float]:
        """Return the numbers in all blocks that a request ever has."""
        rows = slice(PAGE, SPARE * PAGE)
        return [*self.states[1:SPARE].flatten(), *self.keys[rows].flatten(), *self.drafts[rows].flatten()]

    def by_layer(self) -> dict[str, torch.Tensor]:
        pages = {ATTENTION: self.keys, DRAFT: self.drafts}
        return {MIXER: self.states} | {layer: each.view(-1, PAGE, WIDTH) for layer, each in pages.items()}

    def _decode(self, metadata: Any) -> torch.Tensor:
        """Decode one token for each decode row; -1 (up to 0.19) and 0 mean that a row has no state."""
        indices = getattr(metadata, "state_indices_tensor_d", None)  # 0.16 on
        indices = metadata.state_indices_tensor if indices is None else indices
        indices = indices[: metadata.num_decodes].flatten().clamp(min=0).long()
        updated = self.states[indices] * 0.5 + self.hidden[: len(indices)]
        self.states.index_copy_(0, indices, updated)
        return updated


def write_slots(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Stand in for reshape_and_cache; a slot of -1, which it skips, is one of the null block here."""
    cache.index_copy_(0, slots.clamp(min=0), values[: len(slots)])


class Off(SimpleNamespace):
    """A part of vLLM's configuration in which everything that is not set is None, and so off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class KeysBackendStandIn:
    """Stands in for an attention backend whose metadata are the slots."""

    supports_update_block_table = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(slot_mapping=common_attn_metadata.slot_mapping)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SimpleNamespace:
        return self.build(0, common_attn_metadata)


KEYS = (
    KeysBackendStandIn,
    [ATTENTION],
    FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32),
)


def model_runner(cache: CacheStandIn, groups: list[tuple[Any, list[str], Any]]) -> Any:
    """Return a GPUModelRunner with its batch and what an idle step reads.

    *groups* holds the backend, layers and cache specification of each group of layers.
    """
    config = _config()
    runner: Any = object.__new__(gpu_model_runner.GPUModelRunner)
    sizes = [spec.block_size for _, _, spec in groups]
    runner.input_batch = input_batch(REQUESTS, MAX_MODEL_LEN, MAX_TOKENS, sizes, CPU)
    runner.attn_groups = [
        [_attention_group(backend, layers, spec, number, config)]
        for number, (backend, layers, spec) in enumerate(groups)
    ]
    runner.kv_cache_config = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec) for _, layers, spec in groups],
    )
    runner.vllm_config = config
    for name in ("model_config", "cache_config", "scheduler_config", "parallel_config", "compilation_config"):
        setattr(runner, name, getattr(config, name))
    runner.model, runner.device, runner.max_model_len, runner.max_num_tokens = cache, CPU, MAX_MODEL_LEN, MAX_TOKENS
    runner.uniform_decode_query_len = runner.dcp_world_size = 1
    runner.arange_np = np.arange(MAX_TOKENS)
    for name, size, kind in (
        ("query_start_loc", REQUESTS + 1, torch.int32),
        ("query_pos", MAX_TOKENS, torch.int64),
        ("input_ids", MAX_TOKENS, torch.int32),
    ):
        setattr(runner, name, _buffer(size, kind))
    if hasattr(gpu_model_runner.GPUModelRunner, "_get_slot_mappings") and _lengths_are_on_the_device():
        runner.seq_lens = torch.zeros(REQUESTS, dtype=torch.int32)
        runner.optimistic_seq_lens_cpu = torch.zeros(REQUESTS, dtype=torch.int32)
        runner.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    else:
        runner.seq_lens, runner.positions = _buffer(REQUESTS, torch.int32), _buffer(MAX_TOKENS, torch.int64)
    for name in (
        "use_async_spec_decode",
        "routed_experts_initialized",
        "is_mm_prefix_lm",
        "supports_mm_inputs",
        "enable_prompt_embeds",
        "uses_mrope",
        "use_aux_hidden_state_outputs",
    ):
        setattr(runner, name, False)
    runner.uses_xdrope_dim = 0
    for name in ("speculative_config", "lora_config", "prepare_inputs_event", "mamba_prev_last_scheduled_idx"):
        setattr(runner, name, None)
    # Calls of the step that concern other parts than its forward pass.
    runner._init_model_kwargs = lambda *args, **kwargs: {}
    runner.maybe_randomize_inputs = lambda *args, **kwargs: nullcontext()
    runner.maybe_dummy_run_with_lora = lambda *args, **kwargs: nullcontext()
    runner.eplb_step = runner._register_layerwise_nvtx_hooks = runner._prepare_padding_mask = lambda *_, **__: None
    runner._get_encoder_seq_lens = lambda *args, **kwargs: (None, None)
    runner.randomize_dummy_inputs = False
    return runner


def _config() -> Any:
    """Return the parts of a VllmConfig that are on in an idle step."""
    return Off(
        model_config=Off(max_model_len=MAX_MODEL_LEN, get_mamba_chunk_size=lambda: 8),
        cache_config=Off(mamba_cache_mode="none", replayssm_buffer_len=0),
        scheduler_config=Off(max_num_seqs=REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=Off(
            data_parallel_size=1,
            data_parallel_rank=0,
            num_ubatches=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            is_moe_model=False,
        ),
        compilation_config=Off(
            cudagraph_mode=CUDAGraphMode.FULL,
            max_cudagraph_capture_size=REQUESTS,
            static_forward_context={},
            static_all_moe_layers=[],
        ),
        kernel_config=KERNEL_CONFIG,
        num_speculative_tokens=0,
    )


def _attention_group(backend: Any, layers: list[str], spec: Any, number: int, config: Any) -> Any:
    if backend is KeysBackendStandIn:
        return AttentionGroup(backend, layers, spec, number, metadata_builders=[backend()])
    group = AttentionGroup(backend, layers, spec, number)
    group.create_metadata_builders(config, CPU, kernel_block_size=None)
    return group


def eagle_drafter(cache: CacheStandIn, config: Any) -> Any:
    drafter: Any = object.__new__(EagleProposer)
    drafter.num_speculative_tokens, drafter.parallel_drafting, drafter.dp_rank = 1, False, 0
    drafter._slot_mapping_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    drafter.attn_layer_names, drafter.indexer_layer_names = [DRAFT], []
    drafter._draft_attn_layer_names = {DRAFT}
    drafter.supports_mm_inputs = drafter.pass_hidden_states_to_model = drafter.use_cuda_graph = False
    drafter.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    drafter.hidden_states = torch.zeros(MAX_TOKENS, WIDTH)
    drafter._get_positions = lambda tokens: torch.zeros(tokens, dtype=torch.int64)
    drafter.vllm_config, drafter.model = config, cache.draft
    drafter._pad_batch_across_dp = lambda num_tokens_unpadded, num_tokens_padded: (num_tokens_padded, None)
    drafter._determine_batch_execution_and_padding = lambda tokens, **_: (CUDAGraphMode.NONE, tokens, None)
    return drafter


def _buffer(size: int, kind: torch.dtype) -> CpuGpuBuffer:
    return CpuGpuBuffer(size, **supported_kwargs(CpuGpuBuffer, {"dtype": kind, "device": CPU, "pin_memory": False}))


def _lengths_are_on_the_device() -> bool:
    """From 0.19 on."""
    return "optimistic_seq_lens_cpu" in inspect.getsource(gpu_model_runner.GPUModelRunner._dummy_run)


def lengths_of(runner: Any) -> list[torch.Tensor]:
    if isinstance(runner.seq_lens, torch.Tensor):
        return [runner.seq_lens, runner.optimistic_seq_lens_cpu]
    return [runner.seq_lens.cpu, runner.seq_lens.gpu]


def prefilled_request(name: str, groups: int) -> Any:
    """Return the request of that name, its prompt in the cache, with blocks in the last *groups* groups of layers."""
    state, keys = BLOCKS[name]
    return cached_request(name, [0] * PROMPT, ([state], keys)[2 - groups :], PROMPT)


@contextmanager
def step_on_a_cpu() -> Iterator[None]:
    """Replace, within the block, the group of pipeline stages and the query for an encoder, which need an engine."""
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with ExitStack() as stack:
        for name, value in (
            ("get_pp_group", lambda: alone),
            ("supports_mm_encoder_only", lambda model: False),
        ):
            if hasattr(gpu_model_runner, name):
                stack.enter_context(mock.patch.object(gpu_model_runner, name, value))
        yield
