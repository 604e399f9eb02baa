"""What runs elsewhere for this project: GitHub's workflows, and hooks of pre-commit.

They call what is run here, by the same names.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parent.parent
WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
PROGRAMS = Path(sys.executable).parent


def checked(*command: str) -> None:
    done = subprocess.run(
        [str(PROGRAMS / command[0]), *command[1:]], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def recipe(target: str) -> list[str]:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_workflows_are_what_github_takes() -> None:
    checked("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    checked("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")


def test_workflows_are_pinned_ask_for_little_and_have_no_known_hole() -> None:
    """zizmor sees no hole in them, offline.

    It looks for permissions, actions without a version, credentials left behind, words of others in a shell.
    """
    checked("zizmor", "--offline", "--no-progress", "--quiet", "--strict-collection", ".github")


def test_the_right_to_publish_is_one_job_s() -> None:
    asking = {
        f"{workflow.stem}.{name}": job["permissions"]
        for workflow in WORKFLOWS
        for name, job in jobs(workflow).items()
        if "permissions" in job
    }
    assert asking == {"publish.publish": {"id-token": "write", "attestations": "write", "contents": "read"}}
    assert all(yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"} for workflow in WORKFLOWS)


def test_workflows_run_what_ci_runs() -> None:
    runs = [
        step["run"]
        for path in WORKFLOWS
        for job in jobs(path).values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    made = {word for run in runs if run.startswith("make ") for word in run.split()[1:] if "=" not in word}
    targets = re.search(r"for target in (.+); do", (PROJECT / ".ci" / "run").read_text())
    assert targets
    assert set(targets[1].split()) <= made
    assert [run for run in runs if not run.startswith("make ")] == [
        "pipx run --spec dist/*.whl vllm-graphfix explain",
        'test -f "dist/vllm_graphfix-${GITHUB_REF_NAME#v}-py3-none-any.whl"',
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_of_workflows_exist(workflow: Path) -> None:
    runs = [step["run"] for job in jobs(workflow).values() for step in job.get("steps", ()) if "run" in step]
    assert all(recipe(word) for run in runs if run.startswith("make ") for word in run.split()[1:] if "=" not in word)


def test_hooks_are_understood_by_pre_commit() -> None:
    checked("pre-commit", "validate-config", ".pre-commit-config.yaml")


def test_hooks_run_what_make_lint_runs() -> None:
    (repository,) = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = [
        [word for word in shlex.split(hook["entry"]) if word != "--force-exclude"] for hook in repository["hooks"]
    ]
    assert entries == [[word for word in shlex.split(line) if word != "."] for line in recipe("lint")]
