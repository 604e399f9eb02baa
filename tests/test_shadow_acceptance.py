"""Accepted drafts by graph, of a speculator of a few lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from records import record
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.log import logger
from vllm_graphfix.records import write
from vllm_graphfix.shadow.acceptance import Acceptance, Counts, Drafts

GRAPH = "draft decode"


class SpeculatorDouble:
    """Stands in for a speculator of model runner V2."""

    def propose(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        dummy_run: bool = False,
    ) -> str:
        return "drafts"


class Served:
    """A speculator whose drafts are counted."""

    def __init__(self) -> None:
        self.speculator, self.acceptance = SpeculatorDouble(), Acceptance()

    def check(self, replayed: list[int], eager: list[int], *, first: int = 0, request: str = "a") -> None:
        self.acceptance.add(lambda: (self.speculator, Drafts(GRAPH, first, {request: replayed}, {request: eager})))

    def propose(
        self,
        sampled: int,
        rejected: int,
        last: int,
        *others: str,
        request: str = "a",
        prompt: bool | None = False,
        **more: Any,
    ) -> None:
        """Propose after a step of *request*, which is in the last place, and of *others*.

        *prompt*: the step ran tokens of its prompt; None on a release whose batch does not say so.
        """
        names = [*others, request]
        batch = SimpleNamespace(req_ids=names, idx_mapping=torch.arange(len(names), dtype=torch.int32).flip(0))
        if prompt is not None:
            batch.is_prefilling_np = np.array([*(False for _ in others), prompt])
        of_all, refused = (torch.tensor([*(9 for _ in others), number]) for number in (sampled, rejected))
        tokens = torch.tensor([[last], *([7] for _ in others)])
        assert self.speculator.propose(batch, of_all, refused, tokens, **more) == "drafts"

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Requests, drafts, accepted drafts with the graph and without."""
        self.check([], [], request="nobody")
        counts = self.acceptance.by_graph.get(GRAPH, Counts())
        return counts.requests, counts.drafts, counts.accepted, counts.accepted_eagerly


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: logged.append(text % args))
    return logged


@pytest.mark.parametrize(
    ("replayed", "eager", "first", "sampled", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 0, (4, 0, 9), (1, 3, 3, 3)),
        ([1, 2, 3], [1, 2, 3], 0, (2, 2, 9), (1, 3, 1, 1)),
        ([1, 2, 3], [1, 9, 3], 0, (2, 2, 9), (1, 3, 1, 2)),  # no more: what follows 9 was not sampled
        ([1, 2, 3], [5, 2, 3], 0, (3, 1, 9), (1, 3, 2, 0)),
        ([1, 2, 3], [1, 9, 3], 0, (2, 0, 9), (1, 1, 1, 1)),  # one draft was scheduled
        ([1, 2, 3], [1, 2, 9], 2, (3, 1, 9), (1, 1, 0, 1)),
        ([1, 2], [1, 9], 1, (4, 0, 8), (1, 1, 1, 0)),  # a graph for the second draft of three
        ([1, 2, 3], [1, 2, 3], 2, (2, 2, 9), (0, 0, 0, 0)),  # rejected before what the graph drafts
        ([1, 2, 3], [1, 2, 3], 0, (1, 0, 9), (0, 0, 0, 0)),  # a prompt's last step, or one without drafts
        ([1, 2, 3], [1, 2, 3], 0, (0, 0, 9), (0, 0, 0, 0)),
    ],
)
def test_drafts_are_accepted_as_far_as_the_target_samples_them(
    replayed: list[int], eager: list[int], first: int, sampled: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    served = Served()
    served.check(replayed, eager, first=first)
    served.propose(*sampled, "b", "c")
    assert served.counts == expected


def test_a_step_of_other_requests_or_none_verifies_nothing() -> None:
    served = Served()
    served.check([1, 2], [1, 2])
    served.propose(3, 0, 9, request="b")
    served.propose(1, 0, 9, dummy_run=True)
    served.propose(2, 1, 9)
    served.propose(3, 0, 9)
    assert served.counts == (1, 2, 1, 1)


@pytest.mark.parametrize(("prompt", "counted"), [(True, 0), (False, 1), (None, 1)])
def test_placeholders_behind_a_prompt_are_no_drafts(prompt: bool | None, counted: int) -> None:
    """From 0.26.0 on vLLM pads the last token of a prompt with drafts, as of a request that was preempted."""
    served = Served()
    served.check([1, 2, 3], [1, 2, 3])
    served.propose(1, 3, 1, "b", prompt=prompt)
    served.propose(4, 0, 9, "b")  # these drafts are others
    assert served.counts[0] == counted


def test_drafts_of_requests_that_are_gone_are_forgotten() -> None:
    served = Served()
    served.check([1, 2], [1, 2])
    for _ in range(17):
        served.propose(3, 0, 9, request="b")
    served.propose(3, 0, 9)
    assert served.counts == (0, 0, 0, 0)


def test_steps_that_nobody_verifies_or_counts_do_not_add_up() -> None:
    served = Served()
    for _ in range(100):
        served.check([1], [1])
    served.propose(2, 0, 9)
    assert served.counts == (64, 64, 64, 64)


def test_a_proposal_waits_for_no_device(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    served = Served()
    served.check([1, 2], [1, 2])
    with monkeypatch.context() as patched:
        for name in ("tolist", "item", "cpu", "to", "__bool__", "__int__", "__index__", "numpy", "nonzero"):
            patched.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(name))
        served.propose(3, 0, 9)
    assert (served.counts, warnings) == ((1, 2, 2, 2), [])


def test_a_proposal_is_vllms_own_again_once_no_drafts_wait() -> None:
    served = Served()
    served.check([1, 2], [1, 2])
    served.check([1, 2], [1, 2], first=1)
    assert "propose" in vars(served.speculator)
    served.propose(3, 0, 9)
    assert "propose" not in vars(served.speculator)


def test_patches_of_others_stay_and_nothing_is_counted_twice() -> None:
    served = Served()
    patches = []
    for _ in range(3):
        served.check([1, 2], [1, 2])
        patches.append(mock.Mock(side_effect=served.speculator.propose))
        served.speculator.propose = patches[-1]  # type: ignore[method-assign]
        served.propose(3, 0, 9)
    assert (served.counts, [patch.call_count for patch in patches]) == ((3, 6, 6, 6), [3, 2, 1])


@pytest.mark.parametrize(
    ("counts", "collapse"),
    [
        (Counts(30, 90, 0, 30, fewer=27), False),
        (Counts(30, 90, 0, 30, fewer=28), True),
        (Counts(100, 300, 0, 60, fewer=60, more=20), False),
        (Counts(200, 600, 80, 160, fewer=90), False),
        (Counts(200, 600, 79, 160, fewer=90), True),
        (Counts(200, 600, 10, 90, more=90), False),
        (Counts(), False),
    ],
)
def test_a_collapse_is_less_than_half_and_not_by_chance(counts: Counts, collapse: bool) -> None:
    assert counts.is_collapse is collapse


@pytest.mark.parametrize(("alike", "collapses"), [(True, 0), (False, 1)])
def test_copies_of_one_request_in_a_step_are_one_chance(alike: bool, collapses: int, warnings: list[str]) -> None:
    """A last bit that decides on another draft does so in each of them."""
    served = Served()
    texts = {f"{number}": 10 * (0 if alike else number) for number in range(40)}
    replayed, eager = ({name: [text + token] for name, text in texts.items()} for token in (1, 2))
    served.acceptance.add(lambda: (served.speculator, Drafts(GRAPH, 0, replayed, eager)))
    batch = SimpleNamespace(req_ids=[*texts], idx_mapping=torch.arange(40))
    served.speculator.propose(
        batch, torch.full((40,), 1), torch.full((40,), 1), torch.tensor([text + 2 for text in texts.values()])
    )
    assert served.counts == (40, 40, 0, 40)
    assert (served.acceptance.events()["acceptance-collapses"], len(warnings)) == (collapses, collapses)


def test_a_collapse_is_one_warning_and_a_finding_of_fleet(
    warnings: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served()
    for _ in range(40):
        served.check([1, 2], [3, 2])
        served.propose(1, 2, 3)
    assert served.counts == (40, 80, 0, 40)
    (warning,) = warnings
    assert f"{GRAPH}: 0 of 56 drafts accepted, 28 without the graph, in 28 rows of checked steps" in warning
    events = served.acceptance.events()
    assert events == {
        "drafts-verified": 80,
        "drafts-accepted": 0,
        "drafts-accepted-without-graph": 40,
        "acceptance-collapses": 1,
    }
    right = {"drafts-verified": 1000, "drafts-accepted": 900, "drafts-accepted-without-graph": 900}
    write(tmp_path, record(rank=0, events={"shadow": {name: events[name] + right.get(name, 0) for name in events}}))
    (engine,) = look(tmp_path).engines
    (wrong,) = (each for each in engine.wrong if "far fewer drafts of a CUDA graph" in each)
    assert "Of all graphs, 900 of 1080 in checks, 940 without them" in wrong
