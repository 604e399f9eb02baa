"""compressor-skip on vLLM's own compressor: which passes write entries, and what others see of the metadata."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.models.deepseek_v4 import compressor
from vllm.models.deepseek_v4.compressor import CompressorMetadata

from activities import activity_of
from vllm_graphfix.fixes.compressor_skip import LAYER_SKIPPED
from vllm_graphfix.verify.double.compressor import LAYER, RATIO, STATES, LayerStandIn, compressor_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import compressor_skip

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
ACTIVITY = activity_of("compressor-skip")
SKIPPED_LAYERS = ACTIVITY.counter(LAYER_SKIPPED)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with compressor_stand_ins(), cpu_cuda_graphs(), torch.inference_mode():
        yield


class Step:
    """One decode of one token, the last of its group if anybody asks the kernel."""

    def __init__(self, mode: CUDAGraphMode, boundary: bool | None = False) -> None:
        self.model = LayerStandIn()
        self.metadata = CompressorMetadata(
            block_table=torch.arange(1, 1 + RATIO // 8, dtype=torch.int32).unsqueeze(0),
            slot_mapping=torch.tensor([RATIO + 7]),
            block_size=8,
            token_to_req_indices=torch.zeros(1, dtype=torch.int32),
            c128_boundary=boundary,
        )
        entries = SimpleNamespace(slot_mapping=torch.tensor([2 * RATIO - 1]))
        config: Any = compressor_skip._config(mode, [1], known_in_time=True)
        self._context = create_forward_context(
            {STATES: self.metadata, LAYER: entries}, config, cudagraph_runtime_mode=mode
        )
        self._before = self.model.cache.clone()

    def run(self) -> None:
        with override_forward_context(self._context):
            self.model(torch.tensor([3]), torch.tensor([RATIO - 1]))

    def capture_and_replay(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        graph.replay()

    def wrote(self) -> bool:
        """In the one entry of the group."""
        changed = (self.model.cache != self._before).flatten(0, 1).any(-1)
        return bool(changed[1])


def counted(step: Step) -> int:
    before = SKIPPED_LAYERS.count
    step.capture_and_replay()
    return SKIPPED_LAYERS.count - before


@pytest.mark.parametrize("mode", [NONE, PIECEWISE])
def test_a_graph_writes_the_entry_that_its_capture_did_not_complete(mode: CUDAGraphMode) -> None:
    step = Step(mode)
    assert (counted(step), step.wrote()) == (1, True)


@pytest.mark.parametrize(("mode", "boundary"), [(FULL, False), (NONE, True), (NONE, None)])
def test_a_graph_that_stock_gets_right_is_not_counted(mode: CUDAGraphMode, boundary: bool | None) -> None:
    step = Step(mode, boundary)
    assert (counted(step), step.wrote()) == (0, True)


def test_a_warm_up_and_a_step_without_a_graph_leave_out_what_they_need_not_do() -> None:
    step, before = Step(NONE), SKIPPED_LAYERS.count
    step.run()
    assert not step.wrote()
    assert before == SKIPPED_LAYERS.count


def test_the_other_layers_of_the_metadata_see_what_the_builder_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(NONE)
    assert counted(step) == counted(step) == 1
    assert step.metadata.c128_boundary is False

    def failing(**_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compressor, "_SAVE_PARTIAL_STATES_KERNEL", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        step.capture_and_replay()
    assert step.metadata.c128_boundary is False
    assert ACTIVITY.error is None


def test_layers_of_another_ratio_leave_nothing_out_and_are_not_counted() -> None:
    step = Step(NONE)
    vars(step.model.compressor)["compress_ratio"] = 4
    assert (counted(step), step.wrote()) == (0, True)


def test_a_dummy_run_without_metadata_is_not_changed() -> None:
    step, before = Step(NONE), SKIPPED_LAYERS.count
    step._context.attn_metadata = None
    step.capture_and_replay()
    assert not step.wrote()
    assert before == SKIPPED_LAYERS.count


def test_a_torch_without_cuda_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", torch.cuda.graphs.is_current_stream_capturing)
    Step(NONE).run()
    assert ACTIVITY.error is None
