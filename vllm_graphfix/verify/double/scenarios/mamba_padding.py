"""mamba-padding (PR 41873): a padded row of a decode batch takes a slot whose former request was still prefilling.

Three short requests decode while a long prompt is prefilled in chunks in the last slot. One of them finishes, the long
one moves down into its slot, and the batches of three decodes that follow are padded to the captured size of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.arguments import cached_request, input_batch, supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedGraphs, recurrent, wrappers_on_the_double
from vllm_graphfix.verify.double.recurrent_layers import MAX_TOKENS, STATE_SIZE, SelectiveStateStandIn
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.poison.rows import Room, Rows

CAPTURED = 4
MAX_MODEL_LEN = 32
LAYER = "model.layers.0.mixer"
CPU = torch.device("cpu")

PROMPTS = {"first": 3, "second": 4, "third": 5, "long": 8}
STEPS: list[dict[str, int]] = [
    {"first": 3, "second": 4, "third": 5},
    {"first": 1, "second": 1, "third": 1},
    {"first": 1, "second": 1, "third": 1, "long": 4},
    {"second": 1, "third": 1, "long": 4},
    *[{"second": 1, "third": 1, "long": 1}] * 3,
]
"""Tokens that the scheduler gives to each request, step by step."""
PAST_THEIR_PROMPTS: list[dict[str, int]] = [
    {"first": 3, "second": 4, "third": 5},
    *[{"first": 1, "second": 1, "third": 1}] * 3,
    *[{"second": 1, "third": 1}] * 3,
]


def run(*, trigger: bool = True) -> Measurement:
    """Decode with a padded row. Without *trigger*, the former request of its slot was past its prompt."""
    schedule = STEPS if trigger else PAST_THEIR_PROMPTS
    eager: list[float] = []
    graphed: list[float] = []
    for backend in (Mamba1AttentionBackend, Mamba2AttentionBackend):
        with unpinned():
            eager += _serve(backend, CUDAGraphMode.NONE, schedule)
        with unpinned(), cpu_cuda_graphs():
            graphed += _serve(backend, CUDAGraphMode.FULL, schedule)
    numbers = "Mamba1 and Mamba2 layer outputs of 3 requests over 4 decode steps"
    # Three steps of each of two models.
    return Measurement(numbers, tuple(eager), tuple(graphed), counted={"padded-row-prefilling": 6})


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    for backend in (Mamba1AttentionBackend, Mamba2AttentionBackend):
        with unpinned(), wrappers_on_the_double():
            _serve(backend, CUDAGraphMode.FULL, STEPS if trigger else PAST_THEIR_PROMPTS, wrapped=True)


def _serve(
    backend: Any, mode: CUDAGraphMode, schedule: Sequence[dict[str, int]], *, wrapped: bool = False
) -> list[float]:
    """Return the outputs of each step that decodes exactly three requests, one request after the other.

    *wrapped* puts the graph in vLLM's wrapper.
    """
    runner, layer = _runner(backend, mode), recurrent(SelectiveStateStandIn) if wrapped else SelectiveStateStandIn()
    memory, room = {"runner": runner, "hidden": layer.hidden}, Room(CAPTURED, MAX_TOKENS)
    engine = steps.Engine(runner, memory, room, {LAYER: layer._states}, MAX_MODEL_LEN - 1, MAX_MODEL_LEN)
    graphs: Any = None
    if mode == CUDAGraphMode.FULL:
        _set_lengths(runner, [1] * CAPTURED, [1] * CAPTURED)
        captured = _metadata(runner, CAPTURED, CAPTURED, 1, for_cudagraph_capture=True)
        if wrapped:
            graphs = WrappedGraphs(LAYER, layer, lambda metadata, _: layer.eager(metadata, MAX_TOKENS), MAX_MODEL_LEN)
        else:
            graphs = BareGraphs(lambda metadata, _: layer.decode(metadata))
        layer.decode(captured)  # the warm-up
        graphs.capture(CAPTURED, captured)
    numbers: list[float] = []
    random = torch.Generator().manual_seed(0)
    for scheduled in schedule:
        _update_batch(runner, scheduled)
        order = runner.input_batch.req_ids
        held = {1 + list(PROMPTS).index(name) for name in order}
        steps.begin_step(engine, Rows(len(order), sum(scheduled.values()), len(order)), held)
        inputs = {name: torch.randn(count, STATE_SIZE, generator=random) for name, count in scheduled.items()}
        layer.hidden[: sum(scheduled.values())] = torch.cat([inputs[name] for name in order])
        counts = [scheduled[name] for name in order]
        _set_lengths(runner, counts, runner.input_batch.num_computed_tokens_cpu[: len(order)] + counts)
        decode_only = max(counts) == 1
        if graphs is not None and decode_only and len(order) < CAPTURED:
            outputs = graphs.replay(CAPTURED, _metadata(runner, len(order), CAPTURED, 1), len(order))
        else:
            metadata = _metadata(runner, len(order), len(order), max(counts), num_tokens=sum(counts))
            outputs = layer.eager(metadata, sum(counts))
        if len(order) == 3 and decode_only:
            numbers += [n for name in scheduled for n in outputs[order.index(name)].tolist()]
        steps.end_step()
        for name, count in scheduled.items():
            runner.computed[name] += count
    return numbers


def _runner(backend: Any, mode: CUDAGraphMode) -> Any:
    """Return a GPUModelRunner with its batch and what `_build_attention_metadata` reads, and nothing else."""
    spec = MambaSpec(block_size=MAX_MODEL_LEN, shapes=((STATE_SIZE,),), dtypes=(torch.float32,))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_mamba_chunk_size=lambda: 8, rswa_window=None),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none", kv_sharing_fast_prefill=False, use_replayssm=False, replayssm_buffer_len=0
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=CAPTURED),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=CAPTURED),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    group = AttentionGroup(backend, [LAYER], spec, 0)
    group.create_metadata_builders(config, CPU, kernel_block_size=None)
    runner: Any = object.__new__(GPUModelRunner)
    runner.input_batch = input_batch(CAPTURED, MAX_MODEL_LEN, MAX_TOKENS, [MAX_MODEL_LEN], CPU)
    runner.computed = {}
    runner.device, runner.max_model_len = CPU, MAX_MODEL_LEN
    runner.cache_config, runner.compilation_config = config.cache_config, config.compilation_config
    runner.model_config = config.model_config
    groups = [KVCacheGroupSpec([LAYER], spec)]
    runner.kv_cache_config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    runner.attn_groups = [[group]]
    options = supported_kwargs(CpuGpuBuffer, {"dtype": torch.int32, "device": CPU, "pin_memory": False})
    runner.query_start_loc = CpuGpuBuffer(CAPTURED + 1, **options)
    runner.seq_lens = torch.zeros(CAPTURED, dtype=torch.int32)
    runner.optimistic_seq_lens_cpu = torch.zeros(CAPTURED, dtype=torch.int32)
    runner.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    runner.speculative_config = None
    runner.use_async_spec_decode = runner.routed_experts_initialized = runner.is_mm_prefix_lm = False
    runner.dcp_world_size = 1
    return runner


def _update_batch(runner: Any, scheduled: dict[str, int]) -> None:
    """Update the batch as `_update_states` does, in its order."""
    batch = runner.input_batch
    for name in [n for n in batch.req_ids if n not in scheduled]:
        batch.remove_request(name)
    for name, row in batch.req_id_to_index.items():
        batch.num_computed_tokens_cpu[row] = runner.computed[name]
    for name in scheduled:
        if name not in runner.computed:
            runner.computed[name] = 0
            blocks = ([1 + list(PROMPTS).index(name)],)
            batch.add_request(cached_request(name, [0] * PROMPTS[name], blocks))
    batch.condense()
    reorder_batch_to_split_decodes_and_prefills(batch, SimpleNamespace(num_scheduled_tokens=scheduled))
    batch.refresh_metadata()
    batch.block_table.commit_block_table(batch.num_reqs)


def _set_lengths(runner: Any, counts: list[int], seq_lens: Any) -> None:
    """Fill the persistent lengths as `_prepare_inputs` does, slots beyond the batch included."""
    rows = len(counts)
    runner.query_start_loc.np[1 : rows + 1] = np.cumsum(counts)
    runner.query_start_loc.np[rows + 1 :] = sum(counts)
    runner.query_start_loc.copy_to_gpu()
    for lengths in (runner.seq_lens, runner.optimistic_seq_lens_cpu):
        lengths.zero_()[:rows] = torch.as_tensor(seq_lens)


def _metadata(
    runner: Any, rows: int, padded_rows: int, max_query_len: int, num_tokens: int | None = None, **capture: bool
) -> Any:
    """Return the layer's metadata for *rows* requests padded to *padded_rows*, of one token each by default."""
    tokens = num_tokens or rows
    padded_tokens = num_tokens or padded_rows
    slot_mappings, _ = runner._get_slot_mappings(padded_tokens, padded_rows, tokens)
    metadata, _ = runner._build_attention_metadata(
        num_tokens=tokens,
        num_reqs=rows,
        max_query_len=max_query_len,
        num_tokens_padded=padded_tokens,
        num_reqs_padded=padded_rows,
        slot_mappings=slot_mappings,
        **capture,
    )
    return metadata[LAYER]
