"""The checks that run elsewhere for this project: GitHub's workflows, and hooks of pre-commit.

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

from stock import release_root

PROJECT = Path(__file__).parent.parent
WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
PROGRAMS = Path(sys.executable).parent


def checked(*command: str) -> None:
    done = subprocess.run(
        [str(PROGRAMS / command[0]), *command[1:]], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    jobs_by_name: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs_by_name


def recipe(target: str) -> list[str]:
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert match
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_workflows_are_what_github_takes() -> None:
    checked("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    checked("check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    checked("check-jsonschema", "--builtin-schema", "vendor.github-actions", "action.yml")


def test_workflows_are_pinned_ask_for_little_and_have_no_known_hole() -> None:
    """zizmor sees no hole in them, offline.

    It looks for permissions, actions without a version, credentials left behind, words of others in a shell.
    """
    checked("zizmor", "--offline", "--no-progress", "--quiet", "--strict-collection", ".github", "action.yml")


def test_the_right_to_publish_is_one_job_s_and_that_to_propose_another_s() -> None:
    asking = {
        f"{workflow.stem}.{name}": job["permissions"]
        for workflow in WORKFLOWS
        for name, job in jobs(workflow).items()
        if "permissions" in job
    }
    assert asking == {
        "publish.publish": {"id-token": "write", "attestations": "write", "contents": "read"},
        "new-release.propose": {"contents": "write", "pull-requests": "write"},
    }
    assert all(yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"} for workflow in WORKFLOWS)


def test_workflows_run_what_ci_runs() -> None:
    runs = [
        step["run"]
        for path in WORKFLOWS
        for job in jobs(path).values()
        for step in job.get("steps", ())
        if "run" in step and path.stem not in ("new-release", "hunt")
    ]
    made = {word for run in runs if run.startswith("make ") for word in run.split()[1:] if "=" not in word}
    targets = re.search(r"for targets in (.+); do", (PROJECT / ".ci" / "run").read_text())
    assert targets
    assert set(re.findall(r"\w+", targets[1])) - {"releases"} <= made  # `make test` fetches the releases as well
    assert [run for run in runs if not run.startswith("make ")] == [
        "pipx run --spec dist/*.whl vllm-graphfix explain",
        'test -f "dist/vllm_graphfix-${GITHUB_REF_NAME#v}-py3-none-any.whl"',
        jobs(PROJECT / ".github/workflows/test-all.yml")["test"]["steps"][-1]["run"],
    ]


def test_what_is_published_is_made_by_pinned_tools_alone_and_once_more_elsewhere() -> None:
    made = jobs(PROJECT / ".github/workflows/build.yml")
    uploads = {
        name: [step["with"]["name"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        for name, job in made.items()
    }
    assert [name for name, names in uploads.items() if "dist" in names] == ["packages"]
    assert [step["run"] for step in made["packages"]["steps"] if "run" in step] == ["make packages"]
    assert "env" not in made["packages"], "another index"
    again = made["reproduce"]
    assert again["needs"] == "packages"
    assert again["steps"][-2]["with"] == {"name": "dist", "path": "dist/"}
    assert again["steps"][-1] == {"run": "make reproduce"}
    assert jobs(PROJECT / ".github/workflows/publish.yml")["publish"]["needs"] == "tests"
    assert jobs(PROJECT / ".github/workflows/tests.yml")["build"] == {"uses": "./.github/workflows/build.yml"}


def test_all_tests_run_each_week_and_the_summary_names_what_failed(tmp_path: Path) -> None:
    workflow = yaml.safe_load((PROJECT / ".github/workflows/test-all.yml").read_text())
    (when,) = workflow[True]["schedule"]  # YAML takes `on` for a truth value
    assert re.fullmatch(r"\d+ \d+ \* \* \d", when["cron"])
    (job,) = workflow["jobs"].values()
    *_, made, report = job["steps"]
    assert made == {"run": "make test-all PYTEST_WORKERS=4"}
    assert not [step for step in (job, *job["steps"]) if "continue-on-error" in step]
    assert not [line for line in recipe("test-all") if "not slow" in line]
    assert report["if"] == "failure()"
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('text', ['a b', 'c'])\ndef test_it(text): assert text == 'c'\n"
        "def test_that(): assert 0\n"
    )
    environment = {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    tested = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup"]
    assert subprocess.run(tested, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 1
    subprocess.run(["/bin/bash", "-ec", report["run"]], cwd=tmp_path, check=True, env=environment)
    summary = (tmp_path / "summary").read_text().splitlines()
    assert summary == ["- `test_some.py::test_it[a b]`", "- `test_some.py::test_that`"]


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


def test_a_new_release_is_proposed_once(tmp_path: Path) -> None:
    """The steps around `make new-release`, with git as it is and a stand-in for GitHub's own command."""
    steps = [step for job in jobs(PROJECT / ".github/workflows/new-release.yml").values() for step in job["steps"]]
    made, *others = [step["run"] for step in steps if "run" in step]
    assert made == "make new-release ARCHIVE=no"
    assert recipe("new-release")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text('#!/bin/sh\necho "$@" >> "$HOME/asked"\n')
    (tmp_path / "bin" / "gh").chmod(0o755)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }

    def run(script: str, folder: Path) -> None:
        subprocess.run(["/bin/bash", "-ec", script], cwd=folder, check=True, env=environment, capture_output=True)

    add = tmp_path / "add"
    author = "-c user.name=a -c user.email=a@b"
    run(f"git init -q -b main add; cd add; echo /build/ > .gitignore; git add .; git {author} commit -qm a", tmp_path)
    run("git clone -q --bare add origin.git; git clone -q origin.git propose; git clone -q origin.git again", tmp_path)
    (add / "build").mkdir()
    (add / "build" / "new-release.md").write_text("## vLLM 99.0.0\n\n`x`; $(touch here)\n\n## vLLM 99.1.0\n")
    run(others[1], add)
    assert not (tmp_path / "output").exists(), "nothing was written"
    (add / "vllm-99.0.0.added.md").write_text("new\n")
    for script in others[:2]:
        run(script, add)
    assert (tmp_path / "output").read_text() == "changed=true\n"
    assert (tmp_path / "summary").read_text() == (add / "build" / "new-release.md").read_text()
    for clone in ("propose", "again"):
        run(f"mkdir {clone}/build; cp add/build/new-release.* {clone}/build", tmp_path)
        run(others[2], tmp_path / clone)
    calls = (tmp_path / "asked").read_text().splitlines()
    branch = "new-release-99.0.0-99.1.0"
    request = f"pr create --head {branch} --title vLLM 99.0.0-99.1.0 --body-file build/new-release.md"
    assert calls == ["auth setup-git", request, "auth setup-git"]
    run(f"git -C origin.git show {branch}:vllm-99.0.0.added.md", tmp_path)


@pytest.mark.release
@pytest.mark.parametrize(
    ("inputs", "switch", "code"),
    [({"for": "some/model", "gpu": "H200"}, "on", 0), ({}, "off", 3), ({"vllm": "gone"}, "on", 2)],
    ids=["all applied", "needed and not applied", "no vLLM"],
)
def test_the_action_for_forks_fails_as_status_does(
    inputs: dict[str, str], switch: str, code: int, tmp_path: Path
) -> None:
    """Its last step, with the package that runs here as the installed one."""
    action = yaml.safe_load((PROJECT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    chosen = {name: inputs.get(name, str(each["default"])) for name, each in action["inputs"].items()}
    values = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) }}", lambda match: chosen[match[1]], value)
        for name, value in step["env"].items()
    }
    (tmp_path / "vllm-graphfix").symlink_to(PROGRAMS.parent)
    environment = {
        "PATH": "/usr/bin:/bin",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "VLLM_GRAPHFIX": switch,
    }
    done = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=release_root("0.18.1"), env=environment | values, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    if code != 2:
        assert (tmp_path / "summary").read_text() == f"```text\n{done.stdout}```\n"
