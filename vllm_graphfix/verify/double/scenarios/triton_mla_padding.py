"""triton-mla-padding (issue 57017): two requests in a graph of four, and padded rows that hold NaN.

The NaN of the padded rows reaches the requests by a common scale. Real: vLLM's builder, implementation and wrappers of
Triton MLA, and the second stage of its decode kernel. Stand-ins: the first stage, which writes nothing for a row
without tokens; quantisation to fp8 with one scale for the batch, as online MoE does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.ops import triton_decode_attention

from vllm_graphfix.fixes import _triton_mla_reduce
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.mla_decode import CAPTURED, MLADecode, metadata_builder
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.measurement import Measurement

LATENT, ROPE = 8, 4


def run(*, trigger: bool = True) -> Measurement:
    """Decode two requests. Without *trigger*, four, which fill the graph."""
    steps = [[7 + step, 40 + step, *([] if trigger else [16, 1])] for step in range(3)]
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
    """Decode with Triton MLA on a CPU within the block."""
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
    """Stand in for `_fwd_grouped_kernel_stage1`: attention of each row to each split of its tokens.

    Writes the attention and its log-sum-exp to `att_out`, (rows, heads, splits, values + 1). Splits without tokens are
    not written.
    """
    torch.ops.vllm_graphfix.mla_decode_splits(
        [q, k_buffer, att_out, req_to_tokens, b_seqlen], num_kv_splits, sm_scale, page_size
    )


# No tensor is declared as written to, as in `triton_kernels`.
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


class TritonMLADecode(MLADecode):
    """Latent attention on Triton."""

    latent, rope, page_size, max_pages = LATENT, ROPE, 16, 4

    def __init__(self, captured_requests: int | None = None) -> None:
        self.implementation = implementation()
        super().__init__(metadata_builder(triton_mla.TritonMLAMetadataBuilder), captured_requests)

    def attend(self, query: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales = SimpleNamespace(_k_scale=torch.tensor(1.0))
        attended, log_sums = self.implementation.forward_mqa(query, self.cache, metadata, scales)
        return attended, log_sums


def implementation() -> Any:
    made = object.__new__(triton_mla.TritonMLAImpl)
    made.__dict__.update(kv_lora_rank=LATENT, scale=(LATENT + ROPE) ** -0.5, _sm_count=4, dcp_world_size=1)
    return made
