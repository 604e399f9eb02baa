"""c128a-stride on vLLM's own builder: which batches have rows as wide as their buffer, and what else is stock's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from activities import activity_of
from vllm_graphfix.fixes.c128a_stride import ROWS_CLOSER
from vllm_graphfix.verify.double.scenarios.c128a_stride import (
    CAPTURED,
    MAX_MODEL_LEN,
    _batch,
    _builder,
    _cpu_kernels,
    _persistent,
)

NARROW, WIDE = 128, MAX_MODEL_LEN // 128
ACTIVITY = activity_of("c128a-stride")
CLOSER_ROWS = ACTIVITY.counter(ROWS_CLOSER)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    ACTIVITY.reset()
    with _cpu_kernels():
        yield
    assert ACTIVITY.error is None


def batch(lengths: list[int], longest: int | None = None) -> Any:
    table = torch.arange(1, 1 + CAPTURED * 8, dtype=torch.int32).view(CAPTURED, 8)
    return _batch(_persistent(), lengths, len(lengths), table, longest or max(lengths))


def width(built: Any) -> int:
    """The width of a row, and the distance to the next one."""
    rows = built.c128a_global_decode_topk_indices
    assert rows.stride(0) == rows.shape[-1]
    result: int = rows.stride(0)
    return result


def test_a_builder_that_was_made_without_its_init_builds_as_stock_does() -> None:
    builder = _builder(MAX_MODEL_LEN, in_graph=True)
    del builder.vllm_config
    assert width(builder.build(0, batch([700, 1500]))) == NARROW
    assert CLOSER_ROWS.count == 0


def test_a_capture_and_a_shorter_batch_have_rows_at_the_same_places() -> None:
    builder = _builder(MAX_MODEL_LEN, in_graph=True)
    captured = builder.build(0, batch([1, 1], MAX_MODEL_LEN)).c128a_global_decode_topk_indices
    inputs = batch([700, 1500])
    built = builder.build(0, inputs)
    rows = built.c128a_global_decode_topk_indices
    assert [row.data_ptr() for row in rows] == [row.data_ptr() for row in captured]
    assert (CLOSER_ROWS.count, built.max_seq_len, inputs.max_seq_len) == (1, 1500, 1500)
    assert built.c128a_decode_topk_lens.tolist() == [5, 11]
    assert [row[0, :count].min() >= 0 for row, count in zip(rows, (5, 11), strict=True)] == [True, True]
    assert (rows[0, 0, 5:] == -1).all()
    assert (rows[1, 0, 11:] == -1).all()


@pytest.mark.parametrize(
    ("lengths", "longest", "rows"),
    [([700], None, NARROW), ([700, 1500], 16512, WIDE)],
    ids=["one request", "wide already"],
)
def test_rows_that_are_right_on_stock_are_not_changed(lengths: list[int], longest: int | None, rows: int) -> None:
    assert width(_builder(MAX_MODEL_LEN, in_graph=True).build(0, batch(lengths, longest))) == rows
    assert CLOSER_ROWS.count == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_cudagraph_capture_size", 1),
        ("cudagraph_mode", CUDAGraphMode.NONE),
        ("cudagraph_mode", CUDAGraphMode.PIECEWISE),
    ],
)
def test_a_batch_without_a_full_graph_is_not_changed(field: str, value: Any) -> None:
    builder = _builder(MAX_MODEL_LEN, in_graph=True)
    setattr(builder.vllm_config.compilation_config, field, value)
    assert width(builder.build(0, batch([700, 1500]))) == NARROW
    assert CLOSER_ROWS.count == 0


def test_prefills_keep_their_narrower_rows() -> None:
    builder = _builder(MAX_MODEL_LEN, in_graph=True)
    inputs = batch([3, 1500])
    for starts in (inputs.query_start_loc, inputs.query_start_loc_cpu):
        starts.copy_(torch.tensor([0, 1, 3]))  # the second request prefills two tokens
    inputs.num_actual_tokens, inputs.max_query_len = 3, 2
    inputs.positions, inputs.slot_mapping = torch.tensor([2, 1498, 1499]), torch.zeros(3, dtype=torch.int64)
    built = builder.build(0, inputs)
    assert built.c128a_prefill_topk_indices.shape == (2, NARROW)
    assert CLOSER_ROWS.count == 0
