"""Engines with the shadow check on the installed vLLM and a GPU: what it catches, its false alarms and its cost.

    python benchmarks/shadow_check.py --out FOLDER [--only CASE …] [--part PART …] [--checks 10000] [--parallel 6]

Each tiny model of `verify` runs in engines of its own, side by side with the others:

caught      every fix off, every replay checked: checks until the first mismatch, and its first wrong layer
quarantine  every fix off, quarantine: the answers of three passes that equal an eager engine's
alone       every fix off, no check: answers must equal those of `caught`, since a check changes nothing
others-on   only the case's own fix off, no check: wrong answers are this defect's alone
silent      the fixes on, every replay of every kind of graph checked, and all other detectors on: each mismatch is a
            false alarm. First the workload of `verify`, whose answers must equal an eager engine's; then a load of
            requests that come, go, wait, are aborted and, where the cache can be small enough, preempted, until all
            cases together have made --checks. Engines with LoRA adapters run the load only
budget      the fixes on, a rate of 0.1% and the same load for --seconds: the share of time that checks take

ranks       on two GPUs, with tensor and pipeline parallelism, for latent attention also decode context parallelism,
            under the same load for --seconds: every fix off with quarantine, the fixes on, and a budget of 1 %. Both
            ranks must count the same and check the same steps

The result is written after every part to FOLDER/result.json. Exit code 1 if there was a false alarm, or an engine with
the fixes on ended in an error; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring.engine_cases import ALL_DETECTORS
from measuring.engine_process import DiedError, EngineProcess, Order
from measuring.shadow_cases import OF_NO_VERIFY, checked_cases, write
from vllm_graphfix import manifest
from vllm_graphfix.fix import Fix, Verdict, variable
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.settings.environment import PREFIX, SHADOW, SHADOW_ACTION
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.case import Case
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import Engines, JobResult
from vllm_graphfix.verify.trial import further_cases, trial_of

TIMEOUT = 400.0
"""Seconds for one engine."""
LOAD = Path(__file__).parent / "measuring" / "shadow_load.py"
PARTS = ("caught", "alone", "others-on", "quarantine", "silent", "budget", "ranks")
OFF: dict[str, str | None] = {**dict.fromkeys(map(variable, BY_NAME), "off"), PREFIX: "on"}
ON: dict[str, str | None] = {**dict.fromkeys(map(variable, BY_NAME), "auto"), PREFIX: "on"}
WATCHED: dict[str, str | None] = {**ON, **ALL_DETECTORS}
PASSES = 3
RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "context": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
OF_ONE_HEAD = ("mla", "mla-mtp")
"""Models whose context two ranks can share: they have fewer KV heads than ranks."""
FEW_BLOCKS = 34
"""Blocks of a cache: enough for one request of the greatest length, and for a third of the requests of a full batch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="for result.json and the engines' logs"
    )
    cases = checked_cases()
    parser.add_argument("--only", action="append", choices=sorted(case.name for case in cases))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--checks", type=int, default=10_000, metavar="N", help="without a false alarm (10000)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="of load on one engine, at most (300)"
    )
    parser.add_argument("--parallel", type=int, default=6, metavar="N", help="engines at a time (6)")
    options = parser.parse_args()
    options.out = options.out.resolve()  # engines start in other folders
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [case for case in cases if case.name in options.only] if options.only else cases
    benchmark = Benchmark(options, wanted)
    parts = options.part or PARTS
    benchmark.tokens([part for part in PARTS if part in parts])
    for part in ("silent", "budget"):
        if part in parts:
            benchmark.load(part)
    if "ranks" in parts:
        if not metadata.entry_points(group="vllm.general_plugins", name="graphfix"):
            parser.error("install the plugin: a worker that is spawned finds it by its entry point alone")
        benchmark.ranks()
    if not benchmark.ran:
        return 2
    return int(any(map(_false_alarm, benchmark.result["cases"].values())))


def _false_alarm(results: dict[str, Any]) -> bool:
    """Return whether an engine with the fixes on saw a mismatch, or ended in an error."""
    parts = [part for name, part in results.items() if name in ("silent", "load", "budget") or "the fixes on" in name]
    ranks = [rank for part in parts for rank in (part, *part.get("ranks", ()))]
    return any(rank.get("mismatches") or rank.get("ended") or rank.get("error") for rank in ranks)


class Benchmark:
    """One run of all parts, and its result so far."""

    def __init__(self, options: argparse.Namespace, cases: Sequence[Case]) -> None:
        self._options, self._cases = options, cases
        self._source = open_source()
        self.result: dict[str, Any] = {
            "vllm": self._source.version,
            "command": sys.argv[1:],
            "cases": {
                case.name: {"affected": [fix.name for fix in self._defects_of(case)], "runner": case.runner}
                for case in cases
            },
        }
        self.ran = False
        for name in {name for case in cases for name in case.models}:
            write(name, self._models)
        self._adapters = [str(write(name, self._models)) for name in adapters.NAMES]

    @property
    def _models(self) -> Path:
        return Path(self._options.out) / "models"

    def _defects_of(self, case: Case) -> list[Fix]:
        return [
            fix
            for fix in FIXES
            if case
            in (trial_of(fix.name).case, *further_cases(fix.name, self._source), *OF_NO_VERIFY.get(fix.name, ()))
            and manifest.diagnose(fix, self._source).verdict is Verdict.AFFECTED
        ]

    def _write(self, name: str, what: str, result: Any) -> None:
        # After every engine, so that an interrupted run leaves what was benchmark.
        self.result["cases"].setdefault(name, {})[what] = result
        (self._options.out / "result.json").write_text(json.dumps(self.result, indent=1))
        print(f"{self._source.version} {name} {what}: {json.dumps(result)}", file=sys.stderr)

    # -- engines of tiny models with the workload of `verify` -----------------------------------------------------

    def tokens(self, parts: Sequence[str]) -> None:
        jobs = [job for case in self._cases for job in self._jobs(case, parts)]
        engines = Engines(
            self._options.out, TIMEOUT, done=lambda job, how: print(f"{job.name}: {how}", file=sys.stderr)
        )
        ended = engines.run(jobs, self._options.parallel)
        self.ran |= any(end.result for end in ended.values())
        for case in self._cases:
            eager = ended.get(f"{case.name} eager")
            for part in parts:
                if (end := ended.get(f"{case.name} {part}")) is not None:
                    self._write(case.name, part, _counts(end, eager))
            alone, caught = ended.get(f"{case.name} alone"), ended.get(f"{case.name} caught")
            if alone and caught and alone.result and caught.result:
                self._write(
                    case.name, "answers as without the check", _equal(caught.result.passes, alone.result.passes)
                )

    def _jobs(self, case: Case, parts: Sequence[str]) -> list[Job]:
        if not case.workload:
            return []
        eager, stock, _ = case.jobs(self._models)
        shadow: dict[str, str | None] = {SHADOW: "1/1", SHADOW_ACTION: "report"}
        environments = {
            "caught": OFF | shadow,
            "alone": OFF,
            "others-on": ON | dict.fromkeys((fix.variable for fix in self._defects_of(case)), "off"),
            "quarantine": OFF | shadow | {SHADOW_ACTION: "quarantine"},
            "silent": WATCHED | shadow,
        }
        if not self._defects_of(case):
            environments = {"silent": environments["silent"]}
        jobs = [
            replace(
                stock,
                name=f"{case.name} {part}",
                probes=(),
                extra_passes=PASSES - 1,
                environment=stock.environment | environments[part],
            )
            for part in parts
            if part in environments
        ]
        return [replace(eager, probes=()), *jobs] if jobs else []

    # -- the same engines under load ------------------------------------------------------------------------------

    def load(self, part: str) -> None:
        """Run all cases at once, until their checks together are as many as --checks."""
        rate = "1/1" if part == "silent" else "0.1%"
        each = -(-self._options.checks // len(self._cases)) if part == "silent" else 1 << 40

        def one(case: Case) -> None:
            counts = self._loaded(case, part, WATCHED | {SHADOW: rate}, each)
            self.ran |= "error" not in counts
            self._write(case.name, "load" if part == "silent" else part, counts)

        with ThreadPoolExecutor(self._options.parallel) as pool:
            list(pool.map(one, self._cases))

    def _loaded(
        self, case: Case, part: str, environment: dict[str, str | None], checks: int, **more: Any
    ) -> dict[str, Any]:
        job = case.jobs(self._models)[1]
        arguments = dict(job.arguments)
        arguments |= {"max_num_batched_tokens": max(256, arguments.get("max_num_batched_tokens", 0))}  # long: in chunks
        if not case.model.startswith(("mamba", "deepseek-v4")):  # these need more for one request
            arguments["num_gpu_blocks_override"] = FEW_BLOCKS * 64 // arguments.get("block_size", 16)
        environment = job.environment | environment
        engine = EngineProcess(
            Order(
                arguments=arguments | more,
                plugin=True,
                runner=case.runner,
                largest_batch=0,
                where_known=job.supported_arguments,
            ),
            _environment(environment),
            self._options.out / f"{case.name}-{part}-load.log",
            LOAD,
        )
        try:
            engine.ready(TIMEOUT)
            request = {"checks": checks, "seconds": self._options.seconds, "seed": 7}
            request["adapters"] = self._adapters if "enable_lora" in case.arguments else ()
            counts: dict[str, Any] = engine.ask(request, self._options.seconds + TIMEOUT)
        except DiedError as error:
            return {"error": str(error)}
        finally:
            engine.end()
        return counts

    # -- the same on two GPUs -------------------------------------------------------------------------------------

    def ranks(self) -> None:
        wanted = [
            (case, parallel, what, environment)
            for case in self._cases
            for parallel in RANKS
            if parallel != "context" or case.model in OF_ONE_HEAD
            for what, environment in (
                ("the fixes on", ON | {SHADOW: "1/1"}),
                ("the fixes on, a budget", ON | {SHADOW: "1%"}),
                ("every fix off, quarantine", OFF | {SHADOW: "1/1", SHADOW_ACTION: "quarantine"}),
            )
            if what.startswith("the fixes on") or self._defects_of(case)
        ]

        def one(case: Case, parallel: str, what: str, environment: dict[str, str | None]) -> None:
            # `collective_rpc` sends the workers a function, which vLLM pickles with this alone.
            insecure: dict[str, str | None] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            part = f"{parallel} parallel, {what}"
            counts = self._loaded(case, part.replace(" ", "-"), environment | insecure, 0, **RANKS[parallel])
            self.ran |= "error" not in counts
            self._write(case.name, part, counts)

        with ThreadPoolExecutor(self._options.parallel) as pool:
            list(pool.map(lambda which: one(*which), wanted))


def _environment(extra: dict[str, str | None]) -> dict[str, str]:
    merged = {name: value for name, value in {**os.environ, **extra}.items() if value is not None}
    path = os.pathsep.join(filter(None, [str(PACKAGE), merged.get("PYTHONPATH", "")]))
    return merged | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _counts(ended: JobResult, eager: JobResult | None) -> dict[str, Any]:
    """Return the counts of the check, and the answers of each pass that equal the eager engine's; or the error."""
    if ended.result is None:
        return {"error": ended.error}
    counts: dict[str, Any] = {
        name.removeprefix("shadow: "): values[0]
        for name, values in ended.result.observed.items()
        if name.startswith("shadow: ")
    }
    counts["states"] = next(iter(ended.result.states.values()), {}).get("shadow")
    if eager is not None and eager.result is not None:
        # Passes alternate between two orders of prompts: compare like with like, since other batches round otherwise.
        orders = eager.result.passes
        counts["right answers by pass"] = _equal(
            ended.result.passes, [orders[number % 2] for number in range(len(ended.result.passes))]
        )
        counts["answers"] = len(eager.result.passes[0])
    return counts


def _equal(one: Sequence[Sequence[Answer]], other: Sequence[Sequence[Answer]]) -> list[int]:
    """Count the answers of each pass that have the same tokens."""
    return [
        sum(a.tokens == b.tokens for a, b in zip(*answers, strict=True)) for answers in zip(one, other, strict=True)
    ]


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    sys.exit(code)
