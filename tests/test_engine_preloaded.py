"""Engines that are forked from a process which has imported vLLM: as others are, or they are started as others are."""

from __future__ import annotations

import ctypes
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines_run import (  # noqa: F401 - fixtures among them
    ERRORS,
    PARENT,
    SOON,
    all_end,
    fresh_logs,
    installed_double,
    job_of,
    parent,
    started,
)
from vllm_graphfix.verify.engine import device, llm
from vllm_graphfix.verify.engine.job import EAGER, Job
from vllm_graphfix.verify.engine.preloaded import imported_with
from vllm_graphfix.verify.engine.processes import HANG, Engines, JobResult

FAILS_WHERE_FORKED = """
def fails_where_forked(engine):
    if sys.argv[0].endswith("preloaded.py"):
        raise RuntimeError("CUDA error: initialization error")

STARTING["fails where forked"] = fails_where_forked
"""


def run(logs: Path, *jobs: Job, timeout: float = 60.0, parallel: int = 2) -> dict[str, JobResult]:
    return Engines(logs, timeout, preload=True).run(jobs, parallel)


def extended(vllm: Path, code: str) -> None:
    with (vllm / "vllm" / "__init__.py").open("a") as double:
        double.write(code)


def test_several_engines_are_forked_from_one_process_and_say_what_fresh_ones_say(vllm: Path, logs: Path) -> None:
    extended(vllm, "import pathlib; pathlib.Path(f'imported by {os.getpid()}').touch()\n")
    jobs = [
        job_of(vllm, "answers", name="one", mode=EAGER, extra_passes=1),
        job_of(vllm, "answers", name="two", environment={"PYTHONPATH": str(vllm), "VLLM_GRAPHFIX": "off"}),
    ]
    forked, fresh = run(logs, *jobs), Engines(logs, 60.0).run(jobs, 2)
    assert {name: (end.forked, end.error, end.why_not_forked) for name, end in forked.items()} == {
        "one": (True, None, None),
        "two": (True, None, None),
    }
    for name, end in fresh.items():
        result, alone = forked[name].result, end.result
        assert result is not None
        assert alone is not None
        assert not end.forked
        assert (result.passes, result.states, result.facts) == (alone.passes, alone.states, alone.facts)
    assert {forked[name].result.states["0"]["mamba-padding"] for name in forked} == {"active", "off"}  # type: ignore[union-attr]
    assert len(list(logs.glob("imported by *"))) == 1 + len(jobs), "once for those that were forked"
    assert "the double of an engine starts, EAGER answers" in forked["one"].log.read_text()


@pytest.mark.parametrize("behaviour", ["illegal access", "aborts"])
def test_a_forked_engine_that_crashes_is_known_by_its_own_error_and_ends_alone(
    vllm: Path, logs: Path, behaviour: str
) -> None:
    results = run(logs, job_of(vllm, behaviour), job_of(vllm, "answers"), parallel=1)
    assert (results[behaviour].error, results[behaviour].forked) == (ERRORS[behaviour], True)
    assert (results["answers"].error, results["answers"].forked) == (None, True)


def test_a_job_of_the_same_name_does_not_get_the_result_of_the_one_before(vllm: Path, logs: Path) -> None:
    engines = Engines(logs, 60.0, preload=True, retry=False)
    with engines.session():
        ended = [
            engines.run([job_of(vllm, each, name="one")], 1)["one"] for each in ("answers", "out of memory", "answers")
        ]
    assert [each.error is None for each in ended] == [True, False, True]
    assert all(each.forked for each in ended)


def test_a_forked_engine_that_hangs_ends_in_time_with_its_children(vllm: Path, logs: Path) -> None:
    results = run(logs, job_of(vllm, "hangs with a child"), timeout=2.0)["hangs with a child"]
    assert HANG.fullmatch(results.error or "")
    assert results.forked
    assert all_end(started(logs, 1))


def test_after_a_failure_of_forking_engines_start_in_fresh_processes(vllm: Path, logs: Path) -> None:
    extended(vllm, FAILS_WHERE_FORKED)
    results = run(logs, job_of(vllm, "fails where forked"), job_of(vllm, "answers"), parallel=1)
    assert {name: (end.error, end.forked) for name, end in results.items()} == {
        "fails where forked": (None, False),
        "answers": (None, False),
    }
    why_not = results["fails where forked"].why_not_forked or ""
    assert why_not.startswith("RuntimeError: CUDA error: initialization error (log: ")
    assert "initialization error" in (logs / "fails-where-forked.forked.log").read_text()


def test_an_engine_that_fails_whether_it_is_forked_or_not_ends_in_its_error(vllm: Path, logs: Path) -> None:
    results = run(logs, job_of(vllm, "out of memory"), job_of(vllm, "answers"), parallel=1)
    assert results["out of memory"].error == ERRORS["out of memory"]
    assert results["answers"].forked, "it was not because it was forked"


@pytest.mark.parametrize(
    ("code", "why_not"),
    [
        ("raise ImportError('no such kernels')", "could not import vLLM (ImportError: no such kernels)"),
        (
            "from vllm_graphfix.verify.engine import device; device.is_touched = lambda: True",
            "has touched the GPU while it imported vLLM",
        ),
        ("import vllm_graphfix; vllm_graphfix.register()", "has begun with the plugin while it imported vLLM"),
        ("import torch; torch.cuda.is_available = lambda: 1 // 0", "was forked, and the fork could not use the GPU"),
        ("os._exit(3)", "ended while it imported vLLM"),
    ],
)
def test_where_a_process_cannot_be_forked_engines_import_vllm_themselves(
    vllm: Path, logs: Path, code: str, why_not: str
) -> None:
    extended(vllm, f"if sys.argv[0].endswith('preloaded.py'):\n    {code}\n")
    results = run(logs, job_of(vllm, "answers"))["answers"]
    assert (results.error, results.forked, results.why_not_forked) == (None, False, why_not)


def test_engines_with_different_import_environments_come_from_different_processes(vllm: Path, logs: Path) -> None:
    extended(vllm, "print('imported with', os.environ.get('TEST_EARLY'), os.environ.get('VLLM_GRAPHFIX'))\n")
    environments: list[dict[str, str | None]] = [
        {"PYTHONPATH": str(vllm), "VLLM_GRAPHFIX": "on"},
        {"PYTHONPATH": str(vllm), "VLLM_GRAPHFIX": "off", "VLLM_USE_V2_MODEL_RUNNER": "1"},
        {"PYTHONPATH": str(vllm), "VLLM_GRAPHFIX": "off", "TEST_EARLY": "1"},
    ]
    jobs = [
        job_of(vllm, "tells of its environment", name=f"{number}", environment=each | {"TEST_LATE": None})
        for number, each in enumerate(environments)
    ]
    run(logs, *jobs)
    assert sorted(path.read_text() for path in logs.glob("preloaded-*.log")) == [
        "imported with 1 None\n",
        "imported with None None\n",
    ]


def test_an_import_depends_on_all_variables_but_those_that_engines_read_later() -> None:
    read_later = dict.fromkeys(["VLLM_GRAPHFIX", "VLLM_GRAPHFIX_SHADOW", "VLLM_USE_V2_MODEL_RUNNER"], "1")
    assert imported_with(read_later | {"TORCHDYNAMO_DISABLE": "1", "PATH": "/bin"}) == {
        "TORCHDYNAMO_DISABLE": "1",
        "PATH": "/bin",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupt_or_kill_ends_forked_engines_and_their_parent(
    vllm: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("engines_run.PARENT", PARENT.replace("600.0)", "600.0, preload=True)"))
    with parent(vllm, logs) as process:
        pids = started(logs, 2)
        above = {parent_of(pid) for pid in pids} - {*pids}
        process.send_signal(number)
        process.communicate(timeout=SOON)
    assert len(above) == 1, "both engines are of one process"
    assert process.pid not in above
    assert all_end([*pids, *above])


def parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


DRIVERS: dict[str, Any] = {
    "no driver": (OSError("libcuda.so.1: cannot open shared object file"), False),
    "not initialised": (SimpleNamespace(cuCtxGetCurrent=lambda context: 3), False),
    "initialised": (SimpleNamespace(cuCtxGetCurrent=lambda context: 0), True),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_driver_knows_whether_a_process_has_touched_the_gpu(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, touched = DRIVERS[driver]

    def load(name: str) -> Any:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert device.is_touched() is touched


class Tuner:
    """Stands in for Triton's: measures what it keeps of its variants, and takes the fastest."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.compiled = seconds, list[str]()

    def prune_configs(self, kwargs: dict[str, Any]) -> list[str]:
        return list(self.seconds)

    def _bench(self, *args: Any, config: str, **kwargs: Any) -> list[float]:
        self.compiled.append(config)
        return [self.seconds[config]] * 3

    def run(self) -> str:
        timings = {config: self._bench(config=config) for config in self.prune_configs({})}
        return min(timings, key=lambda config: timings[config])


def test_the_first_variant_that_runs_is_taken_and_no_other_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner: Any = type("Autotuner", (Tuner,), {name: vars(Tuner)[name] for name in ("prune_configs", "_bench")})
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=tuner))
    llm.take_first_variant()
    too_large = tuner({"too large": math.inf, "first": 2.0, "fastest": 1.0})
    other = tuner({"first": 2.0, "fastest": 1.0})
    assert [too_large.run(), other.run(), too_large.run()] == ["first", "first", "first"]
    assert too_large.compiled == ["too large", "first"] * 2
    assert other.compiled == ["first"]


def test_tritons_own_tuner_has_what_is_replaced_there() -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    assert {"prune_configs", "_bench"} <= set(vars(autotuner.Autotuner))
