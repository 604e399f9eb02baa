"""A fault in every call that the plugin makes during captures and looks of the shadow check.

vLLM captures its graphs, or the shadow check looks at a step. The outcome is right, stopped, or stock's and said.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from logging import WARNING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fault_engine import INTERRUPTS
from table import ALL_APPLIED
from warm_release import run_in_fork

HERE = Path(__file__).parent
STRICT = ALL_APPLIED | {"VLLM_GRAPHFIX": "strict"}
CHECKED = ALL_APPLIED | {"VLLM_GRAPHFIX_SHADOW": "1/1"}
ACTS = {
    "acts:Capture": {"auto": ALL_APPLIED, "strict": STRICT, "refusing": ALL_APPLIED},
    "acts:Check": {"auto": CHECKED, "refusing": CHECKED},
}
CODE = """
import sys
sys.path[:0] = [{here!r} + "/support", {here!r} + "/in_vllm"]
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
install_flashmla_stand_ins()
import pytest, torch, vllm.v1.worker.gpu_worker
import fault_acts
fault_acts.main({act!r}, {environments!r}, {results!r}, {every})
"""
# Act, release, and which part of the faults.
INJECTED = [
    pytest.param("acts:Capture", "0.21.0", 101, marks=pytest.mark.xdist_group("failing layers of 0.21.0")),
    pytest.param("acts:Check", "0.21.0", 101, marks=pytest.mark.xdist_group("failing layers of 0.21.0")),
    *(
        pytest.param(act, release, 1, marks=[pytest.mark.slow, pytest.mark.xdist_group(f"{act}-{release}")])
        for act, releases in {
            "acts:Capture": ("0.16.0", "0.17.1", "0.18.1", "0.21.0"),
            "acts:Check": ("0.18.1", "0.33.0"),
        }.items()
        for release in releases
    ),
]
every_act = pytest.mark.parametrize(("act", "release", "every"), INJECTED)


@cache
def injected(act: str, release: str, every: int) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Any]]]:
    """Return the runs without a fault, and each fault with its result."""
    with TemporaryDirectory(prefix="vllm-graphfix-") as folder:
        results = str(Path(folder) / "results")
        code = CODE.format(here=str(HERE), act=act, environments=ACTS[act], results=results, every=every)
        run_in_fork(release, code, timeout=4 * 3600)
        first, *rest = map(json.loads, Path(results).read_text().splitlines())
    return first, rest


def outcome(fault: dict[str, Any], result: Any) -> str:
    """One word for what became of a fault; a word that begins with WRONG must not be."""
    if result is None:
        return "WRONG: died or hung"
    if not result["fired"]:
        return "not made"
    end, error = result["end"], fault["error"]
    if error in INTERRUPTS:
        return "interrupted" if (end or "").startswith(error) else "WRONG: an interrupt was swallowed"
    if end is None:
        states = result["states"].values()
        if result["right"]:
            return "right"
        warned = fault["mode"] == "refusing" or any(level >= WARNING for level, _ in result["log"])
        if fault["mode"] != "strict" and "failed" in states and warned:
            return "stock's, and said"
        return "WRONG: serves a wrong graph"
    if end.startswith("GraphfixError: vllm-graphfix stops this engine before it"):
        return "stopped" if fault["mode"] == "strict" else f"WRONG: stopped ({end})"
    own = fault["callee"].startswith(("vllm.", "torch", "fault_acts", "acts", "capture_failures"))
    # vLLM's `set_forward_context` is a context manager: to call it is to call contextlib's helper.
    own |= (
        fault["callee"] == "contextlib"
        and fault["place"].endswith(":helper")
        and ":set_forward_context:" in fault["place"]
    )
    return "an error of vLLM's own" if own else f"WRONG: {end} came out of {fault['place']}"


@every_act
def test_a_fault_leaves_right_answers_or_stops_who_insists_or_is_stocks_and_logged(
    act: str, release: str, every: int, record_property: Callable[[str, object], None]
) -> None:
    first, rest = injected(act, release, every)
    assert all(result["end"] is None and result["right"] for result in first["counted"].values())
    outcomes = Counter(outcome(fault, result) for fault, result in rest)
    for about, number in outcomes.items():
        record_property("counted", (f"faults, {act.rpartition(':')[2].lower()}", release, about, number))
    assert [
        (fault, outcome(fault, result)) for fault, result in rest if outcome(fault, result).startswith("WRONG")
    ] == []
    assert len(rest) == len(range(0, first["planned"], every))
    assert outcomes["not made"] <= 1 + len(rest) // 8  # how far a thread is at that time is not always the same


@every_act
def test_the_calls_of_an_act_are_counted(act: str, release: str, every: int) -> None:
    first, _ = injected(act, release, every)
    files = {place.split(":")[1] for place, *_ in first["counted"]["auto"]["calls"]}
    wanted = (
        {"engine/capture_gate.py", "fixes/_capture_passes.py", "engine/rank_agreement.py"}
        if act == "acts:Capture"
        else {"shadow/check.py", "shadow/runs.py"}
    )
    assert wanted - {"engine/rank_agreement.py"} <= files
    assert first["planned"] > 300


WELL: dict[str, Any] = {"fired": True, "end": None, "right": True, "states": {"a": "active"}, "log": []}
FAULT = {"mode": "auto", "error": "EIO", "callee": "builtins", "place": "MainThread:gate.py:f:1:1:g"}


@pytest.mark.parametrize(
    ("fault", "result"),
    [
        ({}, None),
        ({}, WELL | {"right": False}),
        ({}, WELL | {"right": False, "states": {"a": "failed"}}),  # and the log says nothing
        ({"mode": "strict"}, WELL | {"right": False, "states": {"a": "failed"}, "log": [[30, "a"]]}),
        ({}, WELL | {"end": "OSError: injected"}),
        ({}, WELL | {"end": "GraphfixError: vllm-graphfix stops this engine before it serves: a"}),
        ({"error": "KeyboardInterrupt"}, WELL),
    ],
)
def test_what_must_not_happen_is_noticed(fault: dict[str, Any], result: Any) -> None:
    """On outcomes that no process had."""
    assert outcome(FAULT | fault, result).startswith("WRONG")
    assert outcome(FAULT, WELL) == "right"
