"""c128a-stride (PR 51318): three requests decode in a graph of four, far shorter than the model allows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.models.deepseek_v4 import sparse_mla
from vllm.models.deepseek_v4.nvidia import flashmla
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
from vllm.v1.attention import backend
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import compressor_utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedGraphs, wrappers_on_the_double
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.measurement import Measurement

CAPTURED, BLOCK, RATIO = 4, 256, 128
"""Requests of the graph, tokens of a block, tokens of one cache entry."""
MAX_MODEL_LEN = 32768
HEADS, WIDTH = 2, 8
LENGTHS = (700, 1500, 400)
STEPS = 3


def run(*, trigger: bool = True) -> Measurement:
    """Decode. Without *trigger*, the longest request of the model needs rows no wider than the graph's."""
    longest = MAX_MODEL_LEN if trigger else MAX_MODEL_LEN // 2
    with _cpu_kernels():
        eager = list(chain.from_iterable(_decode(longest, in_graph=False)))
    with _cpu_kernels(), cpu_cuda_graphs():
        graphed = list(chain.from_iterable(_decode(longest, in_graph=True)))
    numbers = f"compressed attention of {len(LENGTHS)} requests padded to {CAPTURED} over {STEPS} decode steps"
    return Measurement(numbers, tuple(eager), tuple(graphed))


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    with _cpu_kernels(), wrappers_on_the_double():
        _decode(MAX_MODEL_LEN if trigger else MAX_MODEL_LEN // 2, in_graph=True, wrapped=True)


def _decode(longest: int, *, in_graph: bool, wrapped: bool = False) -> list[list[float]]:
    random = torch.Generator().manual_seed(0)
    blocks_each = -(-(max(LENGTHS) + STEPS) // BLOCK)
    cache = torch.randn(1 + CAPTURED * blocks_each, BLOCK // RATIO, WIDTH, generator=random)
    table = torch.zeros(CAPTURED, blocks_each, dtype=torch.int32)
    layer: Any = object.__new__(DeepseekV4FlashMLAAttention)
    layer.__dict__.update(
        compress_ratio=RATIO, scale=1.0, attn_sink=None, swa_cache_layer=SimpleNamespace(kv_cache=cache)
    )
    builder, persistent = _builder(longest, in_graph), _persistent()
    query, output = torch.zeros(CAPTURED, HEADS, WIDTH), torch.zeros(CAPTURED, HEADS, WIDTH)
    # Metadata of the sliding window, which this layer does not use here.
    window = SimpleNamespace(
        num_decodes=CAPTURED, num_decode_tokens=CAPTURED, is_valid_token=torch.ones(CAPTURED, dtype=torch.bool),
        decode_swa_indices=None, decode_swa_lens=None, tile_sched_c128a=object(),
    )  # fmt: skip

    def forward(metadata: Any, rows: int) -> torch.Tensor:
        layer._forward_decode(query[:rows], cache, window, metadata, False, output[:rows])
        return output[:rows] * 1.0

    graphs: Any = WrappedGraphs("model.layers.0.attn", layer, forward, BLOCK) if wrapped else BareGraphs(forward)
    if in_graph:
        graphs.capture(CAPTURED, builder.build(0, _batch(persistent, [1] * CAPTURED, CAPTURED, table, longest)))
    rows = len(LENGTHS)
    table[:rows] = torch.arange(1, 1 + rows * blocks_each).view(rows, blocks_each)
    outputs: list[list[float]] = []
    for step in range(STEPS):
        query[:rows] = torch.randn(rows, HEADS, WIDTH, generator=random)
        lengths = [length + step for length in LENGTHS]
        metadata = builder.build(0, _batch(persistent, lengths, CAPTURED if in_graph else rows, table, max(lengths)))
        if in_graph:
            graphs.replay(CAPTURED, metadata, rows)
        else:
            forward(metadata, rows)
        outputs.append(output[:rows].flatten().tolist())
    return outputs


def _builder(longest: int, in_graph: bool) -> Any:
    """Return vLLM's builder for a model whose longest request has *longest* tokens."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest, hf_config=SimpleNamespace(index_topk=8)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2 * CAPTURED),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE if in_graph else CUDAGraphMode.NONE,
            max_cudagraph_capture_size=CAPTURED,
        ),
        speculative_config=None,
    )
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32, compress_ratio=RATIO
    )
    return DeepseekV4FlashMLAMetadataBuilder(spec, ["model.layers.0.attn"], config, torch.device("cpu"))


def _persistent() -> Any:
    """Return a model runner's persistent tensors for a batch."""

    def integers(dtype: torch.dtype = torch.int32, size: int = CAPTURED) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    return SimpleNamespace(
        starts=integers(size=CAPTURED + 1),
        lengths=integers(),
        positions=integers(torch.int64),
        slots=integers(torch.int64),
    )


def _batch(persistent: Any, lengths: list[int], padded: int, table: Any, longest: int) -> Any:
    """Return the metadata of a decode of one token each, padded with length 0, the null block and slot -1."""
    rows = len(lengths)
    known = torch.tensor([*lengths, *[0] * (CAPTURED - rows)])
    persistent.lengths.copy_(known)
    persistent.positions.copy_((known - 1).clamp(min=0))
    persistent.slots.copy_(torch.where(known > 0, 0, -1))
    persistent.starts.copy_(torch.arange(CAPTURED + 1).clamp(max=rows))
    return CommonAttentionMetadata(
        query_start_loc=persistent.starts[: padded + 1],
        query_start_loc_cpu=persistent.starts[: padded + 1].clone(),
        seq_lens=persistent.lengths[:padded],
        num_reqs=padded,
        num_actual_tokens=padded,
        max_query_len=1,
        max_seq_len=longest,
        block_table_tensor=table[:padded],
        slot_mapping=persistent.slots[:padded],
        positions=persistent.positions[:padded],
    )


@contextlib.contextmanager
def _cpu_kernels() -> Iterator[None]:
    """Run the builder's two kernels on the CPU, and replace FlashMLA's kernel, within the block."""
    with (
        cpu_triton_kernels(sparse_mla, compressor_utils),
        mock.patch.object(backend, "np_to_pinned_tensor", torch.from_numpy),  # pinned memory needs CUDA
        mock.patch.object(flashmla, "flash_mla_with_kvcache", _attention_stand_in),
    ):
        yield


def _attention_stand_in(
    *, q: Any, extra_k_cache: Any, extra_indices_in_kvcache: Any, extra_topk_length: Any, out: Any, **_: object
) -> tuple[Any, None]:
    """Stand in for FlashMLA's kernel, with attention to the compressed entries alone.

    q and out are (tokens, 1, heads, width), indices (tokens, 1, entries), of which the first `extra_topk_length` count.
    """
    indices = extra_indices_in_kvcache.squeeze(1)
    counts = torch.arange(indices.shape[1]) < extra_topk_length.unsqueeze(1)
    keys = extra_k_cache.flatten(0, 2)[indices.clamp(min=0).long()]
    scores = torch.einsum("thd,ted->the", q.squeeze(1), keys).exp() * counts.unsqueeze(1)
    weights = scores / scores.sum(-1, keepdim=True).clamp(min=1e-9)
    out.copy_(torch.einsum("the,ted->thd", weights, keys).unsqueeze(1))
    return out, None
