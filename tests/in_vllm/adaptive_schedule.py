"""adaptive-schedule on vLLM's own model runner V2: what a step's batch says of its longest query, and what is counted.

Where no graph is bound to a longest query, a batch says what it does on stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from activities import activity_of
from vllm_graphfix.fixes.adaptive_schedule import SCHEDULE_OF_A_SHORTER_STEP
from vllm_graphfix.verify.double.scenarios import adaptive_schedule as scenario

ACTIVITY = activity_of("adaptive-schedule")
SHORTER = ACTIVITY.counter(SCHEDULE_OF_A_SHORTER_STEP)


@pytest.fixture(autouse=True)
def _nothing_fails() -> Iterator[None]:
    ACTIVITY.error = None
    yield
    assert ACTIVITY.error is None


@pytest.fixture
def runner() -> Iterator[Any]:
    with scenario.prepared_on_the_cpu():
        yield scenario.RunnerStandIn()


def longest_and_counted(runner: Any, drafts: Sequence[int], verified: int, **inputs: Any) -> tuple[int | None, int]:
    """The longest query that the batch of a step says, and how much was counted."""
    before = SHORTER.count
    batch = runner.prepare(drafts, verified, **({"in_a_graph": True} | inputs))
    assert batch.num_scheduled_tokens.tolist() == [1 + each for each in drafts], "others read it"
    return batch.max_query_len, SHORTER.count - before


@pytest.mark.parametrize(("drafts", "verified"), [((1, 1, 0), 2), ((0, 0, 0), 0), ((1, 1, 1), 1)])
def test_a_shorter_step_says_the_longest_of_its_graph(runner: Any, drafts: Sequence[int], verified: int) -> None:
    assert longest_and_counted(runner, drafts, verified) == (3, 1)


@pytest.mark.parametrize(("drafts", "verified"), [((2, 2, 2), 6), ((2, 1, 0), 3), ((2, 2, 1), 2)])
def test_a_step_with_all_drafts_of_a_request_stays_as_it_is(runner: Any, drafts: Sequence[int], verified: int) -> None:
    assert longest_and_counted(runner, drafts, verified) == (3, 0)


def test_a_step_without_a_graph_says_its_own(runner: Any) -> None:
    assert longest_and_counted(runner, (1, 1, 0), 2, in_a_graph=False) == (2, 0)


def test_pieces_of_a_graph_launch_for_each_step(runner: Any) -> None:
    assert longest_and_counted(runner, (1, 1, 0), 2, mode=CUDAGraphMode.PIECEWISE) == (2, 0)


def test_a_graph_without_a_longest_query_is_none_of_adaptive_verification(runner: Any) -> None:
    assert longest_and_counted(runner, (0, 0, 0), 0, longest=None) == (None, 0)


def test_without_adaptive_verification_there_is_no_longest_query(runner: Any) -> None:
    runner.runner.adaptive_verification = None
    assert longest_and_counted(runner, (1, 1, 0), 2, longest=None) == (None, 0)


def test_an_error_of_stock_is_stocks(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.runner, "input_buffers", None)
    with pytest.raises(AttributeError):
        runner.prepare((1, 1, 0), 2, in_a_graph=True)


def test_a_graph_of_an_unknown_form_is_an_error_of_the_fix_and_none_of_the_step(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without:
        cg_mode, num_tokens, num_reqs = CUDAGraphMode.FULL, scenario.TOKENS, scenario.REQUESTS

    monkeypatch.setattr(scenario, "described_graph", Without)
    batch = runner.prepare((1, 1, 0), 2, in_a_graph=True)
    assert batch.max_query_len == 2
    assert ACTIVITY.error is not None
    ACTIVITY.error = None


def test_what_is_wrapped_is_vllms() -> None:
    assert GPUModelRunner.prepare_inputs.__module__ == "vllm.v1.worker.gpu.model_runner"
