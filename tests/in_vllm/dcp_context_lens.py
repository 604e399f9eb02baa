"""dcp-context-lens on vLLM's own metadata builder, for one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

import vllm_graphfix
from vllm_graphfix.fixes.dcp_context_lens import _KEPT, FALLBACK
from vllm_graphfix.verify.double.scenarios.dcp_context_lens import _builder, _Rows, _stand_in

STOCK = FlashAttentionMetadataBuilder.build.__wrapped__
LARGE, SMALL = [9, 23, 14, 30], [8, 5]


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    FALLBACK.reason = None
    with ExitStack() as stack:
        _stand_in(2, stack)
        yield


def test_the_fix_is_active() -> None:
    assert vllm_graphfix.states()["dcp-context-lens"].state.value == "active"


def test_lengths_are_those_of_stock_at_one_address_and_zeros_are_behind_them() -> None:
    builder, rows = _builder(True), _Rows()
    captured = builder.build(0, rows.batch(LARGE, 4)).dcp_context_kv_lens
    assert captured.tolist() == STOCK(builder, 0, rows.batch(LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    replayed = builder.build(0, rows.batch(SMALL, 2)).dcp_context_kv_lens
    assert replayed.data_ptr() == captured.data_ptr()
    assert (replayed.tolist(), captured.tolist()) == ([4, 2], [4, 2, 0, 0])
    assert replayed.dtype == STOCK(builder, 0, rows.batch(SMALL, 2)).dcp_context_kv_lens.dtype
    assert FALLBACK.reason is None


def test_each_builder_has_lengths_of_its_own() -> None:
    first, second = (_builder(True).build(0, _Rows().batch(lengths, 4)) for lengths in (LARGE, LARGE[::-1]))
    assert first.dcp_context_kv_lens.tolist() == second.dcp_context_kv_lens.tolist()[::-1]


def test_a_buffer_made_in_inference_mode_is_written_outside_of_it_too() -> None:
    builder, rows = _builder(True), _Rows()
    with torch.inference_mode():
        builder.build(0, rows.batch(LARGE, 4))
    assert builder.build(0, rows.batch(SMALL, 2)).dcp_context_kv_lens.tolist() == [4, 2]
    assert FALLBACK.reason is None


def test_without_full_graphs_the_metadata_are_stocks() -> None:
    builder = _builder(False)
    assert builder.build(0, _Rows().batch(LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    assert not hasattr(builder, _KEPT)


def test_a_batch_of_more_requests_than_there_may_be_has_stocks_lengths() -> None:
    builder = _builder(True)
    builder.vllm_config.scheduler_config.max_num_seqs = 2
    assert builder.build(0, _Rows().batch(LARGE, 4)).dcp_context_kv_lens.tolist() == [4, 11, 7, 15]
    assert FALLBACK.reason is not None
