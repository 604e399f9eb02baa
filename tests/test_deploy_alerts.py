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
    about,
    documents,
    rule_tests,
    rules,
    rules_of,
    runbook,
)
from judged_fleets import CANARY, FLEETS, JUDGE_VALUES, OTHER, an_engine
from promtool import ran
from vllm_graphfix.text import PAGES

INTERVAL = {"evaluation_interval": documents(RULE_TESTS)[0]["evaluation_interval"]}


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    assert f"{len(rules())} rules found" in ran(promtool, "check", "rules", RULES)


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(promtool: Path, tmp_path: Path) -> None:
    files = []
    for number, test in enumerate(rule_tests()):
        asked_about = {case["alertname"] for case in test["alert_rule_test"]}
        (tmp_path / f"{number}.rules.json").write_text(json.dumps(rules_of(asked_about)))
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(INTERVAL | {"rule_files": [f"{number}.rules.json"], "tests": [test]}))
    assert ran(promtool, "test", "rules", *files).count("SUCCESS") == len(files) > 40


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [each for test in documents(RULE_TESTS)[0]["tests"] for each in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == set(ALERTS)


def test_an_alert_that_is_not_tested_right_fails(promtool: Path, tmp_path: Path) -> None:
    (tmp_path / RULES.name).write_text(
        RULES.read_text().replace("graphfix_ranks_agreeing < graphfix", "graphfix_ranks_agreeing > graphfix")
    )
    of_the_alert = [
        test
        for test in rule_tests()
        if "GraphfixRanksDisagree" in {case["alertname"] for case in test["alert_rule_test"]}
    ]
    (tmp_path / RULE_TESTS.name).write_text(json.dumps({"rule_files": [RULES.name], "tests": of_the_alert}))
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


def test_every_alert_has_a_query_of_its_own_in_the_runbook() -> None:
    queries = runbook()
    assert queries.keys() == ALERTS.keys()
    assert min(map(len, queries.values())) > 1


@pytest.mark.parametrize("name", ALERTS)
def test_from_the_labels_of_an_alert_the_runbook_finds_its_engine(name: str, promtool: Path, tmp_path: Path) -> None:
    """Wherever the rules' unit tests make it fire, by the series of that test and the alert's labels alone."""
    (tmp_path / RULES.name).write_text(json.dumps(rules_of([name])))
    tests = []
    for test in rule_tests():
        cases = [case for case in test["alert_rule_test"] if case["alertname"] == name and case["exp_alerts"]]
        checks = [
            {
                "expr": f"group({about(query, alert['exp_labels'])})",
                "eval_time": case["eval_time"],
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for case in cases
            for alert in case["exp_alerts"]
            for query in runbook()[name]
        ]
        tests += [test | {"alert_rule_test": [], "promql_expr_test": checks}] if checks else []
    (tmp_path / "runbook.yml").write_text(json.dumps(INTERVAL | {"rule_files": [RULES.name], "tests": tests}))
    ran(promtool, "test", "rules", tmp_path / "runbook.yml")


# The judges of Argo Rollouts and Flagger, on fleets written down as series.


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


# The queries on the page of Argo Rollouts, on engines of which one is of another model.


def test_the_queries_on_the_argo_page_find_what_the_page_says(promtool: Path, tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "argo-rollouts.md").read_text()
    observed, judged = re.findall(r"^```promql\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    # A query goes on in the lines behind it that are indented.
    loaded, met = re.split(r"\n(?=\S)", observed.strip().replace("my-model", "m"))
    corrected = met.replace("observing", "active")
    share, faults, disagreeing = re.split(r"\n(?=\S)", judged.strip().replace("my-model", "m"))
    count = 'graphfix_events_total{{{where}, fix="mamba-padding", event="padded"}}'
    others = 'job="vllm", namespace="llm", instance="other"'
    another = {name.replace('"m"', '"n"'): values for name, values in an_engine(others, 0, 0.02, 0).items()}
    events = {
        count.format(where=where): values for where, values in ((CANARY, "3x30"), (OTHER, "0x30"), (others, "7x30"))
    }
    row = count.format(where=CANARY)
    for state, agreeing, expected in (
        ("observing", 2, {loaded: 2, met: row, corrected: None, faults: None, disagreeing: None}),
        ("active", 2, {loaded: 2, met: None, corrected: row, faults: None, disagreeing: None}),
        ("failed", 1, {loaded: 2, met: None, corrected: None, faults: 2, disagreeing: 1}),
    ):
        engines = an_engine(CANARY, 1, 0.02, 0, agreeing, state) | an_engine(OTHER, 0, 0.02, 0, state="observing")
        series = {**engines, **another, **events}
        checks = [(share, 0.5), *expected.items()]
        made = [
            {
                "expr": query if isinstance(value, str) else f"sum({query})",
                "eval_time": "20m",
                "exp_samples": []
                if value is None
                else [{"labels": value, "value": 3} if isinstance(value, str) else {"labels": "{}", "value": value}],
            }
            for query, value in checks
        ]
        tests = [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": made,
            }
        ]
        (tmp_path / "page.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": tests}))
        ran(promtool, "test", "rules", tmp_path / "page.yml")
