"""draft-prefill-state on vLLM's own managers, Eagle speculator and model runner."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from passes import Passes, expected_of_full_graphs
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CapturedAttentionState, CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.cudagraph import PrefillEagleCudaGraphManager

from vllm_graphfix.fixes import _capture_passes
from vllm_graphfix.verify.double.decoding import DEVICE, configuration
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.draft_prefill_state import DRAFT_TOKENS, QUERY_TOKENS, SIZES, Drafting

FULL = CUDAGraphMode.FULL
MODE = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs():
        yield


class Speculating:
    """vLLM's managers and speculator around a target and a draft model, every pass and every built state watched."""

    def __init__(self, mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY) -> None:
        self.drafting = drafting = Drafting()
        self.runner, self.speculator = drafting.runner, drafting.speculator
        self.runner.config.compilation_config.cudagraph_mode = mode
        self.passes = Passes(self.runner, drafting.target, drafting.draft)
        self.manager = ModelCudaGraphManager(self.runner.config, DEVICE, mode, QUERY_TOKENS)
        self.speculator.init_cudagraph_manager(mode)

    def capture_target(self) -> Any:
        return self.manager.capture(
            model=self.drafting.target, intermediate_tensors=None, **self.runner.capture_inputs()
        )

    def capture_draft(self, states: Any) -> list[Any]:
        """The events of the draft's capture."""
        before = len(self.passes.events)
        self.speculator.capture(states)
        return self.passes.events[before:]


class Factory:
    """A target's `create_forward_fn` of the base manager: keeps the states that it made, and passes nothing on."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, descriptor: Any) -> Any:
        assert not torch.cuda.is_current_stream_capturing()
        state = CapturedAttentionState({"layer": len(self.made)}, {})
        self.made.append(state)
        return lambda mode: None, state


def captured_states(factory: Factory) -> Any:
    manager = CudaGraphManager(configuration(MODE, SIZES, DRAFT_TOKENS), DEVICE, MODE, QUERY_TOKENS)
    return manager.capture(factory)


def prefill_passes(states: Any) -> list[tuple[Any, Any, Any]]:
    """Captures a draft's prefill; the attention metadata, slot mappings and mode of each of its passes."""
    manager = PrefillEagleCudaGraphManager(configuration(MODE, SIZES, DRAFT_TOKENS), DEVICE, MODE, QUERY_TOKENS)
    passes = []

    def prefill(reqs: int, tokens: int, metadata: Any, slot_mappings: Any, across: Any, mode: Any) -> None:
        passes.append((metadata, slot_mappings, mode))

    manager.capture(prefill, states)
    return passes


def plan_of(state: Any) -> list[Any]:
    """Return FlashMLA's plan in the state, its tensors with their values."""
    plan = next(iter(state.attn_metadata.values())).decode.scheduler_metadata
    tensors = (plan.tile_scheduler_metadata, plan.num_splits)
    return [
        plan.have_initialized,
        plan.config,
        *map(id, tensors),
        *(None if t is None else t.tolist() for t in tensors),
    ]


def test_each_pass_of_the_draft_has_a_state_that_no_pass_has_touched() -> None:
    speculating = Speculating()
    states = speculating.capture_target()
    built = len(speculating.passes.states)
    events = speculating.capture_draft(states)
    assert events == expected_of_full_graphs(len(states), first_state=built)
    assert not {event.state for event in events} & speculating.passes.planned


def test_the_planner_is_in_every_graph_of_the_draft() -> None:
    speculating = Speculating()
    speculating.capture_draft(speculating.capture_target())
    graphs = speculating.speculator.prefill_cudagraph_manager.graphs
    assert set(graphs) == set(speculating.manager.graphs)
    for graph in graphs.values():
        assert [o.name for o in graph.operations].count("_flashmla_C::plan_stand_in") == 1


def test_the_targets_captured_states_are_neither_executed_nor_altered() -> None:
    speculating = Speculating()
    states = speculating.capture_target()
    entries = {descriptor: tuple(state) for descriptor, state in states.items()}
    plans = {descriptor: plan_of(state) for descriptor, state in states.items()}
    numbers = {next(iter(state.attn_metadata.values())).number for state in states.values()}
    events = speculating.capture_draft(states)
    assert not numbers & {event.state for event in events}
    assert {descriptor: tuple(state) for descriptor, state in states.items()} == entries
    assert {descriptor: plan_of(state) for descriptor, state in states.items()} == plans


def test_the_states_are_built_by_the_targets_factory() -> None:
    factory = Factory()
    states = captured_states(factory)
    targets = [id(state.attn_metadata) for state in factory.made]
    passes = prefill_passes(states)
    full = [id(metadata) for metadata, _, mode in passes if id(metadata) not in targets]
    made = [id(state.attn_metadata) for state in factory.made[len(targets) :]]
    assert full == made
    assert len(set(made)) == 2 * sum(descriptor.cg_mode == FULL for descriptor in states)


def test_piecewise_passes_get_what_stock_gives_them() -> None:
    factory = Factory()
    states = captured_states(factory)
    stock = [state for descriptor, state in states.items() if descriptor.cg_mode == CUDAGraphMode.PIECEWISE]
    passes = prefill_passes(states)[: 2 * len(stock)]  # PIECEWISE comes first
    for number, state in enumerate(stock):
        for metadata, slot_mappings, _ in passes[2 * number : 2 * number + 2]:
            assert metadata is state.attn_metadata
            assert slot_mappings is state.slot_mappings
    assert [mode.name for _, _, mode in passes] == ["NONE", "PIECEWISE"] * len(stock)


def test_a_speculator_with_piecewise_prefill_is_captured() -> None:
    speculating = Speculating(MODE)
    states = speculating.capture_target()
    full = [descriptor for descriptor in states if descriptor.cg_mode == FULL]
    assert 0 < len(full) < len(states)
    built = len(speculating.passes.states)
    events = speculating.capture_draft(states)
    assert [e for e in events if e.state is not None] == expected_of_full_graphs(len(full), built)
    assert len([e for e in events if e.state is None]) == 4 * (len(states) - len(full))
    assert set(speculating.speculator.prefill_cudagraph_manager.graphs) == set(full)


def test_a_plain_dict_of_states_passes_through_as_stock() -> None:
    states = dict(captured_states(Factory()))
    passes = prefill_passes(states)
    expected = [id(state.attn_metadata) for state in states.values() for _ in range(2)]
    assert [id(metadata) for metadata, _, _ in passes] == expected
    assert not _capture_passes.asks_per_pass.get()


@pytest.mark.parametrize("keyword", [False, True])
def test_capture_takes_states_by_position_or_by_name(keyword: bool) -> None:
    speculating = Speculating()
    states = speculating.capture_target()
    built = len(speculating.passes.states)
    prefill = speculating.speculator.prefill_cudagraph_manager
    if keyword:
        prefill.capture(
            forward_fn=speculating.speculator.prefill, full_cg_attn_states=states, progress_bar_desc="draft"
        )
    else:
        prefill.capture(speculating.speculator.prefill, states, "draft")
    assert len(speculating.passes.states) == built + 2 * len(states)


@pytest.mark.parametrize("recording", [False, True], ids=["warm-up", "recorded"])
def test_an_error_in_a_pass_comes_out_as_it_is_and_leaves_nothing_behind(recording: bool) -> None:
    speculating = Speculating()
    states = speculating.capture_target()
    error = ZeroDivisionError()

    def raise_once(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing() == recording:
            handle.remove()
            raise error

    handle = speculating.drafting.draft.register_forward_pre_hook(raise_once)
    with pytest.raises(ZeroDivisionError) as raised:
        speculating.capture_draft(states)
    assert raised.value is error
    assert not _capture_passes.asks_per_pass.get()
    built = len(speculating.passes.states)
    assert speculating.capture_draft(states) == expected_of_full_graphs(len(states), first_state=built)


def test_what_capture_returns_is_used_as_a_dict() -> None:
    states = captured_states(Factory())
    assert isinstance(states, dict)
    assert len(states) == len(list(states)) == len(states.keys()) == len(states.items()) == 2 * len(SIZES)
    assert states
    assert states == dict(states)
    for descriptor in states:
        assert descriptor in states
        assert states[descriptor] is states.get(descriptor)
    with pytest.raises(KeyError):
        states["no descriptor"]


def test_its_copies_can_be_handed_on() -> None:
    factory = Factory()
    states = captured_states(factory)
    for copied in (states.copy(), copy.copy(states)):
        assert copied == states
        assert copied is not states
        made = len(factory.made)
        prefill_passes(copied)
        assert len(factory.made) > made


def test_it_is_pickled_and_deeply_copied_as_the_dict_that_stock_returns() -> None:
    states = captured_states(Factory())
    for copied in (pickle.loads(pickle.dumps(states)), copy.deepcopy(states)):
        assert type(copied) is dict
        assert copied == states


def test_an_empty_capture_is_stock() -> None:
    none = CUDAGraphMode.NONE
    manager = CudaGraphManager(configuration(none, SIZES, DRAFT_TOKENS), DEVICE, none, QUERY_TOKENS)
    states = manager.capture(Factory())
    assert states == {}
    prefill = PrefillEagleCudaGraphManager(configuration(none, SIZES, DRAFT_TOKENS), DEVICE, none, QUERY_TOKENS)
    prefill.capture(None, states)
    assert not prefill.graphs


def test_the_model_runner_captures_target_and_draft() -> None:
    speculating = Speculating(MODE)
    runner: Any = object.__new__(GPUModelRunner)
    vars(runner).update(
        speculating.runner.capture_inputs(),
        cudagraph_manager=speculating.manager,
        model=speculating.drafting.target,
        intermediate_tensors=None,
        lora_config=None,
        use_aux_hidden_state_outputs=False,
        speculator=speculating.speculator,
    )
    with mock.patch.object(torch, "accelerator", SimpleNamespace(empty_cache=lambda: None)):
        assert runner.capture_model() == 0  # bytes, which a CPU has none of
    graphs = speculating.speculator.prefill_cudagraph_manager.graphs
    assert set(graphs) == set(speculating.manager.graphs)
    drafts = [state for state in speculating.passes.of("began") if state is not None][-2 * len(graphs) :]
    assert not set(drafts) & speculating.passes.planned
