"""The shadow check on vLLM's own speculator for Eagle, its managers and forward context.

Graphs are the CPU double's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import verified_drafts
from defects import affected
from eagle_speculator import DRAFTS, VOCABULARY, Served
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

import vllm_graphfix
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import drafter_shapes, drafter_v2, memory, process
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.draft_idx_mapping import _kernels
from vllm_graphfix.verify.engine.exact import ExactReplays

BATCHES = ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 0, 3], [7, 6, 5, 4], [2])
"""Requests of each step: with padded rows and without."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    base = sys.modules.get("vllm.v1.worker.gpu.spec_decode.speculator")
    with contextlib.ExitStack() as stack:
        if hasattr(base, "_target_feeds_hc_residual"):
            stack.enter_context(mock.patch.object(base, "_target_feeds_hc_residual", return_value=False))
        if hasattr(cudagraph_utils, "current_stream"):
            stack.enter_context(mock.patch.object(cudagraph_utils, "current_stream", CPUStream))
        for context in (cpu_cuda_graphs(), _kernels(), torch.inference_mode()):
            stack.enter_context(context)
        yield
    process.start(Rate(), Action.REPORT)


def refused() -> str:
    return process.REFUSED or ""


def wrong_graphs(served: Served) -> set[str]:
    return {each.graph.name.partition(",")[0] for each in served.shadow.results.first_mismatches}


def differing(one: Served, other: Served) -> list[str]:
    mine, stock = one.held(), other.held()
    assert mine.keys() == stock.keys()
    return [name for name in mine if not torch.equal(mine[name], stock[name])]


HAS_PREFILL = hasattr(EagleSpeculator, "init_cudagraph_manager")
GRAPHS = {"draft prefill", "draft decode"} if HAS_PREFILL else {"draft decode"}
BY_STEP = any(hasattr(EagleSpeculator, name) for name in ("multi_step_decode", "_multi_step_decode"))
PADDED = GRAPHS if BY_STEP else {"draft decode"}
"""Those that batches with padded rows run in: before 0.21 a draft prefill has a graph only for as many requests as were
captured."""
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "step-by-step"])


@FUSED
def test_right_graphs_are_equal_to_the_last_bit_and_all_is_as_without_the_check(fused: bool) -> None:
    unwatched, served = Served(Rate(), fused=fused), Served(fused=fused)
    for requests in BATCHES:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    results = served.shadow.results
    assert (results.mismatches, results.noise, served.shadow.stopped, refused()) == (0, 0.0, None, "")
    assert results.checks == served.shadow.schedule.count >= len(BATCHES)


@FUSED
@pytest.mark.parametrize("in_pipeline", [True, False], ids=["pipeline", "alone"])
def test_an_exact_comparison_judges_each_replay_of_a_step(fused: bool, in_pipeline: bool) -> None:
    unwatched, served = Served(Rate(), fused=fused), Served(Rate(every=10**9), fused=fused)
    schedule = served.shadow.schedule
    if in_pipeline:
        schedule.restart(drafts=True)
    expected = [unwatched.step(requests) for requests in BATCHES]
    replays = ExactReplays()
    replays.begin()
    for requests, drafts in zip(BATCHES, expected, strict=True):
        schedule.count = (schedule.count | schedule.within) + 1  # the target model's replay
        assert torch.equal(served.step(requests), drafts)
    rank = replays.end()
    assert differing(served, unwatched) == []
    assert {name.partition(",")[0] for name in rank.graphs} == GRAPHS
    assert rank.compared == sum(rank.graphs.values()) >= len(BATCHES)
    assert (rank.wrong, rank.skipped, rank.unseen, rank.reason) == (0, 0, 0, None)


def _decode(target: verified_drafts.Target, *, fused: bool, factor: float = 1.0) -> Served:
    """Return a speculator whose drafts *target* has verified; its graphs hold another *factor*."""
    eager = Served(Rate(), mode=CUDAGraphMode.NONE, fused=fused)
    served = Served(fused=fused)
    eager.builder.factor = served.builder.factor = factor
    requests = [5, 0, 3, 1]
    graphed, right = (functools.partial(_verified_step, each, requests) for each in (served, eager))
    verified_drafts.decode(graphed, right, target, torch.tensor(requests), VOCABULARY)
    return served


def _verified_step(served: Served, requests: list[int], verified: verified_drafts.Verified) -> torch.Tensor:
    return served.step(requests, verified=verified)


@FUSED
def test_of_each_graph_the_drafts_that_it_makes_are_counted(fused: bool) -> None:
    served = _decode(verified_drafts.like_eager, fused=fused)
    counts = served.shadow.acceptance.by_graph
    assert {name.partition(",")[0] for name in counts} == GRAPHS
    for name, each in counts.items():
        drafts = 1 if name.startswith("draft prefill") else DRAFTS - 1
        expected = 4 * drafts * verified_drafts.VERIFIED
        assert (each.drafts, each.accepted, each.accepted_eagerly) == (expected,) * 3
        assert (each.fewer, each.more, each.collapsed) == (0, 0, False)


@FUSED
def test_drafts_of_stale_graphs_are_a_collapse_where_the_target_samples_others(fused: bool) -> None:
    counts = _decode(verified_drafts.like_eager, fused=fused, factor=-40.0).shadow.acceptance.by_graph
    first = next(name for name in counts if name.startswith("draft prefill" if HAS_PREFILL else "draft decode"))
    assert counts[first].collapsed
    counts = _decode(verified_drafts.like_served, fused=fused, factor=-40.0).shadow.acceptance.by_graph
    assert not [name for name, each in counts.items() if each.fewer or each.collapsed]


def test_memory_of_each_batch_is_measured_while_graphs_are_captured() -> None:
    with mock.patch.object(memory, "_reset_peak", return_value=100), mock.patch.object(memory, "_peak") as peak:
        peak.return_value = 107
        served = Served()
        captured = {
            (id(manager), desc.num_tokens)
            for manager in vars(served.speculator).values()
            if isinstance(manager, cudagraph_utils.CudaGraphManager)
            for desc in manager.graphs
        }
        assert served.shadow.memory.needs == dict.fromkeys(captured, 7)
        assert captured
        peak.return_value = 1000
        served.step([0, 1, 2])
        assert set(served.shadow.memory.needs.values()) == {7}  # what steps take is not measured


@pytest.mark.skipif(hasattr(gumbel, "murmur3_hash32"), reason="the double runs no such kernel")
@FUSED
def test_padded_rows_of_sampled_drafts_that_write_logits_are_caught(fused: bool) -> None:
    unwatched, served = Served(Rate(), sampled=True, fused=fused), Served(sampled=True, fused=fused)
    for requests in BATCHES:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    assert (served.shadow.results.noise, served.shadow.stopped) == (0.0, None)
    assert wrong_graphs(served) == (PADDED if affected("draft-idx-mapping") else set())


@FUSED
def test_stale_graphs_are_mismatches_and_their_drafts_are_served(fused: bool) -> None:
    unwatched, served = Served(Rate(), fused=fused), Served(fused=fused)
    unwatched.builder.factor = served.builder.factor = 2.0
    requests = [5, 0, 3, 1]
    assert torch.equal(served.step(requests), unwatched.step(requests))
    assert [name for name in differing(served, unwatched) if name != "cache"] == []
    assert wrong_graphs(served) == GRAPHS
    served.step([2, 6, 7])
    for each in served.shadow.results.first_mismatches:
        assert len(each.errors) == each.rows <= each.graph.rows == 4
        assert min(each.errors) > 0
        assert len(each.graph.backends) == 1
    assert {each.rows for each in served.shadow.results.first_mismatches} == {3, 4}


def test_a_plan_that_the_warm_up_has_made_is_caught_in_decodes() -> None:
    """`capture-state`, and from 0.23 on no more. Prefills take the target model's states, which are not vLLM's here."""
    unwatched, served = Served(Rate(), planned=True), Served(planned=True)
    for requests in ([0, 1, 2, 3], [4, 5, 6, 7]):
        assert torch.equal(served.step(requests), unwatched.step(requests))
    assert ("draft decode" in wrong_graphs(served)) == affected("capture-state")
    if vllm_graphfix.states()["capture-state"].state.value == "not-needed":
        assert not wrong_graphs(served)
    assert served.shadow.stopped is None


@FUSED
def test_in_quarantine_drafts_are_those_of_a_speculator_without_graphs(fused: bool) -> None:
    right, served = Served(Rate(), mode=CUDAGraphMode.NONE, fused=fused), Served(action=Action.QUARANTINE, fused=fused)
    right.builder.factor = served.builder.factor = 2.0
    for requests in ([0, 1], [2, 3]):
        served.step(requests), right.step(requests)
    assert len(served.shadow.quarantined) == len(GRAPHS)
    replayed = served.shadow.results.checks
    for requests in ([4, 5], [6, 7]):
        assert torch.equal(served.step(requests), right.step(requests))
    assert served.shadow.results.checks == replayed


def test_dummy_batches_and_other_callers_are_not_checked() -> None:
    served = Served()
    served.step([0, 1], dummy_run=True)
    for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager", "cudagraph_manager"):
        if (manager := getattr(served.speculator, name, None)) is not None:
            manager.run_fullgraph(next(iter(manager.graphs)))
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)
    served.step([0, 1])
    assert served.shadow.results.checks > 0


def test_drafts_count_for_a_budget_and_leave_the_clock_to_the_target_model() -> None:
    served = Served(Rate(share=0.001))
    with mock.patch("vllm_graphfix.shadow.schedule.perf_counter", side_effect=AssertionError):
        served.step([0, 1])
    assert served.shadow.schedule.count >= len(GRAPHS)
    assert served.shadow.schedule.due > served.shadow.schedule.count
    assert served.shadow.stopped is None


def test_in_a_pipeline_drafts_are_no_steps_and_belong_to_the_one_before_them() -> None:
    served = Served()
    schedule = served.shadow.schedule
    schedule.restart(drafts=True)
    schedule.count = schedule.within + 1  # the target model's call
    schedule.due = schedule.count + 1
    served.step([0, 1])
    assert (schedule.step, served.shadow.results.checks, served.shadow.stopped) == (1, 1, None)
    assert schedule.due > schedule.count > schedule.within + 1
    assert schedule.due == 2 * (schedule.within + 1)


def test_off_there_is_no_wrapper_at_all_and_no_reason_to_ask() -> None:
    served = Served(Rate())
    assert not [
        name for name, each in vars(served.speculator).items() if "run_fullgraph" in getattr(each, "__dict__", ())
    ]


def test_an_engine_whose_steps_cannot_run_twice_is_refused_and_drafts() -> None:
    unwatched = Served(Rate())
    served = Served(attention_config=SimpleNamespace(hisparse_config=SimpleNamespace()))
    assert torch.equal(served.step([0, 1, 2]), unwatched.step([0, 1, 2]))
    assert "HiSparse" in refused()
    assert served.shadow.results.checks == 0


def test_a_cache_of_unknown_kind_makes_the_check_incompatible() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Compressor(AttentionLayerBase):  # type: ignore[misc]
        get_attn_backend = get_kv_cache_spec = None

    served = Served()
    served.config.compilation_config.static_forward_context["draft.layers.1"] = Compressor()
    served.step([0, 1])
    assert not refused()  # it is none of the drafter's
    served.speculator.draft_attn_layer_names.add("draft.layers.1")
    checks = served.shadow.results.checks
    served.step([0, 1])
    assert "Compressor" in refused()
    assert (served.shadow.results.checks, served.shadow.stopped) == (checks, None)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failing_eager_run_turns_the_check_off_and_drafting_goes_on(at: int) -> None:
    unwatched, served = Served(Rate()), Served()
    if not HAS_PREFILL:
        at += 1  # each step has an eager prefill
    served.model.breaks_at = at
    for requests in BATCHES[:2]:
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert differing(served, unwatched) == []
    assert served.shadow.stopped == "RuntimeError: planted"


def test_noise_of_eager_runs_is_no_mismatch() -> None:
    served = Served()
    served.model.noise = 1e-5  # a hundred times the last bit: runs of one step are never equal by chance
    for requests in BATCHES * 2:
        served.step(requests)
    assert served.shadow.results.mismatches == 0
    assert served.shadow.results.noise > 0


def test_whatever_fails_in_finding_out_what_is_replayed_drafting_goes_on() -> None:
    for name in ("_call_in_frames", "_step", "_buffers", "_without_graph"):
        unwatched, served = Served(Rate()), Served()
        served.shadow.memory.measuring = False
        with mock.patch.object(drafter_v2, name, side_effect=ValueError("planted")):
            assert torch.equal(served.step([0, 1, 2]), unwatched.step([0, 1, 2])), name
        assert "planted" in (served.shadow.stopped or ""), name


@pytest.mark.parametrize("attribute", ["draft_watermarker", "acceptance_estimator"])
def test_drafters_with_a_history_are_not_checked(attribute: str) -> None:
    served = Served()
    setattr(served.speculator, attribute, object())
    managers = {
        name: each for name, each in vars(served.speculator).items() if name.endswith("cudagraph_manager") and each
    }
    for each in managers.values():
        del each.run_fullgraph
    (shape,) = {shape for shape, known in drafter_shapes.SHAPES.items() if known.graphs[0].manager in managers} & {
        drafter_shapes.diagnose(open_source()).shape
    }
    drafter_v2._watch_speculator(served.speculator, drafter_shapes.SHAPES[shape].graphs, served.shadow, None)
    assert not [name for name, each in managers.items() if "run_fullgraph" in vars(each)]
    assert not refused()


def test_the_record_says_what_is_wrapped() -> None:
    wrapped: Any = vllm_graphfix._this_process().component("shadow").manager
    assert wrapped.states()["shadow-v2-drafter"].state.value == "active"
