"""`deploy/`: alerts, and the judges of rollouts, asked of fleets that are written down."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deployed import (
    ALERTS,
    ARGO,
    JUDGES,
    PROJECT,
    QUERIES,
    RULE_TESTS,
    RULES,
    documents,
    rules,
)
from promtool import ran
from vllm_graphfix.commands.links import PAGES


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    assert f"{len(rules())} rules found" in ran(promtool, "check", "rules", RULES)


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(promtool: Path) -> None:
    assert "SUCCESS" in ran(promtool, "test", "rules", RULE_TESTS)


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [each for test in documents(RULE_TESTS)[0]["tests"] for each in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_an_alert_that_is_not_tested_right_fails(promtool: Path, tmp_path: Path) -> None:
    (tmp_path / RULES.name).write_text(
        RULES.read_text().replace("graphfix_ranks_agreeing < graphfix", "graphfix_ranks_agreeing > graphfix")
    )
    (tmp_path / RULE_TESTS.name).write_text(RULE_TESTS.read_text())
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / RULE_TESTS.name], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "GraphfixRanksDisagree" in done.stdout + done.stderr


def test_promtool_accepts_every_query_that_ships(promtool: Path, tmp_path: Path) -> None:
    group = {
        "name": "queries",
        "rules": [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES.values())],
    }
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [group]}))
    ran(promtool, "check", "rules", tmp_path / "queries.yml")


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_and_leads_into_the_runbook(alert: Mapping[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page.startswith(f"{PAGES}/")
    headings = re.findall(r"^#+ (.*)$", (PROJECT / "docs" / page.removeprefix(f"{PAGES}/")).read_text(), re.MULTILINE)
    # As GitHub makes anchors of headings.
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


# The judges of Argo Rollouts and Flagger, on fleets written down as series.

CANARY = 'job="vllm", namespace="llm", instance="in"'
OTHER = 'job="vllm", namespace="llm", instance="out"'
MODEL = 'model_name="m", engine="0"'


def an_engine(
    where: str, canary: int, seconds_a_token: float, failed: int, agreeing: int = 2, state: str = "active"
) -> dict[str, str]:
    """Half an hour of one engine: 600 tokens and 100 finished requests a minute, *failed* of which were aborted."""
    fix = 'fix="mamba-padding", mode="auto", code="none"'
    return {
        f"graphfix_canary{{{where}}}": f"{canary}x30",
        f"graphfix_ranks_expected{{{where}}}": "2x30",
        f"graphfix_ranks_agreeing{{{where}}}": f"{agreeing}x30",
        f'graphfix_fix_ranks{{{where}, {fix}, state="{state}"}}': "2x30",
        f"vllm:num_requests_running{{{where}, {MODEL}}}": "5x30",
        f"vllm:inter_token_latency_seconds_sum{{{where}, {MODEL}}}": f"0+{600 * seconds_a_token:g}x30",
        f"vllm:inter_token_latency_seconds_count{{{where}, {MODEL}}}": "0+600x30",
        f'vllm:request_success_total{{{where}, {MODEL}, finished_reason="stop"}}': f"0+{100 - failed}x30",
        f'vllm:request_success_total{{{where}, {MODEL}, finished_reason="abort"}}': f"0+{failed}x30",
    }


def idle(series: Mapping[str, str]) -> dict[str, str]:
    return {name: "0x30" if name.startswith("vllm:") else values for name, values in series.items()}


HEALTHY = an_engine(CANARY, 1, 0.022, 1) | an_engine(OTHER, 0, 0.02, 3, state="not-in-canary")
SICK = an_engine(CANARY, 1, 0.03, 20, agreeing=1, state="failed") | an_engine(OTHER, 0, 0.02, 0, state="not-in-canary")
WATCHED = an_engine(CANARY, 1, 0.022, 20) | an_engine(OTHER, 0, 0.02, 3, state="not-in-canary")
"""On the canary a detector has 18 of 100 requests ended, and does not work on another engine of it."""
ENDED = f'graphfix_events_total{{{CANARY}, fix="shadow", event="aborted"}}'
DEAF = f'graphfix_fix_ranks{{{CANARY}, fix="kv-marks", mode="auto", state="incompatible", code="engine"}}'
FLEETS: Mapping[str, Mapping[str, str]] = {
    "that ends wrong answers": WATCHED | {ENDED: "0+18x30", DEAF: "2x30"},
    "healthy": HEALTHY,
    "sick": SICK,
    "idle": idle(HEALTHY),
    "without the plugin": {name: values for name, values in HEALTHY.items() if name.startswith("vllm:")},
    "of another model": {name.replace('model_name="m"', 'model_name="n"'): values for name, values in HEALTHY.items()},
}
ENGINES, RANKS, STATES, SPEED, FAILED = (
    "engines-in-canary",
    "ranks-that-do-not-agree",
    "fixes-not-applied",
    "time-per-token",
    "failed-requests",
)
JUDGE_VALUES: Mapping[str, Mapping[str, float | None]] = {
    "healthy": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: -0.02},
    "that ends wrong answers": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: -0.01},
    "sick": {ENGINES: 1, RANKS: 1, STATES: 2, SPEED: 1.5, FAILED: 0.2},
    "idle": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: None, FAILED: None},
    "without the plugin": {ENGINES: None, RANKS: None, STATES: None, SPEED: None, FAILED: None},
    "of another model": {ENGINES: None, RANKS: None, STATES: 0, SPEED: None, FAILED: None},
}
"""The value that each judge gets of a fleet; None for nothing, which Argo takes for inconclusive and Flagger for a
failed check."""


@pytest.mark.parametrize("fleet", FLEETS)
def test_judges_get_the_values_of_the_fleet(fleet: str, promtool: Path, tmp_path: Path) -> None:
    def about(judge: str) -> float | None:
        return next(value for subject, value in JUDGE_VALUES[fleet].items() if subject in judge)

    expected = [(query, about(judge)) for judge, query in JUDGES.items()]
    # promtool compares exactly, and a tenth is none in binary.
    checks = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "20m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for query, value in expected
    ]
    series = [{"series": name, "values": values} for name, values in FLEETS[fleet].items()]
    test = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}],
    }
    (tmp_path / "judges.yml").write_text(json.dumps(test))
    ran(promtool, "test", "rules", tmp_path / "judges.yml")


@pytest.mark.parametrize("metric", documents(ARGO)[0]["spec"]["metrics"], ids=lambda metric: metric["name"])
def test_success_and_failure_of_an_analysis_leave_nothing_between_them(metric: Mapping[str, Any]) -> None:
    """A value is one or the other, and no value is neither: inconclusive."""
    opposite = {">=": "<", "<": ">=", "<=": ">", ">": "<=", "==": ">"}
    condition = re.compile(r"len\(result\) > 0 && result\[0\] (\S+) (\S+)")
    success, failure = condition.fullmatch(metric["successCondition"]), condition.fullmatch(metric["failureCondition"])
    assert success
    assert failure
    assert failure.groups() == (opposite[success[1]], success[2])
