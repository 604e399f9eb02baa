"""mamba-all-mode (PR 34874): three requests decode across block boundaries, on two groups of Mamba-2 layers."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import cached_request, input_batch
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedModel, wrappers_on_the_double
from vllm_graphfix.verify.measurement import Measurement

CAPTURED, MAX_MODEL_LEN, BLOCK = 4, 32, 4
"""Requests of the graph, one more than there are; most tokens of a request; tokens of a block."""
HEADS, HEAD_WIDTH, STATE = 2, 2, 2
LAYERS = ("model.layers.0.mixer", "model.layers.1.mixer")
"""Two layers, each in its own group, as in a model with one attention layer for each."""
COMPUTED = {"first": 6, "second": 9, "third": 3}
"""Tokens of each request before the first step, with a state in each of their blocks."""
STEPS = 6


def run(*, trigger: bool = True) -> Measurement:
    """Measure the outputs of both layers. Without *trigger*, prefix caching is off: one state a request, no index."""
    eager = _serve(CUDAGraphMode.NONE, trigger)
    with cpu_cuda_graphs():
        graphed = _serve(CUDAGraphMode.FULL, trigger)
    numbers = f"outputs of two Mamba-2 layers for {len(COMPUTED)} requests over {STEPS} decode steps"
    return Measurement(numbers, tuple(eager), tuple(graphed))


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    with wrappers_on_the_double():
        _serve(CUDAGraphMode.FULL, trigger, wrapped=True)


def _serve(mode: Any, caching: bool, *, wrapped: bool = False) -> list[float]:
    """Return the outputs of both layers, step by step; *wrapped* puts the graph in vLLM's wrapper."""
    runner = _runner(mode, caching)
    random = torch.Generator().manual_seed(0)
    mixers = [_mixer(runner.cache_config, name, random) for name in LAYERS]
    width = HEADS * HEAD_WIDTH
    hidden = torch.zeros(CAPTURED, 2 * width + 2 * STATE + HEADS)
    outputs = torch.zeros(len(mixers), CAPTURED, width)

    def forward(metadata: Any, rows: int) -> torch.Tensor:
        # A forward context with what these layers read, and nothing else.
        with override_forward_context(SimpleNamespace(attn_metadata=metadata, virtual_engine=0)), _cpu_kernels():
            for mixer, output in zip(mixers, outputs, strict=True):
                mixer.conv_ssm_forward(hidden[:rows], output[:rows])
        return outputs.transpose(0, 1)

    layers = dict(zip(LAYERS, mixers, strict=True))
    graphs: Any = WrappedModel(layers, forward, BLOCK) if wrapped else BareGraphs(forward)
    in_graph = mode.has_full_cudagraphs()
    if in_graph:
        captured = _metadata(runner, [1] * CAPTURED, CAPTURED, for_cudagraph_capture=True)
        forward(captured, CAPTURED)  # the warm-up
        graphs.capture(CAPTURED, captured)
    _add_requests(runner, caching)
    numbers: list[float] = []
    for step in range(STEPS):
        hidden[: len(COMPUTED)] = torch.randn(len(COMPUTED), hidden.shape[1], generator=random)
        lengths = [computed + step + 1 for computed in COMPUTED.values()]
        metadata = _metadata(runner, lengths, CAPTURED if in_graph else len(lengths))
        if in_graph:
            graphs.replay(CAPTURED, metadata, len(lengths))
        else:
            forward(metadata, len(lengths))
        numbers += outputs[:, : len(lengths)].flatten().tolist()
    return numbers


def _runner(mode: Any, caching: bool) -> Any:
    """Return a GPUModelRunner with its batch and what `_build_attention_metadata` reads, and nothing else."""
    device = torch.device("cpu")
    block = BLOCK if caching else MAX_MODEL_LEN
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, get_mamba_chunk_size=lambda: BLOCK, enable_return_routed_experts=False
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=caching,  # 0.14.1 has no other mode than `all`
            mamba_cache_mode="all" if caching else "none",
            mamba_block_size=block,
            kv_sharing_fast_prefill=False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=CAPTURED),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=CAPTURED),
        speculative_config=None,
    )
    cache_mode = {"mamba_cache_mode": config.cache_config.mamba_cache_mode}
    spec = MambaSpec(
        block_size=block,
        shapes=((STATE,),),
        dtypes=(torch.float32,),
        **(cache_mode if "mamba_cache_mode" in inspect.signature(MambaSpec).parameters else {}),
    )
    groups = [AttentionGroup(Mamba2AttentionBackend, [name], spec, at) for at, name in enumerate(LAYERS)]
    for group in groups:
        group.create_metadata_builders(config, device, kernel_block_size=None)
    runner: Any = object.__new__(GPUModelRunner)
    runner.__dict__.update(
        {name: getattr(config, name) for name in ("model_config", "cache_config", "compilation_config")},
        input_batch=input_batch(CAPTURED, MAX_MODEL_LEN, CAPTURED, [block] * len(LAYERS), device),
        kv_cache_config=KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([name], spec) for name in LAYERS]
        ),
        attn_groups=[[group] for group in groups],
        query_start_loc=CpuGpuBuffer(CAPTURED + 1, dtype=torch.int32, device=device, pin_memory=False),
        seq_lens=CpuGpuBuffer(CAPTURED, dtype=torch.int32, device=device, pin_memory=False),
        device=device,
        max_model_len=MAX_MODEL_LEN,
        speculative_config=None,
        is_mm_prefix_lm=False,
        dcp_world_size=1,
    )
    return runner


def _add_requests(runner: Any, caching: bool) -> None:
    blocks = MAX_MODEL_LEN // BLOCK if caching else 1
    for at, (name, computed) in enumerate(COMPUTED.items()):
        mine = list(range(1 + at * blocks, 1 + (at + 1) * blocks))
        runner.input_batch.add_request(cached_request(name, [0] * computed, (mine,) * len(LAYERS), computed))
    runner.input_batch.block_table.commit_block_table(len(COMPUTED))


def _metadata(runner: Any, lengths: list[int], padded: int, **capture: bool) -> Any:
    """Return the metadata of both layers, for a decode of requests of *lengths* in a graph of *padded* rows."""
    rows = len(lengths)
    runner.query_start_loc.np[:] = [min(row, rows) for row in range(CAPTURED + 1)]
    runner.seq_lens.np[:] = [*lengths, *[0] * (CAPTURED - rows)]
    for buffer in (runner.query_start_loc, runner.seq_lens):
        buffer.copy_to_gpu()
    slots = {}
    if hasattr(runner, "_get_slot_mappings"):  # since 0.15.0 beside the metadata
        slots["slot_mappings"] = runner._get_slot_mappings(padded, padded, rows)[0]
    metadata, _ = runner._build_attention_metadata(
        num_tokens=rows,
        num_reqs=rows,
        max_query_len=1,
        num_tokens_padded=padded,
        num_reqs_padded=padded,
        **slots,
        **capture,
    )
    return metadata


def _mixer(cache_config: Any, name: str, random: Any) -> Any:
    """Return vLLM's Mamba-2 layer without its projections, on random states."""
    width, blocks = HEADS * HEAD_WIDTH, 1 + len(COMPUTED) * MAX_MODEL_LEN // BLOCK
    mixer: Any = object.__new__(MambaMixer2)
    mixer.__dict__.update(
        prefix=name,
        cache_config=cache_config,
        kv_cache=[
            (
                torch.randn(blocks, 1, width + 2 * STATE, generator=random),
                torch.randn(blocks, HEADS, HEAD_WIDTH, STATE, generator=random),
            )
        ],
        tped_intermediate_size=width,
        tped_conv_size=width + 2 * STATE,
        tped_dt_size=HEADS,
        split_hidden_states_B_C_fn=functools.partial(torch.split, split_size_or_sections=[width, STATE, STATE], dim=-1),
        conv_weights=None,
        conv1d=SimpleNamespace(bias=None),
        activation="silu",
        n_groups=1,
        tp_size=1,
        num_heads=HEADS,
        head_dim=HEAD_WIDTH,
        ssm_state_size=STATE,
        A=torch.zeros(HEADS),
        D=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS),
        is_blackwell=False,
    )
    return mixer


def _cpu_kernels() -> Any:
    """Replace the two Triton kernels of a decode: states decay by half, and stay in the kernels' places."""
    return mock.patch.multiple(
        mamba_mixer2, causal_conv1d_update=_convolution_stand_in, selective_state_update=_state_update_stand_in
    )


def _convolution_stand_in(
    x: Any,
    conv_state: Any,
    weight: object,
    bias: object,
    activation: object,
    *,
    conv_state_indices: Any,
    block_idx_last_scheduled_token: Any,
    initial_state_idx: Any,
) -> Any:
    """Update conv_state, (blocks, width, 1), by x, (rows, width), and return the mixed x.

    Indices are (rows, blocks of a request), with the columns to read and to write; or (rows,) without these.
    """

    def picked(column: Any) -> Any:
        if column is None:
            return conv_state_indices.clamp(min=0).long()
        return conv_state_indices.gather(1, column.long().unsqueeze(1)).squeeze(1).clamp(min=0).long()

    mixed = x + conv_state[picked(initial_state_idx)].squeeze(-1) / 2
    conv_state.index_copy_(0, picked(block_idx_last_scheduled_token), mixed.unsqueeze(-1))
    return mixed


def _state_update_stand_in(
    state: Any,
    x: Any,
    dt: object,
    A: object,  # noqa: N803 - vLLM's names
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: object,  # noqa: N803
    *,
    state_batch_indices: Any,
    dst_state_batch_indices: Any,
    out: Any,
    **_: object,
) -> None:
    """Update state, (blocks, heads, width, N), and write out, (rows, heads, width) as x; B and C are (rows, 1, N).

    Indices are (rows,), below 0 for padded rows.
    """
    # Padded rows update the null block, which no request has.
    read, written = (blocks.clamp(min=0).long() for blocks in (state_batch_indices, dst_state_batch_indices))
    updated = state[read] / 2 + x.unsqueeze(-1) * B.unsqueeze(2)
    state.index_copy_(0, written, updated)
    out.copy_((updated * C.unsqueeze(2)).sum(-1))
