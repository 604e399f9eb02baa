"""One run of `benchmarks/engine_cost.py`: its engines, their turns and starts, and the result file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from measuring import machine
from measuring.engine_cases import (
    CASES,
    PATCHED,
    REHEARSAL,
    STOCK,
    Case,
    Configuration,
    Plan,
    Site,
    find_sites,
    plan,
    plan_of_detectors,
    rehearsal,
    write_model,
)
from measuring.engine_process import DiedError, EngineProcess, used_gpu_memory
from measuring.engine_steps import STEPS, measured, packed, step_plans
from vllm_graphfix import __version__
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine import processes

SCHEMA = 1
START_TIMEOUT, TURN_TIMEOUT = 240.0, 90.0
"""Seconds for an engine to start, and for a turn."""
WORTHWHILE = 100.0
"""The least seconds for a case to begin with: its engines take most of that to start."""
RESULT = "result.json"


class Benchmark:
    """One run of all cases."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._out: Path = options.out.resolve()
        self._out.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="graphfix-engines-"))
        self._alive: list[EngineProcess] = []
        self._sites: tuple[Site, ...] = ()
        self._result: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Run all cases and end all processes, also on an interrupt. Raises VerifyError, SourceError, ValueError."""
        with ExitStack() as ending:
            ending.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            ending.enter_context(processes.terminated_like_interrupted())
            ending.callback(self._end_all)
            self._sites = find_sites(self._options.site)
            plans, free_gib = self._plans()
            if self._options.steps:
                groups = packed(plans, free_gib)
                for number, group in enumerate(groups):
                    self._decode(group, cases_to_run=sum(map(len, groups[number:])))
                plans = []
            for number, group in enumerate(_groups(plans, free_gib)):
                self._decode(group)
                if number == 0 and self._options.starts:
                    self._start_pairs(group[0])
            self._result["seconds"] = round(time.monotonic() - self._began)
            self._save()
        return self._result

    # -- what is to be run ---------------------------------------------------------------------------------------

    def _plans(self) -> tuple[list[Plan], float]:
        rate = self._options.detectors
        if self._options.rehearse:
            plans = step_plans(self._sites, REHEARSAL) if self._options.steps else rehearsal(self._sites)
            if rate:
                plans = [plan_of_detectors(case, self._sites, rate) for case in REHEARSAL]
            plans = [made for made in plans if self._wanted(made.case)]
            device: dict[str, Any] = {"name": "CPU engine, rehearsal", "driver": "none", "torch": "", "cuda": "none"}
            capability, free_gib = None, float("inf")
        else:
            gpu = devices.find()
            if gpu.name is None:
                raise VerifyError(f"no GPU ({gpu.why_not}); --rehearse runs this script on a CPU engine")
            device = {key: getattr(gpu, key) for key in ("name", "driver", "torch", "cuda", "python", "total_gib")}
            capability, free_gib = gpu.capability[0], gpu.free_gib
            cases = [case for case in CASES if self._wanted(case) and not self._options.steps]
            planned = [
                plan_of_detectors(case, self._sites, rate) if rate else plan(case, self._sites) for case in cases
            ]
            plans = [made for made in planned if made is not None]
            if self._options.steps:
                plans = step_plans(self._sites, [case for case in STEPS if self._wanted(case)])
            for case, made in zip(cases, planned, strict=True):
                if made is None:
                    self._log(
                        f"{case.name}: not run; none of the given releases is affected by {', '.join(case.fixes)}"
                    )
        self._result = {
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "graphfix": __version__,
            "device": device,
            "machine": machine(),
            "command": sys.argv[1:],
            "cases": [self._empty(made) for made in plans],
        }
        self._save()
        runnable = []
        for made in plans:
            case, needed = made.case, made.case.gib * len(made.configurations)
            if capability is not None and case.capability not in (None, capability):
                self._not_run(made, f"needs compute capability {case.capability}.0")
            elif needed > free_gib:
                self._not_run(made, f"needs {needed:.0f} GiB of free GPU memory, {free_gib} are")
            else:
                runnable.append(made)
        return runnable, free_gib

    def _wanted(self, case: Case) -> bool:
        return not self._options.only or case.name.partition("_")[0] in self._options.only

    def _empty(self, made: Plan) -> dict[str, Any]:
        case = made.case
        return {
            "name": case.name,
            "title": case.title,
            "fixes": list(case.fixes),
            "runner": case.runner,
            "model": dict(case.model),
            "target": case.target,
            "tokens": self._options.tokens,
            "not_run": list(made.not_run),
            "configurations": [
                {
                    "name": configuration.name,
                    "label": configuration.label,
                    "release": configuration.site.release,
                    "graphs": configuration.graphs,
                    "attempt": 0,
                    "first_failure": None,
                    "failure": None,
                    "started_in": None,
                    "told": None,
                }
                for configuration in made.configurations
            ],
            "rounds": [],
            "starts": [],
        }

    # -- decoding ------------------------------------------------------------------------------------------------

    def _decode(self, group: Sequence[Plan], cases_to_run: int = 1) -> None:
        """Measure *group*: each of *cases_to_run* gets its share of the time with --steps, or the first all."""
        if self._remaining() < WORTHWHILE:
            for made in group:
                self._not_run(made, "time was up")
            return
        self._log(f"starting {sum(len(made.configurations) for made in group)} engines: {_named(group)}")
        with self._started(group) as engines:
            for number, made in enumerate(group):
                if self._options.steps:
                    self._steps(made, engines[made.case.name], self._remaining() / max(1, cases_to_run - number))
                elif engines[made.case.name]:
                    self._rounds(made, engines[made.case.name], self._remaining())
        self._log(f"ended: {_named(group)}")

    @contextmanager
    def _started(self, group: Sequence[Plan]) -> Iterator[dict[str, dict[str, EngineProcess]]]:
        """Start the engines of *group*, and end them on exit; yields those that answer, by case and configuration."""
        running: dict[str, dict[str, EngineProcess]] = {made.case.name: {} for made in group}
        waiting = [(made, configuration) for made in group for configuration in made.configurations]
        try:
            attempt = 0
            while waiting:
                begun = [(*which, self._begin(*which, attempt)) for which in waiting]
                waiting = []
                until = time.monotonic() + min(START_TIMEOUT, self._remaining())
                for made, configuration, engine in begun:
                    entry = self._entry(made, configuration)
                    try:
                        ready = engine.ready(until - time.monotonic())
                    except DiedError as error:
                        self._end(engine)
                        self._log(f"{made.case.name} {configuration.name}: {error}")
                        if attempt + 1 < configuration.attempts(made.case):
                            entry |= {"attempt": attempt + 1, "first_failure": str(error)}
                            waiting.append((made, configuration))
                        else:
                            entry["failure"] = f"did not start: {error}"
                        continue
                    self._log(f"{made.case.name} {configuration.name}: ready after {ready.seconds:.0f} s")
                    entry |= {"started_in": ready.seconds, "told": ready.answer}
                    running[made.case.name][configuration.name] = engine
                attempt += 1
            self._save()
            yield running
        finally:
            for engines in running.values():
                for engine in engines.values():
                    self._end(engine)

    def _begin(self, made: Plan, configuration: Configuration, attempt: int, suffix: str = "") -> EngineProcess:
        case = made.case
        name = f"{case.name}-{configuration.name}{suffix}{f'-attempt-{attempt + 1}' if attempt else ''}"
        # A compile cache of its own, which its next start finds warm: engines compile at the same time.
        cache = self._scratch / f"cache-{case.name}-{configuration.name}"
        engine = EngineProcess(
            configuration.order(case, attempt, write_model(case, self._scratch), max(self._options.batches)),
            configuration.environment(case, self._sites, cache),
            self._out / f"{name}.log",
        )
        self._alive.append(engine)
        return engine

    def _rounds(self, made: Plan, engines: dict[str, EngineProcess], seconds: float) -> None:
        result, until = self._case(made), time.monotonic() + seconds
        turns = [(batch, name) for batch in self._options.batches for name in engines]
        for batch in self._options.batches:  # the first batch of a size may compile: warm up
            self._turns(made, engines, [(batch, name) for name in engines], together=True)
        took, done = 0.0, 0
        for number in range(self._options.rounds):
            if until - time.monotonic() < 1.2 * took:
                result["not_run"].append(
                    f"{self._options.rounds - number} of {self._options.rounds} rounds: time was up"
                )
                break
            began = time.monotonic()
            taken = self._turns(made, engines, turns if number % 2 else turns[::-1])
            result["rounds"] += [
                {"batch": batch, "seconds": {name: taken[batch, name] for b, name in taken if b == batch}}
                for batch in self._options.batches
            ]
            took, done = time.monotonic() - began, number + 1
            self._save()
        self._log(f"{made.case.name}: {done} rounds, the last one took {took:.1f} s")

    def _steps(self, made: Plan, engines: Mapping[str, EngineProcess], seconds: float) -> None:
        """Measure every batch in each engine; start nothing after *seconds*."""
        until = time.monotonic() + seconds
        for name, engine in engines.items():
            entry = self._entry(made, made[name])
            entry["steps"] = []
            for batch in self._options.batches:
                if time.monotonic() > until:
                    self._case(made)["not_run"].append(f"{name}, batch {batch}: time was up")
                    continue
                try:
                    entry["steps"].append(measured(engine, batch, self._options.count, TURN_TIMEOUT))
                except DiedError as error:
                    entry["failure"] = f"died while decoding batch {batch}: {error}"
                    self._log(f"{made.case.name} {name}: {entry['failure']}")
                    break
                self._save()
        self._log(f"{made.case.name}: measured")

    def _turns(
        self, made: Plan, engines: dict[str, EngineProcess], turns: Sequence[tuple[int, str]], *, together: bool = False
    ) -> dict[tuple[int, str], float]:
        """Return the seconds of each turn. An engine that dies is reported and left out of later turns."""
        taken = {}

        def guarded(turn: tuple[int, str], ask: Callable[[EngineProcess], object]) -> Any:
            batch, name = turn
            try:
                return ask(engines[name]) if name in engines else None
            except DiedError as error:
                self._end(engines.pop(name))
                configuration = made[name]
                self._entry(made, configuration)["failure"] = f"died while decoding batch {batch}: {error}"
                self._log(f"{made.case.name} {name}: died while decoding batch {batch}: {error}")
                return None

        def tell(turn: tuple[int, str]) -> None:
            guarded(turn, lambda engine: engine.tell(turn[0], self._options.tokens))

        if together:
            for turn in turns:
                tell(turn)
        for turn in turns:
            if not together:
                tell(turn)
            seconds = guarded(turn, lambda engine: engine.hear(TURN_TIMEOUT))
            if seconds is not None:
                taken[turn] = seconds
        return taken

    # -- starts --------------------------------------------------------------------------------------------------

    def _start_pairs(self, made: Plan) -> None:
        """Start stock and patched at the same time, on the same machine; both have compiled before."""
        result = self._case(made)
        failed = [name for name in (STOCK, PATCHED) if self._entry(made, made[name])["told"] is None]
        if failed:
            result["not_run"].append(f"starts: {' and '.join(failed)} did not start before")
            return
        took = 0.0
        for number in range(self._options.starts):
            if self._remaining() < 1.2 * took:
                count = self._options.starts
                result["not_run"].append(f"{count - number} of {count} pairs of starts: time was up")
                break
            began = time.monotonic()
            order = (STOCK, PATCHED) if number % 2 else (PATCHED, STOCK)
            try:
                result["starts"].append(self._start_pair(made, order, number + 1))
            except DiedError as error:
                result["not_run"].append(f"a pair of starts: {error}")
                self._end_all()
            took = time.monotonic() - began
            self._save()
            self._log(f"{made.case.name}: pair {number + 1} of starts took {took:.0f} s")

    def _start_pair(self, made: Plan, order: Sequence[str], number: int) -> dict[str, dict[str, Any]]:
        engines = {
            name: self._begin(made, made[name], self._entry(made, made[name])["attempt"], f"-start-{number}")
            for name in order
        }
        timeout = min(START_TIMEOUT, self._remaining())
        ready = {name: engine.ready(timeout) for name, engine in engines.items()}
        pair = {}
        used = used_gpu_memory()
        for name, engine in engines.items():
            self._end(engine)  # its memory is what becomes free
            remaining = used_gpu_memory()
            facts = ready[name].answer
            pair[name] = {
                "seconds": ready[name].seconds,
                "cpu_seconds": facts["cpu_seconds"],
                "capture_seconds": facts["capture_seconds"],
                "reserved_bytes": facts["reserved_bytes"],
                "used_bytes": used - remaining if used is not None and remaining is not None else None,
            }
            used = remaining
        return pair

    # -- the rest ------------------------------------------------------------------------------------------------

    def _case(self, made: Plan) -> dict[str, Any]:
        case: dict[str, Any] = next(case for case in self._result["cases"] if case["name"] == made.case.name)
        return case

    def _entry(self, made: Plan, configuration: Configuration) -> dict[str, Any]:
        entries = self._case(made)["configurations"]
        entry: dict[str, Any] = next(entry for entry in entries if entry["name"] == configuration.name)
        return entry

    def _not_run(self, made: Plan, why: str) -> None:
        self._case(made)["not_run"].append(why)
        self._log(f"{made.case.name}: not run, {why}")
        self._save()

    def _remaining(self) -> float:
        return float(self._options.limit) - (time.monotonic() - self._began)

    def _end(self, engine: EngineProcess) -> None:
        engine.end()
        self._alive.remove(engine)

    def _end_all(self) -> None:
        for engine in [*self._alive]:
            self._end(engine)

    def _save(self) -> None:
        partial = self._out / f"{RESULT}.partial"
        partial.write_text(json.dumps(self._result, indent=1))
        partial.replace(self._out / RESULT)  # atomic: a reader sees a whole file

    def _log(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)


def _groups(plans: Sequence[Plan], free_gib: float) -> list[list[Plan]]:
    """Return the first case alone, since it matters most, and the others together if memory and cores suffice."""
    first, rest = list(plans[:1]), list(plans[1:])
    needed = sum(made.case.gib * len(made.configurations) for made in rest)
    engines = sum(len(made.configurations) for made in rest)
    together = needed <= free_gib and engines <= (os.cpu_count() or 1)
    return [group for group in ([first, rest] if together else [first, *([made] for made in rest)]) if group]


def _named(group: Sequence[Plan]) -> str:
    return ", ".join(made.case.name for made in group)
