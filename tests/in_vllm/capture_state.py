"""capture-state on vLLM's own managers: the four shapes of their capture, the target's and the draft's."""

from __future__ import annotations

import gc
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from passes import Event, Passes, expected_of_full_graphs
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from activities import activity_of
from vllm_graphfix.fixes import _capture_passes
from vllm_graphfix.verify.double.decoding import (
    DEVICE,
    HIDDEN,
    MAX_REQUESTS,
    ModelStandIn,
    RunnerStandIn,
    configuration,
)
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs

FULL = CUDAGraphMode.FULL_DECODE_ONLY
LAYER = "model.layers.0.attention"
KINDS = ("target", "draft")

by_factory = pytest.mark.skipif(
    not hasattr(cudagraph_utils.CudaGraphManager, "dispatch"), reason="captures without a factory"
)
by_capture_graph = pytest.mark.skipif(
    not hasattr(cudagraph_utils.CudaGraphManager, "capture_graph"), reason="has no capture_graph"
)
with_states = pytest.mark.skipif(
    not hasattr(cudagraph_utils, "CapturedAttentionState"), reason="capture returns no states"
)


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs():
        yield


class Stop(Exception):  # noqa: N818 - no error: what a pass raises here
    pass


class Capturing:
    """A manager of vLLM with its model, as the model runner (``target``) or the speculator (``draft``) has them."""

    def __init__(
        self, kind: str, mode: CUDAGraphMode = FULL, sizes: tuple[int, ...] = (2, 4), runner: Any = None
    ) -> None:
        self.kind = kind
        self.runner = runner or RunnerStandIn(configuration(mode, sizes), [LAYER])
        self.model = ModelStandIn([LAYER])
        self.passes = Passes(self.runner, self.model)
        self.manager = _manager(kind, self.runner.config)
        self.draft_steps = 1
        self._output = torch.zeros(MAX_REQUESTS, HIDDEN)

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of `capture` and `capture_graph`, by the names of their parameters."""
        forward = self.generate if self.kind == "draft" else self.model
        return self.runner.capture_inputs() | {
            "model": forward,
            "generate_fn": forward,
            "forward_fn": forward,
            "mrope_positions": None,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }

    def capture(self) -> Any:
        return self.manager.capture(**accepted(self.manager.capture, self.inputs()))

    def generate(self, *arguments: Any) -> None:
        """Stands in for `EagleSpeculator.generate_draft`: its counts, metadata and slots come in this order."""
        counts = [a for a in arguments if type(a) is int]
        metadata, slot_mappings = arguments[len(counts) : len(counts) + 2]
        for _ in range(self.draft_steps):
            self._output[: counts[-1]] = self.runner.forward(self.model, counts[-1], metadata, slot_mappings)

    def stop(self, *, recording: bool) -> Stop:
        """The next pass of that sort raises what is returned."""
        error = Stop()

        def raise_once(*_: object) -> None:
            if torch.cuda.is_current_stream_capturing() == recording:
                handle.remove()
                raise error

        handle = self.model.register_forward_pre_hook(raise_once)
        return error


def _manager(kind: str, config: Any) -> Any:
    manager: Any = getattr(cudagraph_utils, "ModelCudaGraphManager", cudagraph_utils.CudaGraphManager)
    if kind == "draft":
        try:  # a package from 0.17 on
            module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.eagle.cudagraph")
        except ImportError:
            module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.eagle_cudagraph")
        manager = getattr(module, "DecodeEagleCudaGraphManager", None) or module.EagleCudaGraphManager
    values = {
        "vllm_config": config,
        "device": DEVICE,
        "cudagraph_mode": config.compilation_config.cudagraph_mode,
        "decode_query_len": 1,
        "uses_mrope": False,
        "use_aux_hidden_state_outputs": False,
        "draft_tokens": torch.zeros(MAX_REQUESTS, 1, dtype=torch.int64),
    }
    return manager(**accepted(manager, values))


def accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of *values* that *function* has a parameter for, in the order of its parameters."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_pass_runs_on_a_state_that_no_pass_has_touched(kind: str) -> None:
    captured = Capturing(kind)
    captured.capture()
    passes = captured.passes
    warm_ups, recorded = passes.of("began", recording=False), passes.of("began", recording=True)
    assert len(warm_ups) == len(recorded) == len(captured.manager.graphs) == 2
    assert not set(warm_ups) & set(recorded)
    assert not passes.planned
    for graph in captured.manager.graphs.values():
        assert [o.name for o in graph.operations].count("_flashmla_C::plan_stand_in") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_that_state_is_built_outside_the_graph_after_the_warm_up_has_returned(kind: str) -> None:
    captured = Capturing(kind)
    captured.capture()
    assert captured.passes.events == expected_of_full_graphs(2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_a_pass_runs_on_the_state_of_that_pass(kind: str) -> None:
    captured = Capturing(kind, sizes=(4,))
    captured.draft_steps = steps = 3 if kind == "draft" else 1
    captured.capture()
    assert captured.passes.of("built") == [0, 1]
    assert captured.passes.of("began", recording=False) == [0] * steps
    assert captured.passes.of("began", recording=True) == [1] * steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_are_dropped_and_only_what_capture_returns_is_held(kind: str) -> None:
    captured = Capturing(kind)
    returned = captured.capture()
    gc.collect()
    alive = [number for number, state in enumerate(captured.passes.states) if state() is not None]
    assert alive == (captured.passes.of("began", recording=True) if returned else [])
    del returned
    gc.collect()
    assert [state() for state in captured.passes.states] == [None] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "sizes"), [(CUDAGraphMode.NONE, (2, 4)), (FULL, (4,))], ids=["none", "empty"])
def test_a_capture_of_nothing_is_stock(kind: str, mode: CUDAGraphMode, sizes: tuple[int, ...]) -> None:
    captured = Capturing(kind, mode, sizes)
    if mode is FULL:
        for name in ("cudagraph_sizes", "uniform_decode_cudagraph_sizes", "_capture_descs"):
            if hasattr(captured.manager, name):
                getattr(captured.manager, name).clear()
    assert not captured.capture()
    assert not captured.passes.events
    assert not captured.manager.graphs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recording", [False, True], ids=["warm-up", "recorded"])
def test_an_error_in_a_pass_comes_out_as_it_is_and_leaves_nothing_behind(kind: str, recording: bool) -> None:
    captured = Capturing(kind)
    error = captured.stop(recording=recording)
    with pytest.raises(Stop) as raised:
        captured.capture()
    assert raised.value is error
    assert _capture_passes.current_session() is None
    assert not _capture_passes.asks_per_pass.get()
    failed = len(captured.passes.states)
    captured.passes.events.clear()
    captured.capture()  # of the same manager: the one graph that failed was the first
    assert captured.passes.events == expected_of_full_graphs(2, first_state=failed)


def test_a_target_and_a_draft_are_captured_one_after_the_other() -> None:
    runner = RunnerStandIn(configuration(FULL, (2, 4)), [LAYER])
    target = Capturing("target", runner=runner)
    draft = Capturing("draft", runner=runner)  # its events hold the builds of both
    target.capture()
    draft.capture()
    assert target.passes.of("began") == [0, 1, 2, 3]
    assert draft.passes.of("built") == list(range(8))
    assert [e for e in draft.passes.events if e.state is not None and e.state > 3] == expected_of_full_graphs(2, 4)


def test_a_draft_without_attention_metadata_is_captured_as_stock() -> None:
    captured = Capturing("draft", sizes=(4,))
    if captured.runner.model_state is None:
        pytest.skip("this release builds attention metadata without a model state, so there is none to do without")
    captured.runner.model_state.prepare_attn = lambda *_, **__: None
    captured.capture()
    assert captured.passes.events == [
        Event(what, None, recording) for recording in (False, True) for what in ("began", "returned")
    ]


# 0.15.0-0.17.1


@by_capture_graph
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keywords", [False, True])
def test_capture_graph_is_called_by_position_or_by_name(kind: str, keywords: bool) -> None:
    captured = Capturing(kind)
    values = captured.inputs() | {"num_tokens": 4, "capture_cg_mode": CUDAGraphMode.FULL}
    values = accepted(captured.manager.capture_graph, values)
    with torch.inference_mode():
        if keywords:
            captured.manager.capture_graph(**values)
        else:
            captured.manager.capture_graph(*values.values())
    assert captured.passes.events == expected_of_full_graphs(1)
    assert list(captured.manager.graphs) == [4]


@by_capture_graph
@pytest.mark.parametrize("kind", KINDS)
def test_a_piecewise_capture_graph_builds_one_state(kind: str) -> None:
    captured = Capturing(kind, CUDAGraphMode.FULL_AND_PIECEWISE)
    if "capture_cg_mode" not in inspect.signature(captured.manager.capture_graph).parameters:
        pytest.skip("this release has no PIECEWISE graphs on model runner V2: nothing to be left alone")
    values = captured.inputs() | {"num_tokens": 4, "capture_cg_mode": CUDAGraphMode.PIECEWISE}
    with torch.inference_mode():
        captured.manager.capture_graph(**accepted(captured.manager.capture_graph, values))
    # the draft's stand-in takes the state that it is given; the target's stock pass has none
    assert captured.passes.of("built") == [0]
    assert captured.passes.of("began", recording=False) == [0, 0 if kind == "draft" else None]
    assert not captured.manager.graphs


# 0.18.0-0.21.0


class Factory:
    """A `create_forward_fn`: keeps every state it made by descriptor, and every call in order."""

    def __init__(self) -> None:
        self.states: dict[Any, list[Any]] = {}
        self.calls: list[tuple[str, Any, int | str]] = []

    def __call__(self, descriptor: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        assert not torch.cuda.is_current_stream_capturing()
        made = self.states.setdefault(descriptor, [])
        number = len(made)
        made.append(object())
        self.calls.append(("factory", descriptor, number))

        def forward(mode: CUDAGraphMode) -> None:
            self.calls.append(
                (f"{mode.name}{' recording' * torch.cuda.is_current_stream_capturing()}", descriptor, number)
            )

        return (forward, made[-1]) if hasattr(cudagraph_utils, "CapturedAttentionState") else forward


def _capture_by_factory(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The base manager's `capture`, as the target's and the draft's call it; the manager and what it returned."""
    config = configuration(CUDAGraphMode.FULL_AND_PIECEWISE, (2, 4))
    manager = cudagraph_utils.CudaGraphManager(config, DEVICE, CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    return manager, manager.capture(*args, **kwargs)


@by_factory
def test_the_factory_is_called_twice_for_full_and_once_for_piecewise() -> None:
    factory = Factory()
    manager, _ = _capture_by_factory(factory)
    assert {d.cg_mode.name for d in factory.states} == {"PIECEWISE", "FULL"}
    for descriptor in factory.states:
        mine = [(what, number) for what, of, number in factory.calls if of == descriptor]
        if descriptor.cg_mode == CUDAGraphMode.FULL:
            assert mine == [("factory", 0), ("NONE", 0), ("factory", 1), ("NONE recording", 1)]
        else:
            assert mine == [("factory", 0), ("NONE", 0), ("PIECEWISE", 0)]
    assert set(manager.graphs) == {d for d in factory.states if d.cg_mode == CUDAGraphMode.FULL}


@by_factory
def test_capture_takes_its_factory_by_position_or_by_name() -> None:
    for args, kwargs in (
        ((Factory(), "described"), {}),
        ((), {"create_forward_fn": Factory(), "progress_bar_desc": "described"}),
    ):
        manager, _ = _capture_by_factory(*args, **kwargs)
        assert len(manager.graphs) == 2


@by_factory
@with_states
def test_capture_returns_the_recorded_states_of_full_and_the_stock_ones_of_piecewise() -> None:
    factory = Factory()
    _, returned = _capture_by_factory(factory)
    assert isinstance(returned, dict)
    assert set(returned) == set(factory.states)
    for descriptor, states in factory.states.items():
        assert len(states) == (2 if descriptor.cg_mode == CUDAGraphMode.FULL else 1)
        assert returned[descriptor] is states[-1]


@by_factory
@pytest.mark.skipif(hasattr(cudagraph_utils, "CapturedAttentionState"), reason="vLLM's own dict holds it until the end")
def test_the_warm_ups_state_is_gone_before_the_pass_that_is_recorded() -> None:
    alive: list[bool] = []

    class State:
        pass

    def create(descriptor: Any) -> Any:
        state = State()
        states.setdefault(descriptor, weakref.ref(state))

        def forward(mode: CUDAGraphMode, of_this_pass: State = state) -> None:
            if torch.cuda.is_current_stream_capturing():
                alive.append(states[descriptor]() is not None)

        return forward

    states: dict[Any, weakref.ref[State]] = {}
    _capture_by_factory(create)
    assert alive == [False] * 2


def _factory_that_fails(requested: int) -> Callable[[Any], Any]:
    """The first or the second time that it is asked for a descriptor of a full graph."""
    factory = Factory()

    def failing(descriptor: Any) -> Any:
        if len(factory.states.get(descriptor, ())) + 1 == requested and descriptor.cg_mode == CUDAGraphMode.FULL:
            raise Stop
        return factory(descriptor)

    return failing


@by_factory
def test_an_error_in_the_factory_comes_out_as_it_is() -> None:
    with pytest.raises(Stop):
        _capture_by_factory(_factory_that_fails(1))
    assert len(_capture_by_factory(Factory())[0].graphs) == 2


@by_factory
def test_without_a_second_state_the_capture_is_stocks_and_the_fix_has_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = activity_of("capture-state")
    monkeypatch.setattr(activity, "error", None)
    assert len(_capture_by_factory(_factory_that_fails(2))[0].graphs) == 2
    assert str(activity.error).startswith("Stop")
