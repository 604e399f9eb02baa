"""Engines of a double of vLLM in processes of their own, and whether these end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import engine_double
from vllm_graphfix.verify.engine.job import GRAPHS, Job
from vllm_graphfix.verify.engine.processes import (
    Engines,
    JobResult,
)

PROMPTS = ((1, 2), (30, 4, 5))


SOON = 20.0
"""Seconds; a process that was killed is gone in far less."""


@pytest.fixture(name="vllm")
def installed_double(tmp_path: Path) -> Path:
    return engine_double.install(tmp_path / "path")


@pytest.fixture(name="logs")
def fresh_logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def job_of(vllm: Path, behaviour: str, **rest: object) -> Job:
    arguments: dict[str, object] = {
        "name": behaviour,
        "mode": GRAPHS,
        "arguments": {"model": behaviour},
        "prompts": PROMPTS,
        "max_tokens": (3, 4),
        "environment": {"PYTHONPATH": str(vllm)},
    }
    return Job(**(arguments | rest))  # type: ignore[arg-type]


def ended(vllm: Path, logs: Path, behaviour: str, *, timeout: float = 60.0, **rest: object) -> JobResult:
    job = job_of(vllm, behaviour, **rest)
    return Engines(logs, timeout).run([job], 1)[job.name]


def is_running(pid: int) -> bool:
    """A zombie is not: it waits for somebody to ask how it ended."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + SOON
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def started(logs: Path, engines: int, where: str = "pids of *") -> list[int]:
    """The processes of so many engines that hang, and of their children."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        results = [path.read_text() for path in logs.glob(where)]
        if len(results) >= engines:
            return [int(pid) for text in results for pid in text.split()]
        time.sleep(0.02)
    raise AssertionError(f"{len(results)} engines of {engines} have started")


ERRORS = {
    "illegal access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "out of memory": "RuntimeError: CUDA error: out of memory",
    "lacks a module": "ImportError: libcudart.so.13: cannot open shared object file",
    "fails in a worker": engine_double.WORKER_FAILED,
    "aborts": "CUDA error: an illegal memory access was encountered",
    "exits": "SystemExit: enough",
}


PARENT = """
import sys
from pathlib import Path
from vllm_graphfix.verify.engine.job import GRAPHS, Job
from vllm_graphfix.verify.engine.processes import Engines

logs, vllm = map(Path, sys.argv[1:])
jobs = [
    Job(name, GRAPHS, {"model": "hangs with a child"}, environment={"PYTHONPATH": str(vllm)},
        max_tokens=(1,), prompts=((1,),))
    for name in ("one", "two", "three")
]
try:
    Engines(logs, 600.0).run(jobs, 2)
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


@contextmanager
def parent(vllm: Path, logs: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs three engines that hang, two at a time."""
    command = [sys.executable, "-c", PARENT, str(logs), str(vllm)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()  # where a test fails
