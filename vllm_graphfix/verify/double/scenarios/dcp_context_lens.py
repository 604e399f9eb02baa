"""dcp-context-lens (PR 36070): one of two ranks that share the context decodes three requests in a graph for four.

vLLM's own metadata builder and FlashAttention layer; the group of ranks and the kernels are stand-ins.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import WrappedGraphs, wrappers_on_the_double
from vllm_graphfix.verify.measurement import Measurement

CAPTURED = 4
HEADS, WIDTH = 2, 8
BLOCKS, BLOCK_SIZE = 8, 4
LAYER = "model.layers.0.self_attn.attn"
STEPS = [[9 + step, 23 + step, 14 + step] for step in range(3)]
"""Lengths of the requests, step by step, of which one token is decoded."""


def run(*, hit: bool = True) -> Measurement:
    """One of two ranks that share the context decodes three requests in a graph for four. Not *hit*: it has the context to itself."""
    ranks = 2 if hit else 1
    eager = _decode(ranks, captured=False)
    with cpu_cuda_graphs():
        graphed = _decode(ranks, captured=True)
    return Measurement(
        f"attention of 3 requests padded to 4 over {len(STEPS)} decode steps, on one of {ranks} ranks that share the context",
        tuple(eager),
        tuple(graphed),
    )


def watched(*, hit: bool = True) -> None:
    """The replays of `run` by vLLM's wrapper of full graphs, for the shadow check."""
    with wrappers_on_the_double():
        _decode(2 if hit else 1, captured=True, wrapped=True)


def _decode(ranks: int, *, captured: bool, wrapped: bool = False) -> list[float]:
    """The attention of each step's tokens, by vLLM's own metadata builder and layer. *wrapped*: the graph is in vLLM's wrapper."""
    with ExitStack() as stack:
        _stand_in(ranks, stack)
        random = torch.Generator().manual_seed(0)
        cache = torch.randn(2, CAPTURED * BLOCKS, BLOCK_SIZE, 1, WIDTH, generator=random)
        query, key, value = torch.zeros(CAPTURED, HEADS, WIDTH), *torch.zeros(2, CAPTURED, 1, WIDTH)
        builder, rows = _builder(captured), _Rows()
        layer: Any = torch.nn.Module()
        layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(())
        attention: Any = flash_attn.FlashAttentionImpl(HEADS, WIDTH, 0.5, 1, None, None, "auto")
        attention.vllm_flash_attn_version = 2

        def attend(metadata: Any) -> torch.Tensor:
            output = torch.zeros(CAPTURED, HEADS, WIDTH)
            attention.forward(layer, query, key, value, cache, metadata, output)
            return output

        graphs = WrappedGraphs(LAYER, layer, lambda metadata, padded: attend(metadata), BLOCK_SIZE) if wrapped else None
        if captured:
            metadata = builder.build(0, rows.batch([1] * CAPTURED, CAPTURED))
        if graphs is not None:
            graphs.capture(CAPTURED, metadata)
        elif captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = attend(metadata)
        numbers: list[float] = []
        for lengths in STEPS:
            requests = len(lengths)
            for tensor in (query, key, value):
                tensor[:requests] = torch.randn(requests, *tensor.shape[1:], generator=random)
            metadata = builder.build(0, rows.batch(lengths, CAPTURED if captured else requests))
            if graphs is not None:
                output = graphs.replay(CAPTURED, metadata, requests)
            elif captured:
                graph.replay()
            else:
                output = attend(metadata)
            numbers += output[:requests].flatten().tolist()
        return numbers


def _stand_in(ranks: int, stack: ExitStack) -> None:
    """For the group of ranks and for kernels that have no CPU form, until *stack* ends."""

    def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * ranks, dim)  # the other rank's heads ask for the same

    def combined(output: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> Any:
        return output[:, :HEADS], lse[:, :HEADS]  # the other rank has nothing of the context

    def merged(output: Any, first: Any, first_lse: Any, second: Any, second_lse: Any) -> None:
        share = torch.sigmoid(first_lse - second_lse).T.unsqueeze(-1)
        output.copy_(share * first + (1 - share) * second)

    def varlen(**given: Any) -> Any:
        starts, table = given["cu_seqlens_q"], given.get("block_table")
        lengths = given["seqused_k"] if table is not None else starts.diff()
        if table is None:  # keys of the step's own tokens: a block of one for each request
            table = torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1)
            given["k"], given["v"] = given["k"].unsqueeze(1), given["v"].unsqueeze(1)
        attend, _ = _attention_stand_in()
        found = attend(given["q"], given["k"], given["v"], starts, lengths, table, given["softmax_scale"])
        return found if given["out"] is None else given["out"].copy_(found[0])

    group = SimpleNamespace(world_size=ranks, rank_in_group=0, all_gather=gathered)
    stack.enter_context(mock.patch.object(parallel_state, "_DCP", group))
    names = {
        "cp_lse_ag_out_rs": combined,
        "merge_attn_states": merged,
        "flash_attn_varlen_func": varlen,
        "reshape_and_cache_flash": lambda *_: None,  # the cache is full as it is
    }
    for name, function in names.items():
        stack.enter_context(mock.patch.object(flash_attn, name, function, create=True))


@functools.cache
def _attention_stand_in() -> tuple[Any, object]:
    """One query token a request, attending to as many tokens of its blocks as *lengths* says: an operation, whose lengths no capture reads."""
    library = torch.library.Library("vllm_graphfix_dcp", "FRAGMENT")
    library.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor table, float scale) -> (Tensor, Tensor)"
    )

    def attend(q: Any, k: Any, v: Any, starts: Any, lengths: Any, table: Any, scale: float) -> Any:
        out, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf)
        for row, length in enumerate(lengths.tolist()):
            if length < 1 or starts[row] == starts[row + 1]:
                continue
            token = int(starts[row])
            keys, values = (cache[table[row].long()].flatten(0, 1)[:length, 0] for cache in (k, v))
            scores = q[token] @ keys.T * scale
            lse[:, token] = scores.logsumexp(-1)
            out[token] = scores.softmax(-1) @ values
        return out, lse

    library.impl("attend", attend, "CPU")
    library.impl("attend", lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[1::-1])), "Meta")
    return torch.ops.vllm_graphfix_dcp.attend, library  # without which it is gone


def _builder(captured: bool) -> Any:
    """vLLM's own, with a configuration of what it reads."""
    mode = CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            get_num_kv_heads=lambda parallel: 1,
            get_head_size=lambda: WIDTH,
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=CAPTURED),
        scheduler_config=SimpleNamespace(max_num_seqs=CAPTURED),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=1),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
    return flash_attn.FlashAttentionMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


class _Rows:
    """The persistent tensors of a model runner, and a batch of decodes in them, padded as both model runners do it."""

    def __init__(self) -> None:
        self.lengths = torch.zeros(CAPTURED, dtype=torch.int32)
        self.starts = torch.zeros(CAPTURED + 1, dtype=torch.int32)
        self.table = torch.arange(CAPTURED * BLOCKS, dtype=torch.int32).view(CAPTURED, BLOCKS)

    def batch(self, lengths: list[int], rows: int) -> Any:
        requests = len(lengths)
        self.lengths[:requests], self.lengths[requests:] = torch.tensor(lengths), 0
        self.starts[:] = torch.arange(CAPTURED + 1).clamp(max=requests)
        given = {
            "query_start_loc": self.starts[: rows + 1],
            "query_start_loc_cpu": self.starts[: rows + 1].clone(),
            "seq_lens": self.lengths[:rows],
            "num_reqs": rows,
            "num_actual_tokens": rows,
            "max_query_len": 1,
            "max_seq_len": BLOCKS * BLOCK_SIZE,
            "block_table_tensor": self.table[:rows],
            "slot_mapping": torch.zeros(rows, dtype=torch.int64),
        }
        known = {field.name for field in fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})
