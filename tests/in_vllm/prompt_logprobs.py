"""prompt-logprobs on vLLM's own `sample_tokens`.

What the bookkeeping and the drafter are given, and which steps have no copy.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from activities import activity_of
from vllm_graphfix.fixes.prompt_logprobs import READ_AFTER_DRAFT
from vllm_graphfix.verify.double.scenarios import prompt_logprobs as scenario
from vllm_graphfix.verify.double.scenarios.prompt_logprobs import SCORED, STEPS, make_runner, one_memory, prepare, step

PROMPTS, _ = STEPS
GRAPHS = CUDAGraphMode.FULL
ACTIVITY = activity_of("prompt-logprobs")
READS_AFTER_DRAFT = ACTIVITY.counter(READ_AFTER_DRAFT)


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    ACTIVITY.reset()
    with one_memory():
        yield


class Read:
    """The hidden states that the bookkeeping of a runner gets, and their values at that time."""

    def __init__(self, runner: Any) -> None:
        self.inputs: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.drafts: list[int] = []
        """Made before."""
        stock = runner._bookkeeping_sync

        def bookkeeping(scheduler_output: Any, sampler_output: Any, logits: Any, hidden_states: Any, *args: Any) -> Any:
            self.inputs.append(hidden_states)
            self.values.append(hidden_states.clone())
            self.drafts.append(len(runner.drafter.seen) + runner.drafter.dummy_runs)
            return stock(scheduler_output, sampler_output, logits, hidden_states, *args)

        runner._bookkeeping_sync = bookkeeping


def sample(
    runner: Any, scheduled: dict[str, int] = PROMPTS, ask: tuple[str, ...] = SCORED, mode: CUDAGraphMode | None = None
) -> tuple[torch.Tensor, torch.Tensor, Read]:
    """One step: the target's hidden states, their values when it had run, and what the bookkeeping read."""
    prepare(runner, scheduled, ask, mode)
    hidden_states = runner.execute_model_state.hidden_states
    values = hidden_states.clone()
    read = Read(runner)
    runner.sample_tokens(None)
    return hidden_states, values, read


def has_no_copy(runner: Any, *inputs: Any, **keywords: Any) -> bool:
    hidden_states, _, read = sample(runner, *inputs, **keywords)
    assert ACTIVITY.error is None
    assert READS_AFTER_DRAFT.count == int(read.inputs[0] is not hidden_states)
    return read.inputs[0] is hidden_states


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_bookkeeping_reads_the_targets_hidden_states_after_a_draft(asynchronous: bool) -> None:
    runner = make_runner(GRAPHS, asynchronous)
    hidden_states, values, read = sample(runner)
    assert read.drafts == [1]
    assert torch.equal(read.values[0], values)
    assert not torch.equal(hidden_states, values), "the drafter's graph has written there"
    assert (READS_AFTER_DRAFT.count, ACTIVITY.error) == (1, None)


def test_the_drafter_gets_the_targets_hidden_states_as_before() -> None:
    runner = make_runner(GRAPHS)
    _, values, _ = sample(runner)
    (seen,) = runner.drafter.seen
    assert torch.equal(seen, values[: sum(PROMPTS.values())])


@torch.inference_mode()
def test_a_copy_has_the_shape_and_kind_of_what_it_is_of() -> None:
    """In inference mode, as the worker calls it."""
    hidden_states, _, read = sample(make_runner(GRAPHS))
    (copy,) = read.inputs
    assert (copy.shape, copy.dtype, copy.stride()) == (hidden_states.shape, hidden_states.dtype, hidden_states.stride())
    assert copy.is_inference()


def test_all_else_of_the_state_is_handed_on_as_it_is() -> None:
    runner = make_runner(GRAPHS)
    inputs: list[Any] = []
    propose = runner.propose_draft_token_ids

    def proposed(*args: Any) -> Any:
        inputs.extend(args)
        return propose(*args)

    runner.propose_draft_token_ids = proposed
    prepare(runner, PROMPTS)
    state = runner.execute_model_state
    runner.sample_tokens(None)
    handed = {id(argument) for argument in inputs}
    assert {
        id(state.scheduler_output),
        id(state.sample_hidden_states),
        id(state.spec_decode_common_attn_metadata),
    } <= handed
    assert id(state.hidden_states) not in handed


@pytest.mark.parametrize("collected", [False, True], ids=["at once", "by the collector"])
def test_the_copy_is_gone_when_the_step_is_over(collected: bool) -> None:
    runner = make_runner(GRAPHS)
    prepare(runner, PROMPTS)
    copies: list[weakref.ref[torch.Tensor]] = []
    stock = runner._bookkeeping_sync

    def bookkeeping(*args: Any) -> Any:
        copies.append(weakref.ref(args[3]))
        return stock(*args)

    runner._bookkeeping_sync = bookkeeping
    gc.disable()
    try:
        output = runner.sample_tokens(None)
        if collected:
            gc.collect()
        assert READS_AFTER_DRAFT.count == 1
        assert copies[0]() is None
        assert output.prompt_logprobs_dict
    finally:
        gc.enable()


def test_every_chunk_of_a_prompt_is_scored_from_the_target() -> None:
    eager, graphed = (make_runner(mode) for mode in (CUDAGraphMode.NONE, GRAPHS))
    for scheduled in STEPS:
        right, result = (step(runner, scheduled).prompt_logprobs_dict for runner in (eager, graphed))
        assert list(result) == list(right)
        for name, scored in right.items():
            assert torch.equal(result[name].logprobs, scored.logprobs)
            assert torch.equal(result[name].logprob_token_ids, scored.logprob_token_ids)
            assert torch.equal(result[name].selected_token_ranks, scored.selected_token_ranks)
    assert READS_AFTER_DRAFT.count == len(STEPS)


def test_generated_tokens_and_drafts_are_those_of_eager() -> None:
    reported = []
    for mode in (CUDAGraphMode.NONE, GRAPHS):
        runner = make_runner(mode)
        outputs = [step(runner, scheduled) for scheduled in (*STEPS, dict.fromkeys(PROMPTS, 1))]
        reported.append([output.sampled_token_ids for output in outputs] + [runner._draft_token_ids.tolist()])
    assert reported[0] == reported[1]


# Steps without a copy


def test_a_batch_without_requests_for_logprobs_has_none() -> None:
    assert has_no_copy(make_runner(GRAPHS), ask=())


def test_decodes_after_a_scored_prompt_have_none() -> None:
    runner = make_runner(GRAPHS)
    for scheduled in STEPS:
        step(runner, scheduled)
    READS_AFTER_DRAFT.count = 0
    assert has_no_copy(runner, dict.fromkeys(PROMPTS, 1))


def test_a_request_that_was_preempted_while_it_was_scored_has_none() -> None:
    runner = make_runner(GRAPHS)
    runner.num_prompt_logprobs["of another step"] = 1
    assert has_no_copy(runner, ask=())


def test_a_request_that_waits_does_not_keep_another_from_its_copy() -> None:
    runner = make_runner(GRAPHS)
    runner.num_prompt_logprobs["of another step"] = 1
    assert not has_no_copy(runner)


def test_a_drafter_that_runs_after_the_bookkeeping_has_none() -> None:
    runner = make_runner(GRAPHS, disable_padded_drafter_batch=True)
    hidden_states, values, read = sample(runner)
    assert read.inputs[0] is hidden_states
    assert torch.equal(read.values[0], values)
    assert (read.drafts, len(runner.drafter.seen), READS_AFTER_DRAFT.count) == ([0], 1, 0)


def test_a_drafter_without_a_model_has_none() -> None:
    runner = make_runner(GRAPHS, method="suffix")
    runner.propose_draft_token_ids = lambda *_: [[] for _ in PROMPTS]
    assert has_no_copy(runner)


def test_an_engine_without_a_drafter_has_none() -> None:
    runner = make_runner(GRAPHS)
    runner.speculative_config = None
    assert has_no_copy(runner)


def test_an_engine_without_graphs_has_none() -> None:
    assert has_no_copy(make_runner(CUDAGraphMode.NONE))


def test_more_tokens_than_a_graph_takes_have_none() -> None:
    runner = make_runner(GRAPHS)
    runner.compilation_config.max_cudagraph_capture_size = max(scenario.CAPTURE_SIZES) - 1
    assert has_no_copy(runner)


def test_a_batch_as_large_as_the_largest_graph_has_one() -> None:
    runner = make_runner(GRAPHS)
    scheduled = {"scored": 5, "plain": 3, "chunked": 7}
    hidden_states, _, read = sample(runner, scheduled)
    assert len(hidden_states) == max(scenario.CAPTURE_SIZES)
    assert read.inputs[0] is not hidden_states


# What else may happen


def test_a_rank_without_a_state_does_as_stock_does() -> None:
    runner = make_runner(GRAPHS)
    runner.num_prompt_logprobs["scored"] = 1
    runner.sample_tokens(None)
    assert (READS_AFTER_DRAFT.count, ACTIVITY.error) == (0, None)


def test_a_runner_that_was_made_without_its_init_does_as_stock_does() -> None:
    runner = make_runner(GRAPHS)
    del runner.num_prompt_logprobs
    runner.sample_tokens(None)
    assert (READS_AFTER_DRAFT.count, ACTIVITY.error) == (0, None)


@pytest.mark.skipif(
    "dummy_run" not in inspect.unwrap(GPUModelRunner.sample_tokens).__code__.co_names,
    reason="the drafter of this release has no dummy run here",
)
def test_a_dummy_run_of_the_drafter_on_a_data_parallel_rank_is_a_draft() -> None:
    """Prompts are too long for the drafter, and other ranks draft."""
    runner = make_runner(GRAPHS)
    runner.parallel_config.data_parallel_size, runner.effective_drafter_max_model_len = 2, 1
    _, values, read = sample(runner)
    assert (runner.drafter.dummy_runs, runner.drafter.seen) == (1, [])
    assert torch.equal(read.values[0], values)


def test_a_subclass_is_treated_alike() -> None:
    class Runner(GPUModelRunner):  # type: ignore[misc]  # vLLM is a peer
        def sample_tokens(self, grammar_output: Any) -> Any:
            return super().sample_tokens(grammar_output)

    runner = make_runner(GRAPHS)
    runner.__class__ = Runner
    _, values, read = sample(runner)
    assert torch.equal(read.values[0], values)


def test_an_error_of_the_layers_own_leaves_the_step_as_it_was() -> None:
    runner = make_runner(GRAPHS)
    runner.compilation_config.max_cudagraph_capture_size = None  # nothing to compare with
    hidden_states, _, read = sample(runner)
    assert read.inputs[0] is hidden_states
    assert READS_AFTER_DRAFT.count == 0
    assert "TypeError" in (ACTIVITY.error or "")


def test_the_answer_of_a_copy_that_fails_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(GRAPHS)
    prepare(runner, PROMPTS)
    state = runner.execute_model_state

    def clone(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    inputs: list[Any] = []
    stock = runner._bookkeeping_sync

    def bookkeeping(*args: Any) -> Any:
        inputs.append(args[3])
        return stock(*args)

    runner._bookkeeping_sync = bookkeeping
    monkeypatch.setattr(runner.drafter, "propose", lambda **_: torch.zeros(3, scenario.DRAFT_TOKENS, dtype=torch.int32))
    runner.sample_tokens(None)
    assert inputs[0] is state.hidden_states
    assert "no memory for a copy" in (ACTIVITY.error or "")


def test_an_error_of_stock_comes_out_and_leaves_no_copy_behind() -> None:
    runner = make_runner(GRAPHS)
    prepare(runner, PROMPTS)

    def fails(*_: Any) -> None:
        raise RuntimeError("the drafter's own")

    runner.propose_draft_token_ids = fails
    with pytest.raises(RuntimeError, match="the drafter's own"):
        runner.sample_tokens(None)
    assert runner.execute_model_state is None
    assert ACTIVITY.error is None
