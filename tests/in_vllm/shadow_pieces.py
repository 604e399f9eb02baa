"""The shadow check on steps that vLLM's own model runners run in pieces; graphs are the CPU double's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from in_pieces import KINDS, MIXED, run_in_pieces
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, override_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from wrapped_model import CAPTURED, Served

import vllm_graphfix
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.settings.shadow_rate import NEVER, Action, Rate
from vllm_graphfix.shadow import forward, memory, process
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    breakable = breakable_graphs() if "V1 breakable" in KINDS else contextlib.nullcontext()
    with wrappers_on_the_double(), breakable:
        yield
    process.start(Rate(), Action.REPORT)


def _served(kind: str, *args: Any, wrong: bool = False, pieces: bool = True, **config: Any) -> Served:
    served = Served(*args, pieces=pieces, **config)
    model = run_in_pieces(served, kind)
    if wrong:
        model.weight = torch.full((1,), 2.0)  # a new tensor, of which the pieces do not know
    return served


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_step_leaves_what_it_leaves_without_the_check(kind: str) -> None:
    unwatched, served = _served(kind, Rate()), _served(kind)
    for requests in (3, 4, 1, 3, 2):
        assert torch.equal(served.step(requests, MIXED), unwatched.step(requests, MIXED))
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.checks, results.mismatches, results.noise, results.rounding) == (5, 0, 0.0, 0.0)
    assert (served.shadow.stopped, process.REFUSED) == (None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_piece_is_a_mismatch_of_the_step_that_names_the_kind_of_graph(kind: str) -> None:
    unwatched, served = _served(kind, Rate(), wrong=True), _served(kind, wrong=True)
    for _ in range(3):
        assert torch.equal(served.step(mode=MIXED), unwatched.step(mode=MIXED))  # reported, and not meddled with
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    first, second, _ = served.shadow.results.first_mismatches
    model = "draft model" if "draft" in kind else "target model"
    graphs = "breakable" if "breakable" in kind else "piecewise"
    assert first.graph.name.startswith(f"{model}, {graphs} graphs, BatchDescriptor(num_tokens=4")
    assert (first.rows, first.graph.rows, second.first_layer) == (3, CAPTURED, "layer.1")


@pytest.mark.parametrize("kind", KINDS)
def test_quarantine_runs_such_a_step_without_graphs(kind: str) -> None:
    right, served = _served(kind, Rate()), _served(kind, action=Action.QUARANTINE, wrong=True)
    run_in_pieces(right, kind).weight.fill_(2.0)
    for number in range(4):
        for name, layer in right.model.layers.items():  # what a wrong step has left is not what is asked here
            served.model.layers[name].kv_cache[0].copy_(layer.kv_cache[0])
        alike = torch.equal(served.step(mode=MIXED), right.step(mode=MIXED))
        assert alike == (number >= 2), number
    assert (len(served.shadow.quarantined), served.shadow.stopped) == (1, None)


@pytest.mark.parametrize("kind", KINDS)
def test_full_graphs_alone_are_checked_unless_asked_otherwise(kind: str) -> None:
    served = _served(kind, pieces=False)
    served.step(mode=MIXED)
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_counted_once_and_checked_where_one_is_due(kind: str) -> None:
    served = _served(kind)
    for count, due, checks in ((1, 3, 0), (2, 3, 0), (3, 3, 1)):
        served.shadow.schedule.due = due
        served.step(mode=MIXED)
        assert (served.shadow.schedule.count, served.shadow.results.checks) == (count, checks)


@pytest.mark.parametrize("kind", KINDS)
def test_each_run_counts_its_layers_from_where_the_step_began(kind: str) -> None:
    """Experts outside of pieces count in the forward context; a run that went on there would take other layers."""
    served = Served(pieces=True)
    model = run_in_pieces(served, kind)
    model.first_layers.clear()
    served.step(mode=MIXED)
    assert served.shadow.results.checks == 1
    assert set(model.first_layers) <= {0}
    assert not hasattr(served.context, "moe_layer_index") or len(model.first_layers) > 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("V2")])
def test_dummy_batches_and_captures_are_no_steps(kind: str) -> None:
    served = _served(kind)
    served.descriptor = BatchDescriptor(CAPTURED)  # a dummy batch, and the capture of another graph
    served.step(mode=MIXED)
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_graph_is_not_checked(kind: str) -> None:
    served = _served(kind)
    served.step(mode=CUDAGraphMode.NONE)
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_metadata_is_not_checked(kind: str) -> None:
    """It is a dummy batch."""
    served = _served(kind)
    served.shadow.schedule.due = NEVER
    served.step(mode=MIXED)
    served.shadow.schedule.due = 1
    served.context.attn_metadata = None
    with override_forward_context(served.context):
        served.run(served.hidden)
    assert (served.shadow.results.checks, served.shadow.stopped, process.REFUSED) == (0, None, None)


DEEPSTACK = SimpleNamespace(hf_config=SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[1])))
V41 = SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v41"))


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"kv_transfer_config": SimpleNamespace()}, "KV connector"),
        ({"model_config": DEEPSTACK}, "embeddings of its images"),
        ({"model_config": V41}, "graphs of their own"),
    ],
)
def test_steps_that_are_unsafe_in_pieces_alone_are_left_alone_with_the_reason(
    changes: dict[str, Any], because: str
) -> None:
    unwatched, served = _served("V1", Rate()), _served("V1")
    vars(served.config).update(changes)
    with mock.patch.object(forward, "_captures_other_kernels", return_value=False):  # not V4.1 on each GPU
        for _ in range(2):
            assert torch.equal(unwatched.step(mode=MIXED), served.step(mode=MIXED))
    assert (served.shadow.results.checks, process.REFUSED, served.shadow.stopped) == (0, None, None)
    of_full = FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied")
    assert served.shadow.schedule.count == 2  # as on a stage of a pipeline that has not left them alone yet
    actual = process.state({"shadow-v1": of_full})
    assert actual.state is State.ACTIVE
    assert because in actual.reason


def test_an_engine_whose_steps_cannot_run_twice_is_refused() -> None:
    served = _served("V1")
    served.config.attention_config = SimpleNamespace(hisparse_config=SimpleNamespace())
    served.step(mode=MIXED)
    assert "HiSparse" in (process.REFUSED or "")
    assert served.shadow.results.checks == 0


def test_data_parallel_ranks_that_share_experts_check_full_graphs_alone() -> None:
    served = _served("V1")
    with mock.patch("vllm_graphfix.shadow.lockstep.of_this_rank", return_value=mock.Mock(first=2)):
        served.shadow.start_in_lockstep()
    assert "share experts" in served.shadow.without_pieces
    served.step(mode=MIXED)
    assert served.shadow.results.checks == 0


@pytest.mark.parametrize("kind", ["V1", "V1 beside full"])
def test_a_step_whose_run_finds_no_room_is_left_out(kind: str) -> None:
    """A warm-up of as many decodes has measured what it takes at least."""
    served = _served(kind)
    with mock.patch.object(memory, "_free_and_unused", return_value=(memory.RESERVE - 1, 0)):
        served.step(mode=MIXED)
    assert (served.shadow.results.checks, served.shadow.results.skipped) == (0, 1)
    with mock.patch.object(memory, "_free_and_unused", return_value=(memory.RESERVE + (1 << 20), 0)):
        served.step(mode=MIXED)
    assert (served.shadow.results.checks, served.shadow.results.skipped) == (1, 1)


def test_the_functions_of_the_release_are_wrapped() -> None:
    wrapped: Any = vllm_graphfix._this_process().component("shadow").manager
    states = {name: state.state for name, state in wrapped.states().items()}
    assert states["shadow-v1-pieces"] is State.ACTIVE
    assert hasattr(GPUModelRunner._model_forward, "__wrapped__")
    has_function = "V2" in KINDS
    assert states["shadow-v2-pieces"] in ((State.ACTIVE,) if has_function else (State.NOT_NEEDED, State.WAITING))
