"""draft-stale-views on vLLM's own managers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils import PrefillSpeculatorCudaGraphManager

from activities import activity_of
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.draft_stale_views import LAYER, QUERY_TOKENS, SIZES, capture

ACTIVITY = activity_of("draft-stale-views")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs():
        yield


def _passes(mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY) -> tuple[Any, list[tuple[bool, int, Any]]]:
    """The draft's manager, and of each pass of its capture whether it is recorded, its requests, and its metadata."""
    passes: list[tuple[bool, int, Any]] = []

    def draft(requests: int, tokens: int, metadata: Any, slots: Any, across: Any, mode: CUDAGraphMode) -> None:
        passes.append((torch.cuda.is_current_stream_capturing(), requests, metadata and metadata[LAYER]))

    return capture(SIZES, draft, mode), passes


def test_each_pass_has_a_state_of_its_own_whose_plan_nobody_has_made() -> None:
    manager, passes = _passes()
    assert [(recorded, requests) for recorded, requests, _ in passes] == [
        (recorded, size // QUERY_TOKENS) for size in reversed(SIZES) for recorded in (False, True)
    ]
    assert len({id(metadata) for _, _, metadata in passes}) == len(passes)
    assert not any(metadata.decode.scheduler_metadata.have_initialized for _, _, metadata in passes)
    assert len(manager.graphs) == len(SIZES)


def test_all_but_the_smallest_are_counted_once() -> None:
    before = dict(ACTIVITY.counts)["views-of-another-batch"]
    _passes()
    assert ACTIVITY.counts["views-of-another-batch"] == before + len(SIZES) - 1
    assert ACTIVITY.error is None


def test_piecewise_passes_get_what_stock_gives_them() -> None:
    _, passes = _passes(CUDAGraphMode.PIECEWISE)
    assert passes
    assert not any(metadata for _, _, metadata in passes)
    assert ACTIVITY.error is None


def test_pairs_that_somebody_else_has_made_pass_through_as_stock() -> None:
    manager, _ = _passes()
    seen: list[Any] = []
    descriptors = list(manager.graphs)
    pairs = {descriptor: _Pair(descriptor) for descriptor in descriptors}
    manager.graphs.clear()
    PrefillSpeculatorCudaGraphManager.capture(manager, lambda *inputs: seen.append(inputs[2]), pairs)
    assert seen == [
        inputs for descriptor in descriptors for inputs in (("warm-up", descriptor), ("recorded", descriptor))
    ]


class _Pair:
    def __init__(self, descriptor: Any) -> None:
        self.warmup, self.captured = (("warm-up", descriptor), None), (("recorded", descriptor), None)


def test_the_draft_chooses_no_adapters_for_the_target() -> None:
    """The target's factory does, before each of its passes; the draft's graphs are then captured with the last."""
    if "lora_capture_hook" not in inspect.signature(ModelCudaGraphManager.capture).parameters:
        pytest.skip("this vLLM's target chooses no adapters in its capture (0.23.0)")
    calls: list[Any] = []
    capture(SIZES, lambda *_: calls.append("draft"), lora_capture_hook=lambda *inputs: calls.append(inputs))
    assert calls[-2 * len(SIZES) :] == ["draft"] * 2 * len(SIZES)
    assert len(calls) == 4 * len(SIZES)


def test_without_a_state_the_pair_of_the_target_is_used_and_the_fix_has_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worst case is stock."""
    prepare = cudagraph_utils.prepare_inputs_to_capture
    made: list[Any] = []

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        if len(made) >= 2 * len(SIZES):  # both passes of each of the target's graphs
            raise RuntimeError("no state any more")
        made.append(prepare(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(cudagraph_utils, "prepare_inputs_to_capture", fails_later)
    try:
        _, passes = _passes()
        assert [metadata for _, _, metadata in passes] == [state[0][LAYER] for state in made]
        assert "no state any more" in str(ACTIVITY.error)
    finally:
        ACTIVITY.error = None


def test_a_capture_of_nothing_is_stock() -> None:
    manager, _ = _passes()
    manager._capture_descs = {}
    assert CudaGraphManager.capture(manager, lambda *_: pytest.fail("asked")) == {}
    PrefillSpeculatorCudaGraphManager.capture(manager, lambda *_: pytest.fail("ran"), {})
