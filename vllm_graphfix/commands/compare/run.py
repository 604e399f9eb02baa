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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.arbitration import accept_from_padded, accept_from_scores, judge_by_compiled
from vllm_graphfix.commands.compare.gap import measure
from vllm_graphfix.commands.compare.prompts import Prompt
from vllm_graphfix.commands.compare.report import Report
from vllm_graphfix.commands.compare.twin import fit
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.source.files import Source, open_source
from vllm_graphfix.verify.comparison import Kind, compare, noise_between
from vllm_graphfix.verify.engine.bars import EngineBars
from vllm_graphfix.verify.engine.exact import ENVIRONMENT as EXACT_ENVIRONMENT
from vllm_graphfix.verify.engine.exact_report import ExactReport
from vllm_graphfix.verify.engine.job import COMPILED, EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.llm import FlagError
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.processes import Engines, JobResult

if TYPE_CHECKING:
    from rich.console import Console

POISON_JOB, EXACT_JOB, PADDED_JOB, SCORED_JOB = "poison", "exact", "padded", "scored"
"""Names of the engine that is poisoned, of the one whose replays are compared, of the one without graphs whose batches
are filled to the sizes of graphs, and of the one without graphs that scores answers."""
_BATCHES = 8
"""Orders of prompts, by which an answer is scored."""
SCHEDULER_IN_PROCESS: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""With the scheduler in a process of its own, the batches of two passes would differ by timing, and requests that begin
one after the other would not end together where a batch is to be filled."""
_QUICK_START = {
    # FlashInfer's takes minutes; 20 s go into Triton's kernels, most of which a small model has no use for.
    "--no-enable-flashinfer-autotune": ("vllm/engine/arg_utils.py", "enable_flashinfer_autotune"),
    "--kernel-config.enable_jit_warmup=false": ("vllm/config/kernel.py", "enable_jit_warmup"),
}
"""Flags, each with a file of vLLM and the word by which it is known there."""
_SHORTEST = 0.5
"""Length of the shortest answer, relative to the longest: the batch shrinks through sizes between those captured."""


class Options(NamedTuple):
    """The requests to each engine, and the engines that only an option adds."""

    prompts: Sequence[Prompt] = ()
    generated: int = 16
    """Prompts that are made up if there are no *prompts*."""
    max_tokens: int = 128
    """Tokens of the longest answer."""
    timeout: float = 3600.0
    """Seconds for one engine."""
    poison: bool = False
    """Ask the engine with graphs once more, with poison in memory that belongs to no request."""
    exact: bool = False
    """Ask it once more, and compare each replayed step with the same step without graphs."""
    gap: bool = False
    """Ask every engine without graphs, to split the gap between eager and graphs by what it comes from."""


def run(model: str, flags: Sequence[str], options: Options, console: Console, *, as_twin: bool = False) -> Report:
    """Compare the answers of *model* under *flags*, which are vLLM's, with graphs and without.

    With *as_twin* a small model of the same architecture is made from the model's config.json, and compared in its
    place.

    Raises CompareError if the flags or settings make no comparison, or if the engine does not run without graphs.
    """
    if model[:1] in ("/", ".", "~") and not Path(model).expanduser().exists():
        raise CompareError(f"{model} does not exist; name a folder with a model, or one of the Hugging Face Hub")
    refuse_flags(flags, "--poison" if options.poison else "--exact" if options.exact else None)
    refuse_settings(os.environ, exact=options.exact)
    if importlib.util.find_spec("vllm") is None:
        raise CompareError(f"this Python ({sys.executable}) has no vLLM; use the Python that runs vLLM")
    if _is_without_gpu(os.environ):
        raise CompareError(
            "vLLM would find no GPU here, and there are no CUDA graphs without one; run it where it serves"
        )
    if as_twin:
        folder = Path(tempfile.mkdtemp(prefix="graphfix-twin-"))
        try:
            twin = fit(model, (*quick_start(open_source(), flags), *flags), folder)
            jobs = in_one_engine(jobs_for(str(twin.folder), twin.flags, options, twin.adapters), options)
            report = _run_engines(str(twin.folder), twin.flags, options, console, jobs)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if not report.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return replace(report, model=model, twin=twin)
    named = f"./{model}" if model.startswith("-") else model  # else vLLM would parse it as a flag
    jobs = jobs_for(named, flags, options)
    if options.poison:
        jobs.append(replace(jobs[1], name=POISON_JOB, extra_passes=1, poison=True, environment=SCHEDULER_IN_PROCESS))
    if options.exact:
        jobs.append(replace(jobs[1], name=EXACT_JOB, exact=True, environment=SCHEDULER_IN_PROCESS | EXACT_ENVIRONMENT))
    return replace(_run_engines(named, flags, options, console, jobs), model=model)


def _run_engines(model: str, flags: Sequence[str], options: Options, console: Console, jobs: Sequence[Job]) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="graphfix-compare-"))
    keep = True  # after any other error the logs are needed
    try:
        bars = EngineBars(console, jobs)
        engines = Engines(folder, options.timeout, bars.doing, bars.done, preload=True)
        with bars.display(), engines.session():
            report = judge(model, flags, jobs, lambda job: engines.run([job], 1)[job.name], all_references=options.gap)
        report = replace(report, logs=str(folder)) if report.logs else report
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


def jobs_for(model: str, flags: Sequence[str], options: Options, adapters: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of the engines that are eager, with graphs, and compiled without graphs."""
    count = len(options.prompts) or options.generated
    shorter = ((1 - _SHORTEST) * number / count for number in range(count))
    lengths = tuple(max(2, round(options.max_tokens * (1 - share))) for share in shorter)
    turns = (None, *adapters)
    return [
        Job(
            name=mode,
            mode=mode,
            flags=("--model", model, *flags),
            folder=str(Path.cwd()),
            prompts=tuple(options.prompts),
            generated=options.generated,
            max_tokens=lengths,
            extra_passes=int(mode == EAGER),
            adapters=tuple(turns[number % len(turns)] for number in range(count)) if adapters else (),
        )
        for mode in (EAGER, GRAPHS, COMPILED)
    ]


def quick_start(source: Source, flags: Sequence[str]) -> list[str]:
    """Return further flags against what takes longest in the start of a small model, as far as *source* knows them.

    With ``--kernel-config`` among *flags* there are none: vLLM lets a flag with a dot replace that object as a whole,
    and refuses two flags for autotuning.
    """
    if any(flag.replace("_", "-").startswith("--kernel-config") for flag in flags):
        return []
    return [flag for flag, (file, word) in _QUICK_START.items() if source.contains_word(file, word)]


def in_one_engine(jobs: Sequence[Job], options: Options) -> list[Job]:
    """Have the engine with graphs, of *jobs* by `jobs_for`, compare its replays and then have its memory poisoned.

    Each engine starts for longer than it answers. Of a small model all have the scheduler in their process, and run
    the first variant of kernels that would time several.
    """
    eager, graphs, compiled = (replace(job, environment=SCHEDULER_IN_PROCESS, untuned=True) for job in jobs)
    environment = graphs.environment | (EXACT_ENVIRONMENT if options.exact else {})
    return [
        eager,
        replace(graphs, exact=options.exact, poison_last=options.poison, environment=environment),
        compiled,
    ]


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


def refuse_flags(flags: Sequence[str], needing: str | None = None) -> None:
    """Raise CompareError for flags with which nothing can be compared; *needing* names what needs the extension."""
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if "--enforce-eager" in names:
        raise CompareError("with --enforce-eager there are no graphs to compare; leave that flag out")
    if needing and "--worker-extension-cls" in names:
        raise CompareError(f"{needing} needs vLLM's worker extension for itself; leave out --worker-extension-cls")
    if "--model" in names:
        raise CompareError("name the model once, before the flags, as vllm-graphfix compare MODEL …; leave out --model")


def refuse_settings(environment: Mapping[str, str], *, exact: bool) -> None:
    """Raise CompareError if a setting is invalid: it may have turned off the fixes that were to be compared."""
    decision = rollout.decide(settings.read(environment, BY_NAME), "")
    if decision.misconfigured:
        named = ", ".join(f"{name}={value}" for name, value in decision.misconfigured.items())
        raise CompareError(f"{named} means nothing, so what is to be compared is not known; correct or unset it")
    if exact and decision.master is settings.Master.OFF:
        raise CompareError(
            f"--exact needs the shadow check, which {settings.PREFIX}=off switches off; for stock vLLM's answers set "
            f"{settings.PREFIX}=observe"
        )
    if exact and decision.withheld is not None:
        raise CompareError(f"--exact needs the shadow check, which is off outside the rollout: {decision.withheld}")


def judge(
    model: str,
    flags: Sequence[str],
    jobs: Sequence[Job],
    run: Callable[[Job], JobResult],
    *,
    all_references: bool = False,
) -> Report:
    """Run the engines of `jobs_for`, and those behind them, by *run*, and judge the answers.

    Further references run where answers differ, or, with *all_references*, always. If the engine with graphs fails
    while it compares its replays, another one compares none. Raises CompareError if the engine does not run without
    graphs.
    """
    eager, graphs, compiled, *further = jobs
    reference = run(eager)
    if reference.result is None:
        raise _error_of_reference(reference)
    noise = noise_between(*reference.result.passes)
    if not math.isfinite(noise):
        raise CompareError("without graphs some log-probabilities are not finite, so there is nothing to compare with")
    graphed = run(graphs)
    exact = None
    if graphs.exact:
        exact = ExactReport(graphed.result.exact if graphed.result else (), _error_of(graphed))
        if graphed.result is None:
            environment = {**graphs.environment, **dict.fromkeys(EXACT_ENVIRONMENT)}
            graphed = run(replace(graphs, name=f"{graphs.name} alone", exact=False, environment=environment))
    if graphed.result is None:
        error, logs = _error_of(graphed), str(graphed.log.parent)
        return Report(model, tuple(flags), reference.result, None, None, error, logs=logs, exact=exact)
    poisoned = None
    if graphs.poison_last:
        why = graphed.result.poison_error
        poisoned = report_of(None if why else graphed.result, why, graphed.observed)
    for job in further:
        ended = run(job)
        if job.poison:
            poisoned = report_of(ended.result, _error_of(ended), ended.observed)
        else:
            exact = ExactReport(ended.result.exact if ended.result else (), _error_of(ended))
    comparison = compare(reference.result.passes[0], graphed.result.passes[0], noise)
    arbiter = None
    if all_references or len(comparison.of(Kind.EQUAL)) < len(comparison.judgements):
        arbiter = run(compiled)
        if arbiter.result is not None:
            comparison = judge_by_compiled(comparison, graphed.result.passes[0], arbiter.result.passes[0])
    padded = None
    if graphed.result.batch_sizes and (all_references or comparison.corrupt or not comparison.enough_compared):
        environment = compiled.environment | SCHEDULER_IN_PROCESS
        padded = run(_named(compiled, PADDED_JOB, batch_sizes=graphed.result.batch_sizes, environment=environment))
        if padded.result is not None:
            comparison = accept_from_padded(comparison, graphed.result.passes[0], padded.result.passes[0])
    scored = None
    if comparison.corrupt and arbiter is not None and arbiter.result is not None:
        # Prompts that follow each other in another order share steps with others, and so batches differ.
        tokens = tuple(answer.tokens for answer in graphed.result.passes[0])
        scored = run(_named(compiled, SCORED_JOB, continued=tokens, extra_passes=_BATCHES - 1))
        if scored.result is not None:
            comparison = accept_from_scores(comparison, graphed.result.passes[0], scored.result.passes)
    compiled_result, padded_result = (each.result if each is not None else None for each in (arbiter, padded))
    errors = [each.error for each in (arbiter, padded, scored, poisoned, exact) if each is not None]
    return Report(
        model,
        tuple(flags),
        reference.result,
        graphed.result,
        comparison,
        note=_note(arbiter, padded, scored),
        logs=str(graphed.log.parent) if any(errors) else None,
        poison=poisoned,
        exact=exact,
        gaps=measure(reference.result, compiled_result, padded_result, graphed.result) if all_references else (),
    )


def _named(compiled: Job, name: str, **changes: Any) -> Job:
    """Return *compiled* with *changes*, named *name* behind what a hunt sets before the names of a case's jobs."""
    return replace(compiled, name=compiled.name.removesuffix(COMPILED) + name, **changes)


def _error_of(ended: JobResult) -> str | None:
    return f"{ended.error} (log: {ended.log})" if ended.error else None


def _error_of_reference(reference: JobResult) -> CompareError:
    refused, _, message = (reference.error or "").partition(": ")
    if refused == FlagError.__name__:
        return CompareError(f"vLLM rejects these flags: {message}")
    return CompareError(f"the engine does not run even without graphs: {reference.error}", reference.log)


def _note(arbiter: JobResult | None, padded: JobResult | None, scored: JobResult | None) -> str | None:
    """Name the references besides eager, or say why one is missing; None if eager's answers were enough."""
    if arbiter is None:
        return None
    for engine, name in ((arbiter, "compiled"), (padded, "padded"), (scored, "scoring")):
        if engine is not None and engine.result is None:
            return (
                f"the {name} engine without graphs did not run, so answers were not compared with its answers: "
                f"{engine.error} (log: {engine.log})"
            )
    in_batches = ", also in batches of the sizes that graphs have" if padded is not None else ""
    in_orders = f", and scored in {_BATCHES} orders" if scored is not None else ""
    return (
        "answers that differ from eager's were also compared with the compiled engine without graphs"
        f"{in_batches}{in_orders}"
    )
