"""The benchmark of faults of a rank, run on stand-ins for engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path

# isort: split
import shadow_faults

STAND_IN = Path(__file__).parent / "support" / "shadow_faults_engine_stand_in.py"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs `shadow_faults` with stand-ins for engines; the result is its exit code and what became of each fault."""
    monkeypatch.setattr(shadow_faults, "ENGINE", STAND_IN)
    monkeypatch.setattr("vllm_graphfix.verify.engine.models.write", lambda name, folder: folder / name)

    def go(behaviours: Mapping[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("SHADOW_FAULTS_STAND_IN", json.dumps(behaviours))
        which = [part for fault in behaviours for part in ("--fault", fault)]
        given = ["--out", str(tmp_path), "--mode", "check", "--limit", "4", *which, *arguments]
        monkeypatch.setattr(sys, "argv", ["shadow_faults.py", *given])
        code = shadow_faults.main()
        return code, {each["fault"]: each for each in json.loads((tmp_path / "result.json").read_text())}

    return go


def test_right_tokens_and_clean_stops_are_expected_of_an_engine_with_a_fault(faults: Any) -> None:
    code, found = faults(
        {"none": "serves", "exception": "stops", "killed": "stops", "slow": "serves"}, "--parallel", "tensor"
    )
    assert code == 0
    assert {fault: each["outcome"] for fault, each in found.items()} == {
        "none": "right",
        "exception": "clean stop",
        "killed": "clean stop",
        "slow": "right",
    }
    assert found["killed"]["seconds"] < 5


@pytest.mark.parametrize(
    ("behaviour", "fault", "outcome"),
    [
        ("is wrong", "exception", "wrong"),
        ("hangs", "exception", "hang"),
        ("leaves a rank behind", "exception", "hang"),
        ("stops late", "exception", "clean stop"),
        ("stops", "slow", "clean stop"),
        ("never comes to it", "exception", "not reached"),
    ],
)
def test_what_must_not_become_of_an_engine_with_a_fault_is_an_exit_code(
    faults: Any, behaviour: str, fault: str, outcome: str
) -> None:
    code, found = faults({fault: behaviour}, "--parallel", "tensor")
    assert (code, found[fault]["outcome"], found[fault]["as expected"]) == (1, outcome, False)


def test_a_stopped_stage_of_a_pipeline_is_waited_for_as_on_stock(faults: Any) -> None:
    assert faults({"stopped": "stops"}, "--parallel", "pipeline")[0] == 1
    assert faults({"stopped": "stops"}, "--parallel", "tensor")[0] == 0
