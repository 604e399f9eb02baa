"""The shadow check on vLLM's own `CUDAGraphWrapper`, forward context and layer classes; graphs are the CPU double's."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import wrapped_model
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, override_forward_context
from wrapped_model import CAPTURED, LONGEST, WIDTH, Served, SlotsStandIn

from vllm_graphfix.fix import Mode, State
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import check, failures, forward, judge, layers, memory, process, ranks, runner_v1, runs
from vllm_graphfix.shadow.verdict import TARGET
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
from vllm_graphfix.verify.engine.exact import ExactRank, ExactReplays
from vllm_graphfix.verify.engine.exact_report import ExactReport

STATE = FixState("shadow-v1", Mode.AUTO, None, State.ACTIVE, "applied")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double():
        yield
    process.start(Rate(), Action.REPORT)


def test_full_wrappers_alone_are_checked() -> None:
    served = Served()
    assert type(served.run).__mro__[1] is cuda_graph.CUDAGraphWrapper
    assert isinstance(served.run, cuda_graph.CUDAGraphWrapper)
    piece = cuda_graph.CUDAGraphWrapper(served.model, served.config, CUDAGraphMode.PIECEWISE)
    assert type(piece) is cuda_graph.CUDAGraphWrapper


def test_off_there_is_no_wrapper_at_all() -> None:
    assert type(Served(Rate()).run) is cuda_graph.CUDAGraphWrapper


def test_a_right_graph_serves_the_same_bits_with_and_without_the_check() -> None:
    unwatched, served = Served(Rate()), Served()
    for requests in (3, 4, 1, 3, 2):
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.checks, results.mismatches, results.noise, results.rounding) == (5, 0, 0.0, 0.0)
    assert served.shadow.stopped is None


def test_a_stale_graph_is_a_mismatch_with_all_that_a_report_needs() -> None:
    unwatched, served = Served(Rate(), stale=True), Served(stale=True)
    for _ in range(3):
        assert torch.equal(served.step(), unwatched.step())  # reported, and not meddled with
    results = served.shadow.results
    assert (results.checks, results.mismatches) == (3, 3)
    first, second, _ = results.first_mismatches
    assert (first.rows, len(first.errors), first.graph.rows) == (3, 3, CAPTURED)
    assert min(first.errors) > 0.1
    assert first.graph.backends == ("MetadataStandIn",)
    assert "BatchDescriptor(num_tokens=4" in first.graph.name
    assert (first.first_layer, second.first_layer) == (None, "layer.1")  # the output of layer.0 is what is wrong


def test_an_exact_comparison_judges_every_replay_and_counts_those_it_cannot_see() -> None:
    served = Served(Rate(every=10**9))
    served.shadow.schedule.due = 10**6
    served.step()
    replays = ExactReplays()
    replays.begin()
    for requests in (3, 4, 1):
        served.step(requests)
    torch.cuda.CUDAGraph.replay(served.run.concrete_cudagraph_entries[BatchDescriptor(CAPTURED)].cudagraph)
    rank = replays.end()
    assert (rank.compared, rank.wrong, rank.skipped, rank.unseen, rank.reason) == (3, 0, 0, 1, None)
    assert rank.noise == 0.0
    ((graph, count),) = rank.graphs.items()
    assert "BatchDescriptor(num_tokens=4" in graph
    assert count == 3
    assert "check" not in vars(served.shadow)  # both are as before
    assert torch.cuda.CUDAGraph.replay.__qualname__ != "ExactReplays.begin.<locals>.replay"


def test_an_exact_comparison_finds_a_stale_graph_and_says_where_it_was_not_made() -> None:
    served = Served(Rate(every=10**9), stale=True)
    replays = ExactReplays()
    replays.begin()
    served.step(), served.step()
    rank = replays.end()
    assert (rank.compared, rank.wrong) == (2, 2)
    assert "a replayed CUDA graph was wrong" in rank.findings[0]
    process.start(Rate(), Action.REPORT)
    replays = ExactReplays()
    replays.begin()
    assert replays.end().reason == "the shadow check did not start in this engine"


def test_an_exact_comparison_starts_no_check_that_has_ended() -> None:
    served = Served(Rate(every=10**9), stale=True)
    served.shadow.stop(RuntimeError("planted"))
    replays = ExactReplays()
    replays.begin()
    served.step()
    rank = replays.end()
    assert (rank.compared, rank.wrong, rank.unseen, rank.reason) == (0, 0, 1, "RuntimeError: planted")


class OtherEntries(SlotsStandIn):
    """Leaves entries in its cache that its output does not depend on."""

    factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = super().forward(hidden)
        slots = get_forward_context().slot_mapping["layer.0"].clamp(min=0)
        self.kv_cache[0].view(-1, WIDTH).index_copy_(0, slots, hidden * self.factor)
        return mixed


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("apart", [0.0, 1e-6, 0.5])
def test_an_exact_comparison_sees_what_only_a_later_step_would_read(factor: float, apart: float) -> None:
    """Kernels that split their work by the capture's longest request hide no entry, and leave nothing open."""
    with (
        mock.patch.object(wrapped_model, "SlotsStandIn", OtherEntries),
        mock.patch.object(OtherEntries, "apart", apart),
    ):
        lengths = SimpleNamespace(max_model_len=LONGEST)
        served = Served(Rate(every=10**9), model_config=lengths, splits_by="max_seq_len")
        served.model.layers["layer.0"].factor = factor  # of which the graph does not know
        replays = ExactReplays()
        replays.begin()
        served.step()
        rank = replays.end()
    finding = "writes other entries to the cache of layer.0"
    assert (rank.rounding, rank.as_captured > 0, ExactReport([rank]).is_exact) == (0, apart > 0, True)
    assert (rank.compared, rank.wrong) == (1, int(factor != 1.0))
    assert [text.endswith(finding) for text in rank.findings] == [True] * rank.wrong


@pytest.mark.parametrize("varied", [0.3, float("nan")])
@pytest.mark.parametrize("apart", [1e-6, 0.5])
def test_a_replay_that_varies_is_not_exact_although_a_run_split_as_captured_equals_it(
    monkeypatch: pytest.MonkeyPatch, varied: float, apart: float
) -> None:
    monkeypatch.setattr(runs.CheckedStep, "error_of_another_replay", lambda *_: varied)
    rank = exact_of_a_split_step(apart)
    assert (rank.wrong, rank.as_captured, ExactReport([rank]).is_exact) == (0, 0, False)


@pytest.mark.parametrize("apart", [1e-6, 0.5])
def test_a_check_that_ends_proves_nothing_either_way(monkeypatch: pytest.MonkeyPatch, apart: float) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(judge, "error_as_captured", fail)
    rank = exact_of_a_split_step(apart)
    assert (rank.wrong, rank.as_captured, rank.reason) == (0, 0, "RuntimeError: CUDA out of memory")


def exact_of_a_split_step(apart: float) -> ExactRank:
    """Compare one step whose kernels split their work by the longest request, *apart* from those of the capture."""
    with mock.patch.object(SlotsStandIn, "apart", apart):
        lengths = SimpleNamespace(max_model_len=LONGEST)
        served = Served(Rate(every=10**9), model_config=lengths, splits_by="max_seq_len")
        replays = ExactReplays()
        replays.begin()
        served.step()
        return replays.end()


def test_quarantine_corrects_one_graph_and_others_are_replayed() -> None:
    right, served = Served(Rate()), Served(action=Action.QUARANTINE, stale=True)
    for _ in range(2):
        served.step(), right.step()
    assert len(served.shadow.quarantined) == 1
    for mine, correct in zip(served.model.layers.values(), right.model.layers.values(), strict=True):
        mine.kv_cache[0].copy_(correct.kv_cache[0])  # what was served before has left its traces
    replays = served.model.eager_runs
    for _ in range(3):
        assert torch.equal(served.step(), right.step())
    assert served.model.eager_runs == replays + 3
    assert (int(served.model.least_block), int(served.blocks.min())) == (0, -1)  # as in a check
    assert served.shadow.results.quarantined[0].name.startswith("target model")


EXECUTE = """
def execute_model(self, scheduler_output, step):
    return step()
"""


def test_abort_ends_the_requests_of_a_wrong_step_and_lets_its_output_be() -> None:
    """The model runner whose step it is, is a double: of it, the names that `requests_of_rows` reads."""
    unwatched, served = Served(Rate(), stale=True), Served(action=Action.ABORT, stale=True)
    reported: list[Any] = []
    served.shadow.consequences._abort = SimpleNamespace(
        why_not=lambda: None, deliver=lambda *arguments: reported.append(arguments)
    )
    made: dict[str, Any] = {"__name__": "vllm.v1.worker.gpu_model_runner"}
    exec(EXECUTE, made)  # noqa: S102
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["b", "a", "c"]))
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys("abc", 1))
    assert torch.equal(made["execute_model"](runner, output, served.step), unwatched.step())
    ((names, blocks, why),) = reported
    assert (names, blocks) == (["b", "a", "c"], ())
    assert "a replayed CUDA graph was wrong: target model" in why
    assert not served.shadow.quarantined
    served.step()  # in no step that is known
    assert len(reported) == 1
    assert "no step of requests is running" in str(process.state({"shadow-v1": STATE}).reason)
    assert served.shadow.stopped is None


def test_metadata_context_random_numbers_and_addresses_are_restored() -> None:
    served = Served()
    served.model.random = True
    entry = served.run.concrete_cudagraph_entries[BatchDescriptor(CAPTURED)]
    before = torch.get_rng_state()
    served.step()
    assert torch.equal(torch.get_rng_state(), before)
    assert served.metadata["layer.0"].lazy is None
    assert served.context.cudagraph_runtime_mode == CUDAGraphMode.FULL
    assert served.forward(CUDAGraphMode.FULL).data_ptr() == entry.output.data_ptr()


def test_padded_rows_name_existing_blocks_in_further_runs_alone() -> None:
    """With -1 there, flashmla-padding's kernel ends the process, also where the replay does not read it."""
    served = Served()
    served.step(requests=3)
    assert int(served.model.least_block) == 0
    assert served.blocks.tolist() == [[1, 1]] * 3 + [[-1, -1]]
    assert not served.shadow.results.changed_inputs


@pytest.mark.parametrize(
    ("known", "by", "mismatches"),
    [
        (LONGEST, "max_seq_len", 0),
        (LONGEST - 1, "max_seq_len", 2),
        (None, "max_seq_len", 2),
        (LONGEST, "max_query_len", 0),
        (None, "max_query_len", 2),
    ],
)
def test_a_graph_that_rounds_as_its_capture_did_is_no_mismatch(known: int | None, by: str, mismatches: int) -> None:
    """Kernels that split their work by the length of the longest request differ.

    A capture is told of the longest request that there can be, and a step of its own longest one.
    """
    unwatched = Served(Rate(), splits_by=by)
    served = Served(model_config=SimpleNamespace(max_model_len=known), splits_by=by)
    for _ in range(2):
        assert torch.equal(served.step(), unwatched.step())
        assert mismatches or all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.mismatches, results.rounding, served.shadow.stopped) == (mismatches, 0, None)
    assert (results.as_captured > 0) == (not mismatches)
    assert (served.metadata["layer.0"].max_seq_len, served.metadata["layer.0"].max_query_len) == (9, 1)


@pytest.mark.parametrize(
    ("captured", "longest", "mismatches"), [(CAPTURED, LONGEST, 0), (CAPTURED, None, 1), (1, LONGEST, 1)]
)
def test_more_than_rounding_is_explained_by_the_upper_bounds_of_the_capture_alone(
    captured: int, longest: int | None, mismatches: int
) -> None:
    """Attention that picks one key of many turns a last bit into more; a capture's query of one token is no bound."""
    with mock.patch.object(SlotsStandIn, "apart", 0.5):
        served = Served(model_config=SimpleNamespace(max_model_len=longest), splits_by="max_query_len")
        served.descriptor = BatchDescriptor(CAPTURED, num_reqs=2)
        served.forward(CUDAGraphMode.FULL, LONGEST, captured)
        served.step(mode=CUDAGraphMode.NONE)  # fills the buffers
        served.forward(CUDAGraphMode.FULL, LONGEST, 2)
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (1, mismatches)
    assert (served.shadow.results.as_captured > 0.05) == (not mismatches)


def test_a_replay_that_comes_to_something_else_the_next_time_is_no_mismatch() -> None:
    """Atomic additions do this; their odd results are rare: eager runs may never show one."""
    unwatched, served = Served(Rate()), Served()
    entry = served.run.concrete_cudagraph_entries[BatchDescriptor(CAPTURED)]
    replay, oddly = entry.cudagraph.replay, iter([False] * 10 + [True])

    def rarely_odd() -> None:
        replay()
        entry.output.mul_(1 + 1e-6 * next(oddly, False))

    entry.cudagraph = SimpleNamespace(replay=rarely_odd)
    for _ in range(12):
        served.step(), unwatched.step()
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (12, 0)
    assert 0 < served.shadow.results.noise < 1e-5


@pytest.mark.parametrize(
    ("lora", "adapters", "dtype", "stale", "mismatches"),
    [
        (None, False, torch.bfloat16, False, 2),
        ("adapters", True, torch.bfloat16, False, 0),
        ("adapters", False, torch.bfloat16, False, 2),
        ("adapters", True, torch.float32, False, 2),
        ("adapters", True, torch.bfloat16, True, 2),
    ],
)
def test_in_a_graph_with_adapters_a_few_last_bits_are_no_mismatch(
    lora: str | None, adapters: bool, dtype: torch.dtype, stale: bool, mismatches: int
) -> None:
    """Their kernels add atomically, in an order that follows from what ran before: the same in runs of one kind."""
    served = Served(splits_by="max_seq_len", stale=stale, adapters=adapters)
    _begin_with_adapters(served, lora, dtype)
    for _ in range(2):
        served.step()
    results = served.shadow.results
    assert (results.checks, results.mismatches, results.noise, served.shadow.stopped) == (2, mismatches, 0, None)
    assert (results.rounding > 0) == (not mismatches)


def _begin_with_adapters(served: Served, lora: str | None, dtype: Any) -> None:
    served.config.lora_config, served.config.model_config = lora, SimpleNamespace(dtype=dtype)
    served.config.parallel_config.pipeline_parallel_size = 1
    process.on_captured(SimpleNamespace(vllm_config=served.config))


def test_noise_of_graphs_with_adapters_hides_nothing_in_others() -> None:
    served = Served(splits_by="max_seq_len", adapters=True)
    served.model.noise = 1e-3
    for _ in range(3):
        served.step()
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (3, 0)
    assert served.shadow.results.noise > 0
    served.model.noise = 0.0
    served.descriptor = BatchDescriptor(CAPTURED, has_lora=False)
    served.forward(CUDAGraphMode.FULL, LONGEST, CAPTURED)  # its capture
    for _ in range(2):
        served.step()
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (5, 2)


def test_ranks_in_lockstep_have_one_tolerance_with_or_without_adapters() -> None:
    served = Served(splits_by="max_seq_len")
    _begin_with_adapters(served, "adapters", torch.bfloat16)
    served.shadow.lockstep = mock.Mock()
    with mock.patch.object(served.shadow, "all_ranks_replay", return_value=True):
        served.step()
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (1, 0)


def test_an_unknown_dtype_ends_the_check_after_the_rank_has_joined() -> None:
    served = Served(adapters=True)
    served.config.parallel_config.data_parallel_size = 2
    with (
        mock.patch.object(forward, "unsafe", return_value=None),
        mock.patch.object(served.shadow, "start_in_lockstep") as begun,
    ):
        _begin_with_adapters(served, "adapters", "auto")
    assert served.shadow.stopped is not None
    assert "finfo" in served.shadow.stopped
    begun.assert_called_once_with()


@pytest.mark.parametrize(
    ("model", "descriptor", "adapters"),
    [
        (TARGET, {"has_lora": False, "num_active_loras": 0}, False),
        (TARGET, {"has_lora": True, "num_active_loras": 0}, True),
        (TARGET, {"num_active_loras": 2}, True),
        (TARGET, {"num_active_loras": 0}, False),
        (TARGET, {}, True),  # V2 before 0.24.0 does not say
        ("draft decode", {"num_active_loras": 2}, False),
    ],
)
def test_a_graph_may_have_adapters_where_its_descriptor_does_not_say_otherwise(
    model: str, descriptor: dict[str, Any], adapters: bool
) -> None:
    assert forward._has_adapters(model, SimpleNamespace(num_tokens=4, **descriptor)) == adapters


def test_a_wrong_graph_is_one_also_where_kernels_split_their_work() -> None:
    served = Served(model_config=SimpleNamespace(max_model_len=LONGEST), splits_by="max_seq_len", stale=True)
    served.step()
    assert served.shadow.results.mismatches == 1


def test_steps_without_a_replay_are_not_checked_and_the_next_replay_is() -> None:
    served = Served()
    served.step(mode=CUDAGraphMode.NONE)
    assert served.shadow.results.checks == 0
    served.step()
    assert served.shadow.results.checks == 1


@pytest.mark.parametrize("at", [1, 2])
def test_an_eager_run_that_fails_once_turns_the_check_off_and_serving_goes_on(at: int) -> None:
    unwatched, served = Served(Rate(), stale=True), Served(stale=True)
    served.model.breaks_at = at
    for _ in range(3):
        assert torch.equal(served.step(), unwatched.step())
        assert all(map(torch.equal, served.caches()[1:], unwatched.caches()[1:]))
    assert served.shadow.stopped == "RuntimeError: planted"
    assert served.model.eager_runs == 2


def test_a_step_that_cannot_run_eagerly_is_a_mismatch_and_is_replayed() -> None:
    """mamba-padding does this on stock releases: metadata of a prefill, and the graph of a decode."""
    unwatched, served = Served(Rate()), Served(action=Action.QUARANTINE)
    served.model.breaks_eager = IndexError("index is out of bounds")
    for _ in range(4):
        assert torch.equal(served.step(), unwatched.step())
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.checks, results.mismatches, len(results.quarantined), served.shadow.stopped) == (2, 2, 1, None)
    assert results.first_mismatches[0].failure == "IndexError: index is out of bounds"
    assert "two such runs ended in IndexError: index is out of bounds" in results.first_mismatches[0].sentence()
    assert process.wrong()[0].errors == "IndexError: index is out of bounds"


def test_a_quarantined_graph_is_replayed_again_after_three_failures() -> None:
    served = Served(action=Action.QUARANTINE)
    error = IndexError("index is out of bounds")
    for breaks in (error, error, error, error, None, error, error):
        served.model.breaks_eager = breaks
        served.step()
    assert (len(served.shadow.quarantined), served.shadow.results.quarantines_ended) == (1, 0)
    served.model.breaks_eager = error
    served.step()
    assert (len(served.shadow.quarantined), process.counts()["shadow"]["quarantines-given-up"]) == (0, 1)
    runs = served.model.eager_runs
    served.shadow.schedule.due = 1 << 40
    served.step()
    assert served.model.eager_runs == runs


def test_a_run_that_fails_holds_no_memory() -> None:
    """Left to Python's search for cycles, which a GPU without memory does not start."""
    gc.collect()
    gc.disable()
    try:
        served = Served(action=Action.QUARANTINE)
        served.model.breaks_eager = IndexError("index is out of bounds")
        for _ in range(4):
            served.step()
            assert served.model.held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_an_error_of_the_gpu_is_no_mismatch(error: Exception) -> None:
    unwatched, served = Served(Rate()), Served()
    served.model.breaks_eager = error
    assert torch.equal(served.step(), unwatched.step())
    assert (served.shadow.results.mismatches, served.model.eager_runs) == (0, 1)
    assert served.shadow.stopped is not None


def test_noise_of_eager_runs_is_no_mismatch() -> None:
    served = Served()
    served.model.noise = 1e-6
    for _ in range(12):
        served.step()
    results = served.shadow.results
    assert results.mismatches == 0
    assert 0 < results.rounding <= 8 * results.noise


def test_runs_that_differ_by_much_say_nothing_of_their_step_and_blind_no_other() -> None:
    served = Served(stale=True)
    served.model.noise = 0.3
    served.step()
    assert (served.shadow.results.mismatches, served.shadow.results.skipped, served.shadow.results.checks) == (0, 1, 0)
    served.model.noise = 0.0
    served.step()
    assert (served.shadow.results.mismatches, served.shadow.stopped) == (1, None)


def test_after_runs_that_differ_by_much_the_caches_are_the_replays() -> None:
    unwatched, served = Served(Rate()), Served()
    served.model.noise = 0.3
    for _ in range(2):
        assert torch.equal(served.step(), unwatched.step())
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    assert process.REFUSED is None


def test_a_model_that_is_right_once_and_not_twice_is_refused() -> None:
    """It consumes a buffer of its own, which nobody else knows of."""
    served = Served()
    served.model.odd_at = 2
    for _ in range(3):
        served.step()
    assert "the model consumes what it is given" in (process.REFUSED or "")
    assert (served.model.eager_runs, served.shadow.results.mismatches, served.shadow.stopped) == (2, 0, None)


def test_mismatches_of_a_graph_are_bounded_and_its_layer_is_sought_twice() -> None:
    served = Served(stale=True)
    with mock.patch.object(runs, "first_difference", return_value=None) as sought:
        for _ in range(70):
            served.step()
    (known,) = served.shadow._histories.values()
    assert (known.mismatches, known.first_layer, sought.call_count) == (70, None, 2)
    assert len(served.shadow.results.first_mismatches) == 50


def test_a_step_in_quarantine_that_finds_no_memory_is_replayed() -> None:
    unwatched, served = Served(Rate()), Served(action=Action.QUARANTINE)
    served.step(), unwatched.step()
    served.shadow.quarantined.add((id(served.run), BatchDescriptor(CAPTURED)))
    served.model.breaks_eager = torch.OutOfMemoryError("full")
    assert torch.equal(served.step(), unwatched.step())
    assert all(map(torch.equal, served.caches(), unwatched.caches()))
    served.model.breaks_eager = AssertionError("CUDA graph padding: 3 != 4")
    assert torch.equal(served.step(), unwatched.step())


def test_a_step_in_quarantine_is_replayed_by_all_ranks_if_one_cannot_run_it() -> None:
    unwatched, served = Served(Rate()), Served(action=Action.QUARANTINE)
    served.shadow.quarantined.add((id(served.run), BatchDescriptor(CAPTURED)))
    # All can read the call, and are ready; another rank's run fails; nothing is left on any GPU.
    answers = [(0.0,), (0.0,), (2.0,), (0.0,)]
    with (
        mock.patch.object(ranks, "is_single_rank", return_value=False),
        mock.patch.object(ranks, "all_reduce_max", side_effect=answers) as agreements,
    ):
        assert torch.equal(served.step(), unwatched.step())
    assert (agreements.call_count, served.model.eager_runs) == (4, 1)
    (known,) = served.shadow._histories.values()
    assert known.quarantine_failures == 1
    assert all(map(torch.equal, served.caches(), unwatched.caches()))


def test_memory_of_a_batch_is_measured_in_its_warm_up_alone() -> None:
    with mock.patch.object(memory, "_reset_peak", return_value=100), mock.patch.object(memory, "_peak") as peak:
        peak.return_value = 107
        served = Served()
        expected = {(id(served.run), CAPTURED): 7}
        assert served.shadow.memory.needs == expected
        assert served.shadow.memory.measuring
        peak.return_value = 1000
        served.step()
        served.step(mode=CUDAGraphMode.NONE)
        assert served.shadow.memory.needs == expected
    assert not served.shadow.memory.measuring


def test_a_run_of_which_vllm_measures_the_peak_itself_is_not_measured() -> None:
    """This is how vLLM sees how large its cache may be: without attention metadata."""
    with mock.patch.object(memory, "_reset_peak") as begun:
        served = Served()
        begun.reset_mock()
        served.context.attn_metadata = None
        served.context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        with override_forward_context(served.context), contextlib.suppress(TypeError):
            served.run(served.hidden)
    assert not begun.called


def test_an_engine_that_is_refused_in_a_check_is_checked_no_more() -> None:
    served = Served()
    with mock.patch.object(runner_v1, "real_rows", side_effect=failures.UnsafeError("rows cannot be told")):
        for _ in range(3):
            served.step()
    assert served.model.eager_runs == 1
    assert process.REFUSED == "rows cannot be told"


def test_every_call_into_torch_and_the_ranks_may_fail() -> None:
    """Whatever fails in a check, what is served is the replay's, and there is one warning."""
    for owner, name in (
        (check, "CheckedStep"),
        (judge, "FirstRun"),
        (judge, "FurtherRun"),
        (runs, "row_errors"),
        (ranks, "all_reduce_max"),
        (runner_v1, "step"),
        (runner_v1, "_replays"),
        (runs.CheckedStep, "restore"),
        (runs.CheckedStep, "save_replay"),
    ):
        unwatched, served = Served(Rate(), stale=True), Served(stale=True)
        served.shadow.memory.measuring = False
        with mock.patch.object(owner, name, side_effect=ValueError("planted")):
            assert torch.equal(served.step(), unwatched.step()), name
        assert "planted" in (served.shadow.stopped or ""), name
        served.step()
        assert served.shadow.results.checks <= 1


def test_a_check_that_one_rank_cannot_make_is_skipped_by_all() -> None:
    served = Served()
    with mock.patch.object(
        ranks,
        "all_reduce_max",
        lambda *values: tuple(max(value, 1.0) if place == 1 else value for place, value in enumerate(values)),
    ):
        served.step()
    assert (served.shadow.results.skipped, served.shadow.results.checks, served.shadow.stopped) == (1, 0, None)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"attention_config": SimpleNamespace(hisparse_config=SimpleNamespace())}, "HiSparse"),
        ({"additional_config": {"decode_backend": "latency_specialized"}}, "other kernels"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2, all2all_backend="deepep_low_latency")}, "deepep"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=1, enable_eplb=True)}, "load of experts"),
    ],
)
def test_an_engine_whose_steps_cannot_run_twice_is_refused(changes: dict[str, Any], because: str) -> None:
    served = Served(**changes)
    assert because in (process.REFUSED or "")
    assert type(served.run) is cuda_graph.CUDAGraphWrapper


def test_a_model_that_clears_image_embeddings_is_refused_for_prompts() -> None:
    hf_config = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[1]))
    for mode, reason in (("FULL", "embeddings of its images"), ("FULL_AND_PIECEWISE", None)):
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(),
            model_config=SimpleNamespace(hf_config=hf_config),
        )
        actual = forward.unsafe(config)
        assert actual is None if reason is None else reason in (actual or "")


def test_deepseek_v41_is_refused_where_its_graphs_alone_overlap_parts_of_a_layer() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v41")),
    )
    module: Any = ModuleType("vllm.models.deepseek_v41.nvidia.ops.mhc")
    for overlaps in (True, False):
        module.supports_mhc_overlap = lambda each, overlaps=overlaps: each is config and overlaps
        with mock.patch.dict(sys.modules, {module.__name__: module}):
            actual = forward.unsafe(config)
            assert "other kernels" in (actual or "") if overlaps else actual is None
            config.model_config.hf_config.model_type, saved = "llama", config.model_config.hf_config.model_type
            assert forward.unsafe(config) is None
            config.model_config.hf_config.model_type = saved
    module.supports_mhc_overlap = mock.Mock(side_effect=AttributeError("hc_mult"))
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        assert "other kernels" in (forward.unsafe(config) or "")


def test_a_layer_with_other_kernels_in_graphs_is_incompatible() -> None:
    served = Served()
    for most, refused in ((0, False), (32, True)):
        served.model.layers["layer.0"]._projection_overlap_max_tokens = most
        served.step()
        assert ("layer.0 runs other kernels" in (process.REFUSED or "")) is refused


def test_dense_data_parallel_ranks_are_engines_of_their_own() -> None:
    assert Served(parallel_config=SimpleNamespace(data_parallel_size=2, is_moe_model=False)).shadow is not None
    assert process.REFUSED is None


def test_a_cache_of_an_unknown_kind_makes_the_check_incompatible() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Compressor(AttentionLayerBase):  # type: ignore[misc]
        get_attn_backend = get_kv_cache_spec = None

    served = Served()
    served.model.layers["layer.2"] = Compressor()
    with contextlib.suppress(AttributeError, TypeError):
        served.step()
    assert "Compressor" in (process.REFUSED or "")
    assert (served.shadow.stopped, served.shadow.results.checks) == (None, 0)


def test_a_cache_that_a_subclass_says_anew_is_of_an_unknown_kind() -> None:
    class Pooling(SlotsStandIn):
        get_kv_cache_spec = None

    assert layers.unknown_cache({"layer.0": SlotsStandIn()}) is None
    assert "Pooling" in (layers.unknown_cache({"layer.0": Pooling()}) or "")


def test_the_record_says_what_is_wrapped() -> None:
    assert os.environ["VLLM_GRAPHFIX_SHADOW"] == "1/1"
    import vllm_graphfix

    wrapped: Any = vllm_graphfix._this_process().component("shadow").manager
    states = wrapped.states()
    for name in ("shadow-v1-pieces", "shadow-v2-pieces", "shadow-encoder"):
        assert states.pop(name).state is State.OFF
    # Nothing here imports the other runner's graphs; drafts of 0.18 are left alone, and DFlash is of 0.24 on.
    drafters = {states.pop(name).state.value for name in ("shadow-v2-drafter", "shadow-v2-dflash-drafter")}
    assert drafters <= {"waiting", "not-needed"}
    assert {name: state.state.value for name, state in states.items()} == {
        "shadow-v1": "active",
        "shadow-v2": "waiting",
    }
