"""Processes of an engine on Ray go by its decision.

Real Ray, real actors, each release's own way of setting them up.

`ray_engine.py` is the first process of the engines, `ray_workers.py` and `ray_platform.py` stand in for what needs a
GPU, and `warm_python.py` starts all of these processes in a third of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stock import ALL_RELEASES, release_root
from table import slow_but_for
from vllm_graphfix.settings import decision
from vllm_graphfix.verify.engine import models

pytestmark = pytest.mark.xdist_group("ray")

HERE = Path(__file__).parent / "support"
AT_ONCE = 2
LIMIT = 600
"""Seconds for all engines of one release, which take some ten, and a hundred beside other work on two cores."""

NODE = """
import sys, ray
ray.init(
    _temp_dir=sys.argv[1], include_dashboard=False, object_store_memory=80 << 20, num_cpus=8, num_gpus=64,
    _system_config={"prestart_worker_first_driver": False},
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""
"""A Ray node, until its standard input ends. Its GPUs are numbers: nothing touches one."""

ON_THE_NODE = {"VLLM_GRAPHFIX": "off", "VLLM_GRAPHFIX_ROLLOUT": "0", "VLLM_GRAPHFIX_CAPTURE_STATE": "off"}
"""Set there locally, against the engine."""
OF_THE_ENGINE = {
    "VLLM_GRAPHFIX_ROLLOUT": "50",
    "VLLM_GRAPHFIX_ROLLOUT_KEY": next(f"in-{n}" for n in range(99) if decision.bucket(f"in-{n}") < 5000),
    "VLLM_GRAPHFIX_MAMBA_PADDING": "observe",
    "VLLM_GRAPHFIX_FLASHMLA_FP8": "on",
}
PLATFORM = {
    "METADATA": "Metadata-Version: 2.1\nName: stand-in-platform\nVersion: 0\n",
    "entry_points.txt": "[vllm.platform_plugins]\nstand_in = ray_platform:platform\n",
}


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


RELEASES = [release for release in ALL_RELEASES if number(release) >= (0, 15)]
EXECUTORS = [
    *((release, "RayDistributedExecutor") for release in RELEASES if number(release) < (0, 33)),
    *((release, "RayExecutorV2") for release in RELEASES if number(release) >= (0, 20)),
]
KEEPING = ["0.20.0", "0.24.0", "0.25.0", "0.29.0", "0.31.0", "0.33.0"]
"""One release of each form of `ray_executor_v2.py`, which keeps what is set on a node."""
USED_BEFORE = "RayExecutorV2 on a node that was used before"

IN_MAKE_TEST = ("0.15.0", "0.33.0")
"""With each executor, engine cores of either kind, and a node that keeps what is set on it."""

ReportOf = Callable[[str, str], Mapping[str, Any]]


def ways(release: str) -> list[str]:
    """The engines that `ray_engine.py` is to start."""
    executors = [executor for of, executor in EXECUTORS if of == release]
    return [*executors, *([USED_BEFORE] if release in KEEPING else []), engine_cores(release)]


def engine_cores(release: str) -> str:
    """From 0.21.0 on each of several has its rank in its name, which must not make it another engine."""
    return f"CoreEngineActorManager {1 + (number(release) >= (0, 21))}"


@pytest.fixture(scope="module")
def report_of(request: pytest.FixtureRequest) -> Iterator[ReportOf]:
    """Return a function from a release and one of its ways to the reports of an engine and of its processes."""
    # Parametrised all of them, so that they have a `callspec`; those that -k or -m left out are gone from the items.
    items = [item for item in request.session.items if item.path == request.path]
    releases = [item.callspec.params["release"] for item in items]  # type: ignore[attr-defined]
    token = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, contextlib.ExitStack() as started:
        scratch = Path(folder)  # not pytest's, whose longer name leaves no room for the names of Ray's sockets
        environment = _environment(scratch, token)
        started.callback(_kill_leftovers, token)
        pool = started.enter_context(ThreadPoolExecutor(AT_ONCE))
        warm = started.enter_context(_serving("warm_python.py", str(scratch / "warm"), env=environment))
        node = started.enter_context(_serving("-c", NODE, str(scratch / "ray"), env=environment | ON_THE_NODE))
        information = scratch / "stand_in_platform-0.dist-info"
        information.mkdir()
        for name, text in PLATFORM.items():
            (information / name).write_text(text)
        model = models.write("llama", scratch / "models")
        python = [sys.executable, "-S", str(HERE / "warm_python.py"), str(scratch / "warm")]
        _line_of(warm)
        environment |= OF_THE_ENGINE | {"STAND_IN_RAY": _line_of(node), "STAND_IN_PYTHON": shlex.join(python)}

        def engines(release: str) -> dict[str, Any]:
            path = os.pathsep.join(map(str, (release_root(release), scratch, HERE)))
            try:
                done = subprocess.run(
                    [*python, str(HERE / "ray_engine.py"), str(model), *ways(release)],
                    cwd=scratch,
                    env=environment | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:  # which does not show how far they came
                raise AssertionError(f"vLLM {release}: {LIMIT} s are over\n{late.stdout!r}\n{late.stderr!r}") from late
            assert done.returncode == 0, f"vLLM {release}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
            return {engine["way"]: engine for engine in reports}

        futures = {release: pool.submit(engines, release) for release in dict.fromkeys(releases)}
        started.callback(pool.shutdown, wait=False, cancel_futures=True)
        yield lambda release, way: futures[release].result()[way]


def _environment(scratch: Path, token: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RAY_", "CUDA_"))}
    return clean | {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",  # Ray listens on more than this host's own address
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_GRAPHFIX_STATUS_DIR": str(scratch),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(scratch),
        "XDG_CONFIG_HOME": str(scratch),
    }


@contextlib.contextmanager
def _serving(*arguments: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python program that serves until its standard input ends, which it also does if this process is killed."""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=HERE, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"{process.args!r} ended with {process.wait(30)}"
    return line


def _kill_leftovers(token: str) -> None:
    """End processes that outlived Ray: those that were started with *token*."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            if token.encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


def check_says_the_same(process: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """*process* goes by the decision of *engine*, in spite of what is set on its node."""
    assert process["decision"] == engine["decision"]
    assert engine["decision"]["canary"] is True
    wanted = {"capture-state": "auto", "mamba-padding": "observe", "flashmla-fp8": "on"}
    modes = {name: mode for name, (mode, _) in process["states"].items()}
    assert wanted.items() <= modes.items()
    assert not {"off", "not-in-canary"} & {state for _, state in process["states"].values()}


@pytest.mark.parametrize(
    ("release", "executor"),
    [pytest.param(*each, marks=() if each[0] in IN_MAKE_TEST else pytest.mark.slow) for each in EXECUTORS],
)
def test_workers_go_by_the_decision_of_their_engine(release: str, executor: str, report_of: ReportOf) -> None:
    report = report_of(release, executor)
    assert report["engine"]["role"] == "front-end"
    (worker,) = report["processes"]
    assert worker["role"] == "worker"
    assert worker["pid"] != report["engine"]["pid"]
    check_says_the_same(worker, report["engine"])


@pytest.mark.parametrize("release", slow_but_for(IN_MAKE_TEST, RELEASES))
def test_engine_cores_go_by_the_decision_of_their_engine(release: str, report_of: ReportOf) -> None:
    report = report_of(release, engine_cores(release))
    assert len(report["processes"]) == int(engine_cores(release)[-1])
    for core in report["processes"]:
        assert core["role"] == "engine-core"
        check_says_the_same(core, report["engine"])


@pytest.mark.parametrize("release", slow_but_for(IN_MAKE_TEST, KEEPING))
def test_workers_ignore_the_decision_of_another_engine_on_their_node(release: str, report_of: ReportOf) -> None:
    report = report_of(release, USED_BEFORE)
    (worker,) = report["processes"]
    assert worker["began_with"]["engine"] == "another", "the release keeps what is set on the node"
    assert worker["decision"]["engine"] != "another"
    assert worker["decision"]["modes"]["flashmla-fp8"] == OF_THE_ENGINE["VLLM_GRAPHFIX_FLASHMLA_FP8"]
