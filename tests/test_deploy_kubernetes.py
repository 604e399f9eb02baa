"""`deploy/`: manifests of Kubernetes, of Argo Rollouts, of Flagger and of the Prometheus Operator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

import make_prometheus_rule
from deployed import (
    ARGO,
    CONFIGMAP,
    DEPLOYMENT,
    DURATION,
    FLAGGER,
    JUDGES,
    POD_MONITOR,
    PROMETHEUS_RULE,
    RULES,
    STATEFULSET,
    TEXT,
    WHOLE,
    closed,
    custom,
    documents,
    is_scraped,
)
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import decision
from vllm_graphfix.settings import environment as settings


@pytest.mark.parametrize("kubernetes", ["1.27", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", [CONFIGMAP, DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
def test_manifests_are_valid_kubernetes(path: Path, kubernetes: str) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes, strict=True)


@pytest.mark.parametrize("path", [DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
def test_a_misspelt_field_of_a_manifest_is_invalid(path: Path) -> None:
    workload = documents(path)[-1]
    workload["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, kubernetes_validate.latest_version(), strict=True)


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
    POD_MONITOR: custom(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        closed(
            {
                "selector": closed(
                    {
                        "matchExpressions": {
                            "type": "array",
                            "items": closed({"key": TEXT, "operator": {"const": "Exists"}}),
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
    PROMETHEUS_RULE: custom(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        closed({"groups": {"type": "array", "items": closed({"name": TEXT, "rules": {"type": "array"}})}}),
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
    variables = set(
        re.findall(
            r"\bVLLM_GRAPHFIX\w*\b", "\n".join(line for line in path.read_text().splitlines() if "_PORT" not in line)
        )
    )
    assert variables
    assert variables <= set(settings.names(BY_NAME))


def test_the_plugin_understands_the_configmap() -> None:
    data = documents(CONFIGMAP)[0]["data"]
    read = settings.read(data, BY_NAME)
    assert read.problems == ()
    assert read.master is settings.Master.OBSERVE


def test_the_prometheus_rule_is_the_rules_as_the_tool_wraps_them() -> None:
    """promtool tests the rules; what the operator gets is these."""
    assert PROMETHEUS_RULE.read_text() == make_prometheus_rule.text()
    assert documents(PROMETHEUS_RULE)[0]["spec"] == documents(RULES)[0]


@pytest.mark.parametrize("path", [DEPLOYMENT, STATEFULSET], ids=lambda path: path.stem)
class TestWorkload:
    def test_the_percentage_is_a_label_that_is_a_percentage(self, path: Path) -> None:
        workload, variables = documents(path)[-1], self.environment(path)
        label = re.fullmatch(
            r"metadata\.labels\['(.*)'\]", variables[settings.ROLLOUT]["valueFrom"]["fieldRef"]["fieldPath"]
        )
        assert label
        assert decision.buckets_of(workload["spec"]["template"]["metadata"]["labels"][label[1]]) > 0
        assert label[1] not in workload["spec"]["selector"]["matchLabels"]

    def test_a_pod_that_has_lost_its_percentage_is_stock_and_scraped(self, path: Path) -> None:
        """Kubernetes makes an empty value of a label that is gone."""
        workload, variables = documents(path)[-1], self.environment(path)
        label = variables[settings.ROLLOUT]["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert is_scraped({name: value for name, value in labels.items() if name != label})
        decided = decision.decide(settings.read({settings.PREFIX: "on", settings.ROLLOUT: ""}, BY_NAME), "0.21.0")
        assert (decided.applies, decided.percentage) == (False, 0.0)
        assert decided.misconfigured == {settings.ROLLOUT: ""}

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
