"""Runs the user's model eager and with graphs, in one process after the other, and compares the answers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.arbitration import arbitrate
from vllm_graphfix.commands.compare.prompts import Prompt
from vllm_graphfix.commands.compare.report import Report
from vllm_graphfix.commands.compare.twin import fit
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.verify.comparison import Kind, compare, noise_between
from vllm_graphfix.verify.engine.bars import EngineBars
from vllm_graphfix.verify.engine.job import COMPILED, EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.llm import FlagError
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.processes import Engines, JobResult

if TYPE_CHECKING:
    from rich.console import Console

POISON = "poison"
"""Name of the engine that is poisoned."""
_SHORTEST = 0.5
"""Length of the shortest answer, relative to the longest: the batch shrinks through sizes between those captured."""


def run(
    model: str,
    flags: Sequence[str],
    prompts: Sequence[Prompt],
    generated: int,
    max_tokens: int,
    timeout: float,
    console: Console,
    *,
    poison: bool = False,
    as_twin: bool = False,
) -> Report:
    """Ask *prompts*, or *generated* ones if there are none, for up to *max_tokens* tokens each.

    *flags* are vLLM's. *timeout*, in seconds, is for one engine. With *poison* the engine with graphs is asked once
    more, in a process of its own, with poison in memory that belongs to no request. With *as_twin* a small model of the
    same architecture is made from the model's config.json, and compared in its place.

    Raises CompareError if the flags or settings make no comparison, or if the engine does not run without graphs.
    """
    if model[:1] in ("/", ".", "~") and not Path(model).expanduser().exists():
        raise CompareError(f"{model} does not exist; name a folder with a model, or one of the Hugging Face Hub")
    _refuse_flags(flags, poison=poison)
    _refuse_settings(os.environ)
    if importlib.util.find_spec("vllm") is None:
        raise CompareError(f"this Python ({sys.executable}) has no vLLM; use the Python that runs vLLM")
    if _is_without_gpu(os.environ):
        raise CompareError(
            "vLLM would find no GPU here, and there are no CUDA graphs without one; run it where it serves"
        )
    if as_twin:
        folder = Path(tempfile.mkdtemp(prefix="graphfix-twin-"))
        try:
            twin = fit(model, flags, folder)
            report = _run_engines(
                str(twin.folder), twin.flags, prompts, generated, max_tokens, timeout, console, poison, twin.adapters
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if not report.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return replace(report, model=model, twin=twin)
    named = f"./{model}" if model.startswith("-") else model  # else vLLM would parse it as a flag
    return replace(_run_engines(named, flags, prompts, generated, max_tokens, timeout, console, poison), model=model)


def _run_engines(
    model: str,
    flags: Sequence[str],
    prompts: Sequence[Prompt],
    generated: int,
    max_tokens: int,
    timeout: float,
    console: Console,
    poison: bool,
    adapters: Sequence[str] = (),
) -> Report:
    count = len(prompts) or generated
    lengths = tuple(max(2, round(max_tokens * (1 - (1 - _SHORTEST) * number / count))) for number in range(count))
    turns = (None, *adapters)
    jobs = [
        Job(
            name=mode,
            mode=mode,
            flags=("--model", model, *flags),
            folder=str(Path.cwd()),
            prompts=tuple(prompts),
            generated=generated,
            max_tokens=lengths,
            extra_passes=int(mode == EAGER),
            adapters=tuple(turns[number % len(turns)] for number in range(count)) if adapters else (),
        )
        for mode in (EAGER, GRAPHS, COMPILED)
    ]
    if poison:
        # With the scheduler in a process of its own, the batches of two passes would differ by timing.
        alone: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        jobs.append(replace(jobs[1], name=POISON, extra_passes=1, poison=True, environment=alone))
    folder = Path(tempfile.mkdtemp(prefix="graphfix-compare-"))
    keep = True  # after any other error the logs are needed
    try:
        report = _compare(model, flags, jobs, folder, timeout, console)
        keep = report.logs is not None
    except CompareError as error:
        keep = error.log is not None
        raise
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"(logs: {folder})") from interrupt
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return report


def _is_without_gpu(environment: Mapping[str, str]) -> bool:
    """Return True if a vLLM for NVIDIA's GPUs is sure to find none, as engines take a while to find out."""
    try:
        builds = [importlib.metadata.version(name) for name in ("torch", "vllm")]
    except importlib.metadata.PackageNotFoundError:
        return False
    is_for_gpus = not any(re.search(r"\+(?!cu)", build) for build in builds)
    if not is_for_gpus or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return hidden or not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists())  # the latter under WSL


def _refuse_flags(flags: Sequence[str], *, poison: bool) -> None:
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if "--enforce-eager" in names:
        raise CompareError("with --enforce-eager there are no graphs to compare; leave that flag out")
    if poison and "--worker-extension-cls" in names:
        raise CompareError("--poison needs vLLM's worker extension for itself; leave out --worker-extension-cls")
    if "--model" in names:
        raise CompareError("name the model once, before the flags, as vllm-graphfix compare MODEL …; leave out --model")


def _refuse_settings(environment: Mapping[str, str]) -> None:
    """Raise CompareError if a setting is invalid: it may have turned off the fixes that were to be compared."""
    decision = rollout.decide(settings.read(environment, BY_NAME), "")
    if decision.misconfigured:
        named = ", ".join(f"{name}={value}" for name, value in decision.misconfigured.items())
        raise CompareError(f"{named} means nothing, so what is to be compared is not known; correct or unset it")


def _compare(
    model: str, flags: Sequence[str], jobs: Sequence[Job], folder: Path, timeout: float, console: Console
) -> Report:
    bars = EngineBars(console, jobs)
    engines = Engines(folder, timeout, bars.doing, bars.done)
    with bars.display():
        eager, graphs, compiled, *further = jobs
        reference = engines.run([eager], 1)[eager.name]
        if reference.result is None:
            raise _error_of_reference(reference)
        noise = noise_between(*reference.result.passes)
        if not math.isfinite(noise):
            raise CompareError(
                "without graphs some log-probabilities are not finite, so there is nothing to compare with"
            )
        graphed = engines.run([graphs], 1)[graphs.name]
        if graphed.result is None:
            error = f"{graphed.error} (log: {graphed.log})"
            return Report(model, tuple(flags), reference.result, None, None, error, logs=str(folder))
        poisoned = None
        for job in further:
            ended = engines.run([job], 1)[job.name]
            why = f"{ended.error} (log: {ended.log})" if ended.error else None
            poisoned = report_of(ended.result, why, ended.observed)
        comparison = compare(reference.result.passes[0], graphed.result.passes[0], noise)
        arbiter = None
        if len(comparison.of(Kind.EQUAL)) < len(comparison.judgements):
            arbiter = engines.run([compiled], 1)[compiled.name]
            if arbiter.result is not None:
                comparison = arbitrate(comparison, graphed.result.passes[0], arbiter.result.passes[0])
    failed = (arbiter is not None and arbiter.result is None) or (poisoned is not None and poisoned.result is None)
    return Report(
        model,
        tuple(flags),
        reference.result,
        graphed.result,
        comparison,
        note=_why_eager_alone(arbiter),
        logs=str(folder) if failed else None,
        poison=poisoned,
    )


def _error_of_reference(reference: JobResult) -> CompareError:
    refused, _, message = (reference.error or "").partition(": ")
    if refused == FlagError.__name__:
        return CompareError(f"vLLM rejects these flags: {message}")
    return CompareError(f"the engine does not run even without graphs: {reference.error}", reference.log)


def _why_eager_alone(arbiter: JobResult | None) -> str | None:
    if arbiter is None:
        return None
    if arbiter.result is None:
        return (
            "the compiled engine without graphs did not run, so answers were compared with eager alone: "
            f"{arbiter.error} (log: {arbiter.log})"
        )
    return "answers that differ from eager's were also compared with the compiled engine without graphs"
