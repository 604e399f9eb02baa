"""The example of docs/reinforcement-learning.md, with a real engine on a CPU: generate, reload, generate, report."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fetch_cpu_engine
import rollouts
from engine import environment, forking_python, write_llama
from table import affected_by, state_by_default

pytestmark = pytest.mark.xdist_group("examples")

EXAMPLE = Path(__file__).parents[1] / "examples/rollouts.py"
RELEASE = fetch_cpu_engine.AFFECTED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def ran(model: Path, folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The example, from another folder, as a user's scheduler runs it; the engine has processes of its own."""
    python, around = forking_python(
        environment(folder, fetch_cpu_engine.engine(version=RELEASE))
        | {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        | {"XDG_CACHE_HOME": str(model.parent)}  # what vLLM finds out about the model, once
    )
    return subprocess.run(
        [python, str(EXAMPLE), str(model), "--enforce-eager", *flags],
        cwd=folder,
        env=around | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("ranks", "checked", "counters"),
    [
        pytest.param(1, "", "off", marks=pytest.mark.slow, id="one"),
        pytest.param(2, "1/2", "{'checks': 0, 'mismatches': 0,", id="two"),
    ],
)
def test_rollouts_go_on_after_a_reload_and_every_worker_has_the_fixes_that_it_needs(
    ranks: int, checked: str, counters: str, model: Path, tmp_path: Path
) -> None:
    """The shadow check prints its counters, where it is on."""
    done = ran(
        model, tmp_path, f"--tensor-parallel-size={ranks}", **({"VLLM_GRAPHFIX_SHADOW": checked} if checked else {})
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [re.findall(rf"^step {step}: (.*)", done.stdout, re.MULTILINE) for step in (0, 1)]
    assert len(steps[0]) == len(rollouts.PROMPTS)
    assert steps[0] == steps[1]  # the same weights were loaded again
    for rank in range(ranks):
        (active,) = re.findall(rf"^worker {rank}: active: (.*)", done.stdout, re.MULTILINE)
        (waiting,) = re.findall(rf"^worker {rank}: waiting: (.*)", done.stdout, re.MULTILINE)
        expected = {name for name in affected_by(RELEASE) if state_by_default(name, RELEASE) == "active"}
        observed = {*affected_by(RELEASE)} - expected  # of these some wait for code that no request needs
        assert {*active.split(", "), *waiting.split(", ")} - observed == expected | ({"shadow"} if checked else set())
        assert "prefill-dispatch" in active
        assert f"worker {rank}: shadow check: {counters}" in done.stdout


@pytest.mark.slow
def test_the_exit_code_is_1_if_a_fix_is_off(model: Path, tmp_path: Path) -> None:
    done = ran(model, tmp_path, VLLM_GRAPHFIX_PREFILL_DISPATCH="off")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^worker 0: PROBLEM: (\S+) is (\S+):", done.stdout, re.MULTILINE) == [
        ("prefill-dispatch", "off")
    ]


def report(**fix: Any) -> dict[str, Any]:
    return {
        "registered": True,
        "fixes": {"a-fix": {"mode": "auto", "state": "active", "reason": "applied"} | fix},
        "events": {"shadow": {"checks": 9, "mismatches": 0}},
    }


@pytest.mark.parametrize("state", ["off", "not-in-canary", "incompatible", "conflict", "failed", "observing"])
def test_a_fix_in_any_state_in_which_it_may_be_missed_is_a_problem(state: str) -> None:
    assert [*rollouts.problems(report(state=state))] == [f"a-fix is {state}: applied"]


@pytest.mark.parametrize(
    "fix", [{}, {"state": "waiting"}, {"mode": "observe", "state": "observing"}, {"state": "not-needed"}]
)
def test_what_was_chosen_or_is_not_needed_is_none(fix: dict[str, Any]) -> None:
    assert not [*rollouts.problems(report(**fix))]


def test_a_worker_without_the_plugin_is_a_problem(model: Path, tmp_path: Path) -> None:
    """There all fixes wait, as some do in a worker that has not imported their code."""
    done = ran(model, tmp_path, VLLM_PLUGINS="lora_filesystem_resolver")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^worker 0: PROBLEM: (.*)", done.stdout, re.MULTILINE) == [
        "vLLM has not loaded the plugin in this worker: is VLLM_PLUGINS set, without graphfix?"
    ]


def test_a_mismatch_of_the_shadow_check_is_a_problem() -> None:
    fleet_report = report()
    fleet_report["events"]["shadow"]["mismatches"] = 2
    assert [*rollouts.problems(fleet_report)] == [
        "the shadow check found 2 wrong replays; `vllm-graphfix report` has the details"
    ]
