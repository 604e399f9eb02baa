"""dcp-context-lens on vLLM's own metadata builder, for one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from activities import activity_of
from vllm_graphfix.fixes.dcp_context_lens import _BUFFER
from vllm_graphfix.verify.double.flash_attention import Rows
from vllm_graphfix.verify.double.scenarios.dcp_context_lens import CAPTURED, decode_builder, one_of_ranks

STOCK = FlashAttentionMetadataBuilder.build.__wrapped__
ACTIVITY = activity_of("dcp-context-lens")
LARGE, SMALL = [9, 23, 14, 30], [8, 5]


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with one_of_ranks(2):
        yield
    ACTIVITY.error = None


def _decodes(rows: Rows, lengths: list[int], padded: int) -> Any:
    """A batch of one token for each request, of *padded* requests."""
    return rows.batch([1] * len(lengths), lengths, padded, padded)


def test_lengths_are_those_of_stock_at_one_address_and_zeros_are_behind_them() -> None:
    builder, rows = decode_builder(True), Rows(CAPTURED)
    captured = builder.build(0, _decodes(rows, LARGE, 4)).dcp_context_kv_lens
    assert (
        captured.tolist() == STOCK(builder, 0, _decodes(rows, LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    )
    replayed = builder.build(0, _decodes(rows, SMALL, 2)).dcp_context_kv_lens
    assert replayed.data_ptr() == captured.data_ptr()
    assert (replayed.tolist(), captured.tolist()) == ([4, 2], [4, 2, 0, 0])
    assert replayed.dtype == STOCK(builder, 0, _decodes(rows, SMALL, 2)).dcp_context_kv_lens.dtype
    assert ACTIVITY.error is None


def test_each_builder_has_lengths_of_its_own() -> None:
    first, second = (
        decode_builder(True).build(0, _decodes(Rows(CAPTURED), lengths, 4)) for lengths in (LARGE, LARGE[::-1])
    )
    assert first.dcp_context_kv_lens.tolist() == second.dcp_context_kv_lens.tolist()[::-1]


def test_a_buffer_made_in_inference_mode_is_written_outside_of_it_too() -> None:
    builder, rows = decode_builder(True), Rows(CAPTURED)
    with torch.inference_mode():
        builder.build(0, _decodes(rows, LARGE, 4))
    assert builder.build(0, _decodes(rows, SMALL, 2)).dcp_context_kv_lens.tolist() == [4, 2]
    assert ACTIVITY.error is None


def test_without_full_graphs_the_metadata_are_stocks() -> None:
    builder = decode_builder(False)
    assert builder.build(0, _decodes(Rows(CAPTURED), LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    assert not hasattr(builder, _BUFFER)


def test_a_batch_of_more_requests_than_there_may_be_has_stocks_lengths() -> None:
    builder = decode_builder(True)
    builder.vllm_config.scheduler_config.max_num_seqs = 2
    assert builder.build(0, _decodes(Rows(CAPTURED), LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    assert ACTIVITY.error is not None
