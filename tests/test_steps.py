"""The step that a process is in: one that does not end shows beside a heartbeat that goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from records import eventually, only, record
from stock import release_root, run_in_release
from vllm_graphfix.engine import steps
from vllm_graphfix.engine.metrics import EVERY
from vllm_graphfix.engine.steps import STEPS, STUCK_AFTER, StepClock
from vllm_graphfix.records import HEARTBEAT, Reporter, read


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 5000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(steps, "time", made)
    return made


def test_a_step_is_reported_from_five_minutes_on_and_until_it_ends(clock: Clock) -> None:
    watched = StepClock()

    def step() -> str:
        clock.now += STUCK_AFTER - 1
        assert watched.stuck_since() is None
        clock.now += 1
        assert watched.stuck_since() == 6000.0
        clock.now += 0.1  # the same at each heartbeat: another number would be another record
        assert watched.stuck_since() == 6000.0
        return "output"

    assert watched._around(step) == "output"
    clock.now += STUCK_AFTER
    assert watched.stuck_since() is None  # it is idle


def test_the_outermost_call_is_the_step_also_if_it_raises(clock: Clock) -> None:
    watched = StepClock()

    def model() -> None:
        clock.now += STUCK_AFTER

    def core() -> None:
        watched._around(model)
        assert watched.stuck_since() == 6000.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        watched._around(core)
    assert watched.stuck_since() is None


def test_a_stuck_step_shows_before_vllm_ends_the_engine() -> None:
    """Its executor waits for 300 s by default; the alert waits for a minute, and heartbeat and scrape come first."""
    assert STUCK_AFTER + HEARTBEAT + EVERY + 60 + 60 < 300


def test_a_forked_child_is_in_no_step(clock: Clock) -> None:
    watched = StepClock()

    def step() -> None:
        clock.now += STUCK_AFTER
        watched.forked()
        assert watched.stuck_since() is None

    watched._around(step)


@pytest.fixture
def blocked() -> Iterator[Callable[[], object]]:
    """A step that waits until the test is over."""
    end = threading.Event()
    yield end.wait
    end.set()


def test_a_record_says_so_while_its_heartbeat_goes_on(
    tmp_path: Path, blocked: Callable[[], object], clock: Clock
) -> None:
    watched, reporter = StepClock(), Reporter(tmp_path, print)
    thread = threading.Thread(target=watched._around, args=(blocked,), daemon=True)
    thread.start()
    assert eventually(lambda: watched._began is not None)
    reporter.keep(lambda: record(rank=0, in_step_since=watched.stuck_since()), 0.02)
    try:
        assert eventually(lambda: read(tmp_path).found)
        assert only(tmp_path).record.in_step_since is None
        clock.now += STUCK_AFTER
        assert eventually(lambda: only(tmp_path).record.in_step_since == 6000.0)
    finally:
        reporter.close()


@pytest.mark.parametrize("release", ["0.15.0", "0.18.1", "0.21.0", "0.26.0", "0.33.0"])
def test_what_runs_a_step_is_in_vllm(release: str) -> None:
    root = release_root(release)
    for module, owner, names in STEPS:
        text = (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"class {owner}" in text
        if owner != "CPUWorker":  # it inherits them
            assert all(f"    def {name}(" in text for name in names)


def test_a_rank_and_an_engine_core_of_vllm_are_in_a_step_with_every_detector_off() -> None:
    """Stock classes of 0.21.0, around a double of what runs the model."""
    code = """
    from types import SimpleNamespace
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker
    from vllm_graphfix import _this_process
    clock = _this_process().component("steps").clock
    def inside(*args, **kwargs):
        print("STEP", clock._began is not None)
    worker_double = SimpleNamespace(model_runner=SimpleNamespace(sample_tokens=inside))
    for worker in (Worker, CPUWorker):
        worker.sample_tokens(worker_double, None)
    class Scheduler:
        def has_requests(self):
            inside()
            return False
    print("CORE", EngineCore.step(SimpleNamespace(scheduler=Scheduler())))
    print("AFTER", clock._began)
    """
    output = run_in_release("0.21.0", code, {"VLLM_GRAPHFIX": "off"}, libraries_loaded=True).stdout
    assert output.count("STEP True") == 3, output
    assert "CORE ({}, False)" in output
    assert "AFTER None" in output
