"""`deploy/`: the dashboard, and a Prometheus that answers every panel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import record_dashboard
from deployed import PROJECT


def test_the_dashboard_is_the_one_that_the_tool_makes() -> None:
    """With Grafana's own SDK, so what it makes is of Grafana's schema."""
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's SDK needs Python 3.11")
    import make_dashboard

    assert make_dashboard.TARGET.read_text() == make_dashboard.text()


def test_no_panel_lies_over_another_or_beyond_the_edge() -> None:
    places = [panel.place for panel in record_dashboard.panels()]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    covered = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered))


def test_panels_use_the_variables_that_the_dashboard_has() -> None:
    dashboard = json.loads(record_dashboard.DASHBOARD.read_text())
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert {name for query in queries for name in re.findall(r"\$(\w+)", query)} == (known - {"datasource"}) | {
        "__rate_interval"
    }
    assert {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", ())} == {
        "${datasource}"
    }


@pytest.fixture
def fleet() -> Iterator[list[str]]:
    """Addresses of a double of six engines (`exporter_double.py`)."""
    command = [sys.executable, str(PROJECT / "tests" / "support" / "exporter_double.py"), "--seconds", "90"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield [process.stdout.readline().strip() for _ in range(6)]
        finally:
            process.terminate()


@pytest.mark.usefixtures("promtool")
def test_a_prometheus_has_an_answer_for_every_panel(fleet: list[str]) -> None:
    panels = [panel for panel in record_dashboard.panels() if panel.targets]
    actual: dict[str, Any] = {}
    with record_dashboard.prometheus(fleet) as running:
        start, deadline = time.time(), time.monotonic() + 60
        # It takes seconds until the first scrapes are in, more where other tests run beside.
        while actual != FLEET_ANSWERS and time.monotonic() < deadline:
            time.sleep(0.5)
            end = time.time()
            answers = [record_dashboard.ask(running, panel, start, end) for panel in panels]
            alerts = {alert.partition(":")[0] for alert in running.firing()}
            numbers = {answer.panel.title: answer.series[0][1].points[-1][1] for answer in answers if answer.series}
            unanswered = {panel.title for panel in panels} - numbers.keys()
            actual = {"unanswered": unanswered, "alerts": alerts} | {
                name: numbers.get(name) for name in FLEET_ANSWERS if name in numbers
            }
    assert actual == FLEET_ANSWERS
    drawn = record_dashboard.picture(answers, start, end, "doubles")
    assert all(panel.title in drawn for panel in panels)


def test_a_long_cell_is_cut_and_no_column_runs_into_the_next() -> None:
    (table,) = [panel for panel in record_dashboard.panels() if panel.kind == "table"]
    labels = {"instance": "127.0.0.1:37285", "fix": "shadow", "state": "active", "code": "x" * 400}
    answer = record_dashboard.Answer(table, [("", record_dashboard.Series(labels, [(1.0, 2.0)]))])
    drawn = ET.fromstring(record_dashboard.picture([answer], 0.0, 1.0, "doubles"))  # noqa: S314 - our own
    texts = [
        (float(each.attrib["x"]), each.text or "") for each in drawn.iter() if each.text and each.get("y") == "54.0"
    ]
    assert [text[:9] for _, text in texts] == ["127.0.0.1", "shadow", "active", "xxxxxxxxx", "2"]
    assert texts[3][1].endswith("x…")
    for (x, text), (next_x, _) in pairwise(texts):
        assert x + 5.6 * len(text) < next_x


FLEET_ANSWERS = {
    "unanswered": set[str](),
    "alerts": {"GraphfixDefectObserved (firing)", "GraphfixNotSeen (pending)"},
    "Engines with the fixes": 2,
    "Engines with the plugin": 5,
    "Engines without the plugin": 1,
    "Rollout, set": 0.25,
    "Rollout, reached": 0.4,
    "Ranks that do not agree": 0,
    "Misconfigured engines": 0,
}


@pytest.mark.usefixtures("promtool")
def test_an_engine_that_cannot_be_scraped_fails_the_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    into = tmp_path / "dashboard.svg"
    assert record_dashboard.main(["--seconds", "8", "--into", str(into), "http://127.0.0.1:9/metrics"]) == 1
    assert "http://127.0.0.1:9/metrics cannot be scraped" in capsys.readouterr().err
    assert not into.exists()
