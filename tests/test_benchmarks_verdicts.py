"""Exit codes of benchmarks whose engines need a GPU: of made-up results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import adaptive_verification
import elastic_experts
from vllm_graphfix.verify.comparison import Kind

# -- adaptive verification


def adaptive(wrong: int = 15, replays: str = "FULL 8 1", **patched: Any) -> list[dict[str, Any]]:
    """A stock engine and a patched one."""
    fixed = {"wrong": 0, "state": "active", "events": {"schedule-of-a-shorter-step": 211}}
    return [
        {"engine": "adaptive, decodes", "wrong": wrong, "replays": {replays: 83}},
        {"engine": "patched, decodes"} | fixed | patched,
    ]


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (adaptive(), 0),
        (adaptive(wrong=0), 0),  # with heads of 128 a shorter schedule is right, too
        (adaptive(events={}), 1),
        (adaptive(state="conflict"), 1),
        (adaptive(replays="FULL 8 8"), 2),
        (adaptive(replays="NONE 0 1"), 2),
        ([*adaptive(), {"engine": "eager", "error": "exit code 1"}], 2),
    ],
)
def test_adaptive_verification(result: list[dict[str, Any]], code: int) -> None:
    assert adaptive_verification.verdict(result) == code


def test_a_wrong_answer_of_a_patched_engine_is_1() -> None:
    (stock, patched) = adaptive()
    assert adaptive_verification.verdict([stock, patched | {"wrong": 1}]) == 1


# -- elastic expert parallelism

STEPS = ("before", "scaled up", "moved", "scaled down")


def elastic(mode: str, **changed: dict[str, Any]) -> dict[str, Any]:
    """The result of one mode; *changed* has, by step, what is told of it or of its rank otherwise."""
    steps = {}
    for step in STEPS:
        wrong = step == "moved" and mode != "repair"
        rank: dict[str, Any] = {"replays": 25}
        if mode != "stock":
            rank |= {"comparisons": 3, "events": {"failures": 0}, "moved": ["weight"] if step == "moved" else []}
        told = changed.get(step.replace(" ", "_"), {})
        rank |= {name: value for name, value in told.items() if name != Kind.CORRUPT.value}
        steps[step] = {Kind.CORRUPT.value: told.get(Kind.CORRUPT.value, 16 if wrong else 0), "of ranks": [rank]}
    return {"reference": {"noise": "0.0"}, "modes": {mode: {"steps": steps}}}


@pytest.mark.parametrize("mode", elastic_experts.MODES)
def test_an_elastic_engine_that_is_right_and_says_what_moved_is_0(mode: str) -> None:
    assert elastic_experts.verdict(elastic(mode)) == 0


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (elastic("stock", scaled_up={Kind.CORRUPT.value: 1}), 1),
        (elastic("repair", moved={Kind.CORRUPT.value: 1}), 1),
        (elastic("report", scaled_up={"moved": ["weight"]}), 1),
        (elastic("report", moved={"moved": []}), 1),
        (elastic("report", scaled_down={"events": {"failures": 1}}), 1),
        (elastic("report", moved={Kind.CORRUPT.value: 0}), 2),
        (elastic("report", scaled_up={"comparisons": 0}), 2),
        (elastic("stock", before={"replays": 0}), 2),
        (elastic("stock") | {"reference": {"noise": "0.3"}}, 2),
        (elastic("stock") | {"reference": {"error": "died"}}, 2),
        ({"reference": {"noise": "0.0"}, "modes": {"stock": {"steps": {}, "error": "died"}}}, 2),
    ],
)
def test_what_is_wrong_is_1_and_what_shows_nothing_is_2(result: dict[str, Any], code: int) -> None:
    assert elastic_experts.verdict(result) == code
