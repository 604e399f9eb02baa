"""`observe`: vLLM is as it was, and what a fix would have changed is counted.

With the fix on the same is counted and put right.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nightly import make_nightly
from stock import release_root, run_in_release
from table import FEW, PAIRS, affected_by
from vllm_graphfix.fixes.draft_decode_mode import DECODE_PADDED_IN_PIECEWISE, PREFILL_WITH_OLD_INDICES
from warm_release import run_in_fork

Outcome = dict[str, Any]


def observed(release: str | Path, names: tuple[str, ...], further: str = "{}") -> dict[tuple[str, str, str], Outcome]:
    """Return the outcome of every workload, by way (stock, observe, active), fix and workload."""
    code = (Path(__file__).parent / "support" / "observed.py").read_text() + f"\nmain({list(names)!r}, {further})\n"
    done = (
        run_in_fork(release, code) if isinstance(release, str) else run_in_release(release, code, libraries_loaded=True)
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    return {(outcome["way"], outcome["fix"], outcome["workload"]): outcome for outcome in lines}


SAMPLED = dict(sorted(PAIRS, key=lambda pair: pair[1] in FEW))
"""The newest release of FEW that each fix is for, or another where none is."""
each_pair = pytest.mark.parametrize(
    ("name", "release"),
    [
        pytest.param(*pair, marks=[] if SAMPLED[pair[0]] == pair[1] and pair[1] in FEW else pytest.mark.slow)
        for pair in PAIRS
    ],
)


# One run a release, whose tests share a process of pytest-xdist: `--dist loadgroup`.
@cache
def run_together(release: str, names: tuple[str, ...]) -> dict[tuple[str, str, str], Outcome]:
    return observed(release, names)


def in_release(name: str, release: str) -> dict[tuple[str, str, str], Outcome]:
    """Run *name* with all that *release* needs; in `make test` with those that are sampled there."""
    some = tuple(fix for fix in affected_by(release) if SAMPLED[fix] == release)
    return run_together(release, some if name in some else affected_by(release))


@each_pair
def test_observed_the_numbers_are_stocks_wrong_ones_and_the_defect_is_counted(name: str, release: str) -> None:
    outcomes = in_release(name, release)
    stock, seen = outcomes["stock", name, "scenario"], outcomes["observe", name, "scenario"]
    assert (seen["state"], stock["state"]) == ("observing", "off")
    assert (seen["numbers"], seen["right"]) == (stock["numbers"], False)
    assert sum(seen["events"].values()) > 0
    assert sum(stock["events"].values()) == 0


@each_pair
def test_active_the_numbers_are_right_and_the_same_is_counted(name: str, release: str) -> None:
    outcomes = in_release(name, release)
    active, seen = outcomes["active", name, "scenario"], outcomes["observe", name, "scenario"]
    assert (active["state"], active["right"]) == ("active", True)
    expected = active["expected"]
    assert {event: active["events"][event] for event in expected} == expected
    assert sum(active["events"].values()) > 0
    if not seen["stopped"]:  # stock does not get that far
        assert seen["events"] == active["events"]


@each_pair
def test_without_the_defects_condition_nothing_is_counted(name: str, release: str) -> None:
    outcomes = in_release(name, release)
    for way in ("observe", "active"):
        assert set(outcomes[way, name, "without"]["events"].values()) == {0}
        assert outcomes[way, name, "without"]["numbers"] == outcomes["stock", name, "without"]["numbers"]
        assert outcomes[way, name, "without"]["right"]


@pytest.mark.parametrize(
    ("without_mode", "without_zero_fill"),
    [
        pytest.param(True, False, marks=pytest.mark.slow, id="mode"),
        pytest.param(False, True, marks=pytest.mark.slow, id="indices"),
        pytest.param(True, True, id="both"),
    ],
)
def test_nightlies_count_what_their_speculator_has(tmp_path: Path, without_mode: bool, without_zero_fill: bool) -> None:
    name = "draft-decode-mode"
    nightly = make_nightly(
        release_root("0.20.0"), tmp_path, without_mode=without_mode, without_zero_fill=without_zero_fill
    )
    outcomes = observed(nightly, (name,), "{'full': drafts_in_full_graphs}")
    assert outcomes["observe", name, "scenario"]["numbers"] == outcomes["stock", name, "scenario"]["numbers"]
    assert [outcomes[way, name, "scenario"]["right"] for way in ("stock", "active")] == [False, True]
    assert outcomes["active", name, "scenario"]["events"] == {
        DECODE_PADDED_IN_PIECEWISE.name: 4 if without_mode else 0,
        PREFILL_WITH_OLD_INDICES.name: 4 if without_zero_fill else 0,
    }
    assert (outcomes["observe", name, "scenario"]["events"][DECODE_PADDED_IN_PIECEWISE.name] > 0) == without_mode
    assert outcomes["observe", name, "full"]["numbers"] == outcomes["stock", name, "full"]["numbers"]
    for way in ("observe", "active"):
        full = outcomes[way, name, "full"]["events"]
        assert full[DECODE_PADDED_IN_PIECEWISE.name] == 0
        assert (full[PREFILL_WITH_OLD_INDICES.name] > 0) == without_zero_fill
        assert set(outcomes[way, name, "without"]["events"].values()) == {0}
