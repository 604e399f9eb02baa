"""Proves fixes on this machine's GPU: each on a tiny model, eager, with graphs stock, and with graphs and the fixes."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify import VerifyError, cpu_proof
from vllm_graphfix.verify.comparison import Comparison, Kind, compare, noise_between
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.bars import EngineBars
from vllm_graphfix.verify.engine.cases import GIB_PER_ENGINE, MODES, WATCHED, Case
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, Job, Said
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.processes import CRASH, HANG, Ended, Engines
from vllm_graphfix.verify.engine.sign import Sign
from vllm_graphfix.verify.engine.worker import SEED
from vllm_graphfix.verify.measurement import Measurement, Watch
from vllm_graphfix.verify.report import MODES_OF_A_PROOF, Proof, Report
from vllm_graphfix.verify.trial import further_cases, trial_of

if TYPE_CHECKING:
    from rich.console import Console

_TIMEOUT = 600.0
"""Seconds for one engine. Most take less than one minute."""
_MOST, _MOST_FRESH = 12, 6
"""Engines at a time, and without a process that they are forked from: while they import vLLM, more get in each other's
way."""
_NO_CASE = "no tiny model on a GPU shows this defect; `verify --device cpu` proves the fix on the CPU double"
_LOUD = 0.2
"""Eager's own noise on a tiny model, in log-probability, beyond which a defect could pass for rounding: stock's are off
by 0.5 to 1."""
_ENOUGH = 0.5
"""The share of the patched engine's tokens that must be compared: if fewer could be, because answers part early at
ties, nothing is proven."""

Runs = Mapping[str, Ended]
"""The runs of one case, by mode."""


def run(
    source: Source,
    fixes: Sequence[Fix],
    device: Device,
    console: Console,
    *,
    fresh: bool = False,
    parallel: int | None = None,
) -> Report:
    """Proves *fixes* on *device* with the vLLM of *source*, one that can run. Raises `VerifyError`, `SourceError`.

    *fresh* processes are not forked from one that has imported vLLM. *parallel* engines run at a time.
    """
    began = time.monotonic()
    diagnoses = {fix.name: manifest.diagnose(fix, source) for fix in fixes}
    affected = [fix for fix in fixes if diagnoses[fix.name].verdict is Verdict.AFFECTED]
    others = [fix for fix in fixes if fix not in affected]
    if not affected:
        return cpu_proof.run(source, fixes, console)  # nothing to run on a GPU
    cases_of = {
        fix.name: tuple(
            case and case.on(source) for case in (trial_of(fix.name).case, *further_cases(fix.name, source))
        )
        for fix in affected
    }
    skipped = {
        case: why_skipped(case, device) or _what_is_missing(case, source)
        for of_fix in cases_of.values()
        for case in of_fix
        if case is not None
    }
    cases = [case for case, why in skipped.items() if why is None]
    folder = Path(tempfile.mkdtemp(prefix="graphfix-verify-"))
    keep = False
    try:
        with ThreadPoolExecutor(1) as beside:
            from rich.console import Console as Quiet

            # Fixes that are not needed are looked at without a GPU: nothing of what they concern may be touched.
            left_alone = beside.submit(cpu_proof.run, source, others, Quiet(file=io.StringIO())) if others else None
            ended = _run_cases(source, cases, device, folder, console, fresh=fresh, parallel=parallel)
            proofs = {name: [proof] for name, proof in _of_the_others(left_alone, others, diagnoses).items()}
        for fix in affected:
            proofs[fix.name] = []
            for number, case in enumerate(cases_of[fix.name]):
                why = _NO_CASE if case is None else skipped[case]
                runs = {mode: ended[f"{case.name} {mode}"] for mode in MODES} if case and not why else None
                watched = {
                    mode: end for name, mode in WATCHED.items() if case and (end := ended.get(f"{case.name} {name}"))
                }
                proof = prove(fix, diagnoses[fix.name], case, runs, why, watched)
                proofs[fix.name].append(replace(proof, further=case.name) if case and number else proof)
        keep = any(end.error or (end.said and end.said.poison_error) for end in ended.values()) or any(
            proof.outcome not in ("proven", "skipped") for fix in affected for proof in proofs[fix.name]
        )
    finally:
        for made in {folder / name for case in cases for name in case.models} if keep else {folder}:
            shutil.rmtree(made, ignore_errors=True)
    return Report(
        source.version,
        source.label,
        device.name or "",
        tuple(proof for fix in fixes for proof in proofs[fix.name]),
        environment={
            "compute capability": ".".join(map(str, device.capability)),
            "driver": device.driver,
            "CUDA": device.cuda,
            "torch": device.torch,
            "Python": device.python,
            "modes": MODES_OF_A_PROOF,
            "seed": str(SEED),
        },
        logs=str(folder) if keep else None,
        seconds=round(time.monotonic() - began, 1),
        engines=tuple(end.times for end in ended.values()),
    )


def _of_the_others(
    left_alone: Future[Report] | None, others: Sequence[Fix], diagnoses: Mapping[str, Diagnosis]
) -> dict[str, Proof]:
    """What the double found of fixes that are not needed. If it came to no end, what the GPU has proven is not lost."""
    try:
        return {proof.fix.name: proof for proof in left_alone.result().proofs} if left_alone else {}
    except VerifyError as error:
        unknown = ("unknown", str(error))
        return {fix.name: Proof(fix, diagnoses[fix.name], None, None, str(error), unknown, unknown) for fix in others}


def why_skipped(case: Case, device: Device) -> str | None:
    """What *device* lacks for *case*, or None."""
    if case.capability is not None and device.capability[0] != case.capability:
        backend = case.arguments.get("attention_config", {}).get("backend")
        kernels = f"attention backend {backend} needs" if backend else "the kernels of this case need"
        return (
            f"{kernels} compute capability {case.capability}.0, {device.name} has "
            f"{'.'.join(map(str, device.capability))}; `verify --device cpu` proves the fix on the CPU double"
        )
    if device.free_gib < GIB_PER_ENGINE:
        return (
            f"{GIB_PER_ENGINE} GiB of free GPU memory are needed, but only {device.free_gib} GiB are free; stop "
            "whatever else uses the GPU"
        )
    return None


def _what_is_missing(case: Case, source: Source) -> str | None:
    """Why *case* cannot show its defect here, or None.

    The answer names the package that it needs and this machine has not, or says that this vLLM does not show its defect
    with it.
    """
    folder = source.folder
    if case.shows_with is not None and not source.contains_word(*case.shows_with[:2]):
        return f"on this vLLM {case.shows_with[2]}; `verify --device cpu` proves the fix on the CPU double"
    if case.needs is None or importlib.util.find_spec(case.needs) or (folder and (folder / case.needs).is_dir()):
        return None
    return f"{case.needs} is not installed; `verify --device cpu` proves the fix on the CPU double"


def _run_cases(
    source: Source,
    cases: Sequence[Case],
    device: Device,
    folder: Path,
    console: Console,
    *,
    fresh: bool,
    parallel: int | None,
) -> dict[str, Ended]:
    if not cases:
        return {}
    names = {name for case in cases for name in case.models}
    devices.find(folder, tuple(sorted(names)))
    jobs = [job for case in cases for job in case.jobs(folder)]
    jobs += [job for case in cases if case.watched for job in case.watched_jobs(folder)]
    path = os.pathsep.join(filter(None, [str(source.folder or ""), os.environ.get("PYTHONPATH", "")]))
    jobs = [replace(job, environment=job.environment | {"PYTHONPATH": path}) for job in jobs]
    compiling = {case.name for case in cases if case.compiles}
    jobs.sort(key=lambda job: _turn(job, compiling=job.name.split()[0] in compiling))
    if parallel is None:
        processors = os.cpu_count() or 2
        parallel = min(_MOST_FRESH, processors // 2) if fresh else min(_MOST, processors * 3 // 4)
    parallel = min(parallel, int(device.free_gib // GIB_PER_ENGINE))
    if any(case.needs == "flashinfer" for case in cases):
        console.print("FlashInfer compiles its kernels on first use, which takes about two minutes")
    bars = EngineBars(console, jobs)
    with bars.display():
        return Engines(folder, _TIMEOUT, bars.doing, bars.done, preload=not fresh).run(jobs, parallel)


def _turn(job: Job, *, compiling: bool) -> int:
    """When an engine begins: lower is earlier.

    One that may hang takes longest. Then each case's first, so that what begins at the same time compiles as little as
    possible twice, and what comes later finds it compiled.
    """
    if job.seconds is not None and job.name.endswith(" stock"):
        return 0
    return (1 if compiling else 2) if job.mode == EAGER else (3 if compiling else 4)


def prove(
    fix: Fix,
    diagnosis: Diagnosis,
    case: Case | None,
    runs: Runs | None,
    skipped: str | None = None,
    watched: Runs | None = None,
) -> Proof:
    """What the three runs of a fix's case, and the shadow check of the *watched* ones, say about it.

    In the *watched* runs every replay was checked.
    """
    if case is None or runs is None:
        nothing = ("", skipped or "")
        return Proof(fix, diagnosis, None, None, None, nothing, nothing, skipped)
    failure = _why_nothing_is_proven(case, runs)
    poisoned, poison_notes = _what_poison_showed(case, runs)
    stock, patched = (None, None) if failure else (measure(case, runs, mode) for mode in ("stock", "patched"))
    return Proof(
        fix,
        diagnosis,
        stock,
        patched,
        failure,
        _state(fix, runs["stock"], "off"),
        _state(fix, runs["patched"], "active"),
        why_unwatched=trial_of(fix.name).unwatched,
        poisoned=poisoned,
        poison_notes=poison_notes,
        watched={mode: _watch_of(end) for mode, end in (watched or {}).items()},
    )


def _why_nothing_is_proven(case: Case, runs: Runs) -> str | None:
    """A run that ended in an error of its own, a reference that is none, or a probe that saw nothing; or None."""
    for mode, end in runs.items():
        if end.error and (mode == "eager" or not (CRASH.search(end.error) or _hangs(case, end))):
            return f"{mode}: {end.error} (log: {end.log})"
    eager, patched = runs["eager"].said, runs["patched"].said
    noise = noise_between(*eager.passes) if eager is not None else 0.0
    if not math.isfinite(noise):
        return "eager: some log-probabilities are not finite"
    if noise > _LOUD:
        return f"eager: two runs differ in log-probability by up to {noise:.2g}"
    for mode, end in runs.items():
        if mode != "eager" and end.said is not None and end.said.cudagraph_mode == "NONE":
            return f"{mode}: the engine used no graphs"
    if eager is not None and patched is not None:
        comparison = compare(eager.passes[0], patched.passes[0], noise)
        if not comparison.corrupt and comparison.compared < _ENOUGH * comparison.tokens:
            return (
                f"patched: answers diverge early at ties, so only {comparison.compared} of {comparison.tokens} tokens "
                "could be compared"
            )
    signs = ((mode, _sign(case, end)) for mode, end in runs.items() if mode != "eager" and not end.error)
    return next((f"{mode}: {sign.unseen}" for mode, sign in signs if sign is not None and sign.unseen), None)


def _hangs(case: Case, end: Ended) -> bool:
    """Whether an engine was ended from outside after its probe had seen what makes it hang."""
    sign = _sign(case, end)
    return sign is not None and sign.hangs and HANG.fullmatch(end.error or "") is not None


def _sign(case: Case, end: Ended) -> Sign | None:
    """What the probes of *case* saw, judged; None where the defect shows in tokens alone."""
    return case.judge(end.observed) if case.judge is not None else None


def _watch_of(end: Ended) -> Watch:
    counted = {
        name.removeprefix("shadow: "): int(values[0])
        for name, values in end.observed.items()
        if name.startswith("shadow: ")
    }
    states = {states["shadow"] for states in end.said.states.values() if "shadow" in states} if end.said else ()
    return Watch(
        counted.get("checks", 0),
        counted.get("mismatches", 0),
        counted.get("first mismatch in check"),
        " and ".join(sorted(states)) or None,
        end.error,
    )


def _what_poison_showed(case: Case, runs: Runs) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """What it showed, by mode, and why silence says nothing, or is no fault."""
    shown: dict[str, tuple[str, ...]] = {}
    notes: dict[str, str] = {}
    for mode in ("stock", "patched") if case.poisoned else ():
        end, said = runs[mode], runs[mode].said
        if said is None or not (said.poisoned or said.poison_error):
            notes[mode] = "says nothing: the engine ended before it was poisoned"
            continue
        error = f"{said.poison_error} (log: {end.log})" if said.poison_error else None
        report = report_of(None if error else said, error, said.observed)
        told = [line.strip() for line in report.shown()] if report.found else []
        told += filter(None, [report.told_of_padding if case.poison_in_padding else ""])
        if not told and report.inconclusive:
            notes[mode] = f"says nothing: {report.inconclusive}"
            continue
        shown[mode] = tuple(told)
        if mode == "stock" and not told:
            notes[mode] = f"nothing; {report.summary()}. That the defect is there, the numbers alone prove"
    return shown, notes


def _state(fix: Fix, end: Ended, of_a_crash: str) -> tuple[str, str]:
    """A crashed engine cannot be asked for its states; that it crashed is said elsewhere."""
    if end.said is None:
        return of_a_crash, end.error or ""
    states = {states.get(fix.name, "unknown") for states in end.said.states.values()}
    return " and ".join(sorted(states)), ""


def measure(case: Case, runs: Runs, mode: str) -> Measurement:
    """The numbers in which the defect that *case* is for shows, of the run in *mode* against eager's."""
    eager, graphed = runs["eager"], runs[mode]
    assert eager.said is not None  # noqa: S101 - a case whose reference failed is not measured
    total = float(sum(len(answer.tokens) for answer in eager.said.passes[0]))
    sign = _sign(case, graphed) or Sign("", (), ())
    found, lines = sign.found, [sign.told] if sign.told else []
    if graphed.said is not None:
        comparison = compare(eager.said.passes[0], graphed.said.passes[0], noise_between(*eager.said.passes))
        found = (*found, float(comparison.agreed))
        lines += [*comparison_lines(comparison), *_drafts(eager.said, graphed.said)]
    beyond = f"{sign.numbers}; " if sign.numbers else ""
    seen_too_late = graphed.error and sign.unseen
    return Measurement(
        f"{beyond}tokens before corruption, of {total:.0f}",
        (*sign.right, total),
        found,
        graphed.error,
        tuple(f"{mode}: {line}" for line in lines),
        deciding=len(sign.right) if sign.right and not seen_too_late else None,
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """For people: how far a run agrees with the reference."""
    agreed = f"{comparison.compared} of {comparison.tokens} tokens compared and equal to eager's"
    apart = f"log-probabilities up to {comparison.distance:.2g} apart"
    lines = [
        (
            f"{agreed}; {apart} (eager against itself {comparison.noise:.2g}; up to {comparison.tolerance:.2g} counts "
            "as rounding)"
        )
    ]
    corrupt = comparison.of(Kind.CORRUPT)
    if corrupt:
        number, first = min(
            ((i, j) for i, j in enumerate(comparison.judgements) if j.kind is Kind.CORRUPT),
            key=lambda pair: pair[1].position or 0,
        )
        what = (
            f"{first.found} instead of {first.expected}" if first.found != first.expected else "in its log-probability"
        )
        margin = "" if first.margin is None else f"; eager's top two are {first.margin:.2g} apart there"
        lines.append(
            f"corrupt prompts: {len(corrupt)} of {len(comparison.judgements)}, the first at token {first.position} of "
            f"prompt {number}, {what}{margin}"
        )
    ties = len(comparison.of(Kind.TIE))
    return [*lines, f"prompts that diverge at a tie: {ties}"] if ties else lines


def _drafts(eager: Said, graphed: Said) -> list[str]:
    lines = []
    reference, found = eager.observed.get("drafts", []), graphed.observed.get("drafts", [])
    if found:
        same = next((i for i, (a, b) in enumerate(zip(reference, found, strict=False)) if a != b), len(found))
        lines.append(f"draft tokens equal to eager's up to number {same} of {len(found)}")
    return lines
