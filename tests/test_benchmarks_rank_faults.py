"""The benchmark of a part of the plugin that fails on one rank: what it makes of what an engine answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path

# isort: split
import rank_faults
from measuring.rank_fault import Fault
from measuring.rank_fault_cases import CASES

RIGHT = [["length", [number, 5, 6]] for number in range(8)]
STOCK = [RIGHT[0], ["length", [1, 9, 9]], *RIGHT[2:]]
ENDED = [RIGHT[0], ["error", [1]], *RIGHT[2:]]
OTHER = [["length", [7, 7, 7]], *RIGHT[1:]]
ORDER: dict[str, Any] = {"status": "in order", "wrong": [], "notes": []}
WRONG = ORDER | {"status": "not in order", "wrong": ["the shadow check found wrong CUDA graph replays, 2 in 9 checks"]}
STOPPED = ORDER | {"status": "stopped", "wrong": ["vllm-graphfix stops this engine before it serves: why"]}


@pytest.mark.parametrize(
    ("case", "fields", "outcome", "as_expected"),
    [
        ("no fault", {"answers": [RIGHT, RIGHT], "faults": 0}, "right", True),
        ("no fault", {"answers": [RIGHT, RIGHT], "faults": 0, "fleet": WRONG}, "right", False),
        ("no fault", {"error": "no GPU", "started": False, "faults": 0}, "not started", False),
        ("no fault", {"answers": [OTHER, RIGHT], "faults": 0}, "wrong", False),
        ("shadow, a wrong replay", {"answers": [ENDED, RIGHT], "fleet": WRONG}, "ended", True),
        ("shadow, a wrong replay", {"answers": [STOCK, RIGHT], "fleet": WRONG}, "as stock", False),
        ("shadow, a wrong replay", {"answers": [RIGHT, ENDED], "fleet": WRONG}, "wrong", False),
        ("shadow, a wrong replay", {"answers": [RIGHT, RIGHT], "faults": 0}, "not reached", False),
        ("gate, graphs, strict", {"error": "it stops", "seconds": 29.0, "fleet": STOPPED}, "clean stop", True),
        ("gate, graphs, strict", {"error": "it stops", "seconds": 31.0, "fleet": STOPPED}, "hang", False),
        ("gate, graphs, strict", {"error": "no answer", "started": False, "fleet": {}}, "hang", False),
    ],
)
def test_an_outcome_is_expected_only_with_what_fleet_has_to_say(
    case: str, fields: dict[str, Any], outcome: str, as_expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = rank_faults.Engines(tmp_path, "V2", 1.0, rehearse=False)
    vars(engines).update(_right=[RIGHT], _wrong=STOCK)
    result = {"started": True, "faults": 1, "fleet": ORDER} | fields
    monkeypatch.setattr(engines, "_run", lambda *_: dict(result))
    judged = engines.judged(case)
    assert (judged["outcome"], judged["as expected"]) == (outcome, as_expected)


@pytest.mark.parametrize("case", CASES)
def test_what_a_case_lets_fail_is_there(case: str) -> None:
    import importlib

    fault = Fault(folder="", **CASES[case].fault)
    for place in filter(None, fault.at.split(",")):
        module, _, name = place.partition(":")
        target: Any = importlib.import_module(f"vllm_graphfix.{module}")
        for part in name.split("."):
            target = getattr(target, part)
        assert callable(target)
