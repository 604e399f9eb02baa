"""Each statement of the gate fails, alone and on one rank of two: all ranks do the same, or the engine stops.

The gate is real, and so is torch's store; workers, and the states of fixes, are doubles.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from gate_doubles import process_double, worker_of
from statements import call_before_each_statement
from vllm_graphfix import ranks
from vllm_graphfix.engine import (
    capture_gate,
    failed_graphs,
    gate_reports,
    graph_dispatch,
    own_report,
    rank_agreement,
    rank_report,
)
from vllm_graphfix.engine.capture_gate import STOPS
from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.engine.graph_dispatch import Graph
from vllm_graphfix.fix import Mode, State
from vllm_graphfix.fixes import FIXES
from vllm_graphfix.patching.applied_fix import FixState

MODULES = (capture_gate, gate_reports, rank_agreement, rank_report, own_report, failed_graphs, graph_dispatch, ranks)
NOT_OF_THE_GATE = frozenset({"world"})
"""What puts it around vLLM's functions, and what a double replaces."""
MODES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "strict": {"VLLM_GRAPHFIX": "strict"},
    "on": {"VLLM_GRAPHFIX_CAPTURE_STATE": "on"},
}
FAILED, NOT_EXCLUDED = "one failed", "one failed and one cannot leave out"
SCENARIOS = ("alike", FAILED, NOT_EXCLUDED, "differ")
"""The two ranks, and whether a fix failed in a capture of one of them, or another does not know vLLM's dispatch."""
DEADLINE = 60.0
"""Seconds after which a rank is one that hangs."""


class Point(NamedTuple):
    """A statement of the gate, in one phase of an engine's start."""

    phase: str | None
    module: str
    line: int


class Fault:
    """An error of one statement on some ranks: the first time in its phase, or *always*, in any."""

    current: Fault | None = None

    def __init__(self, on: tuple[int, ...] = (), point: Point | None = None, *, always: bool = False) -> None:
        self.on, self.point, self.always = on, point, always
        # Errors of torch's store are RuntimeErrors, which a rank that waits for reports takes for a time-out.
        self.error = RuntimeError("injected") if always else OSError("injected")
        self.fired = False
        self.here = threading.local()
        self.passed: dict[int, dict[Point, None]] = {0: {}, 1: {}}
        """The statements that each rank has come to."""

    def before(self, module: str, line: int) -> None:
        rank, phase = getattr(self.here, "rank", None), getattr(self.here, "phase", None)
        if rank is None or phase is None:
            return
        at = Point(phase, module, line)
        self.passed[rank][at] = None
        if rank not in self.on or self.point is None:
            return
        if at[1:] == self.point[1:] if self.always else at == self.point and not self.fired:
            self.fired = True
            raise self.error


class Outcome(NamedTuple):
    """The state of a rank after its start."""

    what: str
    """`serves`, `is ended`, `hangs`, or the error that it raised."""
    dispatch: frozenset[int]
    """The tokens of the full graphs that it dispatches to."""
    settled: tuple[tuple[str, bool], ...]
    """Fixes that failed in the capture; true of those that stand as failed."""
    watched: tuple[bool, ...]
    checks: frozenset[str]
    """The checks that it has been through."""
    unchecked: str | None


class ProcessEndedError(BaseException):
    """Stands for the end of a rank's process."""


class GraphMode(NamedTuple):
    """As vLLM's enumeration has it."""

    name: str


class Key(NamedTuple):
    """A batch descriptor."""

    num_tokens: int


class RunnerDouble:
    """A model runner of which only the graphs are there that it dispatches to."""

    dispatcher: SimpleNamespace


@pytest.fixture(autouse=True)
def _statements_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(module: str, line: int) -> None:
        if Fault.current is not None:
            Fault.current.before(module, line)

    call_before_each_statement(monkeypatch, MODULES, before, leave_out=NOT_OF_THE_GATE)


def started(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, mode: str, scenario: str, world_size: int = 2
) -> dict[int, Outcome]:
    """Return the outcomes of the ranks of an engine that starts; where one stops, the engine ends the other."""
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=5))
    # Its calls are made in a thread of their own, which is no rank's here; `test_agreement.py` has its bound.
    monkeypatch.setattr(ranks, "BoundedStore", lambda store, *_: store)
    barrier, outcomes, stopped = threading.Barrier(world_size), dict[int, Outcome](), threading.Event()
    compare, hours = rank_agreement.compare, itertools.count(1)

    def end_the_engine() -> None:
        stopped.set()
        barrier.abort()

    def end_process() -> None:
        raise ProcessEndedError

    def run(rank: int) -> None:
        fault.here.rank, fault.here.phase = rank, None
        checks: list[str] = []
        fault.here.checks = checks
        settled: list[tuple[str, bool]] = []
        watched: list[bool] = []
        me = process_double(dict(MODES[mode]))
        assert me.decision is not None
        me.decision = me.decision._replace(agreement_timeout=10)
        state = State.OFF if scenario == "differ" and rank == 1 else State.ACTIVE
        states_double = {fix.name: FixState(fix.name, Mode.AUTO, None, state, "") for fix in FIXES}
        keys = {Key(4), Key(8)}
        worker_double = worker_of(rank)
        worker_double.model_runner = RunnerDouble()
        if rank == 1 or scenario != NOT_EXCLUDED:
            worker_double.model_runner.dispatcher = SimpleNamespace(cudagraph_keys={GraphMode("FULL"): keys})
        graph = Graph(worker_double.model_runner, "FULL", 8, serves=True)

        def unapplied(**_: object) -> tuple[str, ...]:
            checks.append(f"fixes, {fault.here.phase}")
            return ()

        failed = rank == world_size - 1 and scenario in (FAILED, NOT_EXCLUDED)
        vars(me.manager).update(
            states=lambda **_: states_double,
            settle_capture=lambda name, what, failed: settled.append((name, failed)),
            unapplied=unapplied,
        )
        vars(me).update(
            stop_recording_failures=lambda: {"mamba-padding": {graph: "MemoryError"}} if failed else {},
            begin_capture=lambda worker: None,
            end_capture=lambda: None,
            on_captured=lambda worker, graphs: watched.append(graphs),
        )

        def meet(phase: str | None) -> None:
            """As ranks do in what vLLM runs between the sides of the gate."""
            fault.here.phase = None
            barrier.wait(DEADLINE)
            fault.here.phase = phase

        class WorkerDouble:
            determine_available_memory = staticmethod(lambda _: meet(None))
            profile_cudagraph_memory = staticmethod(lambda _: meet(None))
            compile_or_warm_up_model = staticmethod(lambda _: meet("after"))

        module_double = SimpleNamespace(WorkerDouble=WorkerDouble)
        hooks = CaptureHooks(me.gate)
        hooks.watch_profiling("WorkerDouble", module_double)
        for method in ("profile_cudagraph_memory", "compile_or_warm_up_model"):
            hooks.watch_capture("WorkerDouble", method, module_double)
        try:
            fault.here.phase = "profiling"
            WorkerDouble.determine_available_memory(worker_double)
            fault.here.phase = "measuring"
            WorkerDouble.profile_cudagraph_memory(worker_double)
            fault.here.phase = "capturing"
            WorkerDouble.compile_or_warm_up_model(worker_double)
            what = "serves"
        except threading.BrokenBarrierError:
            what = "is ended" if stopped.is_set() else "hangs"
        except ProcessEndedError:
            what = f"GraphfixError: {me.gate.status_record.problem}"
            end_the_engine()
        except Exception as error:
            timed_out = "No report within" in str(error)
            what = ("is ended" if stopped.is_set() else "hangs") if timed_out else f"{type(error).__name__}: {error}"
            # vLLM's executor takes results in the order of ranks: an error of rank 1 ends nothing while rank 0 runs.
            if rank == 0:
                end_the_engine()
        fault.here.phase = None
        record: Any = me.gate.status_record
        tokens = frozenset(key.num_tokens for key in keys)
        outcomes[rank] = Outcome(
            what, tokens, tuple(settled), tuple(watched), frozenset(checks), record.unchecked or record.problem
        )

    def compare_and_note(*args: Any, **kwargs: Any) -> Any:
        agreement = compare(*args, **kwargs)
        fault.here.checks.append(f"ranks, {fault.here.phase}")
        return agreement

    def now() -> float:
        """Time is up for a rank that waits for the report of one that has stopped: it is ended."""
        return time.monotonic() + (3600 * next(hours) if stopped.is_set() else 0)  # also if it has begun to wait since

    with monkeypatch.context() as patch:
        for name, value in MODES[mode].items():
            patch.setenv(name, value)
        patch.setattr(Fault, "current", fault)
        patch.setattr(distributed_c10d, "_get_default_store", lambda: shared)
        for module in (capture_gate, gate_reports):
            patch.setattr(module, "world", lambda: (fault.here.rank, world_size))
        patch.setattr(capture_gate, "exit_process", end_process)
        patch.setattr(rank_agreement, "compare", compare_and_note)
        patch.setattr(rank_agreement, "time", SimpleNamespace(monotonic=now))
        patch.setattr(rank_agreement, "_LAST_READERS", 0.1)
        patch.setattr(rank_agreement, "_SLICE", 0.05)
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE)
    return outcomes


def complaint(outcomes: Mapping[int, Outcome], clean: Mapping[int, Outcome], fault: Fault, mode: str) -> str | None:
    """Return what is wrong with *outcomes*, beside *clean*, which is a start without a fault."""
    messages = stops(outcomes)
    if outcomes.keys() != clean.keys() or any(each.what == "hangs" for each in outcomes.values()):
        return "hangs"
    if messages:
        if not all(message.startswith(f"GraphfixError: {STOPS}") for message in messages):
            return "stops without a clear message"
        # A rank that cannot reach the store can let nobody go on.
        silent = fault.point is not None and fault.point.module == "ranks" and "see that process's log" in str(messages)
        return None if stops(clean) or silent or "injected" in str(messages) else "stops for another reason"
    if stops(clean):
        return "starts"
    if len({(each.dispatch, each.watched) for each in outcomes.values()}) > 1:
        return "dispatches otherwise than the other rank"
    for rank, each in outcomes.items():
        # What could not be checked for graphs that are measured alone is checked again; so are ranks after the capture.
        last = ("capturing", "after") if len(clean) == 1 else ("after",)
        needed = {check for check in clean[rank].checks if check.endswith(last)}
        if needed <= each.checks and each.settled == clean[rank].settled:
            continue
        if mode != "auto":
            return "starts, and was not checked"
        if each.unchecked is None:
            return "starts, was not checked, and does not say so"
    return None


def stops(outcomes: Mapping[int, Outcome]) -> list[str]:
    return [each.what for each in outcomes.values() if each.what not in ("serves", "is ended", "hangs")]


def check_starts(
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    scenario: str,
    on: tuple[int, ...],
    *,
    always: bool = False,
    each: int = 1,
    world_size: int = 2,
) -> Iterator[tuple[str, Point]]:
    """Checks starts of an engine, and yields complaints; every *each*-th statement that a rank comes to fails."""
    without = Fault()
    clean = started(monkeypatch, without, mode, scenario, world_size)
    points = list(without.passed[on[0]])
    assert len(points) > 30
    fired = 0
    for point in itertools.islice(points, 0, None, each):
        fault = Fault(on, point, always=always)
        outcomes = started(monkeypatch, fault, mode, scenario, world_size)
        fired += fault.fired
        if (why := complaint(outcomes, clean, fault, mode)) is not None:
            yield f"{why}: {outcomes}", point
    assert fired


@pytest.mark.parametrize("mode", MODES)
def test_a_statement_that_fails_on_a_single_rank_stops_who_insists_or_is_reported(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_starts(monkeypatch, mode, FAILED, (0,), world_size=1)) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_some_statements_that_fail_on_one_rank_have_one_outcome_on_both(
    mode: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_starts(monkeypatch, mode, FAILED, (rank,), each=11)) == []


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", MODES)
def test_every_statement_that_fails_on_one_rank_has_one_outcome_on_both(
    mode: str, scenario: str, rank: int, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_starts(monkeypatch, mode, scenario, (rank,), always=always)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario != "differ"])
@pytest.mark.parametrize("mode", MODES)
def test_every_statement_that_fails_on_both_ranks_has_one_outcome_on_both(
    mode: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_starts(monkeypatch, mode, scenario, (1, 0), always=True)) == []


def test_a_rank_without_a_report_stops_nobody_and_all_compare_after_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not wait for it until they stop for want of its report."""
    without = Fault()
    clean = started(monkeypatch, without, "auto", FAILED)
    reports = [point for point in without.passed[1] if point.module == "own_report" and point.phase == "capturing"]
    outcomes = started(monkeypatch, Fault((1,), reports[0]), "auto", FAILED)
    assert {each.what for each in outcomes.values()} == {"serves"}
    assert {each.dispatch for each in outcomes.values()} == {clean[0].dispatch} == {frozenset({4})}
    assert all("ranks, after" in each.checks for each in outcomes.values())
