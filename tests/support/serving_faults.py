"""Faults in an engine that serves, one after the other in as few engines as live through them; what came of each."""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engine as cpu
import vllm_graphfix
from serving_faults_engine import ERRORS
from vllm_graphfix.verify.engine import models

ON = {
    "VLLM_GRAPHFIX_SHADOW": "1/1",
    "VLLM_GRAPHFIX_SHADOW_ACTION": "abort",
    "VLLM_GRAPHFIX_KV_MARKS": "1/1",
    "VLLM_GRAPHFIX_KV_MARKS_ACTION": "abort",
    "TORCHDYNAMO_DISABLE": "1",
}
LIMIT = 30.0
"""Seconds after which an engine that neither answers nor stops hangs."""
_START = 300.0
_SLOW = 120.0
"""Seconds that are waited for an outcome, of a machine that may be slow; the engine itself measures the limit."""


class Fault(NamedTuple):
    """An error of one statement: the next time, or always."""

    process: str
    """``scheduler``, or the rank."""
    place: str
    error: str
    times: int | None


class Outcome(NamedTuple):
    fault: Fault
    result: Mapping[str, Any] | None
    """None where the engine hung; without ``after`` it ended."""


class Engine:
    """One engine's process, until `end`."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("serving_faults_engine.py")
        python, environment = cpu.forking_python(cpu.environment(folder, cpu.cpu_engine()) | ON)
        environment["PYTHONPATH"] = os.pathsep.join([str(script.parent), environment["PYTHONPATH"]])
        self._log = (folder / "engine.log").open("a+")
        self._process = subprocess.Popen(
            [python, str(script), str(models.write("llama", folder))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._pending = b""
        self.start = self._read(_START)
        assert self.start is not None, (folder / "engine.log").read_text()[-8000:]

    def try_out(self, fault: Fault) -> Mapping[str, Any] | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fault).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(_SLOW)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        until, descriptor = time.monotonic() + seconds, self._process.stdout.fileno()
        while True:
            while b"\n" in self._pending:
                line, self._pending = self._pending.split(b"\n", 1)
                if line.startswith(b"{"):
                    result: dict[str, Any] = json.loads(line)
                    return result
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            more = os.read(descriptor, 1 << 16) if ready else b""
            if not more:
                return None
            self._pending += more

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def functions(places: Sequence[str]) -> list[str]:
    """Of *places* the first of each function."""
    first: dict[tuple[str, int], str] = {}
    trees: dict[str, ast.AST] = {}
    root = Path(vllm_graphfix.__file__).parent
    for place in sorted(places, key=_line):
        file = place.rpartition(":")[0]
        if file not in trees:
            trees[file] = ast.parse((root / file).read_text())
        around = [
            node
            for node in ast.walk(trees[file])
            if isinstance(node, ast.FunctionDef) and node.lineno <= _line(place) <= (node.end_lineno or 0)
        ]
        innermost = max(around, key=lambda node: node.lineno)
        first.setdefault((file, innermost.lineno), place)
    return sorted(first.values())


def _line(place: str) -> int:
    return int(place.rpartition(":")[2])


def plan(places: Mapping[str, Sequence[str]], *, whole: bool) -> list[Fault]:
    """Faults of each function, once and always, on the ranks in turn; of the *whole* of each statement."""
    errors, faults = list(ERRORS), []
    for process, of_process in places.items():
        chosen = sorted(of_process) if whole else functions(of_process)
        for number, place in enumerate(chosen):
            where = process if process == "scheduler" else str(number % 2)
            faults += [Fault(where, place, errors[(number + (n or 0)) % len(errors)], n) for n in (1, None)]
    return faults


def outcomes(folder: Path, *, whole: bool = False, every: int = 1) -> tuple[dict[str, Any], list[Outcome]]:
    """Return an engine's report of itself without a fault, and the outcomes of one of *every* faults."""
    engine = Engine(folder)
    start: dict[str, Any] = engine.start or {}
    collected: list[Outcome] = []
    try:
        for fault in plan(start["places"], whole=whole)[::every]:
            if collected and _has_ended(collected[-1]):
                engine.end()
                engine = Engine(folder)
            collected.append(Outcome(fault, engine.try_out(fault)))
    finally:
        engine.end()
    return start, collected


def _has_ended(outcome: Outcome) -> bool:
    return outcome.result is None or "after" not in outcome.result


def complaints(start: Mapping[str, Any], outcome: Outcome) -> list[str]:
    """Return what must not be."""
    result = outcome.result
    if result is None:
        return ["the engine hangs, or has ended without a word"]
    bad: list[str] = []
    if result["took"] > LIMIT:
        bad.append(f"it took {result['took']:.0f} s")
    eager = [tokens for _, tokens in start["eager"]]
    stock = [tokens for _, tokens in start["stock"]]
    missed = False
    for batch in ("first", "second", "after"):
        for number, (reason, tokens) in enumerate(result.get(batch, ())):
            right = eager[number][: len(tokens)]
            if tokens == right and (reason == "length" or (reason == "error" and batch != "after")):
                continue
            if batch == "first" and reason == "length" and tokens == stock[number]:
                missed = True
                continue
            bad.append(f"{batch}: request {number} has {reason} {tokens}")
    struck = [result["scheduler"], *result.get("ranks", ())]
    speaks = any(level >= 30 for report in struck for level, text in report["log"] if _is_of_a_failure(text))
    speaks = speaks or any(
        state != "active"
        for report in struck
        for name, (state, _) in report["states"].items()
        if not (name == "kv-marks" and state == "waiting")
    )
    if "first" in result and missed and not speaks:
        bad.append("nothing says that a verdict is missing")
    if "second" in result and all(reason == "length" for reason, _ in result["second"]) and not speaks:
        bad.append("nothing says that a mark is missing")
    return bad


def _is_of_a_failure(text: str) -> bool:
    return not ("a replayed CUDA graph was wrong" in text or "has changed although it was finished" in text)


def ended(outcome: Outcome) -> str:
    """Return how it ended, in words, to be counted."""
    result = outcome.result
    if result is None:
        return "hung"
    if "ended" in result:
        return "the engine stopped"
    if not (result["scheduler"]["fired"] or any(report["fired"] for report in result["ranks"])):
        return "not made"
    if "failed" in result:
        return "the step failed"
    return "as without a fault" if result["first"][1][0] == "error" else "right as stock"
