"""What ships for operators in deploy/: real schemas where there are some, real promtool and Prometheus, the metrics that are really exposed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fetch_promtool
import jsonschema
import kubernetes_validate
import pytest
import record_dashboard
import yaml
from fetch_vllm import FetchError
from stock import release_root, run_in_release

from vllm_graphfix import metrics, rollout, settings
from vllm_graphfix.fixes import BY_NAME

PROJECT = Path(__file__).parent.parent
DEPLOY = PROJECT / "deploy"
RULES = DEPLOY / "prometheus" / "vllm-graphfix.rules.yml"
RULE_TESTS = DEPLOY / "prometheus" / "vllm-graphfix.rules.test.yml"
ARGO = DEPLOY / "argo-rollouts" / "analysis-template.yaml"
FLAGGER = DEPLOY / "flagger" / "metric-template.yaml"
DEPLOYMENT = DEPLOY / "kubernetes" / "deployment.yaml"
STATEFULSET = DEPLOY / "kubernetes" / "statefulset.yaml"
CONFIGMAP = DEPLOY / "kubernetes" / "configmap.yaml"

GRAPHFIX_LABELS: Mapping[str, Iterable[str]] = {
    "graphfix_fix_state": metrics.STATE_LABELS,
    "graphfix_events_total": metrics.EVENT_LABELS,
}
"""Labels of what `metrics.NAMES` names; the others have none."""
TARGET_LABELS = {"cluster", "namespace", "job", "instance", "pod"}
"""Of the scrape, not of the exporter."""
VLLM_LABELS = {"model_name", "engine", "finished_reason", "le"}
OTHERS = {"up", "process_start_time_seconds"}
"""Prometheus's own, and prometheus_client's."""
RELEASES = ("0.15.0", "0.21.0", "0.33.0")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def of_argo(metric: Mapping[str, Any]) -> str:
    query: str = metric["provider"]["prometheus"]["query"]
    return query.replace("{{args.namespace}}", "llm").replace("{{args.model}}", "m")


def of_flagger(template: Mapping[str, Any]) -> str:
    query: str = template["spec"]["query"]
    for name, value in (("namespace", "llm"), ("interval", "10m"), ("variables.model", "m")):
        query = query.replace(f"{{{{ {name} }}}}", value)
    return query


JUDGES = {f"argo {each['name']}": of_argo(each) for each in documents(ARGO)[0]["spec"]["metrics"]} | {
    f"flagger {each['metadata']['name']}": of_flagger(each) for each in documents(FLAGGER)
}
QUERIES = {
    **{f"rule {rule.get('alert') or rule['record']} {rule.get('labels')}": rule["expr"] for rule in rules()},
    **{
        f"panel {panel.title} {number}": target.query
        for panel in record_dashboard.panels()
        for number, target in enumerate(panel.targets)
    },
    **JUDGES,
}


def names_in(query: str) -> set[str]:
    """The metrics of *query*: words that are followed by a selector, a range or an end, and are no label, function or operator."""
    without = re.sub(r'"[^"]*"', "", query)
    without = re.sub(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)", "", without)
    without = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", without)
    words = re.findall(r"[a-zA-Z_][a-zA-Z0-9_:]*(?!\s*\()(?![a-zA-Z0-9_:])", without)
    return set(words) - {"and", "or", "unless", "Inf"}


def labels_in(query: str) -> set[str]:
    clauses = re.findall(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)", query)
    matchers = re.findall(r"\{([^}]*)\}", query)
    grouped = {label.strip() for clause in clauses for label in clause.split(",") if label.strip()}
    return grouped | {name for matcher in matchers for name in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matcher)}


# Metrics, labels, variables: what is used is there.


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_metric_of_ours_that_is_asked_for_is_exposed(query: str) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    ours = {name for name in names_in(query) if not name.startswith("vllm:")}
    assert ours <= {*metrics.NAMES, *recorded, *OTHERS}


@cache
def named_by_stock(release: str) -> frozenset[str]:
    """Every metric that the code of a release names, as it is named there: counters without _total."""
    sources = (release_root(release) / "vllm").rglob("*.py")
    return frozenset(name for source in sources for name in re.findall(r"['\"](vllm:\w+)['\"]", source.read_text()))


@pytest.mark.parametrize("release", RELEASES)
def test_every_metric_of_vllm_that_is_asked_for_is_in_the_first_the_middle_and_the_last_release(release: str) -> None:
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
    ).stdout
    assert 'vllm:num_requests_running{model_name="m"} 1.0' in printed.splitlines()


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_label_that_is_used_is_one_of_the_metrics_that_are_asked_for(query: str) -> None:
    known = TARGET_LABELS | {"canary"} if "graphfix:" in query else set(TARGET_LABELS)
    names = names_in(query)
    for name in names:
        known |= set(GRAPHFIX_LABELS.get(name, ()))
        if name.startswith(("vllm:", "graphfix:")):
            known |= VLLM_LABELS
    assert labels_in(query) <= known


def test_what_is_asked_for_is_found_in_a_query() -> None:
    query = (
        'sum by (fix) (rate(vllm:a_total{x="b c"}[5m]) and on (job) (graphfix_canary == 1)) / up > -Inf or vector(0)'
    )
    assert names_in(query) == {"vllm:a_total", "graphfix_canary", "up"}
    assert labels_in(query) == {"fix", "job", "x"}


def test_every_state_that_is_asked_for_is_one() -> None:
    from vllm_graphfix.fix import State

    asked = {
        state
        for query in QUERIES.values()
        for found in re.findall(r'\bstate[!=~]+"([^"]*)"', query)
        for state in found.split("|")
    }
    assert "failed" in asked
    assert asked <= {state.value for state in State}


def test_the_page_of_metrics_tells_of_every_metric_label_and_alert() -> None:
    page = (PROJECT / "docs" / "metrics.md").read_text()
    wanted = {*metrics.NAMES, *metrics.STATE_LABELS, *metrics.EVENT_LABELS, *ALERTS}
    assert {name for name in wanted if f"`{name}" not in page} == set()


# Kubernetes.


@pytest.mark.parametrize("kubernetes", ["1.27", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", [CONFIGMAP, DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
def test_manifests_are_valid_kubernetes(path: Path, kubernetes: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes, strict=True)


@pytest.mark.parametrize("path", [DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
def test_a_misspelt_field_of_a_manifest_is_found(path: Path) -> None:
    workload = documents(path)[-1]
    workload["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)


def closed(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    """A schema of an object with just *properties*, all of them required but those named."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


# No package of PyPI brings these schemas. Written by hand after the CRDs, closed, with the fields that are used here.
TEXT, WHOLE, DURATION = (
    {"type": "string", "minLength": 1},
    {"type": "integer", "minimum": 0},
    {"type": "string", "pattern": "^[0-9]+[smh]$"},
)
NAMED = closed({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}})


def custom(version: str, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return closed({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": NAMED, "spec": spec})


ANALYSIS_METRIC = closed(
    {
        "name": TEXT,
        "initialDelay": DURATION,
        "interval": DURATION,
        "count": WHOLE,
        "successCondition": TEXT,
        "failureCondition": TEXT,
        "failureLimit": WHOLE,
        "inconclusiveLimit": WHOLE,
        "provider": closed({"prometheus": closed({"address": TEXT, "query": TEXT})}),
    },
    "initialDelay",
)
CUSTOM = {
    ARGO: custom(
        "argoproj.io/v1alpha1",
        "AnalysisTemplate",
        closed(
            {
                "args": {"type": "array", "items": closed({"name": TEXT})},
                "metrics": {"type": "array", "items": ANALYSIS_METRIC, "minItems": 1},
            }
        ),
    ),
    FLAGGER: custom(
        "flagger.app/v1beta1",
        "MetricTemplate",
        closed(
            {
                "provider": closed({"type": {"const": "prometheus"}, "address": {"type": "string", "format": "uri"}}),
                "query": TEXT,
            }
        ),
    ),
    DEPLOY / "kubernetes" / "pod-monitor.yaml": custom(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        closed(
            {
                "selector": closed(
                    {
                        "matchExpressions": {
                            "type": "array",
                            "items": closed(
                                {"key": TEXT, "operator": {"const": "In"}, "values": {"type": "array", "items": TEXT}}
                            ),
                        }
                    }
                ),
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": closed({"port": TEXT, "path": TEXT, "interval": DURATION}),
                },
            }
        ),
    ),
}


@pytest.mark.parametrize("path", CUSTOM, ids=lambda path: path.stem)
def test_objects_of_other_controllers_have_the_fields_of_their_definitions(path: Path) -> None:
    for document in documents(path):
        jsonschema.validate(document, CUSTOM[path])


def test_arguments_of_the_analysis_are_those_that_its_queries_use() -> None:
    text = re.sub("^#.*$", "", ARGO.read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\{\{args\.([a-z]+)\}\}", text)) == {
        each["name"] for each in documents(ARGO)[0]["spec"]["args"]
    }


def test_flagger_fills_in_everything_that_its_templates_leave_open() -> None:
    assert not [name for name, query in JUDGES.items() if "{{" in query]


def test_the_comment_of_the_metric_templates_refers_to_templates_that_are_there() -> None:
    referred = re.findall(r"templateRef: \{name: ([a-z-]+)\}", FLAGGER.read_text())
    assert sorted(referred) == sorted(each["metadata"]["name"] for each in documents(FLAGGER))


@pytest.mark.parametrize("path", [DEPLOYMENT, STATEFULSET, CONFIGMAP], ids=lambda path: path.stem)
def test_every_variable_that_is_set_is_one_of_the_plugin(path: Path) -> None:
    found = set(
        re.findall(
            r"\bVLLM_GRAPHFIX\w*\b", "\n".join(line for line in path.read_text().splitlines() if "_PORT" not in line)
        )
    )
    assert found
    assert found <= set(settings.names(BY_NAME))


def test_the_plugin_understands_the_configmap() -> None:
    data = documents(CONFIGMAP)[0]["data"]
    read = settings.read(data, BY_NAME)
    assert read.problems == ()
    assert read.master is settings.Master.OBSERVE


@pytest.mark.parametrize("path", [DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
class TestWorkload:
    def test_the_percentage_is_a_label_that_is_a_percentage(self, path: Path) -> None:
        workload, variables = documents(path)[-1], self.environment(path)
        label = re.fullmatch(
            r"metadata\.labels\['(.*)'\]", variables[settings.ROLLOUT]["valueFrom"]["fieldRef"]["fieldPath"]
        )
        assert label
        assert rollout.buckets_of(workload["spec"]["template"]["metadata"]["labels"][label[1]]) > 0
        assert label[1] not in workload["spec"]["selector"]["matchLabels"]

    def test_the_selector_chooses_the_pods(self, path: Path) -> None:
        workload = documents(path)[-1]["spec"]
        assert workload["selector"]["matchLabels"].items() <= workload["template"]["metadata"]["labels"].items()

    def test_nothing_stands_before_the_kill_switch(self, path: Path) -> None:
        """A variable in `env` would win over the ConfigMap's."""
        assert set(self.environment(path)).isdisjoint(documents(CONFIGMAP)[0]["data"])
        container = documents(path)[-1]["spec"]["template"]["spec"]["containers"][0]
        assert container["envFrom"] == [{"configMapRef": {"name": documents(CONFIGMAP)[0]["metadata"]["name"]}}]

    def test_records_have_a_folder_that_may_be_written_to(self, path: Path) -> None:
        pod = documents(path)[-1]["spec"]["template"]["spec"]
        folder = documents(CONFIGMAP)[0]["data"][settings.STATUS_DIR]
        mount = next(each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == folder)
        assert not mount.get("readOnly")
        assert "emptyDir" in next(each for each in pod["volumes"] if each["name"] == mount["name"])

    def test_kubernetes_adds_no_variable_of_our_name(self, path: Path) -> None:
        """A Service named vllm-graphfix would."""
        assert documents(path)[-1]["spec"]["template"]["spec"]["enableServiceLinks"] is False

    @staticmethod
    def environment(path: Path) -> dict[str, Any]:
        return {each["name"]: each for each in documents(path)[-1]["spec"]["template"]["spec"]["containers"][0]["env"]}


# Prometheus.


@pytest.fixture(scope="session")
def promtool() -> Path:
    """From the PATH or Debian's package. Only where neither can be is the test skipped; a failed download is an error."""
    try:
        return fetch_promtool.tool("promtool")
    except fetch_promtool.NoDebianError as error:
        pytest.skip(str(error))


def ran(promtool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (PROJECT / page).read_text(), re.MULTILINE)
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
    fix = 'fix="mamba-padding", mode="auto", reason="", vllm="0.21.0", graphfix="0.1.0"'
    return {
        f"graphfix_canary{{{where}}}": f"{canary}x30",
        f"graphfix_ranks_expected{{{where}}}": "2x30",
        f"graphfix_ranks_agreeing{{{where}}}": f"{agreeing}x30",
        f'graphfix_fix_state{{{where}, {fix}, state="{state}"}}': "2x30",
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
FLEETS: Mapping[str, Mapping[str, str]] = {
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
TOLD: Mapping[str, Mapping[str, float | None]] = {
    "healthy": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: -0.02},
    "sick": {ENGINES: 1, RANKS: 1, STATES: 2, SPEED: 1.5, FAILED: 0.2},
    "idle": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: None, FAILED: None},
    "without the plugin": {ENGINES: None, RANKS: None, STATES: None, SPEED: None, FAILED: None},
    "of another model": {ENGINES: None, RANKS: None, STATES: 0, SPEED: None, FAILED: None},
}
"""What each judge is told of a fleet; None for nothing, which Argo takes for inconclusive and Flagger for a failed check."""


@pytest.mark.parametrize("fleet", FLEETS)
def test_judges_are_told_what_the_fleet_is_like(fleet: str, promtool: Path, tmp_path: Path) -> None:
    def about(judge: str) -> float | None:
        return next(value for subject, value in TOLD[fleet].items() if subject in judge)

    expected = [(query, about(judge)) for judge, query in JUDGES.items()]
    # promtool compares exactly, and a tenth is none in binary.
    asked = [
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
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}],
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


# Grafana.


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
    command = [sys.executable, str(PROJECT / "tests" / "exporter_double.py"), "--seconds", "90"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield [process.stdout.readline().strip() for _ in range(6)]
        finally:
            process.terminate()


@pytest.mark.usefixtures("promtool")
def test_a_prometheus_has_an_answer_for_every_panel(fleet: list[str]) -> None:
    panels = [panel for panel in record_dashboard.panels() if panel.targets]
    told: dict[str, Any] = {}
    with record_dashboard.prometheus(fleet) as running:
        start, deadline = time.time(), time.monotonic() + 60
        # It takes seconds until the first scrapes are in, more where other tests run beside.
        while told != TOLD_BY_FLEET and time.monotonic() < deadline:
            time.sleep(2)
            end = time.time()
            answers = [record_dashboard.ask(running, panel, start, end) for panel in panels]
            alerts = {alert.partition(":")[0] for alert in running.firing()}
            numbers = {answer.panel.title: answer.series[0][1].points[-1][1] for answer in answers if answer.series}
            unanswered = {panel.title for panel in panels} - numbers.keys()
            told = {"unanswered": unanswered, "alerts": alerts} | {
                name: numbers.get(name) for name in TOLD_BY_FLEET if name in numbers
            }
    assert told == TOLD_BY_FLEET
    drawn = record_dashboard.picture(answers, start, end, "doubles")
    assert all(panel.title in drawn for panel in panels)


TOLD_BY_FLEET = {
    "unanswered": set[str](),
    "alerts": {"GraphfixDefectObserved (firing)"},
    "Engines in the rollout": 2,
    "Engines with the plugin": 5,
    "Engines without the plugin": 1,
    "Rollout, set": 25,
    "Rollout, reached": 40,
    "Ranks that do not agree": 0,
}


@pytest.mark.usefixtures("promtool")
def test_an_engine_that_cannot_be_scraped_fails_the_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    into = tmp_path / "dashboard.svg"
    assert record_dashboard.main(["--seconds", "8", "--into", str(into), "http://127.0.0.1:9/metrics"]) == 1
    assert "http://127.0.0.1:9/metrics cannot be scraped" in capsys.readouterr().err
    assert not into.exists()


# Getting promtool.


def test_a_promtool_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "promtool").write_text("#!/bin/sh\n")
    (tmp_path / "promtool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_promtool.tool("promtool", tmp_path / "cache") == tmp_path / "promtool"
    assert not (tmp_path / "cache").exists()


def test_a_machine_that_is_no_debian_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_promtool.main(["--into", str(tmp_path / "cache")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "promtool is not on the PATH" in told.err
    assert fetch_promtool.INSTEAD in told.err


def test_a_failed_download_is_no_reason_to_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("apt-get", "echo E: no network; exit 100"), ("dpkg-deb", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="no network") as raised:
        fetch_promtool.tool("promtool", tmp_path / "cache")
    assert not isinstance(raised.value, fetch_promtool.NoDebianError)
    assert not (tmp_path / "cache" / fetch_promtool.PACKAGE).exists()
