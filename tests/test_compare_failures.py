"""`compare` as a user calls it, where something goes wrong: exit code, message, what is kept, what is left running.

Engines are doubles here (`flags_double`).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
import flags_double
from engine import report
from engine_double import WORKER_FAILED

Compare = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flags_double.install(tmp_path_factory.mktemp("double"))


@pytest.fixture
def environment(double: Path, tmp_path: Path) -> dict[str, str]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return engine.environment(tmp_path, double) | {"TMPDIR": str(temporary)}


@pytest.fixture
def compare(environment: dict[str, str], tmp_path: Path) -> Compare:
    """`compare` of engines that do what is said for their mode: `eager`, `graphs`, `compiled`."""

    def call(*arguments: str, code: int, **behaviours: str) -> subprocess.CompletedProcess[str]:
        extra = {f"ENGINE_DOUBLE_{mode.upper()}": behaviour for mode, behaviour in behaviours.items()}
        model = ("the/model", "--num-prompts", "3", "--max-tokens", "8")
        return engine.check_call(tmp_path, *model, *arguments, env=environment | extra, code=code)

    return call


def logs_in(folder: Path) -> list[str]:
    """Names of the engines' logs that are left."""
    logs = (path.name for path in (folder / "temporary").glob("graphfix-compare-*/*.log"))
    return sorted(name for name in logs if not name.startswith("preloaded-"))


def engines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The modes that were run, in their order; what is told of each as it ends."""
    return [line.partition(": ")[0] for line in done.stderr.splitlines() if not line.startswith("vllm-graphfix: ")]


def test_equal_answers_are_exit_code_0_and_leave_nothing(compare: Compare, tmp_path: Path) -> None:
    done = compare(code=0)
    assert done.stdout.splitlines()[-1] == "no corruption"
    assert "graphs: FULL; fixes: capture-state active" in done.stdout
    assert engines(done) == ["eager", "graphs"], "the third engine is for answers that differ"
    assert not list((tmp_path / "temporary").iterdir())


def test_a_setting_that_means_nothing_is_one_line_before_any_engine_starts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Its engines would be stock, and their corruption nothing to do with the fixes."""
    done = engine.check_call(tmp_path, "the/model", env=environment | {"VLLM_GRAPHFIX": "onn"}, code=2)
    assert done.stderr == (
        "vllm-graphfix: VLLM_GRAPHFIX=onn means nothing, so what is to be compared is not known; correct or unset it\n"
    )
    assert engines(done) == []


def test_corruption_is_exit_code_1(compare: Compare) -> None:
    done = compare("--json", code=1, graphs="wrong")
    assert engines(done) == ["eager", "graphs", "no graphs", "scored"]
    output = report(done)
    assert output["corrupt"]
    assert output["note"].endswith("without graphs, and scored in 8 orders")
    assert [(prompt["kind"], prompt["position"]) for prompt in output["prompts"]] == [("corrupt", 2)] * 3


def test_what_the_engine_gives_without_graphs_too_is_not_corruption(compare: Compare) -> None:
    output = report(compare("--json", code=0, graphs="wrong", compiled="wrong"))
    assert [prompt["kind"] for prompt in output["prompts"]] == ["compiled"] * 3
    assert "no graphs" not in (output["error"] or "")


def test_numbers_that_are_none_are_corruption_and_null_in_json(compare: Compare) -> None:
    output = report(compare("--json", code=1, graphs="no numbers"))
    assert {prompt["distance"] for prompt in output["prompts"]} == {None}


def test_eager_without_numbers_is_nothing_to_compare_with(compare: Compare) -> None:
    """Else graphs would be blamed for what eager does too."""
    done = compare(code=2, eager="no numbers")
    *_, line = done.stderr.splitlines()
    assert "some log-probabilities are not finite" in line
    assert engines(done) == ["eager"]


def test_an_engine_that_fails_without_graphs_is_one_line_with_its_own_error_and_log(
    compare: Compare, tmp_path: Path
) -> None:
    done = compare(code=2, eager="fails in a worker")
    assert done.stdout == ""
    *_, line = done.stderr.splitlines()
    (log,) = (tmp_path / "temporary").glob("*/eager.log")
    assert line == f"vllm-graphfix: the engine does not run even without graphs: {WORKER_FAILED} (log: {log})"
    assert engines(done) == ["eager"]


def test_an_engine_that_fails_with_graphs_alone_is_corruption_and_its_log_stays(
    compare: Compare, tmp_path: Path
) -> None:
    done = compare(code=1, graphs="illegal access")
    assert engines(done) == ["eager", "graphs"]
    (log,) = (tmp_path / "temporary").glob("*/graphs.log")
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert done.stdout.splitlines()[-1] == f"the engine runs without graphs and fails with them: {error} (log: {log})"


def test_an_engine_that_fails_with_graphs_alone_is_so_in_json(compare: Compare, tmp_path: Path) -> None:
    output = report(compare("--json", code=1, graphs="aborts"))
    assert "illegal memory access" in output["error"]
    assert (output["corrupt"], output["prompts"], output["tokens"]) == (True, [], None)
    assert logs_in(tmp_path) == ["eager.log", "graphs.log"]
    assert output["logs"] in output["error"]


def test_without_the_third_engine_eager_is_the_only_witness(compare: Compare, tmp_path: Path) -> None:
    done = compare("--json", code=1, graphs="wrong", compiled="out of memory")
    output = report(done)
    assert "the compiled engine without graphs did not run" in output["note"]
    assert "CUDA error: out of memory" in output["note"]
    assert output["logs"] in output["note"]
    # A fresh process has failed as well.
    assert logs_in(tmp_path) == ["eager.log", "graphs.log", "no-graphs.forked.log", "no-graphs.log"]


def test_an_engine_that_does_not_end_is_ended(compare: Compare, tmp_path: Path) -> None:
    done = compare("--timeout", "3", code=2, eager="hangs with a child")
    assert "the engine does not run even without graphs: did not finish in 3 s (log: " in done.stderr
    assert not running(tmp_path)


def test_a_flag_that_vllm_does_not_know_is_one_line_with_vllms_message(compare: Compare, tmp_path: Path) -> None:
    done = compare("--tensor-paralel-size", "2", code=2)
    *_, line = done.stderr.splitlines()
    message = "unrecognized arguments: --tensor-paralel-size 2"
    assert line == f"vllm-graphfix: vLLM rejects these flags: {message}"
    assert logs_in(tmp_path) == [], "its log has nothing more to say"


def running(folder: Path) -> list[int]:
    """Processes of the double that hangs and still runs."""
    named = [int(pid) for path in folder.rglob("pids of *") for pid in path.read_text().split()]
    return [
        pid for pid in named if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]


def test_interrupting_it_is_exit_code_130_and_leaves_no_process(environment: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_graphfix", "compare", "the/model"],
        cwd=tmp_path,
        env=environment | {"ENGINE_DOUBLE_GRAPHS": "hangs with a child"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(running(tmp_path)) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    *_, line = err.splitlines()
    extra = re.fullmatch(r"vllm-graphfix: interrupted; all processes it had started have ended \(logs: (.*)\)", line)
    assert extra, err
    assert (Path(extra[1]) / "graphs.log").exists(), "whoever waited too long wants to know for what"
    assert not running(tmp_path)


def test_without_vllm_it_says_where_to_run_it(environment: dict[str, str], tmp_path: Path) -> None:
    done = engine.check_call(tmp_path, "the/model", env=environment | {"PYTHONPATH": ""}, code=2)
    assert done.stderr == (
        f"vllm-graphfix: this Python ({sys.executable}) has no vLLM; use the Python that runs vLLM\n"
    )


def test_an_error_of_the_prompts_starts_no_engine(compare: Compare, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    done = compare("--prompts", str(missing), code=2)
    assert done.stderr == f"vllm-graphfix: {missing} cannot be read: No such file or directory\n"
    assert not list((tmp_path / "temporary").iterdir())
