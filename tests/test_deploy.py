"""`deploy/`: metrics, labels and states that queries ask for are there."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache

import pytest

from deployed import (
    ALERTS,
    GRAPHFIX_LABELS,
    OTHERS,
    PROJECT,
    QUERIES,
    RELEASES,
    TARGET_LABELS,
    VLLM_LABELS,
    labels_in,
    names_in,
    rules,
)
from stock import release_root, run_in_release
from vllm_graphfix.engine import metrics
from vllm_graphfix.fix import Code, State


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_metric_of_ours_that_is_queried_is_exposed(query: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    ours = {name for name in names_in(query) if not name.startswith("vllm:")}
    assert ours <= {*metrics.NAMES, *recorded, *OTHERS}


@cache
def named_by_stock(release: str) -> frozenset[str]:
    """Every metric that the code of a release names, as it is named there: counters without _total."""
    sources = (release_root(release) / "vllm").rglob("*.py")
    return frozenset(name for source in sources for name in re.findall(r"['\"](vllm:\w+)['\"]", source.read_text()))


@pytest.mark.parametrize("release", RELEASES)
def test_every_queried_metric_of_vllm_is_in_the_first_middle_and_last_release(release: str) -> None:
    used = {name for query in QUERIES.values() for name in names_in(query) if name.startswith("vllm:")}
    assert len(used) > 10
    named = named_by_stock(release)
    assert {
        name for name in used if name not in named and re.sub(r"_(total|sum|count|bucket)$", "", name) not in named
    } == set()


@pytest.mark.parametrize("release", RELEASES)
def test_vllm_labels_its_metrics_as_the_queries_expect(release: str) -> None:
    logger = (release_root(release) / "vllm" / "v1" / "metrics" / "loggers.py").read_text()
    assert 'labelnames = ["model_name", "engine"]' in logger
    assert 'labelnames + ["finished_reason"]' in logger


@pytest.mark.parametrize("release", RELEASES)
def test_a_prometheus_that_offers_to_take_openmetrics_still_gets_the_names_of_vllm(release: str) -> None:
    """In OpenMetrics, prometheus_client would make vllm_ of vllm:, and no query that ships would find anything."""
    printed = run_in_release(
        release,
        """
        from fastapi import FastAPI
        from prometheus_client import Gauge
        from starlette.testclient import TestClient
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router

        Gauge("vllm:num_requests_running", "", ["model_name"]).labels("m").set(1)
        app = FastAPI()
        attach_router(app)
        asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        print(TestClient(app).get("/metrics", headers={"Accept": asked}).text)
        """,
        {"VLLM_PLUGINS": ""},
        libraries_loaded=True,
    ).stdout
    assert 'vllm:num_requests_running{model_name="m"} 1.0' in printed.splitlines()


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_label_that_is_used_is_one_of_the_metrics_that_are_queried(query: str) -> None:
    known = TARGET_LABELS | {"canary"} if "graphfix:" in query else set(TARGET_LABELS)
    names = names_in(query)
    for name in names:
        known |= set(GRAPHFIX_LABELS.get(name, ()))
        if name.startswith(("vllm:", "graphfix:")):
            known |= VLLM_LABELS
    assert labels_in(query) <= known


def test_metrics_and_labels_are_read_from_a_query() -> None:
    query = (
        'sum by (fix) (rate(vllm:a_total{x="b c"}[5m]) and on (job) (graphfix_canary == 1)) / up > -Inf or vector(0)'
    )
    assert names_in(query) == {"vllm:a_total", "graphfix_canary", "up"}
    assert labels_in(query) == {"fix", "job", "x"}


@pytest.mark.parametrize(("label", "values"), [("state", State), ("code", Code)])
def test_every_state_and_code_that_is_queried_is_one(label: str, values: type[Enum]) -> None:
    patterns = {each for query in QUERIES.values() for each in re.findall(rf'\b{label}[!=~]+"([^"]*)"', query)}
    queried = {value for pattern in patterns for value in pattern.split("|")}
    assert queried
    assert queried <= {each.value for each in values}


def test_the_page_of_metrics_tells_of_every_metric_label_and_alert() -> None:
    page = (PROJECT / "docs" / "metrics.md").read_text()
    labels = {*metrics.FIX_LABELS, *metrics.EVENT_LABELS, *metrics.BUILD_LABELS, "variable"}
    wanted = {*metrics.NAMES, *metrics.DEPRECATED, *labels, *ALERTS, *(code.value for code in Code)}
    assert {name for name in wanted if f"`{name}" not in page} == set()
