"""A fault in each function of the plugin that runs while an engine serves.

Right, stock, or a clean stop: never a hang, never a wrong token without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from serving_faults import LIMIT, Fault, Outcome, complaints, ended, outcomes

FAULTS = [
    pytest.param(False, 97, marks=pytest.mark.xdist_group("serving-faults")),
    pytest.param(False, 1, marks=[pytest.mark.slow, pytest.mark.xdist_group("serving-faults-functions")]),
    pytest.param(True, 1, marks=[pytest.mark.slow, pytest.mark.xdist_group("serving-faults-statements")]),
]
"""Of each statement or of each function alone, and which part of the faults."""
every_part = pytest.mark.parametrize(("whole", "every"), FAULTS)


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, int], tuple[dict[str, Any], list[Outcome]]]:
    @cache
    def inject(whole: bool, every: int) -> tuple[dict[str, Any], list[Outcome]]:
        return outcomes(tmp_path_factory.mktemp("serving-faults"), whole=whole, every=every)

    return inject


@every_part
def test_without_a_fault_requests_end_by_the_verdicts_of_both_detectors(injected: Any, whole: bool, every: int) -> None:
    start, _ = injected(whole, every)
    assert [reason for reason, _ in start["first"]] == ["length", "error", "length"]
    assert "error" in {reason for reason, _ in start["second"]}
    assert complaints(start, Outcome(Fault("scheduler", "none", "OSError", 1), start)) == []
    assert start["stock"] != [[reason, tokens[: len(start["stock"][0][1])]] for reason, tokens in start["eager"]]
    called = {place.partition(":")[0] for of_process in start["places"].values() for place in of_process}
    assert {f"{part}.py" for part in ("shadow/check", "marks/watch", "records/reporter", "engine/abort")} <= called
    assert {"engine/metrics.py", "engine/rank_addresses.py", "engine/status_record.py"} <= called
    assert len(start["places"]["0"]) > 700


@every_part
def test_each_fault_leaves_it_right_or_as_stock_or_stops_it(
    injected: Any, whole: bool, every: int, record_property: Callable[[str, object], None]
) -> None:
    start, results = injected(whole, every)
    for about, number in Counter(map(ended, results)).items():
        record_property("counted", ("faults while an engine serves", "0.27.0", about, number))
    assert len(results) > 7
    assert {each.fault: complaint for each in results if (complaint := complaints(start, each))} == {}


RIGHT, OTHER = [3, 4, 5, 6], [3, 4, 9, 9]
STATES = {"shadow": ["active", "why"], "abort": ["active", "why"]}
CALM: dict[str, Any] = {"fired": 1, "states": STATES, "log": []}
START = {"eager": [["length", RIGHT]], "stock": [["length", OTHER]]}
WELL: dict[str, Any] = {
    "took": 1.0,
    "first": [["error", RIGHT[:2]]],
    "second": [["error", RIGHT[:1]]],
    "after": [["length", RIGHT]],
    "scheduler": CALM,
    "ranks": [CALM],
}
SPEAKS = {"ranks": [CALM | {"log": [[30, "graphfix: the shadow check is now off"]]}]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"first": [["length", OTHER]]} | SPEAKS, ""),
        ({"first": [["length", OTHER]]}, "a verdict is missing"),
        ({"second": [["length", RIGHT]]}, "a mark is missing"),
        ({"first": [["error", [3, 9]]]} | SPEAKS, "request 0 has error"),
        ({"first": [["length", [3, 4, 7, 7]]]} | SPEAKS, "request 0 has length"),
        ({"second": [["length", OTHER]]} | SPEAKS, "request 0 has length"),
        ({"after": [["error", RIGHT]]}, "after: request 0 has error"),
        ({"took": LIMIT + 1}, "it took"),
    ],
)
def test_what_must_not_be_is_noticed(change: dict[str, Any], complaint: str) -> None:
    fault = Fault("0", "shadow/check.py:1", "OSError", 1)
    messages = complaints(START, Outcome(fault, WELL | change))
    assert (len(messages), complaint in "".join(messages)) == (int(bool(complaint)), True)
    assert complaints(START, Outcome(fault, None)) == ["the engine hangs, or has ended without a word"]
