"""A fix that fails while vLLM's own managers capture: what becomes of the graph, of the fix and of the engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_state import Capturing, by_factory
from vllm.config.compilation import CUDAGraphMode

import vllm_graphfix
from activities import activity_of
from vllm_graphfix import _this_process
from vllm_graphfix.engine.capture_gate import GraphfixError
from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.engine.graph_dispatch import graph_being_captured
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs

FIX = "capture-state"
ACTIVITY = activity_of(FIX)
STRICT = os.environ.get("VLLM_GRAPHFIX") == "strict"
quietly = pytest.mark.skipif(STRICT, reason="strict stops the engine")
strictly = pytest.mark.skipif(not STRICT, reason="of strict")


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    progress = _this_process().manager._applied[FIX]
    before = progress.state, progress.reason
    with cpu_cuda_graphs():
        yield
    ACTIVITY.error = None
    progress.set_state(*before)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.graphfix")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    yield messages
    log.setLevel(level)
    log.removeHandler(handler)


class RunnerDouble:
    """A model runner without tensors; graphs are the managers' of its `Capturing`."""

    def __init__(self) -> None:
        self.cudagraph_manager: Any = None
        self.speculator = SimpleNamespace(cudagraph_manager=None)
        self.model = torch.nn.Module()


class WorkerDouble:
    """A worker of which the gate sees the capture alone."""

    def __init__(self, runner: Any, capture: Any, mode: str = "FULL") -> None:
        self.model_runner, self._capture = runner, capture
        self.local_rank, self.use_v2_model_runner, self.device = 0, True, torch.device("cpu")
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=0, enable_elastic_ep="ELASTIC" in os.environ),
            model_config=SimpleNamespace(enforce_eager=mode == "NONE"),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode)),
        )

    def compile_or_warm_up_model(self) -> Any:
        return self._capture()


GATE = _this_process().gate
CaptureHooks(GATE).watch_capture("WorkerDouble", "compile_or_warm_up_model", SimpleNamespace(WorkerDouble=WorkerDouble))


def started(captured: Capturing, *, failing: int | None = None, has_manager: bool = True) -> WorkerDouble:
    """An engine whose graphs have been captured.

    The attention state that is built as number *failing*, from 0, cannot be built.
    """
    runner = RunnerDouble()
    if has_manager:
        owner: Any = runner if captured.kind == "target" else runner.speculator
        owner.cudagraph_manager = captured.manager
    worker = WorkerDouble(runner, captured.capture)
    fail_at(captured, failing)
    worker.compile_or_warm_up_model()
    return worker


def fail_at(captured: Capturing, failing: int | None) -> None:
    build, built = captured.runner.builder.build, iter(range(100))

    def build_or_fail(*args: Any, **kwargs: Any) -> Any:
        if next(built) == failing:
            raise MemoryError("no room for a second state")
        return build(*args, **kwargs)

    captured.runner.builder.build = build_or_fail


def state() -> Any:
    return vllm_graphfix.states()[FIX]


def graph_of(manager: Any, requests: int) -> int | None:
    """The tokens of the full graph that a decode of so many requests is dispatched to; None for none."""
    if hasattr(manager, "dispatch"):
        descriptor = manager.dispatch(requests, requests, 1)
        if descriptor.cg_mode is not CUDAGraphMode.FULL:
            return None
        assert descriptor in manager.graphs
        return int(descriptor.num_tokens)
    if hasattr(manager, "get_cudagraph_runtime_mode"):
        draft = "Eagle" in type(manager).__name__
        mode, tokens = manager.get_cudagraph_runtime_mode(*([requests] if draft else [requests, requests, 1]))
        return int(tokens) if mode is CUDAGraphMode.FULL else None
    more = [] if "Eagle" in type(manager).__name__ else [[1] * requests]
    size: int | None = manager.get_cudagraph_size(requests, *more)
    assert size is None or size in manager.graphs
    return size


@pytest.mark.parametrize("kind", ["target", "draft"])
@quietly
def test_no_batch_is_dispatched_to_the_graph_that_it_failed_in(kind: str, warnings: list[str]) -> None:
    captured = Capturing(kind)
    started(captured, failing=1)  # the second state of the larger graph, which is captured first
    assert len(captured.manager.graphs) >= 1
    assert [graph_of(captured.manager, requests) for requests in (1, 2, 3, 4)] == [2, 2, None, None]
    assert state().state == "active"
    assert "cudagraph_manager FULL 4" in state().reason
    assert "MemoryError: no room for a second state" in state().reason
    assert any("FULL 4" in text and FIX in text for text in warnings)


@quietly
def test_a_capture_without_a_failure_changes_nothing(warnings: list[str]) -> None:
    captured = Capturing("target")
    before = state().reason
    started(captured)
    assert [graph_of(captured.manager, requests) for requests in (1, 2, 3, 4)] == [2, 2, 4, 4]
    assert (state().state, state().reason, warnings) == ("active", before, [])


@quietly
def test_where_a_graph_cannot_be_omitted_the_fix_fails_and_says_that_it_is_served(warnings: list[str]) -> None:
    captured = Capturing("target")
    started(captured, failing=1, has_manager=False)
    assert [graph_of(captured.manager, requests) for requests in (1, 4)] == [2, 4]
    assert state().state == "failed"
    assert "the graphs that stock captures are served" in state().reason
    assert any("are served, with its defect" in text for text in warnings)


@strictly
def test_strict_stops_the_engine_with_the_fix_and_the_cause() -> None:
    captured = Capturing("target")
    with pytest.raises(GraphfixError) as raised:
        started(captured, failing=1)
    message = str(raised.value)
    assert message.startswith("vllm-graphfix stops this engine before it serves: ")
    assert (
        "capture-state failed while CUDA graphs were captured (cudagraph_manager FULL 4): MemoryError: no room"
        in message
    )
    assert "set the variable of the fix to auto" in message


@strictly
def test_strict_starts_an_engine_in_whose_capture_nothing_fails() -> None:
    started(Capturing("target"))


@strictly
def test_a_fix_that_failed_in_a_step_does_not_stop_a_later_capture_without_failures() -> None:
    """Elastic expert parallelism captures again in an engine that serves."""
    captured = Capturing("target")
    worker = started(captured)
    ACTIVITY.failed(RuntimeError("once, in a step"))
    assert state().state == "failed"
    captured.manager.graphs.clear()
    worker.compile_or_warm_up_model()
    captured.manager.graphs.clear()
    fail_at(captured, 1)
    with pytest.raises(GraphfixError, match="no room for a second state"):
        worker.compile_or_warm_up_model()


@strictly
def test_a_fix_that_is_lost_while_graphs_are_captured_stops_the_engine_too() -> None:
    captured = Capturing("target")
    runner = SimpleNamespace(cudagraph_manager=captured.manager)
    owner: Any = next(
        kind
        for kind in type(captured.manager).__mro__
        if "capture" in vars(kind) and kind.__name__ == "CudaGraphManager"
    )
    name = "capture_graph" if "capture_graph" in vars(owner) else "capture"  # the one that the fix wraps
    ours = vars(owner)[name]

    def capture() -> None:
        captured.capture()
        setattr(owner, name, lambda *_: None)

    try:
        with pytest.raises(GraphfixError, match="before it serves: capture-state is conflict"):
            WorkerDouble(runner, capture).compile_or_warm_up_model()
    finally:
        setattr(owner, name, ours)


def test_an_error_that_cannot_be_printed_is_recorded_by_its_type() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    process = _this_process().manager
    process.begin_capture(graph_being_captured)
    ACTIVITY.failed(UnprintableError())
    assert ACTIVITY.graphs == {None: "UnprintableError"}
    process.discard_failures()
    ACTIVITY.failed(UnprintableError())
    assert ACTIVITY.error == "UnprintableError"


@strictly
def test_without_graphs_nothing_is_captured_and_nothing_stops() -> None:
    WorkerDouble(None, lambda: ACTIVITY.failed(RuntimeError("in a warm-up")), "NONE").compile_or_warm_up_model()


@quietly
def test_an_error_of_vllms_own_comes_out_as_it_is_and_the_next_failure_is_of_a_step() -> None:
    captured = Capturing("target")
    error = captured.stop(recording=True)
    with pytest.raises(type(error)) as raised:
        started(captured, failing=1)
    assert raised.value is error
    assert not ACTIVITY.graphs
    ACTIVITY.failed(RuntimeError("in a step"))
    assert ACTIVITY.error == "RuntimeError: in a step"


@by_factory
@quietly
def test_an_observer_that_fails_takes_no_graph_out_of_dispatch() -> None:
    captured = Capturing("target")
    process = _this_process().manager
    progress = process._applied[FIX]
    try:
        progress.mode = vllm_graphfix.fix.Mode.OBSERVE
        process.begin_capture(graph_being_captured)
        ACTIVITY.graphs = {None: "RuntimeError: seen"}
        assert not process.stop_recording_failures()
        assert ACTIVITY.error == "RuntimeError: seen"
    finally:
        progress.mode = vllm_graphfix.fix.Mode.AUTO
        process.discard_failures()
    assert captured.manager is not None
