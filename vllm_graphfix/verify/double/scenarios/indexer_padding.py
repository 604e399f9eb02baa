"""indexer-padding (issue 51593): the sparse indexer's top-k gets padded rows of a decode batch with draft tokens.

Three requests with a draft token each decode in a graph that was captured for four.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.poison.rows import Room, Rows

CAPTURED = 4
MAX_BLOCKS, BLOCK_SIZE = 3, 64
MAX_MODEL_LEN = MAX_BLOCKS * BLOCK_SIZE
WIDTH = 8
TOP_K = 16
LAYER = "model.layers.0.self_attn.indexer.k_cache"
CPU = torch.device("cpu")
STEPS = [[63 + step, 120 + step, 20 + step] for step in range(3)]
"""Lengths of the requests, step by step; TOKENS tokens of each are decoded."""
TOKENS = 2

RADIX_THRESHOLD = 32768
"""Length beyond which several blocks of the top-k kernel share a row."""


def run(*, trigger: bool = True) -> Measurement:
    """Decode with a draft token. Without *trigger*, without one, though with padded rows."""
    tokens = TOKENS if trigger else 1
    eager = Decode(tokens=tokens)
    expected = [eager.step(lengths) for lengths in STEPS]
    replayed: list[list[float]] = []
    error = None
    with cpu_cuda_graphs():
        graphed = Decode(CAPTURED, tokens)
        try:
            replayed = [graphed.step(lengths) for lengths in STEPS]
        except RuntimeError as e:
            error = str(e).splitlines()[0]
    return Measurement(
        numbers=f"the {TOP_K} best positions for {tokens} tokens of 3 requests padded to 4 over {len(STEPS)} decode "
        "steps",
        eager=tuple(chain.from_iterable(expected)),
        graphed=tuple(chain.from_iterable(replayed)),
        error=error,
        counted={"padded-rows-below-zero": len(STEPS)},
    )


_kernels = torch.library.Library("vllm_graphfix_indexer", "FRAGMENT")
_kernels.define("top_k_stand_in(Tensor logits, Tensor lengths, int max_seq_len) -> Tensor")


@torch.library.impl(_kernels, "top_k_stand_in", "CPU")
def _top_k(logits: torch.Tensor, lengths: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """Stand in for `persistent_topk`, which reads *lengths* unsigned: (rows, TOP_K) int32, -1 beyond a row's length.

    Blocks other than a row's first exit at once if *max_seq_len*, from the host, is short. The first block reads the
    row's own length, and waits for the others if that is long.

    Raises:
        RuntimeError: the kernel would hang.
    """
    best = torch.full((len(logits), TOP_K), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.flatten().tolist()):
        if length % 2**32 > RADIX_THRESHOLD >= max_seq_len:
            raise RuntimeError(
                f"hangs (CPU stand-in): a block of the top-k kernel takes row {row} of {len(logits)}, of length "
                f"{length}, for one of {length % 2**32} tokens, and waits for blocks that have left"
            )
        best_positions = logits[row, :length].topk(min(TOP_K, length)).indices
        best[row, : len(best_positions)] = best_positions.int()
    return best


@torch.library.impl(_kernels, "top_k_stand_in", "Meta")
def _top_k_shape(logits: torch.Tensor, lengths: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    return logits.new_empty((len(logits), TOP_K), dtype=torch.int32)


class Decode:
    """The builder of the indexer's metadata, and a stand-in for the indexer.

    `captured_requests` is the size of its one decode graph, to which a step's batch is padded; None runs eagerly.
    """

    def __init__(self, captured_requests: int | None = None, tokens: int = TOKENS) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._keys = torch.randn(1 + CAPTURED * MAX_BLOCKS, BLOCK_SIZE, WIDTH, generator=self._random)
        self._query = torch.zeros(CAPTURED, tokens, WIDTH)
        self._runner = Batches(CAPTURED)
        self._tokens = tokens
        self._builder = builder(tokens - 1)
        inputs = {"query": self._query, "runner": self._runner, "builder": self._builder}
        room = Room(CAPTURED, CAPTURED * tokens)
        self._engine = steps.Engine(self, inputs, room, {LAYER: self._keys}, MAX_MODEL_LEN, BLOCK_SIZE)
        self._captured_requests = captured_requests
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured_requests is not None:
            metadata = self._builder.build(0, self._runner.batch([tokens] * CAPTURED, [tokens] * CAPTURED))
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._captured_output = self._index(metadata)

    def step(self, lengths: list[int]) -> list[float]:
        """Return the positions chosen for each token of each request, sorted."""
        requests = len(lengths)
        held = range(1, requests * MAX_BLOCKS + 1)
        steps.begin_step(self._engine, Rows(requests, requests * self._tokens), held)
        self._query[:requests] = torch.randn(requests, self._tokens, WIDTH, generator=self._random)
        padding = (self._captured_requests or requests) - requests
        batch = self._runner.batch([self._tokens] * requests + [0] * padding, lengths + [0] * padding)
        metadata = self._builder.build(0, batch)
        if self._graph is None:
            output = self._index(metadata)
        else:
            self._graph.replay()
            output = self._captured_output
        chosen: list[float] = output[: requests * self._tokens].sort().values.float().flatten().tolist()
        return chosen

    def _index(self, metadata: Any) -> torch.Tensor:
        """Return the top-k of the logits of all cached tokens of each request, of which *metadata*'s lengths count."""
        decode = metadata.decode
        rows = len(decode.seq_lens)
        keys = self._keys[decode.block_table[:rows].long()].flatten(1, 2)
        logits = torch.bmm(self._query[:rows], keys.transpose(1, 2)).flatten(0, 1)
        best: torch.Tensor = torch.ops.vllm_graphfix_indexer.top_k_stand_in(logits, decode.seq_lens, MAX_MODEL_LEN)
        return best


class Batches:
    """Persistent tensors of a model runner, with batches padded as by both model runners."""

    def __init__(self, requests: int) -> None:
        self.lengths = torch.zeros(requests, dtype=torch.int32)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32)
        self.starts_cpu = torch.zeros_like(self.starts)
        self.table = torch.zeros(requests, MAX_BLOCKS, dtype=torch.int32)

    def batch(self, scheduled: list[int], lengths: list[int], **further: Any) -> Any:
        """Return the metadata of a batch, by the scheduled tokens and the length of each row.

        Padded rows, at the end, have 0 of both. *further* are more fields of the metadata.
        """
        rows = len(scheduled)
        self.lengths[:rows] = torch.tensor(lengths, dtype=torch.int32)
        self.starts_cpu[: rows + 1] = torch.tensor([0, *scheduled]).cumsum(0)
        self.starts.copy_(self.starts_cpu)
        real = torch.tensor(scheduled, dtype=torch.int32)[:, None] > 0
        blocks = torch.arange(1, rows * MAX_BLOCKS + 1, dtype=torch.int32).view(rows, MAX_BLOCKS)
        self.table[:rows] = blocks * real  # padded with the null block
        padded_tokens = max(scheduled) * rows
        values = {
            "query_start_loc": self.starts[: rows + 1],
            "query_start_loc_cpu": self.starts_cpu[: rows + 1],
            "seq_lens": self.lengths[:rows],
            "num_reqs": rows,
            "num_actual_tokens": padded_tokens if 0 in scheduled else sum(scheduled),
            "max_query_len": max(scheduled),
            "max_seq_len": MAX_MODEL_LEN,
            "block_table_tensor": self.table[:rows],
            "slot_mapping": torch.zeros(padded_tokens, dtype=torch.int64),
            "seq_lens_cpu_upper_bound": self.lengths[:rows].clone(),
            **further,
        }
        return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))


def builder(
    draft_tokens: int, *, blackwell: bool = False, compress_ratio: int = 1, requests: int = CAPTURED, tokens: int = 64
) -> Any:
    """Return vLLM's builder for up to *requests* and *tokens*; kernels for *blackwell* take any number of drafts."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        attention_config=SimpleNamespace(use_fp4_indexer_cache=False),
        speculative_config=SimpleNamespace(num_speculative_tokens=draft_tokens) if draft_tokens else None,
    )
    kind = indexer.DeepseekV32IndexerMetadataBuilder
    spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8, compress_ratio=compress_ratio
    )
    wide = {"block_table_width": MAX_BLOCKS} if getattr(kind, "requires_block_table_width", False) else {}
    with _gpu_double(blackwell):
        return kind(spec, [LAYER], config, CPU, **wide)


@contextmanager
def _gpu_double(blackwell: bool) -> Iterator[None]:
    """Answer the builder's queries of its GPU within the block."""
    platform = SimpleNamespace(is_device_capability_family=lambda capability: blackwell and capability == 100)
    with (
        mock.patch.object(indexer, "current_platform", platform),
        mock.patch.object(indexer, "num_compute_units", return_value=2),
    ):
        yield
