"""What the shadow check finds and costs on one GPU, with the tiny models of `verify` on the installed vLLM.

    python benchmarks/shadow_check.py --out FOLDER [--only CASE …] [--checks 10000] [--rounds 5]

For each case, one engine after the other, in processes of their own:

caught      every fix off, every replay checked: how many checks until the first mismatch, and its first wrong layer
silent      the fixes on, every replay checked, the workload again and again until --checks are made: mismatches are false alarms
quarantine  every fix off, quarantine: tokens of the second pass against those of an eager engine
throughput  the fixes on; off, 1/100 and 0.1%: seconds for the workload, --rounds times in turn, as ratios to off

The result is written after every engine to FOLDER/result.json. Exit code 1 if there was a false alarm, 2 if nothing could be run.
Not run yet: no GPU could be had when this was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import PREFIX, SHADOW, SHADOW_ACTION
from vllm_graphfix.verify.engine import models
from vllm_graphfix.verify.engine.cases import CASES, Case
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import Ended, Engines

TIMEOUT = 900.0
"""Seconds for one engine."""
OFF: dict[str, str | None] = {**dict.fromkeys(map(variable, BY_NAME), "off"), PREFIX: "on"}
ON: dict[str, str | None] = {PREFIX: "on"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the engines' logs"
    )
    parser.add_argument("--only", action="append", choices=sorted({case.name for case in CASES.values()}))
    parser.add_argument(
        "--checks", type=int, default=10_000, metavar="N", help="without a false alarm (default: 10000)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of throughput (default: 5)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured = Measured(options.out)
    cases = {case.name: case for case in CASES.values() if not options.only or case.name in options.only}
    for case in cases.values():
        for name in case.models:
            models.write(name, options.out / "models")
        caught(measured, case)
        silent(measured, case, options.checks)
        quarantine(measured, case)
        throughput(measured, case, options.rounds)
    if not measured.ran:
        return 2
    return int(any(found.get("silent", {}).get("mismatches") for found in measured.result.values()))


class Measured:
    """Engines, and the result so far."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._engines = Engines(out, TIMEOUT)
        self.result: dict[str, dict[str, Any]] = {}
        self.ran = False

    def engine(self, case: Case, what: str, environment: dict[str, str | None], **changes: Any) -> Ended:
        eager, stock, _ = case.jobs(self._out / "models")
        job: Job = replace(eager if what == "eager" else stock, name=f"{case.name} {what}", probes=(), **changes)
        job = replace(job, environment=job.environment | environment)
        ended = self._engines.run([job], 1)[job.name]
        self.ran |= ended.said is not None
        return ended

    def write(self, case: Case, what: str, found: Any) -> None:
        self.result.setdefault(case.name, {})[what] = found
        (self._out / "result.json").write_text(json.dumps(self.result, indent=1))
        print(f"{case.name} {what}: {found}", file=sys.stderr)


def seen(ended: Ended) -> dict[str, Any]:
    """What the check counted in an engine; its error if it did not end well."""
    if ended.said is None:
        return {"error": ended.error}
    return {
        name.removeprefix("shadow: "): values
        for name, values in ended.said.observed.items()
        if name.startswith("shadow: ")
    }


def caught(measured: Measured, case: Case) -> None:
    measured.write(case, "caught", seen(measured.engine(case, "caught", OFF | {SHADOW: "1/1"})))


def silent(measured: Measured, case: Case, checks: int) -> None:
    made, mismatches, engines = 0, 0, 0
    while made < checks:
        found = seen(measured.engine(case, f"silent {engines}", ON | {SHADOW: "1/1"}, again=True))
        if not found.get("checks"):
            measured.write(case, "silent", {"error": found})
            return
        made, mismatches, engines = (
            made + int(found["checks"][0]),
            mismatches + int(found["mismatches"][0]),
            engines + 1,
        )
        measured.write(case, "silent", {"checks": made, "mismatches": mismatches, "engines": engines})


def quarantine(measured: Measured, case: Case) -> None:
    eager = measured.engine(case, "eager", {PREFIX: "off"})
    given = OFF | {SHADOW: "1/1", SHADOW_ACTION: "quarantine"}
    served = measured.engine(case, "quarantine", given, again=True)
    if eager.said is None or served.said is None:
        measured.write(case, "quarantine", {"error": eager.error or served.error})
        return
    right = [
        sum(one.tokens == other.tokens for one, other in zip(answers, eager.said.passes[0], strict=True))
        for answers in served.said.passes
    ]
    measured.write(case, "quarantine", seen(served) | {"right answers by pass": right, "of": len(eager.said.passes[0])})


def throughput(measured: Measured, case: Case, rounds: int) -> None:
    taken: dict[str, list[float]] = {"off": [], "1/100": [], "0.1%": []}
    for _ in range(rounds):
        for rate, seconds in taken.items():
            ended = measured.engine(case, f"throughput {rate.replace('/', ' of ')}", ON | {SHADOW: rate}, again=True)
            if ended.said is not None:
                seconds.append(ended.seconds - ended.said.start_seconds)
    medians = {rate: statistics.median(seconds) for rate, seconds in taken.items() if seconds}
    measured.write(
        case, "throughput", {rate: value / medians["off"] for rate, value in medians.items() if "off" in medians}
    )


if __name__ == "__main__":
    sys.exit(main())
