"""The contents of `deploy/`: its files, the rules, and every query in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import record_dashboard
from vllm_graphfix.engine import metrics

PROJECT = Path(__file__).parents[2]
DEPLOY = PROJECT / "deploy"
RULES = DEPLOY / "prometheus" / "vllm-graphfix.rules.yml"
RULE_TESTS = DEPLOY / "prometheus" / "vllm-graphfix.rules.test.yml"
ARGO = DEPLOY / "argo-rollouts" / "analysis-template.yaml"
FLAGGER = DEPLOY / "flagger" / "metric-template.yaml"
DEPLOYMENT = DEPLOY / "kubernetes" / "deployment.yaml"
STATEFULSET = DEPLOY / "kubernetes" / "statefulset.yaml"
CONFIGMAP = DEPLOY / "kubernetes" / "configmap.yaml"
POD_MONITOR = DEPLOY / "kubernetes" / "pod-monitor.yaml"
PROMETHEUS_RULE = DEPLOY / "prometheus" / "prometheus-rule.yaml"

GRAPHFIX_LABELS: Mapping[str, Iterable[str]] = {
    "graphfix_build_info": metrics.BUILD_LABELS,
    "graphfix_fix_ranks": metrics.FIX_LABELS,
    "graphfix_events_total": metrics.EVENT_LABELS,
    "graphfix_detector_seconds_total": ("fix",),
    "graphfix_misconfigured_variable": ("variable",),
}
"""Labels of what `metrics.NAMES` names; the others have none."""
TARGET_LABELS = {"cluster", "namespace", "job", "instance", "pod"}
"""Labels of the scrape, not of the exporter."""
VLLM_LABELS = {"model_name", "engine", "finished_reason", "le"}
OTHERS = {"up", "process_start_time_seconds"}
"""Prometheus's own, and prometheus_client's."""
RELEASES = ("0.15.0", "0.21.0", "0.33.0")


def documents(path: Path) -> list[dict[str, Any]]:
    # libyaml's: the loader in Python takes half a second for the rules, which some hundred tests read.
    loaded = yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader)
    return [document for document in loaded if document is not None]


def is_scraped(labels: Mapping[str, str]) -> bool:
    """Return if the PodMonitor selects a pod with these labels, by `Exists` and by equality, as far as it has them."""
    selector = documents(POD_MONITOR)[0]["spec"]["selector"]
    assert all(each["operator"] == "Exists" for each in selector.get("matchExpressions", ()))
    keys = {each["key"] for each in selector.get("matchExpressions", ())}
    return keys <= set(labels) and selector.get("matchLabels", {}).items() <= labels.items()


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]]


def rule_tests() -> list[dict[str, Any]]:
    """Return the rules' unit tests with every value as text: to YAML 0x30, promtool's notation of 31 zeros, is 48."""
    # This loader makes texts alone.
    tests: list[dict[str, Any]] = yaml.load(RULE_TESTS.read_text(), Loader=yaml.BaseLoader)["tests"]  # noqa: S506
    return tests


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def rules_of(alerts: Collection[str]) -> dict[str, Any]:
    """Return the rules of *alerts* alone, in their groups, and those that record what one of them goes by.

    promtool evaluates all rules for each minute of each test, most of them for no question.
    """
    records = any("graphfix:" in ALERTS[name]["expr"] for name in alerts)
    groups = [
        group
        | {"rules": [rule for rule in group["rules"] if rule.get("alert") in alerts or ("record" in rule and records)]}
        for group in documents(RULES)[0]["groups"]
    ]
    return {"groups": [group for group in groups if group["rules"]]}


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


def runbook() -> dict[str, list[str]]:
    """Return the queries of docs/alerts.md by alert, those for any included."""
    table = (PROJECT / "docs" / "alerts.md").read_text().partition("\n## ")[0]
    queries: dict[str, list[str]] = {}
    for alerts, query in re.findall(r"^\| (\w[\w, ]*) \| `(.*?)` \| ", table, re.MULTILINE):
        for alert in ALERTS if alerts == "any" else [f"Graphfix{each}" for each in alerts.split(", ")]:
            queries.setdefault(alert, []).append(query)
    return queries


def about(query: str, labels: Mapping[str, str]) -> str:
    """Return *query* of the runbook for an alert with *labels*, restricted to what it says about that alert."""
    model = ["model_name"] if "vllm:" in query else []
    engine = ", ".join(
        f'{name}="{labels[name]}"' for name in (*sorted(TARGET_LABELS - {"pod"}), *model) if name in labels
    )
    keys = re.search(r"\bby \(([^)]*)\)", query)
    names = [name.strip() for name in keys[1].split(",")] if keys else [*TARGET_LABELS, "fix", *model]
    here = "vector(1)"
    for name in (known := [name for name in names if name in labels]):
        here = f'label_replace({here}, "{name}", "{labels[name]}", "", "")'
    return f"({query.replace('$engine', engine)}) and on ({', '.join(known)}) {here}"


def names_in(query: str) -> set[str]:
    """The metrics of *query*.

    These are words that are followed by a selector, a range or an end, and are no label, function or operator.
    """
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


def custom(version: str, kind: str, spec: Mapping[str, Any], metadata: Mapping[str, Any] = NAMED) -> dict[str, Any]:
    return closed({"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec})
