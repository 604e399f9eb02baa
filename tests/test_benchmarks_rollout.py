"""The benchmarks of rollouts and fleets: what they make of what they have seen."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path

# isort: split
import healthy_day
import live_alerts
import two_hosts
from deployed import FLAGGER, RULES, documents
from judged_fleets import NAMED

LIMITS = {
    "count": 4,
    "successCondition": "len(result) > 0 && result[0] == 0",
    "failureCondition": "len(result) > 0 && result[0] > 0",
    "failureLimit": 1,
    "inconclusiveLimit": 2,
}


def test_samples_are_written_as_promtool_reads_them() -> None:
    samples = [None, 4, 4, 4, None, None, 0.5, None]
    assert live_alerts.expanded(" ".join(healthy_day._compressed(samples))) == samples
    assert live_alerts.expanded("1+2x2 7 6-3x1 _") == [1, 3, 5, 7, 6, 3, None]


def test_an_alert_fires_once_it_has_held_for_as_long_as_it_says() -> None:
    values = [(minute * 60.0, "1") for minute in (0, 1, 2, 3, 5, 6)]
    assert [*healthy_day._firing(values, "2m")] == [120, 180]
    assert [*healthy_day._firing(values, None)] == [at for at, _ in values]


def test_a_day_is_exposed_with_a_time_for_each_sample() -> None:
    lines = "".join(healthy_day._exposed("m", 1, 86400, wrong=False)).splitlines()
    ratio = [line for line in lines if line.startswith("graphfix_rollout_ratio{")]
    assert ratio[0] == 'graphfix_rollout_ratio{job="vllm",namespace="m",instance="m-0"} 0.05 86400'
    assert healthy_day.DAY - 60 < len(ratio) < healthy_day.DAY


def test_every_duration_of_the_rules_is_shortened() -> None:
    durations = re.compile(r"(?:\[|for: )(\d+[smhd]\b)")
    shipped = RULES.read_text()
    shorter = live_alerts.shortened(shipped, 2.0)
    assert durations.findall(shipped)
    assert not durations.findall(shorter)
    assert ("for: 15m" in shipped, "for: 30000ms" in shorter) == (True, True)
    assert "read_timestamp_seconds > 4\n" in shorter


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0, 1, 0, 0], "goes on"),
        ([0, 1, 1, 0], "taken back"),
        ([None, None, 0, 1], "goes on"),
        ([None, None, None, 0], "waits for a person"),
        ([0, 0, 0, 0, 1, 1], "goes on"),
    ],
)
def test_a_canary_is_judged_by_the_limits_of_its_template(values: list[float | None], verdict: str) -> None:
    assert live_alerts.argo_verdict(LIMITS, values) == verdict


def test_each_template_of_flagger_has_a_range() -> None:
    limits, threshold = live_alerts.flagger_limits()
    assert limits.keys() == {each["metadata"]["name"] for each in documents(FLAGGER)}
    assert live_alerts.flagger_verdict({"max": 0.0}, [1, None, 1], threshold) == "taken back"
    assert live_alerts.flagger_verdict({"max": 0.0}, [1, None, 0], threshold) == "goes on"


def test_a_fleet_has_its_share_in_the_canary_and_a_fault_of_one_engine_once() -> None:
    names = NAMED["pods of a StatefulSet"][:100]
    samples = "".join(live_alerts.of_fleet("with ranks that differ", names, 25, 0)).splitlines()
    now = [line.rpartition(" ")[0] for line in samples if line.endswith(f" {live_alerts.JUDGED.start * 60}")]
    assert sum(line.startswith("graphfix_canary{") for line in now) >= 98
    assert sum(line.startswith("graphfix_canary{") and line.endswith(" 1.0") for line in now) == 23
    assert sum(line.startswith("graphfix_ranks_agreeing{") and line.endswith(" 1.0") for line in now) == 1


def seen(**changes: Any) -> dict[str, Any]:
    """Return what was seen of an engine of two ranks that serves."""
    record = {"rank": {"rank": 0}, "decision": {"canary": True, "bucket": None}, "agreement": {"agreeing": 2}}
    return {"records": [record, record], "answers": {"host-a": True}, "log": {"host-a": [], "host-b": []}} | changes


STOPPED = {"log": {"host-a": ["they do not agree"], "host-b": ["they do not agree"]}}
OTHER = [
    {"rank": {"rank": 0}, "decision": {"canary": canary, "bucket": None}, "agreement": None} for canary in (True, False)
]
BUCKETS = [
    {"rank": {"rank": 0}, "decision": {"canary": True, "bucket": bucket}, "agreement": {"agreeing": 2}}
    for bucket in (1, 2)
]


@pytest.mark.parametrize(
    ("case", "changes", "faults"),
    [
        (two_hosts.Case(), {}, 0),
        (two_hosts.Case(), {"answers": {"host-a": False}}, 1),
        (two_hosts.Case(agreeing=None), {"records": OTHER}, 2),
        (two_hosts.Case("do not agree"), STOPPED | {"ends after": {"host-a": 3, "host-b": 4}}, 0),
        (two_hosts.Case("do not agree"), STOPPED | {"ends after": {"host-a": 3}}, 1),
        (two_hosts.Case("do not agree"), {"ends after": {"host-a": 3, "host-b": 4}}, 2),
        (
            two_hosts.Case("agree", ended_at="before"),
            {"log": {"host-a": [], "host-b": ["they do not agree"]}, "ends after": {"host-a": 3, "host-b": 4}},
            0,
        ),
        (
            two_hosts.Case("agree", cut_at="before"),
            {"log": {"host-a": [], "host-b": ["they do not agree"]}, "ends after": {"host-a": 3, "host-b": 4}},
            1,
        ),
        (two_hosts.Case(), {"records": BUCKETS}, 0),
        (two_hosts.Case(env=two_hosts.KEY), {"records": BUCKETS}, 1),
        (two_hosts.Case(cut_when_serving=True), {"shown after": {"graphfix_ranks_silent": 70}}, 1),
    ],
)
def test_an_engine_on_two_hosts_is_as_expected_only_with_all_that_its_case_names(
    case: two_hosts.Case, changes: dict[str, Any], faults: int
) -> None:
    assert len(two_hosts.as_expected(case, json.loads(json.dumps(seen(**changes))))) == faults
