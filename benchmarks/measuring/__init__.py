"""Shared by the benchmarks: fresh processes, interleaved calls, the machine, tables."""

from __future__ import annotations

import array
import gc
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "tools"))  # fetch_vllm is a script there, not an installed module


class Times(NamedTuple):
    """Minimum and median of many repetitions. On a shared machine, compare minima."""

    minimum: float
    median: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        return cls(min(values), statistics.median(values))


class Run(NamedTuple):
    """A process from start to end."""

    seconds: float
    cpu_seconds: float
    """User and system time of the process and its children."""
    output: str


def environment(*path: Path, **extra: str) -> dict[str, str]:
    """Return an environment with *path* first in PYTHONPATH, bytecode cached, and no inherited setting of vLLM."""
    unwanted = ("VLLM_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    search_path = os.pathsep.join(map(str, (*path, PROJECT)))
    return inherited | {"PYTHONPATH": search_path, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""} | extra


def run(arguments: Sequence[str], env: Mapping[str, str]) -> Run:
    """Run this Python with *arguments*. Raises CalledProcessError for an exit code other than 0."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, done.stdout)


def elsewhere() -> Callable[[], object]:
    """Return a function that reads more memory than a processor caches, as a model's step does between two calls."""
    memory = array.array("d", bytes(1 << 26))
    return lambda: memory[::8]  # of each line of a cache one number


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    calls: int,
    rounds: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Return microseconds a call. Each round calls each function *calls* times, so that all see the same machine.

    *between* is called before each turn of a function, untimed.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    gc.disable()
    try:
        for number in range(rounds):
            for name, function in order if number % 2 else reversed(order):
                between()
                started = time.perf_counter_ns()
                for _ in range(calls):
                    function()
                taken[name].append((time.perf_counter_ns() - started) / calls / 1000)
    finally:
        gc.enable()
    return {name: Times.of(values) for name, values in taken.items()}


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made


def verdict(value: float, target: float, unit: str) -> str:
    return f"[green]within {target:g} {unit}[/]" if value <= target else f"[bold red]over {target:g} {unit}[/]"


def console() -> Console:
    made = Console()
    return made if made.is_terminal else Console(width=140)


def machine() -> str:
    """Return one line about this machine, to print beside figures."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpu_facts() if line.startswith("model name")), "unknown CPU"
    )
    load = f"load average {os.getloadavg()[0]:.1f}"
    return f"{model}, {os.cpu_count()} cores, {load}, Python {platform.python_version()}"


def _cpu_facts() -> list[str]:
    facts = Path("/proc/cpuinfo")
    return facts.read_text().splitlines() if facts.exists() else []
