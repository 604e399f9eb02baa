"""Each command that a page shows is run as it stands there, or listed below with the reason why not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

import evidence_tables
import warm_python
from deployed import ARGO, CONFIGMAP, DEPLOYMENT, TARGET_LABELS, documents, labels_in, names_in
from promtool import ran
from stock import release_environment, release_root
from test_readme import PAGES
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare import run as compare_run
from vllm_graphfix.commands.hunt import deployed
from vllm_graphfix.commands.hunt import run as hunting
from vllm_graphfix.engine import metrics
from warm_release import run_in_fork

BLOCK = re.compile(r"(<!-- walked: [^\n]+ -->\n)?^```(?:bash|console|sh|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)

PROJECT = Path(__file__).parent.parent
CHEAP = ("status", "explain", "fleet", "report", "doctor")
"""Commands of vllm-graphfix that take well below a second, and need neither a GPU nor an engine."""

NOT_RUN = {
    "kubectl delete pod POD...": "needs a cluster",
    **dict.fromkeys(
        (
            "kubectl argo rollouts abort vllm -n llm",
            "kubectl argo rollouts get rollout vllm -n llm",
            "kubectl argo rollouts promote vllm -n llm",
            "kubectl argo rollouts promote vllm -n llm --full",
            "kubectl -n llm apply -f deploy/argo-rollouts/analysis-template.yaml",
            "kubectl -n llm delete pod -l vllm-graphfix/mode=on",
        ),
        "needs a cluster with Argo Rollouts",
    ),
    (
        "kubectl exec POD -- sh -c   'pip install -q --target /tmp/g vllm-graphfix && PYTHONPATH=/tmp/g python3 -m "
        "vllm_graphfix status --running'"
    ): "needs a cluster",
    "VLLM_GRAPHFIX_KV_MARKS=1/16 vllm serve MODEL": "an engine that is marked is in test_kv_marks.py",
}
"""The reason why a command is not run here. Of a block that tools/walk_rollout.py has written, none is: it ran them on
real servers."""

ELSEWHERE = {
    "python benchmarks/engine_cost.py --steps --site 0.25.1=FOLDER --limit 200 --out build/steps-0.25.1": (
        "test_benchmarks.py::test_the_engines_of_a_step_are_compared_with_themselves"
    ),
    "python benchmarks/engine_cost.py --from build/steps-*/result.json --markdown": (
        "test_benchmarks_figures.py::test_results_of_several_releases_are_one_table"
    ),
    "vllm-graphfix fleet --watch 5": (
        "test_fleet_command.py::test_watching_goes_on_until_it_is_interrupted_which_is_exit_0"
    ),
    """vllm-graphfix fleet --prometheus https://prometheus:9090 --selector 'namespace="llm"'""": (
        "test_fleet_prometheus.py::test_a_selector_leaves_engines_out"
    ),
    "vllm-graphfix fleet --prometheus https://thanos.example.com --token-file /run/secrets/token --ca-file ca.pem": (
        "test_fleet_prometheus.py::test_token_and_tenant_are_sent"
    ),
    (
        "vllm-graphfix fleet --prometheus https://mimir.example.com/prometheus --tenant team "
        """--selector 'cluster="eu",job="vllm"'"""
    ): "test_fleet_prometheus.py::test_token_and_tenant_are_sent",
    "python examples/rollouts.py MODEL": "test_examples.py::test_the_exit_code_is_1_if_a_fix_is_off",
    "pip install .": "test_package.py::test_an_empty_environment_judges_a_wheel_of_vllm",
    "vllm collect-env": "test_collect_env.py::test_every_releases_own_report_ends_with_what_the_plugin_would_do",
    "unzip -p vllm_graphfix-*.whl '*/WHEEL'": "test_package.py::test_the_wheel_says_which_setuptools_made_it",
}
"""By command: the test that runs it."""

INSTALL, UNINSTALL = "pip install vllm-graphfix", "pip uninstall vllm-graphfix"
DOWNLOAD = "pip download --no-deps --only-binary :all: vllm-graphfix==VERSION && sha256sum vllm_graphfix-*.whl"
CLONE = "git clone --branch vVERSION REPOSITORY vllm-graphfix && cd vllm-graphfix"
BUILDER = "python3 -m venv /tmp/build && /tmp/build/bin/pip install build"
PUBLISHED = {INSTALL, UNINSTALL, DOWNLOAD, CLONE, BUILDER}
"""test_package.py runs them: a folder takes the index's place, and a tag in a clone of this tree that of a release."""

MADE = {
    "make demo",
    "make test",
    "make generated FIX=mamba-padding",
    "make bench",
    "make bench-engine VLLM_PYTHON=python3",
    "make venv",
    "make lint",
    "make check",
    "make fix NAME=mamba-padding",
    "make docs",
    "make site-check",
    "make new-release VERSION=0.34.0",
    "make new-release VERSION=0.34.0 PACK='--machine there.txt --part-size 60'",
    ".ci/run",
    "PIP_CONSTRAINT=/tmp/build/constraint make --old-file .venv/installed packages BIN=/tmp/build/bin",
}
"""Dry runs here: they take minutes, or write into the tree. CI runs lint, test and build; test_site.py builds what
`make docs` does."""

PARSED = {
    "python tools/record_dashboard.py --seconds 120 http://127.0.0.1:8000/metrics",
    "python tools/walk_rollout.py canary --record 90",
}
"""The script parses its arguments here, and does nothing: it needs a GPU, servers or a release to come, or writes the
pages."""

COMPARED = (
    "vllm-graphfix compare MODEL -tp 2",
    "vllm-graphfix compare MODEL -tp 2 --kv-cache-dtype fp8",
    "vllm-graphfix compare MODEL --prompts prompts.txt --max-tokens 256",
    "vllm-graphfix compare MODEL --exact --poison",
    "vllm-graphfix compare MODEL --twin -tp 8 --kv-cache-dtype fp8",
    "vllm-graphfix compare MODEL --json > compared.json",
)
"""In this order. Their engines need a GPU; here the command takes its options, and vLLM's parser the flags."""

HUNTED = (
    "vllm-graphfix hunt --out hunt-0.33.0 --cases 60",
    "vllm-graphfix hunt --out hunt-0.33.0 --shard 3/8",
    "vllm-graphfix hunt --out hunt-0.33.0 --architectures LlamaForCausalLM,JambaForCausalLM --leave-out FLASHINFER",
    "vllm-graphfix hunt --out hunt-0.33.0 --changed-since vllm-0.32.0-cp38-abi3-manylinux_2_31_x86_64.whl",
    "vllm-graphfix hunt --out hunt-0.33.0 --for 'Qwen/Qwen3-30B-A3B -tp 2 --kv-cache-dtype fp8'",
)
"""They need a GPU; here the command takes its options."""

RECORDED = [run["command"] for run in evidence_tables.runs()]
"""The commands of docs/evidence/. Scripts that are still in the tree parse their arguments here."""
RECORDED_COMPARED = [command for command in RECORDED if "vllm-graphfix compare " in command]

PATCHED = {
    (
        """kubectl patch deployment vllm --patch '{"spec": {"template": {"metadata": {"labels": """
        """{"vllm-graphfix/rollout": "5"}}}}}'"""
    ),
    *(
        """kubectl -n llm patch rollout vllm --type merge --patch '{"spec": {"template": {"metadata": {"labels": """
        f"""{{"vllm-graphfix/mode": "{mode}"}}}}}}}}}}'"""
        for mode in ("on", "off")
    ),
    """kubectl patch configmap vllm-graphfix --patch '{"data": {"VLLM_GRAPHFIX": "on"}}'""",
    """kubectl patch configmap vllm-graphfix --patch '{"data": {"VLLM_GRAPHFIX": "off"}}'""",
    "kubectl rollout restart deployment/vllm",
    "kubectl rollout status deployment/vllm",
}
"""They need a cluster; here they are compared with `deploy/kubernetes`, and with the Rollout of a page."""

SWITCH = "export VLLM_GRAPHFIX=off"
WITHOUT_GPU = "vllm-graphfix verify --device gpu"
QUERIED = """promtool query instant http://prometheus:9090 'graphfix_canary{namespace="llm"} == 1'"""
CONSTRAINED = "echo 'setuptools==84.2.1' > /tmp/build/constraint"
TRIED = {
    *NOT_RUN, *ELSEWHERE, *PUBLISHED, *MADE, *PARSED, *COMPARED, *HUNTED, *PATCHED, SWITCH, WITHOUT_GPU, QUERIED,
    CONSTRAINED,
}  # fmt: skip
"""The commands that the tests below look at, or say why not."""

SLOW = {
    "vllm-graphfix verify",
    "vllm-graphfix verify --vllm PATH",
    "vllm-graphfix verify --json > verified.json",
    (
        """PYTHONPATH=$(python tools/fetch_vllm.py 0.16.0) VLLM_GRAPHFIX=off python -c "from """
        """vllm_graphfix.verify.double.scenarios.mamba_all_mode import run; print(run())\""""
    ),
}
"""Run with the slow tests."""


def commands(page: str) -> list[str]:
    """The commands of *page*, without their comments.

    These are the lines behind a prompt, or all lines of a block that has no prompt.
    """
    listed = []
    for walked, block in BLOCK.findall(page):
        lines = block.replace("\\\n", "").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        listed += [] if walked else [re.sub(r"\s+# .*|^# .*", "", line).strip() for line in prompted or lines]
    return [command for command in listed if command]


DOCUMENTED = sorted({command for page in PAGES for command in commands(page.read_text())})
REMAINING = [command for command in DOCUMENTED if command not in TRIED and command not in SLOW]
UVX = re.compile(r"uvx (--from \. )?")
RUN = [command for command in REMAINING if re.match(rf"({UVX.pattern})?vllm-graphfix ({'|'.join(CHEAP)})\b", command)]
"""Never what nobody has looked at: a page may show how to delete something."""


def run(command: str, folder: Path) -> str:
    """Runs *command* in *folder*, with stock 0.18.1 installed, and returns what it prints.

    PATH in a command is its folder, and shared storage is below *folder*. What uvx does first, an environment that has
    nothing but the package, test_package.py does.
    """
    release = release_root("0.18.1")
    script = re.sub(r"\bPATH\b", shlex.quote(str(release)), command).replace("/mnt/shared/graphfix", "records")
    script = UVX.sub("", script, count=1)
    (folder / "records").mkdir()
    (folder / "tools").symlink_to(PROJECT / "tools")
    bin_of_python = Path(sys.executable).parent
    # A fork has imported what the command line needs; test_package.py runs the command as it is installed.
    (folder / "bin").mkdir()
    forking = f'exec {warm_python.executable()} {bin_of_python}/vllm-graphfix "$@"'
    (folder / "bin" / "vllm-graphfix").write_text(f"#!/bin/sh\n{forking}\n")
    (folder / "bin" / "vllm-graphfix").chmod(0o755)
    environment = release_environment(release, str(folder))
    environment |= {
        "PATH": f"{folder / 'bin'}:{bin_of_python}:{environment['PATH']}",
        "VLLM_GRAPHFIX_STATUS_DIR": str(folder / "records"),
    }
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in expected(command), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in command:
        written = re.search(r"> (\S+)$", command)
        assert json.loads((folder / written[1]).read_text() if written else done.stdout)["schema"] == 1
    return done.stdout


def expected(command: str) -> set[int]:
    words = command.split()
    if words[:2] == ["vllm-graphfix", "fleet"]:
        if words[2:] and not words[2].startswith("-"):
            return {2}  # an engine that is not there
        return {1, 3}  # no engine runs, or one of somebody else on this machine, which has no record here
    if words[:2] == ["vllm-graphfix", "report"]:
        return {2 if "--compared" in words else 3}  # nothing was compared here, and no shadow check has run
    return {0, 3} if "--check" in words else {0}  # 3: a fix is needed, and would not be applied


def test_a_command_that_is_new_is_run_or_listed_with_a_reason() -> None:
    unlisted = [command for command in REMAINING if command not in RUN]
    assert unlisted == [], (
        "let it be run (CHEAP, SLOW), let a test below look at it, or say in NOT_RUN why that is not possible"
    )


def test_the_table_lists_only_what_a_page_shows() -> None:
    assert (TRIED | SLOW) - set(DOCUMENTED) == set()


def test_prompts_comments_and_continued_lines_are_understood() -> None:
    page = (
        "```console\n$ one  # first\nits output\n$ two \\\n  --more\n```\n```bash\n# nothing\nthree '#4'\n```\n"
        "```text\nno command\n```\n"
    )
    assert commands(page) == ["one", "two   --more", "three '#4'"]


@pytest.mark.parametrize("command", RUN)
def test_what_a_page_shows_can_be_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(SLOW))
def test_what_a_page_shows_and_takes_longer_can_be_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


# What cannot be run whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_that_runs_a_command_is_there(command: str) -> None:
    module, _, name = ELSEWHERE[command].partition("::")
    assert re.search(rf"^def {name}\(", (PROJECT / "tests" / module).read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", sorted(MADE))
def test_what_make_would_do_is_there(command: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", command],
        cwd=PROJECT, env=clean | {"MAKEFLAGS": "n"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    named = set(re.findall(r"(?<![\w/*])(?:tools|tests|benchmarks)/[\w/]+\.\w+", done.stdout))
    assert [path for path in sorted(named) if not (PROJECT / path).is_file()] == []
    if command.startswith("make bench-engine"):  # one call of one script
        check_parsed(shlex.split(done.stdout)[1:])


PARSES = """
    import argparse, json, runpy, sys
    from pathlib import Path

    class Parsed(Exception):
        pass

    def parse_and_stop(self, *given):
        parse(self, *given)
        raise Parsed

    parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_and_stop
    for sys.argv in json.load(sys.stdin):
        sys.path.insert(0, str(Path(sys.argv[0]).parent.resolve()))  # scripts may have put folders of theirs there
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Parsed:
            pass
        else:
            raise AssertionError(f"{sys.argv}: no arguments are parsed")
"""


def check_parsed(*calls: list[str]) -> None:
    """Each script takes its arguments. It goes no further."""
    done = subprocess.run(
        [warm_python.executable(), "-c", textwrap.dedent(PARSES)],
        cwd=PROJECT, input=json.dumps(calls), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_scripts_understand_the_arguments_in_the_docs() -> None:
    values = {"FOLDER": "folder", "CASE": "mla", "PART": "silent"}
    recorded = {command for command in RECORDED if command.startswith("python ")}
    assert recorded
    invocations = [shlex.split(re.sub(r"[][]", "", command)) for command in sorted({*PARSED, *recorded})]
    check_parsed(*[[values.get(word, word) for word in words[1:]] for words in invocations])
    with pytest.raises(AssertionError, match="unrecognized arguments: --no-such-flag"):
        check_parsed(["tools/update_docs.py", "--no-such-flag"])


ACCEPTED = """
    import json, sys
    import huggingface_hub.constants
    huggingface_hub.constants.HF_HUB_OFFLINE = False  # else the model has to be there
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    vllm.platforms._current_platform = CpuPlatform()  # there is none where neither a GPU nor vLLM's CPU kernels are
    from vllm_graphfix.verify.engine import llm
    from vllm_graphfix.verify.engine.job import GRAPHS, Job

    for flags in json.loads({flags!r}):
        args = llm.engine_arguments(Job("", GRAPHS, flags=tuple(flags)))
        speculative = (args.speculative_config or {{}}).get("method")
        print("ACCEPTED", json.dumps([args.model, args.tensor_parallel_size, args.max_model_len, args.kv_cache_dtype, speculative]))
"""  # noqa: E501


@pytest.mark.parametrize("command", HUNTED)
def test_hunt_takes_the_options_in_the_docs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(source: object, hunt: hunting.Hunt, console: object) -> None:
        raise CompareError(f"no engine is started here for {hunt.folder}")

    monkeypatch.setattr(hunting, "run", run)
    monkeypatch.setattr("vllm_graphfix.commands.cli.open_source", lambda place: None)
    monkeypatch.setattr(deployed, "read", lambda flags, source: None)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 2
    assert "no engine is started here for hunt-0.33.0" in done.output


@pytest.mark.xdist_group("0.21.0")
def test_compare_takes_the_options_in_the_docs_and_vllm_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "bin" / "vllm-graphfix"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, sys\nwith open('given', 'a') as file:\n"
        "    print(json.dumps(sys.argv[1:]), file=file)\n"
    )
    stand_in.chmod(0o700)
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    (tmp_path / "FILE").write_text("a prompt\n")
    script = "\n".join([*COMPARED, *RECORDED_COMPARED])
    subprocess.run(["/bin/bash", "-euc", script], cwd=tmp_path, env={"PATH": path}, check=True)
    reached: list[tuple[str, list[str], int, int]] = []
    poisoned: list[bool] = []
    exact: list[bool] = []
    twins: list[bool] = []

    def run(model: str, flags: list[str], options: compare_run.Options, console: object, *, as_twin: bool) -> None:
        poisoned.append(options.poison)
        exact.append(options.exact)
        twins.append(as_twin)
        reached.append((model, flags, len(options.prompts), options.max_tokens))
        raise CompareError("engines are not started here")

    monkeypatch.setattr(compare_run, "run", run)
    monkeypatch.chdir(tmp_path)
    invocations = [json.loads(line) for line in (tmp_path / "given").read_text().splitlines()]
    assert len(invocations) == len(COMPARED) + len(RECORDED_COMPARED)
    assert [CliRunner().invoke(app, arguments).exit_code for arguments in invocations] == [2] * len(invocations)
    assert [(model, prompts, tokens) for model, _, prompts, tokens in reached] == [
        ("MODEL", 0, 128),
        ("MODEL", 0, 128),
        ("MODEL", 1, 256),
        ("MODEL", 0, 128),
        ("MODEL", 0, 128),
        ("MODEL", 0, 128),
        ("mla", 0, 128),
        ("mla-mtp", 0, 128),
        ("mla", 0, 128),
        ("mla-mtp", 0, 128),
        ("mamba2", 0, 128),
        ("llama", 0, 128),
        ("smollm2", 1, 96),
        ("llama", 0, 128),
        ("mla-mtp", 0, 128),
        ("llama", 0, 128),
    ]
    assert [number for number, poison in enumerate(poisoned) if poison] == [3, 11]
    assert [number for number, each in enumerate(exact) if each] == [3]
    assert [number for number, twin in enumerate(twins) if twin] == [4]
    flags = json.dumps([["--model", model, *flags] for model, flags, *_ in reached])
    done = run_in_fork("0.21.0", ACCEPTED.format(flags=flags))
    assert [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("ACCEPTED")] == [
        ["MODEL", 2, None, "auto", None],
        ["MODEL", 2, None, "fp8", None],
        ["MODEL", 1, None, "auto", None],
        ["MODEL", 1, None, "auto", None],
        ["MODEL", 8, None, "fp8", None],
        ["MODEL", 1, None, "auto", None],
        ["mla", 1, 2048, "auto", None],
        ["mla-mtp", 1, 2048, "auto", "mtp"],
        ["mla", 2, 2048, "auto", None],
        ["mla-mtp", 2, 2048, "auto", "mtp"],
        ["mamba2", 2, 2048, "auto", None],
        ["llama", 1, None, "auto", None],
        ["smollm2", 1, 2048, "auto", None],
        ["llama", 2, 2048, "auto", None],
        ["mla-mtp", 2, 2048, "auto", "mtp"],
        ["llama", 1, 2048, "auto", "eagle"],
    ]


def test_the_switch_in_the_docs_leaves_every_fix_off(tmp_path: Path) -> None:
    report = json.loads(run(f"{SWITCH}; vllm-graphfix status --json", tmp_path))
    assert {fix["would_be"] for fix in report["fixes"]} == {"off"}


def test_without_a_gpu_verify_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "vllm-graphfix"), *WITHOUT_GPU.split()[1:]],
        env=release_environment("0.18.1", str(tmp_path)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot verify on a GPU: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", sorted(PATCHED))
def test_what_kubectl_changes_is_in_the_manifests(command: str) -> None:
    kinds = {"deployment": documents(DEPLOYMENT), "configmap": documents(CONFIGMAP), "rollout": [argo_page()[0]]}
    kind, name = re.findall(r" (?:patch|status|restart) (deployment|configmap|rollout)[ /](\S+)", command)[0]
    (stands,) = [each for each in kinds[kind] if each["kind"].lower() == kind and each["metadata"]["name"] == name]
    if "--patch" in command:
        patched = list(leaves(json.loads(shlex.split(command)[-1])))
        assert patched
        for *path, value in patched:
            at = stands
            for key in path:
                at = at[key]
            assert type(at) is type(value), path


def argo_page() -> list[Any]:
    """Return the YAML on docs/argo-rollouts.md: a Rollout, and its strategy."""
    page = (PROJECT / "docs" / "argo-rollouts.md").read_text()
    return [yaml.safe_load(block) for block in re.findall("^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)]


def test_the_rollout_on_the_page_takes_its_switch_from_its_label_and_calls_the_analysis() -> None:
    rollout, strategy = argo_page()
    template = rollout["spec"]["template"]
    (variable,) = template["spec"]["containers"][0]["env"]
    (label,) = template["metadata"]["labels"]
    assert variable == {
        "name": SWITCH.split()[1].split("=", maxsplit=1)[0],
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}},
    }
    (analysis,) = [step["analysis"] for step in strategy["strategy"]["canary"]["steps"] if "analysis" in step]
    (called,) = documents(ARGO)
    assert analysis["templates"] == [{"templateName": called["metadata"]["name"]}]
    assert [each["name"] for each in analysis["args"]] == [each["name"] for each in called["spec"]["args"]]


def leaves(tree: dict[str, Any], *path: str) -> Iterator[list[Any]]:
    """Each value of *tree*, behind its path."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, *path, key)
        else:
            yield [*path, key, value]


def test_the_query_for_prometheus_is_of_our_metrics(promtool: Path, tmp_path: Path) -> None:
    *call, url, query = shlex.split(QUERIED)
    assert names_in(query) <= set(metrics.NAMES)
    assert labels_in(query) <= TARGET_LABELS
    rule = {"groups": [{"name": "shown", "rules": [{"record": "shown:query", "expr": query}]}]}
    (tmp_path / "rules.yml").write_text(json.dumps(rule))
    ran(promtool, "check", "rules", tmp_path / "rules.yml")
    assert url == "http://prometheus:9090"
    nobody = subprocess.run(
        [promtool, *call[1:], "http://127.0.0.1:9", query], capture_output=True, text=True, check=False
    )
    assert "connection refused" in nobody.stderr  # the arguments were understood


def test_the_setuptools_in_the_docs_may_build_the_package() -> None:
    (constraint,) = re.findall(r"^echo '([^']+)' > \S+$", CONSTRAINED)
    pinned = Requirement(constraint)
    (version,) = pinned.specifier
    text = (PROJECT / "pyproject.toml").read_text()
    wanted = Requirement(re.findall(r'^requires = \["([^"]+)"\]', text, re.MULTILINE)[0])
    assert (pinned.name, version.operator) == (wanted.name, "==")
    assert wanted.specifier.contains(version.version)
