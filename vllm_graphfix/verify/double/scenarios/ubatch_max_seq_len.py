"""ubatch-max-seq-len: a full graph of decodes in two micro-batches, and a layer with a sliding window.

Real: vLLM's micro-batches, FlashAttention's metadata builder and layer. Stand-ins: the kernel, and micro-batches in
turns, where vLLM has two threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends import flash_attn, utils
from vllm.v1.worker import ubatch_utils

from vllm_graphfix.verify.double.flash_attention import (
    BLOCK_SIZE,
    BLOCKS,
    HEADS,
    WIDTH,
    Rows,
    flash_attention_stand_ins,
    metadata_builder,
    random_cache,
)
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

REQUESTS, WINDOW, LONGEST = 4, 4, BLOCKS * BLOCK_SIZE
STEPS = ([9, 23, 14, 3], [10, 24, 15, 4], [11, 2, 16, 5])
"""Lengths of the requests, step by step."""
HALVES = [ubatch_utils.UBatchSlice(slice(row, row + 2), slice(row, row + 2)) for row in range(0, REQUESTS, 2)]


def run(*, trigger: bool = True) -> Measurement:
    """Decode in a graph of two micro-batches. Without *trigger*, its capture has requests of the greatest length."""
    eager = _serve(None)
    with cpu_cuda_graphs():
        graphed = _serve([1 if trigger else LONGEST] * REQUESTS)
    return Measurement(
        f"attention of {REQUESTS} requests in two micro-batches, {len(STEPS)} steps with a window of {WINDOW}",
        tuple(eager),
        tuple(graphed),
        counted={"longest-length-forgotten": len(HALVES) if trigger else 0},
    )


def _serve(captured: list[int] | None) -> list[float]:
    """Return the attention of all steps, in a graph whose capture has the lengths *captured*, or without a graph."""
    mode = CUDAGraphMode.NONE if captured is None else CUDAGraphMode.FULL_DECODE_ONLY
    random, rows = torch.Generator().manual_seed(0), Rows(REQUESTS)
    cache = random_cache(REQUESTS * BLOCKS, random)
    query, output = torch.zeros(2, REQUESTS, HEADS, WIDTH)
    unused = torch.zeros(REQUESTS, 1, WIDTH)  # the step's own keys and values, which nothing writes: the cache is full
    layer: Any = torch.nn.Module()
    layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(())
    split = getattr(ubatch_utils, "split_attn_metadata", None) or utils.split_attn_metadata
    with flash_attention_stand_ins(3):
        builders = [metadata_builder(mode, REQUESTS, [REQUESTS]) for _ in HALVES]
        attention: Any = flash_attn.FlashAttentionImpl(HEADS, WIDTH, 0.5, 1, None, WINDOW, "auto")

        def built(lengths: list[int], longest: int, way: str, *first: int) -> list[Any]:
            batch = replace(rows.batch([1] * REQUESTS, lengths, REQUESTS, REQUESTS), max_seq_len=longest)
            return [
                getattr(builder, way)(*first, half)
                for builder, half in zip(builders, split(HALVES, batch), strict=True)
            ]

        def forward(metadata: list[Any]) -> None:
            for half, own in zip(HALVES, metadata, strict=True):
                tokens = half.token_slice
                attention.forward(layer, query[tokens], unused[tokens], unused[tokens], cache, own, output[tokens])

        graph = torch.cuda.CUDAGraph() if captured is not None else None
        if graph is not None and captured is not None:
            metadata = built(captured, LONGEST, "build_for_cudagraph_capture")
            with torch.cuda.graph(graph):
                forward(metadata)
        numbers: list[float] = []
        for lengths in STEPS:
            query.copy_(torch.randn(query.shape, generator=random))
            metadata = built(lengths, max(lengths), "build", 0)
            if graph is None:
                forward(metadata)
            else:
                graph.replay()
            numbers += output.flatten().tolist()
    return numbers
