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
    found = Memory()
    gpu.run(takes=900 * MIB, leaves=50 * MIB)
    for takes in (70, 80, 60):
        found.measured(1, 8, lambda takes=takes: gpu.run(takes * MIB, leaves=MIB))  # type: ignore[misc]
    assert found.needs == {(1, 8): 80 * MIB}


def test_nothing_is_measured_while_a_graph_records_and_what_fails_there_stays_there(
    gpu: GpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Memory()
    gpu.capturing = True
    assert found.measured(1, 8, lambda: "output") == "output"
    gpu.capturing = False
    monkeypatch.setattr(gpu, "max_memory_allocated", SimpleNamespace())
    assert found.measured(1, 8, lambda: "output") == "output"
    assert found.needs == {}
    with pytest.raises(ValueError, match="vLLM's own"):
        found.measured(1, 8, lambda: (_ for _ in ()).throw(ValueError("vLLM's own")).__next__())


def test_a_run_needs_what_was_measured_its_copies_and_the_reserve(gpu: GpuStandIn) -> None:
    found = Memory()
    found.needs[1, 8] = 100 * MIB
    gpu.free = RESERVE + 110 * MIB
    assert found.lacks(10 * MIB, 1, 8, must_know=True) is None
    gpu.free -= 1
    assert (
        found.lacks(10 * MIB, 1, 8, must_know=True)
        == "a run without its graph takes 100 MiB, copies 10 and the reserve 512, and 621 MiB are free"
    )
    gpu.free = 1 << 33
    assert "copies of its inputs" in (found.lacks(gpu.free // 4 + 1, 1, 8, must_know=True) or "")


def test_what_was_not_measured_is_tried_by_a_rank_alone_and_by_no_group(gpu: GpuStandIn) -> None:
    found = Memory()
    found.needs[1, 8] = 100 * MIB
    for owner, tokens in ((1, 4), (2, 8)):
        assert found.lacks(0, owner, tokens, must_know=False) is None
        assert "was not measured" in (found.lacks(0, owner, tokens, must_know=True) or "")


def test_memory_that_graphs_keep_is_not_free_and_what_the_allocator_keeps_otherwise_is(gpu: GpuStandIn) -> None:
    gpu.free, gpu.allocated, gpu.reserved = 100 * MIB, 1000 * MIB, 1000 * MIB + RESERVE + 300 * MIB
    gpu.segments = [
        {"segment_pool_id": (0, 0), "total_size": RESERVE + 100 * MIB, "allocated_size": 0},
        {"segment_pool_id": (0, 7), "total_size": 250 * MIB, "allocated_size": 50 * MIB},
    ]
    found = Memory()
    found.needs[1, 8] = 200 * MIB  # 100 on the device and 100 beside the reserve; without the pool there would be 400
    assert found.lacks(0, 1, 8, must_know=True) is None
    found.needs[1, 8] += 1
    assert found.lacks(0, 1, 8, must_know=True) is not None


def test_without_a_gpu_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_gpu", lambda: None)
    assert Memory().lacks(1 << 60, 1, 8, must_know=True) is None
