"""In the scenarios of fixes that calls in each step prove, vLLM makes such a call before each replay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import vllm_graphfix
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.patching.applied_fix import Proof, is_of_builder
from vllm_graphfix.verify.double.graph import CPUGraph
from vllm_graphfix.verify.double.worker import load_scenario

MANAGER = vllm_graphfix._this_process().manager


def proved_by_steps() -> list[str]:
    for fix in FIXES:
        scenario_or_none(fix.name)
    return [name for name, proofs in MANAGER.proofs().items() if any(proof is Proof.STEP for _, proof in proofs)]


def scenario_or_none(name: str) -> Callable[..., Any] | None:
    try:
        return load_scenario(name)
    except Exception:  # the releases that lack its code
        return None


NAMES = proved_by_steps()


def test_some_fix_is_proved_by_its_steps() -> None:
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_call_comes_before_each_replay(name: str) -> None:
    since_replay: list[int] = [0]
    calls: list[int] = []
    sites = [site for site, proof in MANAGER.proofs()[name] if proof is Proof.STEP]

    def counting(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def count(*args: Any, **kwargs: Any) -> Any:
            since_replay[0] += 1
            return stock(*args, **kwargs)

        return count

    def replay(graph: CPUGraph) -> None:
        calls.append(since_replay[0])
        since_replay[0] = 0
        stock_replay(graph)

    stock_replay = CPUGraph.replay
    with mock.patch.object(CPUGraph, "replay", replay):
        with_builds = {(site.owner, name) for site in sites for name in {site.attribute, _method(site)}}
        patches = [mock.patch.object(owner, one, counting(getattr(owner, one))) for owner, one in with_builds]
        for each in patches:
            each.start()
        try:
            load_scenario(name)()
        finally:
            for each in patches:
                each.stop()
    assert min(calls, default=1) >= 1, calls


def _method(site: Any) -> str:
    return "build" if is_of_builder(site.name) else str(site.attribute)
