"""dcp-context-lens (PR 36070): one of two ranks that share the context decodes three requests in a graph for four.

Real: vLLM's metadata builder and FlashAttention layer. Stand-ins: the group of ranks and the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.attention.backends import flash_attn

from vllm_graphfix.verify.double.flash_attention import HEADS, attend, flash_attention_stand_ins, metadata_builder
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
from vllm_graphfix.verify.measurement import Measurement

CAPTURED = 4
STEPS = [[9 + step, 23 + step, 14 + step] for step in range(3)]
"""Lengths of the requests, step by step; one token of each is decoded."""


def run(*, trigger: bool = True) -> Measurement:
    """Decode on one of two ranks. Without *trigger*, the rank has the whole context."""
    ranks = 2 if trigger else 1
    eager = _decode(ranks, captured=False)
    with cpu_cuda_graphs():
        graphed = _decode(ranks, captured=True)
    return Measurement(
        f"attention of 3 requests padded to 4 over {len(STEPS)} decode steps, on one of {ranks} ranks that share the "
        "context",
        tuple(eager),
        tuple(graphed),
    )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    with wrappers_on_the_double():
        _decode(2 if trigger else 1, captured=True, wrapped=True)


def _decode(ranks: int, *, captured: bool, wrapped: bool = False) -> list[float]:
    with one_of_ranks(ranks):
        # With some context, as vLLM captures from 0.26.0 on: without any, the builder chooses another path.
        capture, steps = ([1] * CAPTURED, [3] * CAPTURED), [([1] * len(lengths), lengths) for lengths in STEPS]
        return attend(decode_builder(captured), capture, steps, CAPTURED, CAPTURED, wrapped=wrapped)


@contextmanager
def one_of_ranks(ranks: int) -> Iterator[None]:
    """Replace, within the block, the group of *ranks* and the kernels that have no CPU form."""

    def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * ranks, dim)  # the other rank's heads have the same queries

    def combined(output: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> Any:
        return output[:, :HEADS], lse[:, :HEADS]  # the other rank has nothing of the context

    def merged(output: Any, first: Any, first_lse: Any, second: Any, second_lse: Any) -> None:
        share = torch.sigmoid(first_lse - second_lse).T.unsqueeze(-1)
        output.copy_(share * first + (1 - share) * second)

    group = SimpleNamespace(world_size=ranks, rank_in_group=0, all_gather=gathered)
    with (
        mock.patch.object(parallel_state, "_DCP", group),
        mock.patch.multiple(flash_attn, cp_lse_ag_out_rs=combined, merge_attn_states=merged),
        flash_attention_stand_ins(2),
    ):
        yield


def decode_builder(captured: bool) -> Any:
    return metadata_builder(CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE, CAPTURED, [CAPTURED])
