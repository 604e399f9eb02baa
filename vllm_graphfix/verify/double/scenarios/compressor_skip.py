"""compressor-skip: requests of DeepSeek V4 complete groups of 128 tokens in graphs whose capture completed none.

Model runner V2 (from 0.30.0 on) decodes in a full graph and prefills in a piecewise one; model runner V1 decodes in a
full graph of two microbatches. The cache entries of the groups are compared.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, override_forward_context, set_forward_context
from vllm.models.deepseek_v4 import compressor
from vllm.models.deepseek_v4.compressor import CompressorBackend
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG
from vllm_graphfix.verify.double.compressor import (
    BLOCK,
    CPU,
    LAYER,
    MAX_MODEL_LEN,
    REQUESTS,
    STATE_BLOCK,
    STATES,
    EntryMetadataBuilderStandIn,
    LayerStandIn,
    block_tables,
    compressor_stand_ins,
    entries_of,
    metadata_builder,
    slots_of,
    state_spec,
    tokens_of,
)
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import breakable_graphs
from vllm_graphfix.verify.measurement import Measurement

PROMPT, CAPTURED_TOKENS = 130, 136
"""Tokens of the prompt, and of its piecewise graph, whose capture has 34 tokens a request."""
LENGTHS, STEPS = (126, 300, 255), 3
"""Lengths of the decoding requests in the first step, and steps: the last request completes a group in the second step,
the first request in the third."""
OF_V2 = "seq_lens_cpu_upper_bound" in compressor._get_c128_boundary.__code__.co_names
"""False before 0.30.0: there the compressor reads a number that model runner V2 lacks, and skips nothing with it."""


def run(*, trigger: bool = True) -> Measurement:
    """Complete groups. Without *trigger*, scheduling is asynchronous with drafts: groups are unknown in time."""
    served = (_decode_and_prefill, _decode_in_microbatches) if OF_V2 else (_decode_in_microbatches,)
    eager: list[float] = []
    graphed: list[float] = []
    for serve in served:
        with compressor_stand_ins(), cpu_cuda_graphs(), torch.inference_mode():
            eager += serve(in_graph=False, known_in_time=trigger)
            graphed += serve(in_graph=True, known_in_time=trigger)
    numbers = "cache entries of groups that are completed in a decode" + " and in a prompt" * OF_V2
    # Two microbatches of a forward pass; with model runner V2, two graphs.
    return Measurement(numbers, tuple(eager), tuple(graphed), counted={"layer-left-out": 2 * len(served)})


# -- model runner V2


def _decode_and_prefill(*, in_graph: bool, known_in_time: bool) -> list[float]:
    full = CUDAGraphMode.FULL_DECODE_ONLY if in_graph else CUDAGraphMode.NONE
    decoded = _RunnerV2StandIn(full, known_in_time)
    for step in range(STEPS):
        decoded.step([1] * len(LENGTHS), [length - 1 + step for length in LENGTHS])
    piecewise = CUDAGraphMode.PIECEWISE if in_graph else CUDAGraphMode.NONE
    with mock.patch.object(cudagraph_utils, "is_breakable_cudagraph_enabled", return_value=True):
        prompt = _RunnerV2StandIn(piecewise, known_in_time)
        prompt.step([PROMPT], [0])
    return entries_of(decoded.model, {0: 0, 2: 1}) + entries_of(prompt.model, {0: 0})


class _RunnerV2StandIn:
    """Model runner V2 with its graphs and what it prepares for them, and nothing else."""

    def __init__(self, mode: CUDAGraphMode, known_in_time: bool) -> None:
        self.model, self._mode = LayerStandIn(), mode
        tokens = CAPTURED_TOKENS if mode == CUDAGraphMode.PIECEWISE else REQUESTS
        self._config = _config(mode, [tokens], known_in_time)
        self._buffers = InputBuffers(max_num_reqs=REQUESTS, max_num_tokens=CAPTURED_TOKENS, device=CPU)
        self._tables: Any = object.__new__(BlockTables)
        self._tables.input_block_tables = [torch.zeros(table.shape, dtype=torch.int32) for table in block_tables()]
        self._tables.slot_mappings = torch.zeros(2, CAPTURED_TOKENS, dtype=torch.int64)
        vars(self._tables).update(
            num_kv_cache_groups=2, cp_size=1, cp_rank=0, cp_interleave=1, _num_dirty_rows=REQUESTS
        )
        spec, entries = state_spec(self._config), SimpleNamespace(block_size=BLOCK)
        states = AttentionGroup(CompressorBackend, [STATES], spec, 0)
        states.metadata_builders = [metadata_builder(spec, self._config)]
        attention = AttentionGroup(CompressorBackend, [LAYER], entries, 1)
        attention.metadata_builders = [EntryMetadataBuilderStandIn()]
        self._groups = [[states], [attention]]
        self._caches = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=[STATES], kv_cache_spec=spec),
                SimpleNamespace(layer_names=[LAYER], kv_cache_spec=entries),
            ]
        )
        self._state: Any = object.__new__(DefaultModelState)
        vars(self._state).update(
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            max_model_len=MAX_MODEL_LEN,
            supports_mm_inputs=False,
            prompt_embeds_state=None,
            rope_state=None,
        )
        self._manager = ModelCudaGraphManager(self._config, CPU, mode, decode_query_len=1)
        if mode != CUDAGraphMode.NONE:
            with breakable_graphs() if mode == CUDAGraphMode.PIECEWISE else contextlib.nullcontext():
                self._manager.capture(
                    self.model, self._state, self._buffers, None, self._tables, self._groups, self._caches
                )

    def step(self, counts: list[int], computed: list[int]) -> None:
        """Run a step of *counts* tokens of each request, equal for all, after *computed* tokens of each."""
        requests, tokens = len(counts), sum(counts)
        descriptor = self._manager.dispatch(requests, tokens, counts[0], num_active_loras=0)
        batch = InputBatch.make_dummy(requests, tokens, self._buffers)
        lengths = torch.tensor(computed) + counts[0]
        rows = torch.arange(requests).repeat_interleave(counts[0])
        positions = torch.cat([torch.arange(start, start + counts[0]) for start in computed])
        self._buffers.seq_lens[:requests] = lengths
        self._buffers.positions[:tokens] = positions
        self._buffers.input_ids[:tokens] = tokens_of(rows, positions)
        for group, (table, size) in enumerate(zip(block_tables(), (STATE_BLOCK, BLOCK), strict=True)):
            self._tables.input_block_tables[group].copy_(table)
            self._tables.slot_mappings[group].fill_(-1)
            self._tables.slot_mappings[group, :tokens] = slots_of(table, rows, positions, size)
        full = descriptor.cg_mode == CUDAGraphMode.FULL
        batch.num_reqs_after_padding = descriptor.num_reqs if full else requests
        batch.num_tokens_after_padding = descriptor.num_tokens
        batch.query_start_loc = self._buffers.query_start_loc
        batch.query_start_loc_np = self._buffers.query_start_loc.numpy().copy()
        batch.is_prefilling_np = batch.is_prefilling_np.repeat(REQUESTS)[:REQUESTS]
        batch.seq_lens = self._buffers.seq_lens
        batch.seq_lens_cpu_upper_bound = self._buffers.seq_lens.clone()
        slots = self._tables.slot_mappings[:, : descriptor.num_tokens]
        metadata = self._state.prepare_attn(
            batch, descriptor.cg_mode, tuple(self._tables.input_block_tables), slots, self._groups, self._caches
        )
        if full:
            self._manager.run_fullgraph(descriptor)
            return
        inputs = {
            "input_ids": self._buffers.input_ids[: descriptor.num_tokens],
            "positions": self._buffers.positions[: descriptor.num_tokens],
            "intermediate_tensors": None,
        }
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=descriptor.num_tokens,
            cudagraph_runtime_mode=descriptor.cg_mode,
            batch_descriptor=BatchDescriptor(descriptor.num_tokens),
            slot_mapping=build_slot_mappings_by_layer(slots, self._caches),
        ):
            if descriptor.cg_mode == CUDAGraphMode.PIECEWISE:
                self._manager.run_pw_graph(self.model, inputs)
            else:
                self.model(**inputs)


# -- model runner V1


def _decode_in_microbatches(*, in_graph: bool, known_in_time: bool) -> list[float]:
    model, config = LayerStandIn(), _config(CUDAGraphMode.FULL, [REQUESTS], known_in_time)
    spec = state_spec(config)
    wrapper = UBatchWrapper(model, config, CUDAGraphMode.FULL, CPU)
    halves = [UBatchSlice(slice(first, first + 2), slice(first, first + 2)) for first in (0, 2)]
    builders = [metadata_builder(spec, config) for _ in halves]
    entries = EntryMetadataBuilderStandIn()
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    tables = [torch.zeros(table.shape, dtype=torch.int32) for table in block_tables()]
    inputs, lengths = torch.zeros(2, REQUESTS, dtype=torch.int64), torch.zeros(REQUESTS, dtype=torch.int32)
    slots = torch.full((2, REQUESTS), -1)

    def step(counts: list[int]) -> None:
        """Run a step in which requests have *counts* tokens, this step's included."""
        lengths.copy_(torch.tensor(counts))
        values: dict[str, Any] = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": lengths,
            "seq_lens_cpu_upper_bound": lengths.clone(),
            "num_reqs": REQUESTS,
            "num_actual_tokens": REQUESTS,
            "max_query_len": 1,
            "max_seq_len": MAX_MODEL_LEN,
        }
        if known_in_time and not OF_V2:
            values["_num_computed_tokens_cpu"] = lengths - 1
        of_states, of_entries = (
            split_attn_metadata(
                halves, CommonAttentionMetadata(**values, block_table_tensor=table, slot_mapping=slots[group])
            )
            for group, table in enumerate(tables)
        )
        metadata = [
            {STATES: builder.build(0, common), LAYER: entries.build(0, other)}
            for builder, common, other in zip(builders, of_states, of_entries, strict=True)
        ]
        context = create_forward_context(
            metadata,
            config,
            dp_metadata=object(),
            cudagraph_runtime_mode=CUDAGraphMode.FULL if in_graph else CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(REQUESTS),
            ubatch_slices=halves,
        )
        with override_forward_context(context):
            wrapper(input_ids=inputs[0], positions=inputs[1], intermediate_tensors=None, inputs_embeds=None)

    if in_graph:
        step([1] * REQUESTS)  # vLLM's wrapper captures the first step of each size, a dummy run
    rows = torch.arange(REQUESTS)
    for table, filled in zip(tables, block_tables(), strict=True):
        table.copy_(filled)
    for number in range(STEPS):
        counts = [length + number for length in (*LENGTHS, 17)]
        inputs[1] = torch.tensor(counts) - 1
        inputs[0] = tokens_of(rows, inputs[1])
        for group, (table, size) in enumerate(zip(tables, (STATE_BLOCK, BLOCK), strict=True)):
            slots[group] = slots_of(table, rows, inputs[1], size)
        step(counts)
    return entries_of(model, {0: 0, 2: 1})


# -- both model runners


def _config(mode: CUDAGraphMode, sizes: list[int], known_in_time: bool) -> Any:
    """Return the parts of a VllmConfig that graphs and the compressor's builder read."""
    drafts = SimpleNamespace(num_speculative_tokens=1, uses_dynamic_speculative_decoding=lambda: False)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=max(sizes),
            static_forward_context={},
            fast_moe_cold_start=False,
            static_all_moe_layers=[],
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=REQUESTS, max_num_batched_tokens=CAPTURED_TOKENS, async_scheduling=not known_in_time
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            tensor_parallel_size=1,
            use_sequence_parallel_moe=True,
            is_moe_model=True,
            num_ubatches=2,
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla", use_kda_recoverssm=False),
        kernel_config=KERNEL_CONFIG,
        speculative_config=None if known_in_time else drafts,
        num_speculative_tokens=0 if known_in_time else 1,
        use_cumem_cudagraph_pool=False,
    )
