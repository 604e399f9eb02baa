"""Proves fixes on this machine's GPU: each on a tiny model, eager, with graphs, and with graphs and the fixes."""

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
from vllm_graphfix.verify.comparison import compare, comparison_lines, noise_between
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.bars import EngineBars
from vllm_graphfix.verify.engine.case import GIB_PER_ENGINE, MODES, WATCHED, Case
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, EngineResult, Job
from vllm_graphfix.verify.engine.poison_report import report_of
from vllm_graphfix.verify.engine.probe_verdict import ProbeVerdict
from vllm_graphfix.verify.engine.processes import CRASH, HANG, Engines, JobResult
from vllm_graphfix.verify.engine.questions import SEED
from vllm_graphfix.verify.measurement import Measurement, Watch
from vllm_graphfix.verify.proof import MODES_OF_A_PROOF, Proof
from vllm_graphfix.verify.report import Report
from vllm_graphfix.verify.trial import further_cases, trial_of

if TYPE_CHECKING:
    from rich.console import Console

_TIMEOUT = 600.0
"""Seconds for one engine. Most take less than one minute."""
_MAX_FORKED, _MAX_FRESH = 12, 6
"""Engines at a time, forked or fresh: while fresh ones import vLLM, more of them slow each other down."""
_NO_CASE = "no tiny model on a GPU shows this defect; `verify --device cpu` proves the fix on the CPU double"
_MAX_NOISE = 0.2
"""Eager's own noise on a tiny model, in log-probability, beyond which a defect could pass for rounding. Stock's
log-probabilities are wrong by 0.5 to 1."""

Runs = Mapping[str, JobResult]
"""Results of the engines of one case, by mode."""


def run(
    source: Source,
    fixes: Sequence[Fix],
    device: Device,
    console: Console,
    *,
    fresh: bool = False,
    parallel: int | None = None,
) -> Report:
    """Prove *fixes* on *device* with the vLLM of *source*, which must have compiled kernels.

    *parallel* engines run at a time, in *fresh* processes or forked from one that has imported vLLM.

    Raises `VerifyError`, `SourceError`.
    """
    began = time.monotonic()
    diagnoses = {fix.name: manifest.diagnose(fix, source) for fix in fixes}
    affected = [fix for fix in fixes if diagnoses[fix.name].verdict is Verdict.AFFECTED]
    others = [fix for fix in fixes if fix not in affected]
    if not affected:
        return cpu_proof.run(source, fixes, console)  # nothing to run on a GPU
    cases_of = {fix.name: _cases_of(fix, source) for fix in affected}
    skipped = {
        case: why_skipped(case, device) or _what_is_missing(case, source)
        for of_fix in cases_of.values()
        for case in of_fix
        if case is not None
    }
    cases = [case for case, why in skipped.items() if why is None]
    folder = Path(tempfile.mkdtemp(prefix="graphfix-verify-"))
    keep_logs = False
    try:
        with ThreadPoolExecutor(1) as beside:
            from rich.console import Console as Quiet

            # The other fixes are checked on the CPU meanwhile: they must leave their code untouched.
            on_double = beside.submit(cpu_proof.run, source, others, Quiet(file=io.StringIO())) if others else None
            ended = _run_cases(source, cases, device, folder, console, fresh=fresh, parallel=parallel)
            proofs = {name: [proof] for name, proof in _proofs_on_double(on_double, others, diagnoses).items()}
        for fix in affected:
            proofs[fix.name] = _proofs_of(fix, diagnoses[fix.name], cases_of[fix.name], skipped, ended)
        keep_logs = any(end.error or (end.result and end.result.poison_error) for end in ended.values()) or any(
            proof.outcome not in ("proven", "skipped") for fix in affected for proof in proofs[fix.name]
        )
    finally:
        # With logs to keep, the models alone: they are large, and can be made again.
        for made in {folder / name for case in cases for name in case.models} if keep_logs else {folder}:
            shutil.rmtree(made, ignore_errors=True)
    return Report(
        source.version,
        source.label,
        device.name or "",
        tuple(proof for fix in fixes for proof in proofs[fix.name]),
        environment=_environment(device),
        logs=str(folder) if keep_logs else None,
        seconds=round(time.monotonic() - began, 1),
        engines=tuple(end.times for end in ended.values()),
    )


def _cases_of(fix: Fix, source: Source) -> tuple[Case | None, ...]:
    """Return the first case of *fix*, or None if it has no case, and the further ones."""
    return tuple(case and case.on(source) for case in (trial_of(fix.name).case, *further_cases(fix.name, source)))


def _proofs_of(
    fix: Fix,
    diagnosis: Diagnosis,
    cases: Sequence[Case | None],
    skipped: Mapping[Case, str | None],
    ended: Mapping[str, JobResult],
) -> list[Proof]:
    """Return the proofs of *fix*, one for each of its *cases*, from all engines by name."""
    proofs = []
    for number, case in enumerate(cases):
        why = _NO_CASE if case is None else skipped[case]
        runs = {mode: ended[f"{case.name} {mode}"] for mode in MODES} if case and not why else None
        watched = {mode: end for name, mode in WATCHED.items() if case and (end := ended.get(f"{case.name} {name}"))}
        proof = prove(fix, diagnosis, case, runs, why, watched)
        proofs.append(replace(proof, further=case.name) if case and number else proof)
    return proofs


def _proofs_on_double(
    on_double: Future[Report] | None, others: Sequence[Fix], diagnoses: Mapping[str, Diagnosis]
) -> dict[str, Proof]:
    """Return the proofs of fixes that are not needed. An error of the CPU double loses nothing that the GPU proved."""
    try:
        return {proof.fix.name: proof for proof in on_double.result().proofs} if on_double else {}
    except VerifyError as error:
        unknown = ("unknown", str(error))
        return {fix.name: Proof(fix, diagnoses[fix.name], None, None, str(error), unknown, unknown) for fix in others}


def _environment(device: Device) -> dict[str, str]:
    return {
        "compute capability": ".".join(map(str, device.capability)),
        "driver": device.driver,
        "CUDA": device.cuda,
        "torch": device.torch,
        "Python": device.python,
        "modes": MODES_OF_A_PROOF,
        "seed": str(SEED),
    }


def why_skipped(case: Case, device: Device) -> str | None:
    """Return the reason why *case* cannot run on *device*, or None."""
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
    """Return the reason why *case* cannot show its defect with this vLLM and these packages, or None."""
    if case.shows_with is not None and not source.contains_word(*case.shows_with[:2]):
        return f"on this vLLM {case.shows_with[2]}; `verify --device cpu` proves the fix on the CPU double"
    if case.needs is None or (source.folder and (source.folder / case.needs).exists()):
        return None
    if "/" not in case.needs and importlib.util.find_spec(case.needs):
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
) -> dict[str, JobResult]:
    if not cases:
        return {}
    names = {name for case in cases for name in case.models}
    devices.find(folder, tuple(sorted(names)))
    jobs = [job for case in cases for job in case.jobs(folder)]
    jobs += [job for case in cases if case.watched for job in case.watched_jobs(folder)]
    path = os.pathsep.join(filter(None, [str(source.folder or ""), os.environ.get("PYTHONPATH", "")]))
    jobs = [replace(job, environment=job.environment | {"PYTHONPATH": path}) for job in jobs]
    compiling = {case.name for case in cases if case.compiles}
    jobs.sort(key=lambda job: _start_order(job, compiling=job.name.split()[0] in compiling))
    if parallel is None:
        processors = os.cpu_count() or 2
        parallel = min(_MAX_FRESH, processors // 2) if fresh else min(_MAX_FORKED, processors * 3 // 4)
    parallel = min(parallel, int(device.free_gib // GIB_PER_ENGINE))
    if any(case.needs == "flashinfer" for case in cases):
        console.print("FlashInfer compiles its kernels on first use, which takes about two minutes")
    bars = EngineBars(console, jobs)
    with bars.display():
        return Engines(folder, _TIMEOUT, bars.doing, bars.done, preload=not fresh).run(jobs, parallel)


def _start_order(job: Job, *, compiling: bool) -> int:
    """Return the place of *job* in the order of starts; lower is earlier.

    An engine that may hang takes longest and starts first. Then comes one engine of each case, so that few kernels are
    compiled twice at the same time, and later engines find them compiled.
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
    """Judge *fix* by the three *runs* of its case, and by the *watched* ones, in which every replay was checked."""
    if case is None or runs is None:
        nothing = ("", skipped or "")
        return Proof(fix, diagnosis, None, None, None, nothing, nothing, skipped)
    failure = _why_unproven(case, runs)
    poisoned, poison_notes = _poison_effects(case, runs)
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


def _why_unproven(case: Case, runs: Runs) -> str | None:
    """Return the reason why *runs* prove nothing, or None.

    A run failed for a reason of its own, the reference is unfit, too few tokens were compared, or a probe observed
    nothing.
    """
    for mode, end in runs.items():
        if end.error and (mode == "eager" or not (CRASH.search(end.error) or _hangs(case, end))):
            return f"{mode}: {end.error} (log: {end.log})"
    eager, patched = runs["eager"].result, runs["patched"].result
    noise = noise_between(*eager.passes) if eager is not None else 0.0
    if not math.isfinite(noise):
        return "eager: some log-probabilities are not finite"
    if noise > _MAX_NOISE:
        return f"eager: two runs differ in log-probability by up to {noise:.2g}"
    for mode, end in runs.items():
        if mode != "eager" and end.result is not None and end.result.cudagraph_mode == "NONE":
            return f"{mode}: the engine used no graphs"
    if eager is not None and patched is not None:
        comparison = compare(eager.passes[0], patched.passes[0], noise)
        if not comparison.corrupt and not comparison.enough_compared:
            return (
                f"patched: answers diverge early at ties, so only {comparison.tokens_compared} of {comparison.tokens} "
                "tokens could be compared"
            )
    verdicts = ((mode, _probe_verdict(case, end)) for mode, end in runs.items() if mode != "eager" and not end.error)
    return next((f"{mode}: {verdict.unseen}" for mode, verdict in verdicts if verdict and verdict.unseen), None)


def _hangs(case: Case, end: JobResult) -> bool:
    """True if an engine was killed at its time limit after its probe had observed what makes it hang."""
    verdict = _probe_verdict(case, end)
    return verdict is not None and verdict.hangs and HANG.fullmatch(end.error or "") is not None


def _probe_verdict(case: Case, end: JobResult) -> ProbeVerdict | None:
    """Judge the observations of *end*; None if the defect of *case* shows in tokens alone."""
    return case.judge(end.observed) if case.judge is not None else None


def _watch_of(end: JobResult) -> Watch:
    counted = {
        name.removeprefix("shadow: "): int(values[0])
        for name, values in end.observed.items()
        if name.startswith("shadow: ")
    }
    of_ranks = end.result.states.values() if end.result else ()
    states = {of_rank["shadow"] for of_rank in of_ranks if "shadow" in of_rank}
    return Watch(
        counted.get("checks", 0),
        counted.get("mismatches", 0),
        counted.get("first mismatch in check"),
        " and ".join(sorted(states)) or None,
        end.error,
    )


def _poison_effects(case: Case, runs: Runs) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the effects of poison by mode, and notes by mode: why there is no verdict, or why none is needed."""
    effects: dict[str, tuple[str, ...]] = {}
    notes: dict[str, str] = {}
    for mode in ("stock", "patched") if case.poisoned else ():
        end, result = runs[mode], runs[mode].result
        if result is None or not (result.poisoned or result.poison_error):
            notes[mode] = "says nothing: the engine ended before it was poisoned"
            continue
        error = f"{result.poison_error} (log: {end.log})" if result.poison_error else None
        report = report_of(None if error else result, error, result.observed)
        lines = [line.strip() for line in report.effects()] if report.detected else []
        lines += filter(None, [report.padding_note if case.poison_in_padding else ""])
        if not lines and report.inconclusive:
            notes[mode] = f"says nothing: {report.inconclusive}"
            continue
        effects[mode] = tuple(lines)
        if mode == "stock" and not lines:
            notes[mode] = f"nothing; {report.summary()}. That the defect is there, the numbers alone prove"
    return effects, notes


def _state(fix: Fix, end: JobResult, of_a_crash: str) -> tuple[str, str]:
    """Return the state of *fix* on all ranks, and an error; a crashed engine has the state *of_a_crash*."""
    if end.result is None:
        return of_a_crash, end.error or ""
    states = {of_rank.get(fix.name, "unknown") for of_rank in end.result.states.values()}
    return " and ".join(sorted(states)), ""


def measure(case: Case, runs: Runs, mode: str) -> Measurement:
    """Return the numbers in which the defect of *case* shows, of the run in *mode* against the eager one."""
    eager, graphed = runs["eager"], runs[mode]
    assert eager.result is not None  # noqa: S101 - a case whose reference failed is not measured
    total = float(sum(len(answer.tokens) for answer in eager.result.passes[0]))
    probed = _probe_verdict(case, graphed) or ProbeVerdict("", (), ())
    numbers, lines = probed.observed, [probed.summary] if probed.summary else []
    if graphed.result is not None:
        comparison = compare(eager.result.passes[0], graphed.result.passes[0], noise_between(*eager.result.passes))
        numbers = (*numbers, float(comparison.tokens_before_corruption))
        lines += [*comparison_lines(comparison), *_drafts(eager.result, graphed.result)]
    before_tokens = f"{probed.numbers}; " if probed.numbers else ""
    crashed_unseen = graphed.error and probed.unseen
    return Measurement(
        f"{before_tokens}tokens before corruption, of {total:.0f}",
        (*probed.right, total),
        numbers,
        graphed.error,
        tuple(f"{mode}: {line}" for line in lines),
        deciding=len(probed.right) if probed.right and not crashed_unseen else None,
    )


def _drafts(eager: EngineResult, graphed: EngineResult) -> list[str]:
    reference, drafts = eager.observed.get("drafts", []), graphed.observed.get("drafts", [])
    if not drafts:
        return []
    same = next((i for i, (a, b) in enumerate(zip(reference, drafts, strict=False)) if a != b), len(drafts))
    return [f"draft tokens equal to eager's up to number {same} of {len(drafts)}"]
