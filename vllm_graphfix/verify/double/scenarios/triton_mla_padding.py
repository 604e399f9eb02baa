"""triton-mla-padding (issue 57017): two requests in a graph of four, and padded rows that hold NaN.

The NaN of the padded rows reaches the requests by a common scale. Real: vLLM's builder, implementation and wrappers of
Triton MLA, and the second stage of its decode kernel. Stand-ins: the first stage, which writes nothing for a row
without tokens; quantisation to fp8 with one scale for the batch, as online MoE does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.ops import triton_decode_attention

from vllm_graphfix.fixes import _triton_mla_reduce
from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.poison.rows import Room, Rows

CAPTURED = 4
HEADS, LATENT, ROPE = 2, 8, 4
PAGE_SIZE, MAX_PAGES = 16, 4
SPLITS_FROM = 1024
"""Tokens in the longest sequence that the metadata claim: enough for two splits, in eager as in a graph."""
LAYER = "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")


def run(*, hit: bool = True) -> Measurement:
    """Not *hit*: four requests, which fill the graph."""
    steps = [[7 + step, 40 + step, *([] if hit else [16, 1])] for step in range(3)]
    with cpu_triton_mla():
        eager = TritonMLADecode()
        expected = [eager.step(lengths) for lengths in steps]
    with cpu_triton_mla(), cpu_cuda_graphs():
        graphed = TritonMLADecode(captured_requests=CAPTURED)
        replayed = [graphed.step(lengths) for lengths in steps]
    return Measurement(
        numbers=f"quantised attention output of {len(steps[0])} requests padded to 4 over 3 decode steps",
        eager=tuple(chain.from_iterable(expected)),
        graphed=tuple(chain.from_iterable(replayed)),
        counted={"empty-rows-given": len(steps)},
    )


@contextlib.contextmanager
def cpu_triton_mla() -> Iterator[None]:
    """For the block, Triton MLA decodes on a CPU."""
    with (
        cpu_triton_kernels(triton_decode_attention, triton_mla, _triton_mla_reduce),
        mock.patch.object(triton_decode_attention, "_decode_grouped_att_m_fwd", first_stage_stand_in),
    ):
        yield


def first_stage_stand_in(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    att_out: torch.Tensor,
    req_to_tokens: torch.Tensor,
    b_seqlen: torch.Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int,
    *_: object,
    **__: object,
) -> None:
    """Stands in for `_fwd_grouped_kernel_stage1`.

    It computes the attention of each row to each split of its tokens, and its log-sum-exp. Writes `att_out` (rows,
    heads, splits, values + 1); what belongs to a split without tokens is left as it is.
    """
    torch.ops.vllm_graphfix.mla_decode_splits(
        [q, k_buffer, att_out, req_to_tokens, b_seqlen], num_kv_splits, sm_scale, page_size
    )


# what it writes to is not declared, as in `triton_kernels`
@torch.library.custom_op(
    "vllm_graphfix::mla_decode_splits",
    mutates_args=(),
    schema="(Tensor[] tensors, int splits, float scale, int page_size) -> ()",
)
def _mla_decode_splits(tensors: list[torch.Tensor], splits: int, scale: float, page_size: int) -> None:
    query, cache, out, tables, lengths = tensors
    values = out.shape[-1] - 1
    for row, length in enumerate(lengths.tolist()):
        share = -(-length // splits)
        for split in range(splits):
            positions = torch.arange(share * split, max(share * split, min(share * (split + 1), length)))
            if not len(positions):
                continue
            keys = cache[tables[row, positions // page_size].long(), positions % page_size, 0]
            scores = query[row] @ keys.T * scale
            out[row, :, split, :values] = scores.softmax(-1) @ keys[:, :values]
            out[row, :, split, values] = scores.logsumexp(-1)


@_mla_decode_splits.register_fake
def _(tensors: list[torch.Tensor], splits: int, scale: float, page_size: int) -> None: ...


def quantised_with_one_scale(states: torch.Tensor) -> torch.Tensor:
    """Stands in for the activations of online fp8 MoE.

    They go to fp8 and back, with the largest value of the batch for a scale.
    """
    scale = states.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


class TritonMLADecode:
    """The persistent buffers of a model runner, and a Triton MLA layer whose output is quantised.

    `captured_requests` is the size of its one decode graph, to which a step's batch is padded as both model runners do
    it: length 0, the null block, no query token. None is eager.
    """

    def __init__(self, captured_requests: int | None = None) -> None:
        self._random = torch.Generator().manual_seed(0)
        pages = 1 + CAPTURED * MAX_PAGES  # block 0 is the null block
        self.cache = torch.randn(pages, PAGE_SIZE, LATENT + ROPE, generator=self._random)
        self.query = torch.zeros(CAPTURED, HEADS, LATENT + ROPE)
        self.lengths = torch.zeros(CAPTURED, dtype=torch.int32)
        self.tables = torch.zeros(CAPTURED, MAX_PAGES, dtype=torch.int32)
        self.query_start = torch.zeros(CAPTURED + 1, dtype=torch.int32)
        self.builder, self.implementation = metadata_builder(), implementation()
        inputs = {name: vars(self)[name] for name in ("query", "lengths", "tables", "query_start", "builder")}
        longest = MAX_PAGES * PAGE_SIZE
        self._engine = steps.Engine(self, inputs, Room(CAPTURED, CAPTURED), {LAYER: self.cache}, longest, PAGE_SIZE)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._captured_requests = captured_requests
        if captured_requests is not None:
            self._capture(captured_requests)

    def step(self, lengths: list[int]) -> list[float]:
        """Decode one token a request (counted in `lengths`): requests * heads * values of the quantised output."""
        requests = len(lengths)
        steps.begins(self._engine, Rows(requests, requests), range(1, requests * MAX_PAGES + 1))
        self.query[:requests] = torch.randn(requests, HEADS, LATENT + ROPE, generator=self._random)
        metadata = self.metadata(lengths, self._captured_requests or requests)
        if self.graph is None:
            self.attended, self.log_sums, self.output = self._layer(metadata, requests)
        else:
            self.graph.replay()
        values: list[float] = self.output[:requests].flatten().tolist()
        return values

    def metadata(self, lengths: list[int], padded_requests: int) -> Any:
        requests = len(lengths)
        self.lengths.zero_()[:requests] = torch.tensor(lengths, dtype=torch.int32)
        pages = torch.arange(1, 1 + CAPTURED * MAX_PAGES, dtype=torch.int32).view(CAPTURED, MAX_PAGES)
        self.tables.zero_()[:requests] = pages[:requests]
        self.query_start.fill_(requests)[: requests + 1] = torch.arange(requests + 1)
        return self.builder.build(0, common_metadata(self, padded_requests))

    def _capture(self, requests: int) -> None:
        """Captures as the runner's dummy run does: every request is one token long.

        The metadata are built outside of the graph.
        """
        metadata = self.metadata([1] * requests, requests)
        self._layer(metadata, requests)  # the warm-up
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.attended, self.log_sums, self.output = self._layer(metadata, requests)

    def _layer(self, metadata: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales = SimpleNamespace(_k_scale=torch.tensor(1.0))
        attended, log_sums = self.implementation.forward_mqa(self.query[:rows], self.cache, metadata, scales)
        return attended, log_sums, quantised_with_one_scale(attended)


def common_metadata(decode: TritonMLADecode, rows: int) -> Any:
    """What a model runner tells a builder of a batch of *rows*, padded ones among them."""
    given = {
        "query_start_loc": decode.query_start[: rows + 1],
        "query_start_loc_cpu": decode.query_start[: rows + 1].clone(),
        "seq_lens": decode.lengths[:rows],
        "num_reqs": rows,
        "num_actual_tokens": rows,
        "max_query_len": 1,
        "max_seq_len": SPLITS_FROM,
        "block_table_tensor": decode.tables[:rows],
        "slot_mapping": torch.zeros(rows, dtype=torch.int64),
        "seq_lens_cpu_upper_bound": decode.lengths[:rows].clone(),
    }
    known = {field.name for field in fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})


def metadata_builder(kind: Any = triton_mla.TritonMLAMetadataBuilder) -> Any:
    """A metadata builder with what it reads for a batch of decodes in 0.22 to 0.33."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    builder = object.__new__(kind)
    builder.__dict__.update(
        device=CPU,
        metadata_cls=MLACommonMetadata,
        # MLA metadata accept the widths of its models only; the kernels take any, and get a smaller one
        model_config=SimpleNamespace(get_head_size=lambda: 576),
        reorder_batch_threshold=1,
        dcp_world_size=1,
        non_causal_multi_token_decode=False,
        use_pcp=False,
    )
    return builder


def implementation() -> Any:
    made = object.__new__(triton_mla.TritonMLAImpl)
    made.__dict__.update(kv_lora_rank=LATENT, scale=(LATENT + ROPE) ** -0.5, _sm_count=4, dcp_world_size=1)
    return made
