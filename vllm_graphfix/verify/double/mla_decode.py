"""Decode steps of latent attention with vLLM's own metadata builder, without and with a graph."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.poison.rows import Room, Rows

CAPTURED = 4
HEADS = 2
SPLITS_FROM = 1024
"""Longest sequence according to the metadata, in tokens: enough for two splits, in eager runs and in a graph."""
LAYER = "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")


def quantised_with_one_scale(states: torch.Tensor) -> torch.Tensor:
    """Stand in for the activations of online fp8 MoE: to fp8 and back, scaled by the largest value of the batch."""
    scale = states.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


class MLADecode:
    """Persistent buffers of a model runner, and a latent attention layer with quantised output.

    `captured_requests` is the size of its one decode graph, to which a step's batch is padded as by both model runners:
    length 0, the null block, no query token. None runs eagerly.
    """

    latent: int
    rope: int
    page_size: int
    max_pages: int
    dtype = torch.float32

    def __init__(self, builder: Any, captured_requests: int | None = None) -> None:
        self._random = torch.Generator().manual_seed(0)
        pages = 1 + CAPTURED * self.max_pages  # block 0 is the null block
        width = self.latent + self.rope
        self.cache = torch.randn(pages, self.page_size, width, generator=self._random).to(self.dtype)
        self.query = torch.zeros(CAPTURED, HEADS, width, dtype=self.dtype)
        self.lengths = torch.zeros(CAPTURED, dtype=torch.int32)
        self.tables = torch.zeros(CAPTURED, self.max_pages, dtype=torch.int32)
        self.query_start = torch.zeros(CAPTURED + 1, dtype=torch.int32)
        self.builder = builder
        inputs = {name: vars(self)[name] for name in ("query", "lengths", "tables", "query_start", "builder")}
        longest = self.max_pages * self.page_size
        self._engine = steps.Engine(
            self, inputs, Room(CAPTURED, CAPTURED), {LAYER: self.cache}, longest, self.page_size
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self._captured_requests = captured_requests
        if captured_requests is not None:
            self._capture(captured_requests)

    def attend(self, query: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of vLLM's layer for *query*, (rows, heads, values), and its log-sum-exp, (rows, heads)."""
        raise NotImplementedError

    def step(self, lengths: list[int]) -> list[float]:
        """Decode one token a request, counted in *lengths*. Returns requests * heads * values of quantised output."""
        requests = len(lengths)
        steps.begin_step(self._engine, Rows(requests, requests), range(1, requests * self.max_pages + 1))
        self.query[:requests] = torch.randn(requests, HEADS, self.latent + self.rope, generator=self._random)
        metadata = self.metadata(lengths, self._captured_requests or requests)
        if self.graph is None:
            self._layer(metadata, requests)
        else:
            self.graph.replay()
        values: list[float] = self.output[:requests].flatten().tolist()
        return values

    def metadata(self, lengths: list[int], padded_requests: int) -> Any:
        requests = len(lengths)
        self.lengths.zero_()[:requests] = torch.tensor(lengths, dtype=torch.int32)
        pages = torch.arange(1, 1 + CAPTURED * self.max_pages, dtype=torch.int32).view(CAPTURED, self.max_pages)
        self.tables.zero_()[:requests] = pages[:requests]
        self.query_start.fill_(requests)[: requests + 1] = torch.arange(requests + 1)
        return self.builder.build(0, common_metadata(self, padded_requests))

    def _capture(self, requests: int) -> None:
        """Capture as the runner's dummy run does: one token a request, and metadata built outside of the graph."""
        metadata = self.metadata([1] * requests, requests)
        self._layer(metadata, requests)  # the warm-up
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._layer(metadata, requests)

    def _layer(self, metadata: Any, rows: int) -> None:
        self.attended, self.log_sums = self.attend(self.query[:rows], metadata)
        self.output = quantised_with_one_scale(self.attended)


def common_metadata(decode: MLADecode, rows: int) -> Any:
    """Return the metadata that a model runner passes to a builder for a batch of *rows*, padding included."""
    lengths = decode.lengths[:rows]
    values = {
        "query_start_loc": decode.query_start[: rows + 1],
        "query_start_loc_cpu": decode.query_start[: rows + 1].clone(),
        "seq_lens": lengths,
        "num_reqs": rows,
        "num_actual_tokens": rows,
        "max_query_len": 1,
        "max_seq_len": SPLITS_FROM,
        "block_table_tensor": decode.tables[:rows],
        "slot_mapping": torch.zeros(rows, dtype=torch.int64),
        "seq_lens_cpu_upper_bound": lengths.clone(),
    }
    return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))


def metadata_builder(kind: Any) -> Any:
    """Return a metadata builder of *kind* with what 0.14 to 0.33 read for a batch of decodes."""
    common = import_module(next(cls for cls in kind.__mro__ if cls.__name__ == "MLACommonMetadataBuilder").__module__)
    builder = object.__new__(kind)
    builder.__dict__.update(
        device=CPU,
        metadata_cls=common.MLACommonMetadata,
        # MLA metadata accept the widths of its models only; the kernels take any, and get a smaller one
        model_config=SimpleNamespace(get_head_size=lambda: 576),
        reorder_batch_threshold=1,
        dcp_world_size=1,
        non_causal_multi_token_decode=False,
        use_pcp=False,
        _use_fi_prefill=False,
    )
    return builder
