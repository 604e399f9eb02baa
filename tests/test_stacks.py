"""`deploy/stacks` and `deploy/kustomize`: the plugin in what people run vLLM with.

By hand, with what no test may fetch: docs/stacks.md says which stack's own schema has seen which recipe.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deployed import CONFIGMAP, DEPLOY, PROJECT, TEXT, WHOLE, closed, custom, documents, is_scraped
from stock import release_root
from vllm_graphfix._version import __version__
from vllm_graphfix.deployment import read_deployment
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import decision
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.source.files import open_source

STACKS = {path.stem: path for path in sorted((DEPLOY / "stacks").glob("*.yaml"))}
COMPONENT = DEPLOY / "kustomize"
GROUP = "metadata.labels['leaderworkerset.sigs.k8s.io/group-key']"
FOLDER = documents(CONFIGMAP)[0]["data"][settings.STATUS_DIR]
EVERY = pytest.mark.parametrize("stack", STACKS)


class Pod(NamedTuple):
    """The pods of one kind in a recipe, as Kubernetes has them."""

    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        first: dict[str, Any] = self.spec["containers"][0]
        return first

    @property
    def variables(self) -> dict[str, Mapping[str, Any]]:
        return {each["name"]: each for each in self.container.get("env", ())}


def of_template(template: Mapping[str, Any]) -> Pod:
    return Pod(template.get("metadata", {}).get("labels", {}), template["spec"])


def of_llm_d(values: Mapping[str, Any]) -> Pod:
    """As the chart llm-d-modelservice makes a pod of *values*: what it knows by other names than Kubernetes is gone."""
    (container,) = values["containers"]
    own = {"modelCommand", "mountModelVolume", "extraConfig"}
    fields = {name: value for name, value in container.items() if name not in own} | container["extraConfig"]
    rest = {name: value for name, value in values.items() if name not in {"containers", "monitoring"}}
    return Pod({}, {**rest, "containers": [fields]})


def of_production_stack(values: Mapping[str, Any]) -> Pod:
    """As the chart vllm-stack makes a pod of *values*."""
    (model,) = values["modelSpec"]
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "env": model["env"],
        "envFrom": [{"configMapRef": {"name": "release-configs"}}],
        "volumeMounts": model["extraVolumeMounts"],
    }
    return Pod({}, {"containers": [container], "volumes": model["extraVolumes"]})


def engines(stack: str) -> Iterator[Pod]:
    """The pods in which an engine, or a part of one, runs."""
    (recipe,) = documents(STACKS[stack])
    match stack:
        case "aibrix":
            yield of_template(recipe["spec"]["template"])
        case "dynamo":
            yield from (of_template(c["podTemplate"]) for c in recipe["spec"]["components"] if c["type"] == "worker")
        case "kserve":
            predictor = dict(recipe["spec"]["predictor"])
            labels = predictor.pop("labels")
            del predictor["minReplicas"]
            yield Pod(labels, predictor)
        case "leaderworkerset":
            yield from (of_template(recipe["spec"]["leaderWorkerTemplate"][f"{who}Template"]) for who in LWS)
        case "llm-d":
            yield from (of_llm_d(recipe[role]) for role in ("decode", "prefill"))
        case "production-stack":
            yield of_production_stack(recipe["servingEngineSpec"])
        case "ray-serve":
            yield from (
                of_template(group["template"]) for group in recipe["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            )
        case _:
            raise AssertionError(f"how are the pods of {stack} made?")


LWS = ("leader", "worker")


@EVERY
def test_pods_are_valid_kubernetes(stack: str) -> None:
    for pod in engines(stack):
        document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one", "labels": pod.labels},
            "spec": pod.spec,
        }
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


# After the CRDs, closed, with the fields that are used here: see CUSTOM in test_deploy_kubernetes.py.
TEMPLATE = closed({"metadata": closed({"labels": {"type": "object"}}), "spec": {"type": "object"}}, "metadata")
COMPONENT_OF_DYNAMO = closed(
    {
        "name": TEXT,
        "type": {"enum": ["frontend", "worker"]},
        "replicas": WHOLE,
        "runtimeVersionOverride": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "podTemplate": TEMPLATE,
    },
    "runtimeVersionOverride",
)
GROUP_OF_RAY = {"rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": TEMPLATE}
CUSTOM = {
    "dynamo": custom(
        "nvidia.com/v1beta1",
        "DynamoGraphDeployment",
        closed({"components": {"type": "array", "items": COMPONENT_OF_DYNAMO}}),
    ),
    "kserve": custom(
        "serving.kserve.io/v1beta1",
        "InferenceService",
        closed({"predictor": {"type": "object", "required": ["labels", "minReplicas", "containers", "volumes"]}}),
        closed({"name": TEXT, "annotations": closed({"serving.kserve.io/deploymentMode": {"const": "RawDeployment"}})}),
    ),
    "leaderworkerset": custom(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        closed(
            {
                "replicas": WHOLE,
                "leaderWorkerTemplate": closed(
                    {
                        "size": WHOLE,
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                        "leaderTemplate": TEMPLATE,
                        "workerTemplate": TEMPLATE,
                    }
                ),
            }
        ),
    ),
    "ray-serve": custom(
        "ray.io/v1",
        "RayService",
        closed(
            {
                "serveConfigV2": TEXT,
                "rayClusterConfig": closed(
                    {
                        "headGroupSpec": closed(GROUP_OF_RAY),
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": closed(
                                {
                                    "groupName": TEXT,
                                    "replicas": WHOLE,
                                    "minReplicas": WHOLE,
                                    "maxReplicas": WHOLE,
                                    **GROUP_OF_RAY,
                                }
                            ),
                        },
                    }
                ),
            }
        ),
    ),
}


@pytest.mark.parametrize("stack", CUSTOM)
def test_objects_have_the_fields_of_their_definitions(stack: str) -> None:
    (document,) = documents(STACKS[stack])
    jsonschema.validate(document, CUSTOM[stack])


def test_a_deployment_for_aibrix_is_one() -> None:
    (document,) = documents(STACKS["aibrix"])
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    chosen, labels = document["spec"]["selector"]["matchLabels"], document["spec"]["template"]["metadata"]["labels"]
    assert chosen.items() <= labels.items()
    assert (
        labels["model.aibrix.ai/name"]
        == document["metadata"]["name"]
        == document["metadata"]["labels"]["model.aibrix.ai/name"]
    )


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_takes_the_configuration_of_serve() -> None:
    pytest.importorskip("grpc_reflection", reason="tests/requirements-ray.txt has it: `make venv`")
    from ray.serve.schema import ServeDeploySchema

    (document,) = documents(STACKS["ray-serve"])
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    assert set(config["applications"][0]) <= set(type(application).model_fields)  # it ignores what it does not know
    with pytest.raises(ValueError, match="import_path"):
        ServeDeploySchema.model_validate({"applications": [{**config["applications"][0], "import_path": "ray"}]})


@EVERY
def test_every_variable_that_is_named_is_one_of_the_plugin(stack: str) -> None:
    names = set(re.findall(r"\bVLLM_GRAPHFIX\w*\b", STACKS[stack].read_text()))
    assert {settings.ROLLOUT, settings.ROLLOUT_KEY} <= names <= set(settings.names(BY_NAME))


@EVERY
def test_the_switch_is_in_a_configmap_that_nothing_stands_before(stack: str) -> None:
    """A variable in `env` would win over the ConfigMap's."""
    data = documents(CONFIGMAP)[0]["data"]
    for pod in engines(stack):
        assert not set(pod.variables) & set(data)
        ((reference,),) = [each.values() for each in pod.container["envFrom"]]
        if stack == "production-stack":  # the chart makes it
            made = documents(STACKS[stack])[0]["servingEngineSpec"]["configs"]
            assert settings.read(made, BY_NAME).problems == ()
            assert made == {name: data[name] for name in made}
            assert settings.STATUS_DIR in made
        else:
            assert reference == {"name": documents(CONFIGMAP)[0]["metadata"]["name"]}


@EVERY
def test_the_percentage_is_one_and_puts_everybody_in_while_the_switch_says_observe(stack: str) -> None:
    """An engine that is out observes nothing."""
    for pod in engines(stack):
        variable = pod.variables[settings.ROLLOUT]
        if "valueFrom" in variable:
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", variable["valueFrom"]["fieldRef"]["fieldPath"])
            assert label
            percentage = pod.labels[label[1]]
        else:
            percentage = variable["value"]
        assert decision.buckets_of(percentage) == decision.buckets_of("100")


@EVERY
def test_a_pod_that_has_lost_its_percentage_is_stock_and_scraped(stack: str) -> None:
    for pod in engines(stack):
        variable = pod.variables[settings.ROLLOUT]
        if "valueFrom" not in variable:
            continue  # a value is not lost with a label
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", variable["valueFrom"]["fieldRef"]["fieldPath"])
        assert label
        assert is_scraped({name: value for name, value in pod.labels.items() if name != label[1]})


@EVERY
def test_records_have_a_folder_that_may_be_written_to(stack: str) -> None:
    for pod in engines(stack):
        mount = next(each for each in pod.container["volumeMounts"] if each["mountPath"] == FOLDER)
        assert not mount.get("readOnly")
        assert "emptyDir" in next(each for each in pod.spec["volumes"] if each["name"] == mount["name"])
        assert {each["name"] for each in pod.container["volumeMounts"]} <= {
            each["name"] for each in pod.spec["volumes"]
        }


@EVERY
def test_no_services_variables_reach_an_engine_whose_recipe_can_say_so(stack: str) -> None:
    for pod in engines(stack):
        assert pod.spec.get("enableServiceLinks") is (None if stack == "production-stack" else False)


def line_of(container: Mapping[str, Any], size: int) -> str:
    return " ".join(container["args"]).replace("$(LWS_GROUP_SIZE)", str(size))


def test_pods_that_decide_separately_have_the_key_of_their_group_and_equal_settings() -> None:
    """They are what `status --for` says of their flags, too."""
    leader, worker = engines("leaderworkerset")
    size = documents(STACKS["leaderworkerset"])[0]["spec"]["leaderWorkerTemplate"]["size"]
    source = open_source(release_root("0.21.0"))
    for pod in (leader, worker):
        assert (
            read_deployment(
                line_of(pod.container, size), source, environment={}, read=lambda *_: None
            ).decides_separately()
            == "--nnodes 2"
        )
        assert pod.variables[settings.ROLLOUT_KEY]["valueFrom"]["fieldRef"]["fieldPath"] == GROUP
    assert leader.labels == worker.labels
    for same in ("image", "env", "envFrom", "resources"):
        assert leader.container[same] == worker.container[same]
    assert set(worker.container["args"]) - set(leader.container["args"]) == {"--headless"}


@pytest.mark.parametrize("stack", sorted(set(STACKS) - {"leaderworkerset"}))
def test_pods_that_are_engines_have_the_key_of_their_node(stack: str) -> None:
    source = open_source(release_root("0.21.0"))
    for pod in engines(stack):
        assert pod.variables[settings.ROLLOUT_KEY]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        line = line_of({"args": ["model"], **pod.container}, 1)  # production-stack and llm-d make theirs themselves
        assert read_deployment(line, source, environment={}, read=lambda *_: None).decides_separately() is None


# Kustomize.

MINE = """
apiVersion: apps/v1
kind: {kind}
metadata: {{name: {name}, labels: {labels}}}
spec:
  {service}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      containers:
        - name: {container}
          image: {image}
          env: [{{name: HF_HOME, value: /models}}]
          ports: [{{name: http, containerPort: 8000}}]
          volumeMounts: [{{name: models, mountPath: /models}}]
      initContainers: [{{name: mine, image: mine}}]
      volumes: [{{name: models, emptyDir: {{}}}}]
"""
SERVICE = "serviceName: b"
CHOSEN = '{"vllm-graphfix/inject": "true"}'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Two workloads with the label and one without, with the component; by kind and name."""
    tool = [path for path in [shutil.which("kustomize")] if path] or [shutil.which("kubectl") or ""]
    if tool == [""]:
        pytest.skip("neither kustomize nor kubectl is on the PATH")
    folder = tmp_path_factory.mktemp("mine")
    workloads = [
        MINE.format(kind="Deployment", name="a", labels=CHOSEN, container="vllm", image="vllm:1", service=""),
        MINE.format(kind="StatefulSet", name="b", labels=CHOSEN, container="vllm", image="vllm:2", service=SERVICE),
        MINE.format(kind="Deployment", name="router", labels="{}", container="router", image="router:1", service=""),
    ]  # fmt: skip
    (folder / "mine.yaml").write_text("---".join(workloads))
    (folder / "kustomization.yaml").write_text(
        f"resources: [mine.yaml]\ncomponents: [{os.path.relpath(COMPONENT, folder)}]\n"
    )
    command = [*tool, "build" if tool[0].endswith("kustomize") else "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}


Built = Mapping[tuple[str, str], Mapping[str, Any]]
WORKLOADS = pytest.mark.parametrize("which", [("Deployment", "a"), ("StatefulSet", "b")], ids="/".join)


@WORKLOADS
def test_a_workload_with_the_label_gets_plugin_and_variables_and_keeps_what_it_had(
    built: Built, which: tuple[str, str]
) -> None:
    workload = built[which]
    kubernetes_validate.validate(dict(workload), kubernetes_validate.latest_version(), strict=True)
    pod = of_template(workload["spec"]["template"])
    first, mine = pod.spec["initContainers"]
    assert (first["image"], mine) == (pod.container["image"], {"name": "mine", "image": "mine"})
    assert pod.labels["app"] == which[1]
    assert pod.variables["HF_HOME"]["value"] == "/models"
    mounts = {each["name"]: each["mountPath"] for each in pod.container["volumeMounts"]}
    assert mounts["models"] == "/models"
    assert mounts["vllm-graphfix-status"] == FOLDER
    assert {each["name"] for each in (*first["volumeMounts"], *pod.container["volumeMounts"])} == {
        each["name"] for each in pod.spec["volumes"]
    }
    # What is added is where the engine looks for it, and the script is that of the image.
    _, script, command, packages, requirement = first["command"]
    assert (pod.variables["PYTHONPATH"]["value"], command) == (packages, "add")
    added = next(each["configMap"]["name"] for each in pod.spec["volumes"] if "configMap" in each)
    assert Path(script).name == "add.py"
    files = {name: (DEPLOY / "container" / name).read_text() for name in ("add.py", "requirements.txt")}
    assert built["ConfigMap", added]["data"] == files
    assert requirement.partition(" --hash=sha256:")[::2] == (f"vllm-graphfix=={__version__}", "FILL-IN")
    assert (settings.ROLLOUT_KEY in pod.variables) is (which[0] == "Deployment")
    assert decision.buckets_of(pod.labels["vllm-graphfix/rollout"]) == decision.buckets_of("100")
    assert is_scraped({name: value for name, value in pod.labels.items() if name != "vllm-graphfix/rollout"})


def test_a_workload_without_the_label_is_not_changed(built: Built) -> None:
    pod = of_template(built["Deployment", "router"]["spec"]["template"])
    assert "vllm-graphfix" not in yaml.safe_dump(pod._asdict())


def test_what_goes_beside_the_workloads_is_there(built: Built) -> None:
    assert dict(built["ConfigMap", "vllm-graphfix"]["data"]) == documents(CONFIGMAP)[0]["data"]
    assert {kind for kind, name in built if name == "vllm-graphfix"} == {"ConfigMap", "PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize("folder", ["kustomize", "kubernetes", "prometheus", "container"])
def test_a_kustomization_refers_to_what_is_there(folder: str) -> None:
    (kustomization,) = documents(DEPLOY / folder / "kustomization.yaml")
    generated = [name for each in kustomization.get("configMapGenerator", ()) for name in each["files"]]
    patches = [each["path"] for each in kustomization.get("patches", ()) if "path" in each]
    referred = [*kustomization.get("resources", ()), *generated, *patches]
    assert referred
    assert [name for name in referred if not (DEPLOY / folder / name).exists()] == []


# Why nobody needs sitecustomize.

LOADED_IN = {
    "vllm/engine/arg_utils.py": "EngineArgs.__post_init__",
    "vllm/v1/engine/core.py": "EngineCore.__init__",
    "vllm/v1/worker/worker_base.py": "WorkerWrapperBase.init_worker",
}


def callers(path: Path, name: str) -> set[str]:
    """The methods in which a function called *name* is called."""

    def inside(node: ast.AST, around: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                yield from inside(child, f"{around}.{child.name}".lstrip("."))
            else:
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == name:
                    yield around
                yield from inside(child, around)

    return set(inside(ast.parse(path.read_text()), ""))


@pytest.mark.parametrize("release", ["0.14.1", "0.21.0", "0.33.0"])
@pytest.mark.parametrize("path", LOADED_IN)
def test_vllm_loads_plugins_in_every_process_of_an_engine(release: str, path: str) -> None:
    assert LOADED_IN[path] in callers(release_root(release) / path, "load_general_plugins")


def test_the_page_names_every_recipe_and_every_place_where_plugins_are_loaded() -> None:
    page = (PROJECT / "docs" / "stacks.md").read_text()
    assert [
        name for name in (*(f"stacks/{stack}.yaml" for stack in STACKS), *LOADED_IN.values()) if name not in page
    ] == []


def test_the_values_for_any_chart_make_a_pod() -> None:
    page = (PROJECT / "docs" / "stacks.md").read_text()
    values = yaml.safe_load(page.partition("### Values for Helm")[2].partition("```yaml\n")[2].partition("```")[0])
    container = {"name": "vllm", "image": "vllm", "env": values["env"], "volumeMounts": values["volumeMounts"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vllm", "labels": values["podLabels"]},
        "spec": {"containers": [container], "volumes": values["volumes"]},
    }
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert is_scraped(values["podLabels"])
    names = {each["name"] for each in values["env"]}
    assert names <= {*settings.names(BY_NAME)}
    assert {"VLLM_GRAPHFIX", settings.ROLLOUT, settings.ROLLOUT_KEY, settings.STATUS_DIR} == names
