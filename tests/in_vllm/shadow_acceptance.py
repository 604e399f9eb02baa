"""Accepted drafts in the scenario of `draft-non-causal`, whose answers are right and whose speed-up is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from defects import affected
from one_pass import VERIFIED, decode
from verified_drafts import like_eager
from vllm.config import CUDAGraphMode

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_non_causal as scenario

if TYPE_CHECKING:
    import pytest


def test_drafts_of_graphs_that_hold_a_plan_are_a_collapse_on_stock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args, **_: warnings.append(text % args))
    process.start(Rate(), Action.REPORT)
    with cpu_cuda_graphs(), scenario._on_a_blackwell():
        eager = scenario._speculator(CUDAGraphMode.NONE, causal=False)
        process.start(Rate(every=1), Action.REPORT)
        shadow: Any = process.SHADOW
        decode(scenario._speculator(CUDAGraphMode.FULL_DECODE_ONLY, causal=False), eager, like_eager)
    process.start(Rate(), Action.REPORT)
    assert shadow.stopped is None
    collapses = [each for each in warnings if "accepts far fewer drafts" in each]
    if not affected("draft-non-causal"):
        assert (collapses, shadow.acceptance.by_graph) == ([], {}), "nothing is captured"
        return
    (counts,) = shadow.acceptance.by_graph.values()
    assert (counts.requests, counts.collapsed, len(collapses)) == (VERIFIED, True, 1)
    assert counts.accepted < counts.accepted_eagerly / 2
