"""workspace-growth on vLLM's own workspace manager and `capture_model`: what is kept, for how long, and what is not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu import model_runner

import vllm_graphfix
from activities import activity_of, layers
from vllm_graphfix.fixes.workspace_growth import FIX, RECORDED_WORKSPACE_OUTGROWN
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.workspace_growth import (
    CPU,
    DeviceMemoryStandIn,
    MixtureStandIn,
    RunnerStandIn,
    memory_of_a_device,
)

ACTIVITY = activity_of("workspace-growth")
OUTGROWN = ACTIVITY.counter(RECORDED_WORKSPACE_OUTGROWN)


@pytest.fixture(autouse=True)
def _nothing_failed() -> Iterator[None]:
    OUTGROWN.count = 0
    yield
    error, ACTIVITY.error = ACTIVITY.error, None
    assert error is None


@pytest.fixture
def memory() -> Iterator[DeviceMemoryStandIn]:
    with torch.inference_mode(), memory_of_a_device() as memory, cpu_cuda_graphs():
        yield memory


def needs(number: int) -> torch.Tensor:
    """Return the tensor of a layer that needs so many bytes of workspace."""
    (inputs,) = workspace.current_workspace_manager().get_simultaneous(((number,), torch.uint8))
    assert isinstance(inputs, torch.Tensor)
    return inputs


def captured(*sizes: int, warm_up: bool = True) -> RunnerStandIn:
    """A runner whose `capture_model` captures a graph for each of *sizes*, whose pass needs so many bytes."""
    runner = RunnerStandIn(MixtureStandIn(), torch.empty(0))
    runner.graphs = []

    def capture(*_: Any, **__: Any) -> dict[Any, Any]:
        for size in sizes:
            if warm_up:
                needs(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                needs(size).add_(1)
            runner.graphs.append(graph)
        return {}

    runner.capture = capture  # type: ignore[method-assign]
    runner.capture_model()
    return runner


def blocks(memory: DeviceMemoryStandIn) -> list[int]:
    """Bytes of each block that somebody has."""
    return sorted(end - start for start, end in memory.taken.items())


def test_growth_before_the_first_capture_keeps_nothing(memory: DeviceMemoryStandIn) -> None:
    for number in (256, 512, 1024):
        needs(number)
        assert blocks(memory) == [number]
    assert OUTGROWN.count == 0


def test_workspaces_that_a_warm_up_outgrows_are_released(memory: DeviceMemoryStandIn) -> None:
    needs(256)
    captured(512)
    assert blocks(memory) == [512]
    assert OUTGROWN.count == 0


def test_what_a_graph_has_recorded_stays_and_is_nobody_elses(memory: DeviceMemoryStandIn) -> None:
    address = needs(256).data_ptr()
    captured(256)
    assert needs(512).data_ptr() != address
    assert blocks(memory) == [256, 512]
    assert memory.empty((256,), torch.uint8).data_ptr() != address
    assert OUTGROWN.count == 1


def test_after_the_captures_no_more_than_one_is_retained(memory: DeviceMemoryStandIn) -> None:
    captured(256)
    for number in (512, 1024, 2048, 4096):
        needs(number)
    assert blocks(memory) == [256, 4096]
    assert OUTGROWN.count == 1


def test_a_request_that_fits_changes_nothing(memory: DeviceMemoryStandIn) -> None:
    captured(512)
    assert needs(512).data_ptr() == needs(256).data_ptr()
    assert blocks(memory) == [512]
    assert OUTGROWN.count == 0


def test_each_workspace_that_a_capture_outgrows_is_retained(memory: DeviceMemoryStandIn) -> None:
    runner = captured(256, 256, 512, 1024)
    assert blocks(memory) == [256, 512, 1024]
    assert OUTGROWN.count == 2
    for graph in runner.graphs:
        graph.replay()
    assert blocks(memory) == [256, 512, 1024]


def test_growth_inside_a_graph_keeps_the_one_before(memory: DeviceMemoryStandIn) -> None:
    captured(256, 512, warm_up=False)
    assert blocks(memory) == [256, 512]
    assert OUTGROWN.count == 1


def turboquant() -> Any:
    """TurboQuant's attention where its decodes share a workspace that nobody reserves (0.21.0 to 0.23.0), else None."""
    try:
        module = importlib.import_module("vllm.v1.attention.backends.turboquant_attn")
    except ImportError:
        return None
    reserved = hasattr(module.TurboQuantMetadataBuilder, "_reserve_workspace")
    return module if hasattr(module, "current_workspace_manager") and not reserved else None


@pytest.mark.skipif(turboquant() is None, reason="TurboQuant's decodes do not, or it is reserved")
def test_turboquants_decodes_keep_their_scratch(memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 45670: a prompt that is continued takes more of the workspace than a captured decode did."""
    heads, width, splits = 2, 16, 4
    implementation = object.__new__(turboquant().TurboQuantAttentionImpl)
    implementation.__dict__.update(
        num_heads=heads, head_size=width, max_num_kv_splits=splits, scale=1.0, tq_config=mock.MagicMock()
    )
    places = []

    def kernel(*, mid_o_buf: torch.Tensor, output_buf: torch.Tensor, **_: Any) -> torch.Tensor:
        places.append(mid_o_buf.data_ptr())
        mid_o_buf.fill_(1)
        return output_buf.fill_(2)

    monkeypatch.setattr(turboquant(), "triton_turboquant_decode_attention", kernel)
    runner, graph = RunnerStandIn(MixtureStandIn(), torch.empty(0)), torch.cuda.CUDAGraph()

    def capture(*_: Any, **__: Any) -> dict[Any, Any]:
        batch = (torch.zeros(3, heads, width), torch.empty(0), mock.MagicMock(), torch.empty(0), torch.empty(0))
        implementation._decode_attention(*batch)
        with torch.cuda.graph(graph):
            implementation._decode_attention(*batch)
        return {}

    runner.capture = capture  # type: ignore[method-assign]
    runner.capture_model()
    (decodes,) = blocks(memory)
    needs(2 * decodes)
    taken = memory.empty((decodes,), torch.uint8)
    assert blocks(memory) == [decodes, decodes, 2 * decodes]
    before = taken.clone()
    graph.replay()
    assert len(set(places)) == 1
    assert torch.equal(taken, before), "the replay wrote to memory that somebody else has"
    assert OUTGROWN.count == 1


def test_a_second_capture_adds_what_it_records(memory: DeviceMemoryStandIn) -> None:
    captured(256)
    needs(512)
    captured(512)
    needs(1024)
    assert blocks(memory) == [256, 512, 1024]
    assert OUTGROWN.count == 2


def test_graphs_that_model_runner_v2_did_not_capture_keep_nothing(memory: DeviceMemoryStandIn) -> None:
    """V1's, which locks the workspace when all are captured."""
    needs(256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        needs(256).add_(1)
    needs(512)
    assert blocks(memory) == [512]
    assert OUTGROWN.count == 0


def test_a_locked_workspace_does_not_grow(memory: DeviceMemoryStandIn) -> None:
    captured(256)
    workspace.lock_workspace()
    for _ in range(2):
        with pytest.raises(AssertionError, match="Workspace is locked"):
            needs(512)
    assert needs(256).numel() == 256
    assert blocks(memory) == [256]
    assert OUTGROWN.count == 0


def test_retained_workspaces_are_released_with_their_manager(memory: DeviceMemoryStandIn) -> None:
    captured(256)
    needs(512)
    workspace.reset_workspace_manager()
    assert blocks(memory) == []
    workspace.init_workspace_manager(CPU)
    needs(1024)
    needs(2048)
    assert blocks(memory) == [2048]
    assert OUTGROWN.count == 1


def test_each_micro_batch_has_what_it_recorded(memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.init_workspace_manager(CPU, 2)
    current = [0]
    monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: current[0])
    needs(256)
    current[0] = 1
    needs(256)
    captured(256)
    assert blocks(memory) == [256, 256]
    current[0] = 0
    needs(512)  # up to 0.19.1 of both
    current[0] = 1
    needs(512)
    assert blocks(memory) == [256, 512, 512], "the first has recorded nothing"
    assert OUTGROWN.count == 1


def test_each_lane_has_what_it_recorded(memory: DeviceMemoryStandIn) -> None:
    workspace.init_workspace_manager(CPU, 1, 2)
    captured(256)
    with workspace.use_workspace_lane(1):
        captured(256)
        needs(512)
        assert blocks(memory) == [256, 256, 512]
    needs(1024)
    assert blocks(memory) == [256, 256, 512, 1024]
    assert OUTGROWN.count == 2


def test_an_error_of_a_capture_comes_out_and_ends_it(memory: DeviceMemoryStandIn) -> None:
    runner = RunnerStandIn(MixtureStandIn(), torch.empty(0))

    def capture(*_: Any, **__: Any) -> dict[Any, Any]:
        raise MemoryError("of a capture")

    runner.capture = capture  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="of a capture"):
        runner.capture_model()
    test_graphs_that_model_runner_v2_did_not_capture_keep_nothing(memory)


def test_a_manager_of_a_fork_has_it_too(memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager(workspace.WorkspaceManager):  # type: ignore[misc]
        pass

    monkeypatch.setattr(workspace, "_manager", Manager(CPU))
    captured(256)
    needs(512)
    assert blocks(memory) == [256, 512]


def test_a_manager_that_refuses_attributes_is_stocks(memory: DeviceMemoryStandIn) -> None:
    def refuse(self: Any, name: str, value: Any) -> None:
        raise TypeError(name)

    manager = workspace.current_workspace_manager()
    with mock.patch.object(type(manager), "__setattr__", refuse):
        captured(256)
    assert needs(512).numel() == 512
    assert blocks(memory) == [512]
    assert OUTGROWN.count == 0
    assert ACTIVITY.error is not None
    assert "graphfix_recorded" in ACTIVITY.error
    ACTIVITY.error = None


def test_outside_of_a_capture_no_stream_is_queried(
    memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(256)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", None)
    needs(512)
    assert blocks(memory) == [256, 512]


def test_observed_no_memory_is_held_and_the_same_is_counted(memory: DeviceMemoryStandIn) -> None:
    activity, (growth, captures) = layers(FIX, "one-slot", corrects=False)
    manager, runner = workspace.WorkspaceManager, model_runner.GPUModelRunner
    with (
        mock.patch.object(manager, "_ensure_workspace_size", growth.wrap(manager._ensure_workspace_size.__wrapped__)),
        mock.patch.object(runner, "capture_model", captures.wrap(runner.capture_model)),
    ):
        captured(256)
        for number in (512, 1024):
            needs(number)
            assert blocks(memory) == [number]
        captured(1024)
        needs(2048)
    assert blocks(memory) == [2048]
    assert (activity.counts, activity.error) == ({RECORDED_WORKSPACE_OUTGROWN.name: 2}, None)
    assert OUTGROWN.count == 0


WITHOUT_GRAPHS = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(enforce_eager=True))
"""The plugin's gate asks: the stand-in's ranks cannot be compared, which would stop an engine with graphs."""


def test_a_trial_capture_keeps_until_its_graphs_are_gone(
    memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile: list[list[int]] = []

    def profile(runner: Any) -> int:
        captured(512)
        needs(1024)
        meanwhile.append(blocks(memory))
        return 7

    monkeypatch.setattr(model_runner, "_profile_cudagraph_memory", profile)
    runner = captured(256)
    runner.vllm_config = WITHOUT_GRAPHS
    assert runner.profile_cudagraph_memory() == 7
    assert meanwhile == [[256, 512, 1024]]
    assert blocks(memory) == [256, 1024], "the graph of before is there"
    needs(2048)
    assert blocks(memory) == [256, 2048]
    captured(2048)
    needs(4096)
    assert blocks(memory) == [256, 2048, 4096]


def test_an_error_of_a_trial_comes_out_and_ends_it(
    memory: DeviceMemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(runner: Any) -> int:
        captured(256)
        raise MemoryError("of a trial")

    monkeypatch.setattr(model_runner, "_profile_cudagraph_memory", profile)
    runner = RunnerStandIn(MixtureStandIn(), torch.empty(0))
    runner.vllm_config = WITHOUT_GRAPHS
    with pytest.raises(MemoryError, match="of a trial"):
        runner.profile_cudagraph_memory()
    needs(512)
    assert blocks(memory) == [512]
    captured(512)
    needs(1024)
    assert blocks(memory) == [512, 1024]


def test_with_capture_state_both_are_right() -> None:
    """The scenario of `capture-state`, target and draft, with a layer behind the attention.

    That layer works in the workspace, which grows after the captures.
    """
    from vllm_graphfix.verify.double import decoding
    from vllm_graphfix.verify.double.scenarios import capture_state

    states = vllm_graphfix.states()
    assert {states[name].state.value for name in ("capture-state", "workspace-growth")} == {"active"}
    attend, replay, layer = decoding.AttentionStandIn.forward, capture_state._replay, MixtureStandIn()
    images: list[torch.Tensor] = []

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return layer.forward(attend(self, hidden))

    def growing(*args: Any) -> Any:
        if not images:
            needs(4096)
            images.append(device.empty((8, 4)).fill_(7))
        return replay(*args)

    with (
        mock.patch.object(decoding.AttentionStandIn, "forward", forward),
        mock.patch.object(capture_state, "_replay", growing),
        torch.inference_mode(),
    ):
        with memory_of_a_device():
            eager = capture_state._eager()
        with memory_of_a_device() as device:
            runner, graphed = RunnerStandIn(layer, torch.empty(0)), list[torch.Tensor]()

            def capture(*_: Any, **__: Any) -> dict[Any, Any]:
                graphed.extend(capture_state._graphed())
                return {}

            runner.capture = capture  # type: ignore[method-assign]
            with cpu_cuda_graphs():
                runner.capture_model()
    (image,) = images
    assert image.unique().tolist() == [7.0]
    assert OUTGROWN.count == 1
    assert len(eager) == len(graphed) > 0
    for expected, result in zip(eager, graphed, strict=True):
        torch.testing.assert_close(result, expected)


def test_the_memory_stand_in_gives_freed_memory_again() -> None:
    """So that the others can fail."""
    memory = DeviceMemoryStandIn()
    first = memory.empty((16,))
    behind = memory.empty((16,))
    address = first.data_ptr()
    view = first[2:]  # a graph's address is no tensor that it holds
    del first
    again = memory.empty((8,))
    assert again.data_ptr() == address != behind.data_ptr()
    assert again.isnan().all()
    assert view.shape == (14,)
    assert len(memory.taken) == 2
