"""Room for a run without a graph: what is measured of it, what counts as free, and when it is not tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.shadow import memory
from vllm_graphfix.shadow.memory import RESERVE, Memory

MIB = 1 << 20


class GpuStandIn:
    """Stands in for torch.cuda: an allocator that says what it has."""

    def __init__(self, *, free: int = 1 << 33) -> None:
        self.free, self.allocated, self.peak, self.reserved = free, 0, 0, 0
        self.capturing = False
        self.segments: list[dict[str, Any]] = []

    def run(self, takes: int, leaves: int = 0) -> None:
        self.peak = max(self.peak, self.allocated + takes)
        self.allocated += leaves

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_reserved(self) -> int:
        return self.reserved

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 1 << 40

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuStandIn:
    made = GpuStandIn()
    monkeypatch.setattr(memory, "_gpu", lambda: made)
    return made


def test_the_need_of_a_run_is_its_own_peak_above_what_was_there_before(gpu: GpuStandIn) -> None:
    measurements = Memory()
    gpu.run(takes=900 * MIB, leaves=50 * MIB)
    for takes in (70, 80, 60):
        measurements.measured(1, 8, lambda takes=takes: gpu.run(takes * MIB, leaves=MIB))  # type: ignore[misc]
    assert measurements.needs == {(1, 8): 80 * MIB}


def test_nothing_is_measured_while_a_graph_records_and_what_fails_there_stays_there(
    gpu: GpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Memory()
    gpu.capturing = True
    assert measurements.measured(1, 8, lambda: "output") == "output"
    gpu.capturing = False
    monkeypatch.setattr(gpu, "max_memory_allocated", SimpleNamespace())
    assert measurements.measured(1, 8, lambda: "output") == "output"
    assert measurements.needs == {}
    with pytest.raises(ValueError, match="vLLM's own"):
        measurements.measured(1, 8, lambda: (_ for _ in ()).throw(ValueError("vLLM's own")).__next__())


def test_a_run_needs_what_was_measured_its_copies_and_the_reserve(gpu: GpuStandIn) -> None:
    measurements = Memory()
    measurements.needs[1, 8] = 100 * MIB
    gpu.free = RESERVE + 110 * MIB
    assert measurements.shortage(10 * MIB, 1, 8, must_know=True) is None
    gpu.free -= 1
    assert (
        measurements.shortage(10 * MIB, 1, 8, must_know=True)
        == "a run without its graph takes 100 MiB, copies 10 and the reserve 512, and 621 MiB are free"
    )
    gpu.free = 1 << 33
    assert "copies of its inputs" in (measurements.shortage(gpu.free // 4 + 1, 1, 8, must_know=True) or "")


def test_what_was_not_measured_is_tried_by_a_rank_alone_and_by_no_group(gpu: GpuStandIn) -> None:
    measurements = Memory()
    measurements.needs[1, 8] = 100 * MIB
    for owner, tokens in ((1, 4), (2, 8)):
        assert measurements.shortage(0, owner, tokens, must_know=False) is None
        assert "was not measured" in (measurements.shortage(0, owner, tokens, must_know=True) or "")


def test_unused_memory_of_the_allocator_is_free_and_that_of_graphs_is_not(gpu: GpuStandIn) -> None:
    gpu.free, gpu.allocated, gpu.reserved = 100 * MIB, 1000 * MIB, 1000 * MIB + RESERVE + 300 * MIB
    gpu.segments = [
        {"segment_pool_id": (0, 0), "total_size": RESERVE + 100 * MIB, "allocated_size": 0},
        {"segment_pool_id": (0, 7), "total_size": 250 * MIB, "allocated_size": 50 * MIB},
    ]
    measurements = Memory()
    measurements.needs[1, 8] = (
        200 * MIB
    )  # 100 on the device and 100 beside the reserve; without the pool there would be 400
    assert measurements.shortage(0, 1, 8, must_know=True) is None
    measurements.needs[1, 8] += 1
    assert measurements.shortage(0, 1, 8, must_know=True) is not None


def test_without_a_gpu_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_gpu", lambda: None)
    assert Memory().shortage(1 << 60, 1, 8, must_know=True) is None
