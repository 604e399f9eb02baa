"""draft-idx-mapping on vLLM's own speculators."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode

from activities import activity_of
from vllm_graphfix.fix import STEPPED_ASIDE
from vllm_graphfix.fixes.draft_idx_mapping import (
    _SPARE,
    ROWS_PADDED_WITH_REQUESTS,
    _has_padded_rows,
    _with_one_row_more,
)
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_idx_mapping as scenario
from vllm_graphfix.verify.double.scenarios.draft_idx_mapping import (
    DRAFT_TOKENS,
    REQUESTS,
    VOCABULARY,
    _kernels,
    _propose,
    _speculator,
)
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels

ACTIVITY = activity_of("draft-idx-mapping")
PADDED_ROWS = ACTIVITY.counter(ROWS_PADDED_WITH_REQUESTS)


@pytest.fixture(autouse=True)
def _on_the_double() -> Iterator[None]:
    ACTIVITY.reset()
    with cpu_cuda_graphs(), _kernels():
        yield
    assert ACTIVITY.error is None


def drafted(speculator: Any, batch: list[int]) -> None:
    _propose(speculator, batch, 3, torch.Generator().manual_seed(0))


def test_shapes_are_stocks_and_the_spare_row_is_behind_them() -> None:
    speculator = _speculator(CUDAGraphMode.NONE)
    shapes = {"draft_logits": (REQUESTS, DRAFT_TOKENS, VOCABULARY), "temperature": (REQUESTS,), "seeds": (REQUESTS,)}
    for name, shape in shapes.items():
        tensor = getattr(speculator, name)
        assert (tensor.shape, tensor.is_contiguous()) == (shape, True)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes // REQUESTS * (REQUESTS + 1)
    assert getattr(speculator, _SPARE) == REQUESTS


def test_rows_of_requests_are_stocks_and_those_behind_are_the_spare_row() -> None:
    speculator = _speculator(CUDAGraphMode.NONE)
    place = speculator.idx_mapping.data_ptr()
    drafted(speculator, [5, 0, 3])
    assert speculator.idx_mapping.tolist() == [5, 0, 3, REQUESTS, REQUESTS, REQUESTS]
    assert speculator.idx_mapping.data_ptr() == place


def test_a_speculator_that_drafts_the_likeliest_tokens_is_not_touched() -> None:
    speculator = _speculator(CUDAGraphMode.FULL_DECODE_ONLY, "greedy")
    assert speculator.draft_logits is None
    assert not hasattr(speculator, _SPARE)
    assert speculator.temperature.untyped_storage().nbytes() == speculator.temperature.nbytes
    drafted(speculator, [0, 1, 2, 3, 4, 5])
    drafted(speculator, [5, 0, 3, 1])
    assert speculator.idx_mapping.tolist() == [5, 0, 3, 1, 4, 5]
    assert PADDED_ROWS.count == 0


def test_a_speculator_of_another_class_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Speculator(scenario.EagleSpeculator):  # type: ignore[misc, name-defined]
        def sample_of(self, row: int) -> torch.Tensor:
            logits: torch.Tensor = self.draft_logits[self.idx_mapping[row]]
            return logits

    monkeypatch.setattr(scenario, "EagleSpeculator", Speculator)
    speculator = _speculator(CUDAGraphMode.NONE)
    assert not hasattr(speculator, _SPARE)
    assert ACTIVITY.counts[STEPPED_ASIDE] == 1
    drafted(speculator, [5, 0, 3])
    assert [speculator.sample_of(row).shape for row in range(REQUESTS)] == [(DRAFT_TOKENS, VOCABULARY)] * REQUESTS


def test_what_a_buffer_is_filled_with_stays() -> None:
    filled = torch.full((REQUESTS, 2), 3.5)
    widened = _with_one_row_more(filled)
    assert torch.equal(widened, filled)
    assert widened.untyped_storage().nbytes() == filled.nbytes // REQUESTS * (REQUESTS + 1)


def test_padded_is_a_batch_between_two_sizes() -> None:
    speculator = _speculator(CUDAGraphMode.FULL_DECODE_ONLY)
    assert [_has_padded_rows(speculator, requests) for requests in range(1, 8)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert not _has_padded_rows(_speculator(CUDAGraphMode.NONE), 2)


def test_a_graph_that_is_captured_later_counts() -> None:
    """Sizes are looked at once for so many graphs."""
    graphs_double = [SimpleNamespace(num_reqs=8)]
    manager_double = SimpleNamespace(graphs=graphs_double)
    speculator_double = SimpleNamespace(cudagraph_manager=manager_double)
    assert _has_padded_rows(speculator_double, 4)
    graphs_double.append(SimpleNamespace(num_reqs=4))
    assert [_has_padded_rows(speculator_double, requests) for requests in (3, 4, 5, 8, 9)] == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_of_dflash_tokens_behind_the_batch_are_of_the_spare_row() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

    own: Any = object.__new__(dflash.DFlashSpeculator)
    of_eagle = _speculator(CUDAGraphMode.NONE)
    vars(own).update(
        {name: getattr(of_eagle, name) for name in ("temperature", "seeds", "idx_mapping", "draft_logits")}
    )
    setattr(own, _SPARE, REQUESTS)
    own.sample_idx_mapping = torch.zeros(REQUESTS * DRAFT_TOKENS, dtype=torch.int32)
    batch, width = [4, 2], 1 + DRAFT_TOKENS
    rows = torch.tensor(batch, dtype=torch.int32)
    own._copy_request_inputs(len(batch), rows, torch.zeros(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64))
    tokens = REQUESTS * width

    def integers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    inputs = SimpleNamespace(
        num_reqs=len(batch),
        num_scheduled_tokens=np.full(len(batch), 1),
        positions=integers(len(batch), torch.int64) + 7,
        query_start_loc=torch.arange(len(batch) + 1, dtype=torch.int32),
        idx_mapping=rows,
    )
    with cpu_triton_kernels(dflash):
        dflash.prepare_dflash_inputs(
            SimpleNamespace(
                input_ids=integers(tokens),
                positions=integers(tokens, torch.int64),
                query_start_loc=integers(REQUESTS + 1),
                seq_lens=integers(REQUESTS),
            ),
            integers(tokens, torch.int64),
            integers(tokens, torch.int64),
            integers(tokens, torch.int64),
            integers(REQUESTS * DRAFT_TOKENS, torch.int64),
            integers(REQUESTS * DRAFT_TOKENS, torch.int64),
            own.sample_idx_mapping,
            inputs,
            integers(len(batch)) + 1,
            integers(len(batch)),
            integers(REQUESTS, torch.int64),
            integers(REQUESTS),
            integers(REQUESTS * 4).view(REQUESTS, 4),
            4,
            1,
            width,
            DRAFT_TOKENS,
            REQUESTS,
            tokens,
        )
    assert own.sample_idx_mapping.tolist() == [4, 4, 2, 2, *[REQUESTS] * 8]
