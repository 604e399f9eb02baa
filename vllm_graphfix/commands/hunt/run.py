"""Runs the cases of a hunt, several at a time, and writes a line of JSON for each."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.report import NO_GRAPHS, Report
from vllm_graphfix.commands.compare.report import as_json as compared_as_json
from vllm_graphfix.commands.compare.run import (
    Options,
    in_one_engine,
    jobs_for,
    judge,
    quick_start,
    refuse_settings,
)
from vllm_graphfix.commands.hunt import twins
from vllm_graphfix.commands.hunt.design import DIMENSIONS, MODEL, ON_TWO_GPUS, Architecture, HuntCase, around, design
from vllm_graphfix.commands.hunt.smaller import Size, smaller
from vllm_graphfix.commands.output import say
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.comparison import comparison_lines, finite_or_none
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.case import CASE_ENVIRONMENT, GIB_PER_ENGINE, NOTHING_COMPILED
from vllm_graphfix.verify.engine.job import Job
from vllm_graphfix.verify.engine.processes import HANG, Engines, JobResult

if TYPE_CHECKING:
    from rich.console import Console

RIGHT, WRONG, FAILS, UNCLEAR, REFUSED, NO_TWIN = "right", "wrong", "fails", "inconclusive", "refused", "no twin"
"""Verdicts on a case. An engine fails that runs without graphs alone; vLLM refuses flags, or graphs with them."""
RESULTS, CONFIGS = "results.jsonl", "configs"
"""A file and a folder in the hunt's folder."""
MIN_REPLAYS = 100
"""A case with fewer replays is not covered."""
_MOST_ENGINES, _MAKERS = 12, 4
_TOKENS, _TOKENS_WITH_DRAFTS = 192, 480
"""Tokens of the longest answer; drafts make steps fewer, by up to 4."""
_SIZES, _SIZES_WITH_DRAFTS = (1, 2, 4, 8, 16, 48, 128), (4, 8, 16, 32, 64, 128)
"""Sizes of graphs; the last is a step of nothing but a long prompt's tokens."""
_COMMON = (
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--seed", "0", "--skip-tokenizer-init"),
    # Keeps vLLM's memory profiling out of a GPU that several engines share.
    *("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05"),
)
_GDN_ON_TRITON = ("--gdn-prefill-backend=triton", "vllm/engine/arg_utils.py", "gdn_prefill_backend")
"""A flag, a file of vLLM and the word by which it is known there: to compile FlashInfer's kernel of gated delta nets
takes minutes, and 5 GiB a compiler."""
_OF_THE_MACHINE = re.compile(
    r"out of memory|allocate memory|MemoryError|ALLOC_FAILED|[Ff]ree memory|available memory|space left"
    r"|ended with signal|timed out|NCCL error|initialization failed"
)
"""Errors that say nothing of graphs."""
_NO_SUCH_GRAPHS = re.compile(r"CUDAGraphMode\.\w+ is not supported")
_OTHER_NAMES = re.compile(
    r"not initialized from checkpoint|no module or parameter named|KeyError: '[\w.]+'"
    r"|'\w+Config' object has no attribute|not exist,please check config|Tokenizer not available"
)
"""Errors of a vLLM that names weights or keys of a config otherwise than transformers does, or needs a tokenizer."""


class Hunt(NamedTuple):
    """The options of a hunt."""

    folder: Path
    cases: int | None = None
    shard: tuple[int, int] = (1, 1)
    architectures: Sequence[str] = ()
    leave_out: Sequence[str] = ()
    seed: int = 0
    minutes: float | None = None
    timeout: float = 300.0
    parallel: int | None = None
    deployed: Architecture | None = None
    """A user's model, around whose flags the cases vary."""
    earlier: Source | None = None
    """The vLLM before this one: architectures whose model's file has changed since then come first."""


class Hunted(NamedTuple):
    """All results in the hunt's folder that its options ask for, and what could not be hunted."""

    rows: list[dict[str, Any]]
    planned: int
    without_twin: dict[str, str]
    """Architectures of vLLM without a twin, and why."""
    seconds: float


def run(source: Source, hunt: Hunt, console: Console) -> Hunted:
    """Run the cases of *hunt* that its folder has no result of. Raises CompareError."""
    refuse_settings(os.environ, exact=True)
    began = time.monotonic()
    files = twins.architectures_of(source)
    if unknown := set(hunt.architectures) - set(files):
        raise CompareError(f"this vLLM has no text-generation architecture {', '.join(sorted(unknown))}")
    chosen = [] if hunt.deployed else hunt.architectures or files
    names = [name for name in files if name in chosen]
    hunt = hunt._replace(folder=hunt.folder.absolute())  # engines run in another working directory
    hunt.folder.mkdir(parents=True, exist_ok=True)
    with twins.pool(min(_MAKERS, os.cpu_count() or 1)) as makers, ThreadPoolExecutor(1) as finder:
        finding = finder.submit(devices.find)
        configs = dict(zip(names, makers.map(twins.default_config, names), strict=True))
        without = {name: config for name, config in configs.items() if isinstance(config, str)}
        if len(names) == len(files):
            without |= dict.fromkeys(twins.architectures_of(source, twins.IMAGES), "images are not made")
        known = [
            Architecture(name, config, *twins.takes(source, files[name]))
            for name, config in configs.items()
            if not isinstance(config, str)
        ]
        leave_out = [*hunt.leave_out, *without_effect(source)]
        try:
            device = finding.result()
        except VerifyError as error:
            raise CompareError(str(error)) from error
        leave_out += ON_TWO_GPUS if device.count < 2 else ()
        if empty := [key for key, values in DIMENSIONS.items() if set(values) <= set(leave_out)]:
            raise CompareError(
                f"no value of {empty[0]} is left to hunt with on {max(device.count, 1)} GPU; "
                "leave out less (--leave-out)"
            )
        changed = [each for each in known if hunt.earlier and twins.is_changed(files[each.name], source, hunt.earlier)]
        groups = (changed, [each for each in known if each not in changed])
        designs = [design(group, hunt.seed, leave_out) for group in groups]
        if hunt.deployed:
            designs = [around(hunt.deployed, hunt.seed, leave_out)]
            known.append(hunt.deployed)
        planned = list(islice(chain.from_iterable(designs), hunt.cases))
        cases = planned[hunt.shard[0] - 1 :: hunt.shard[1]]
        results = read_results(hunt.folder, source.version)
        write_inputs(hunt.folder, known)
        missing = [case for case in cases if case.name not in results]
        room = int(device.free_gib // GIB_PER_ENGINE) if device.name else 2
        parallel = hunt.parallel or max(1, min(_MOST_ENGINES, (os.cpu_count() or 2) * 3 // 4, room))
        newer = f", {len(changed)} of them changed since {hunt.earlier.version}" if hunt.earlier else ""
        console.print(
            f"{len(cases)} cases of {len(known)} architectures{newer}, {len(cases) - len(missing)} done before; "
            f"{parallel} engines at a time on {device.name or 'a CPU'}; {time.monotonic() - began:.0f} s so far",
            highlight=False,
        )
        with closing(_run_cases(source, hunt, missing, makers, parallel, began)) as rows:
            for row in rows:
                with (hunt.folder / RESULTS).open("a") as file:
                    file.write(json.dumps(row) + "\n")
                results[row["case"]] = row
                count = f"[{sum(case.name in results for case in cases)}/{len(cases)}]"
                say(console, f"{count} {line_of(row)}", markup=False)
    rows_of_cases = [results[case.name] for case in cases if case.name in results]
    return Hunted(rows_of_cases, len(cases), without, round(time.monotonic() - began, 1))


def without_effect(source: Source) -> list[str]:
    """Return the values that this vLLM does not have, or that change nothing there."""
    arguments, variables, caches = "vllm/engine/arg_utils.py", "vllm/envs.py", "vllm/config/cache.py"
    effects = {
        # Since 0.33 that flag does nothing.
        "states-aligned": not source.contains_word(arguments, "_MAMBA_CACHE_MODE_DEPRECATION_MESSAGE"),
        "adapters-by-number": source.contains_word(arguments, "specialize_active_lora"),
        "breakable": source.contains_word(variables, "VLLM_USE_BREAKABLE_CUDAGRAPH"),
        "turboquant_k8v4": source.contains_word(caches, "turboquant_k8v4"),
    }
    return [name for name, has_effect in effects.items() if not has_effect]


def write_inputs(folder: Path, architectures: Sequence[Architecture]) -> None:
    """Write what commands that reproduce a case need: configs, and the prompts without n-grams and with them."""
    (folder / CONFIGS).mkdir(exist_ok=True)
    for each in architectures:
        (folder / CONFIGS / f"{each.name}.json").write_text(json.dumps(each.config, indent=2))
    for ngrams in (False, True):
        lines = [json.dumps(prompt) + "\n" for prompt in made_prompts(ngrams=ngrams)]
        for requests in range(1, len(lines) + 1):  # a finding is reduced to any of these
            _prompts(folder, requests, ngrams=ngrams).write_text("".join(lines[:requests]))


def made_prompts(*, ngrams: bool) -> tuple[tuple[int, ...], ...]:
    """Return 16 prompts of up to 472 tokens; every other one begins alike, for the prefix cache.

    Two of one token follow, which wait until others have ended (`_COMMON`): their first step is then one of decodes
    alone.

    With *ngrams* none does, and each begins with every token: what n-grams draft is then as long for each request, and
    only where it is does the runner V1 replay a full graph.
    """
    chance = random.Random(0)  # noqa: S311 - the same prompts in every hunt
    words = range(10, 250)
    shared = tuple(chance.choices(words, k=96))
    lengths = [5 + 25 * number for number in range(16)]
    chance.shuffle(lengths)
    if ngrams:
        shared = tuple(chance.sample(range(twins.VOCABULARY), twins.VOCABULARY))
        lengths = [length // 4 for length in lengths]
    other = tuple(chance.sample(shared, len(shared))) if ngrams else ()
    longer = tuple(
        (*(shared if number % 2 else other), *chance.choices(words, k=length)) for number, length in enumerate(lengths)
    )
    return longer if ngrams else (*longer, (words[0],), (words[1],))


def _whole(case: HuntCase) -> Size:
    requests = len(made_prompts(ngrams=case.drafts_ngrams))
    return Size(requests, _TOKENS_WITH_DRAFTS if case.has_drafts else _TOKENS)


def _prompts(folder: Path, requests: int, *, ngrams: bool) -> Path:
    return folder / f"{requests}-prompts{'-with-ngrams' if ngrams else ''}.jsonl"


def read_results(folder: Path, version: str | None) -> dict[str, dict[str, Any]]:
    """Return the results in *folder* by case. Raises CompareError if they are of another vLLM."""
    file = folder / RESULTS
    if not file.exists():
        return {}
    *lines, cut = file.read_text().split("\n")
    if cut:  # by an interrupt; the next line must not be appended to it
        file.write_text("".join(f"{line}\n" for line in lines))
    rows = [json.loads(line) for line in lines]
    if others := {str(row["vllm"]) for row in rows} - {str(version)}:
        raise CompareError(f"{folder} has results of vLLM {', '.join(others)}; name another folder (--out)")
    return {row["case"]: row for row in rows}


def _run_cases(
    source: Source, hunt: Hunt, cases: Sequence[HuntCase], makers: Executor, parallel: int, began: float
) -> Generator[dict[str, Any], None, None]:
    folder = hunt.folder / "engines"
    folder.mkdir(exist_ok=True)
    engines = Engines(folder, hunt.timeout, preload=True, retry=False)
    stopped = threading.Event()
    slots, turn = threading.Semaphore(parallel), threading.Lock()

    def is_over() -> bool:
        return stopped.is_set() or (hunt.minutes is not None and time.monotonic() - began > 60 * hunt.minutes)

    def run_engine(case: HuntCase, job: Job) -> JobResult:
        """Run *job* once there is room on each GPU: one with two ranks is two engines."""
        needed = min(case.gpus, parallel)
        with turn:  # else two engines could each hold what the other one waits for
            for _ in range(needed):
                slots.acquire()
        try:
            return submit(job).result()
        finally:
            slots.release(needed)

    runner = CaseRunner(source, hunt, makers, run_engine, is_over)

    def task(case: HuntCase) -> dict[str, Any] | None:
        if is_over():
            return None
        try:
            row = runner.run(case)
        except Exception as error:  # one case must not end the hunt
            failed = {"verdict": UNCLEAR, "why": f"{type(error).__name__}: {error}"}
            row = _about(case, hunt.folder, (), _whole(case)) | failed
        return None if stopped.is_set() else row | {"vllm": source.version, "ended": round(time.monotonic() - began)}

    # The pool of cases around the engines: an interrupt ends the engines first, and so each case.
    with ThreadPoolExecutor(parallel) as pool, engines.open(parallel) as submit:
        futures: list[Future[dict[str, Any] | None]] = [pool.submit(task, case) for case in cases]
        try:
            for future in as_completed(futures):
                if (row := future.result()) is not None:
                    yield row
        except BaseException:
            stopped.set()
            for future in futures:
                future.cancel()
            raise


class CaseRunner(NamedTuple):
    """Makes the twin of a case, runs its engines, and judges their answers."""

    source: Source
    hunt: Hunt
    makers: Executor
    run_engine: Callable[[HuntCase, Job], JobResult]
    is_over: Callable[[], bool] = lambda: False
    """True once no more engines are to start: reducing a finding ends."""

    def run(self, case: HuntCase) -> dict[str, Any]:
        """Return the result of *case* as JSON; a wrong one is reduced."""
        whole = _whole(case)
        row = self._run_one(case, whole, case.stem)
        if row["verdict"] != WRONG:
            return row

        def is_wrong(other: HuntCase, size: Size) -> bool:
            # A stem of its own: the other case may be one of the hunt, and run now.
            return not self.is_over() and self._run_one(other, size, f"{case.stem}-reduced")["verdict"] == WRONG

        try:
            config = json.loads(_config(case, self.hunt.folder).read_text())
            architecture = Architecture(case.architecture, config, deployed=case.deployed)
            least, size = smaller(case, whole, architecture, is_wrong)
        except Exception as error:  # the finding stays one
            return row | {"reduced": None, "why_not_reduced": f"{type(error).__name__}: {error}"}
        command = _about(least, self.hunt.folder, self._flags(least), size)["command"]
        return row | {"reduced": {"case": least.name, **size._asdict(), "command": command}}

    def _run_one(self, case: HuntCase, size: Size, stem: str) -> dict[str, Any]:
        began, flags, folder = time.monotonic(), self._flags(case), self.hunt.folder
        place = folder / "twins" / stem
        row = _about(case, folder, flags, size)
        try:
            twin = self.makers.submit(twins.make, _config(case, folder), flags, place).result()
            if twin.why_not is not None:
                return row | {"verdict": NO_TWIN, "why": twin.why_not, "seconds": round(time.monotonic() - began, 1)}
            row["twin_seconds"] = round(time.monotonic() - began, 1)
            ended: list[JobResult] = []
            judged = self._judged(case, _jobs(case, size, stem, twin, self.hunt), ended)
            row |= judged | {"seconds": round(time.monotonic() - began, 1), "engines": [each.times for each in ended]}
            if row["verdict"] == RIGHT:
                for log in (folder / "engines").glob(f"{stem}-*"):
                    log.unlink()
            return row
        finally:
            shutil.rmtree(place, ignore_errors=True)
            shutil.rmtree(folder / "caches" / stem, ignore_errors=True)

    def _flags(self, case: HuntCase) -> tuple[str, ...]:
        """Return the flags that every case has, those of them that this vLLM knows, and the case's own."""
        sizes = map(str, _SIZES_WITH_DRAFTS if case.has_drafts else _SIZES)
        quick = quick_start(self.source, case.flags)
        flag, *known_by = _GDN_ON_TRITON
        if not case.deployed and self.source.contains_word(*known_by):  # a user's kernels are the user's
            quick.append(flag)
        captured = () if case.deployed else ("--cudagraph-capture-sizes", *sizes)
        model = json.dumps(str(_config(case, self.hunt.folder)))
        flags = (flag.replace(json.dumps(MODEL), model) for flag in case.flags)
        return (*_COMMON, *captured, *quick, *flags)

    def _judged(self, case: HuntCase, jobs: list[Job], ended: list[JobResult]) -> dict[str, Any]:
        def run_engine(job: Job) -> JobResult:
            ended.append(self.run_engine(case, job))
            return ended[-1]

        try:
            report = judge(case.name, case.flags, jobs, run_engine)
            if report.comparison is None and not report.wrong and not _may_be_the_machines(report.error or ""):
                without = run_engine(jobs[-1])  # compiled as the engine with graphs, which eager is not
                if without.result is None:
                    return _row_of(report) | {"verdict": REFUSED, "why": f"not without graphs either: {without.error}"}
        except CompareError as error:
            failed = ended[-1].error or ""
            unclear = ended[-1].result is not None or _may_be_the_machines(failed)
            verdict = UNCLEAR if unclear else NO_TWIN if _OTHER_NAMES.search(failed) else REFUSED
            return {"verdict": verdict, "why": str(error)}
        return _row_of(report)


def _jobs(case: HuntCase, size: Size, stem: str, twin: twins.Made, hunt: Hunt) -> list[Job]:
    prompts = made_prompts(ngrams=case.drafts_ngrams)[: size.requests]
    options = Options(prompts, max_tokens=size.tokens, poison=True, exact=True)
    # A cache for each case: vLLM may write that of one hash from two engines at the same time. Triton's is made
    # for that, and its kernels are the same in most cases.
    caches = hunt.folder / "caches"
    own: dict[str, str | None] = {"VLLM_CACHE_ROOT": str(caches / stem), "TRITON_CACHE_DIR": str(caches / "triton")}
    environment = CASE_ENVIRONMENT | _environment(case) | own
    return [
        replace(job, name=f"{stem} {job.name}", environment=environment | job.environment)
        for job in in_one_engine(jobs_for(twin.folder, twin.flags, options, twin.adapters), options)
    ]


def _environment(case: HuntCase) -> dict[str, str | None]:
    is_compiled = case.settings["compile"] != "uncompiled" or case.settings["attention"] == "FLEX_ATTENTION"
    return case.environment | ({} if is_compiled else NOTHING_COMPILED)


def _row_of(report: Report) -> dict[str, Any]:
    compared = max((rank.compared for rank in _ranks(report)), default=0)
    replays = compared + max((rank.skipped + rank.unseen for rank in _ranks(report)), default=0)
    why = report.inconclusive
    if why is None and not report.wrong and replays < MIN_REPLAYS:
        why = f"only {replays} replays; {MIN_REPLAYS} are needed"
    comparison, graphs = report.comparison, report.graphs
    row: dict[str, Any] = {
        "verdict": WRONG if report.wrong else _unproven(report) if why else RIGHT,
        "why": _finding(report) if report.wrong else why,
        "note": report.note,
        "cudagraph_mode": graphs.cudagraph_mode if graphs else NO_GRAPHS,
        "replays": replays,
        "compared": compared,
        "noise": finite_or_none(comparison.noise) if comparison else None,
        "distance": finite_or_none(comparison.distance) if comparison else None,
        "drafts": graphs.drafts if graphs else None,
        "facts": report.eager.facts,
    }
    return row | ({"report": compared_as_json(report)} if row["verdict"] != RIGHT else {})


def _unproven(report: Report) -> str:
    """Return the verdict on a case that is neither right nor wrong."""
    error = report.error or ""
    if report.comparison is not None or _may_be_the_machines(error):
        return UNCLEAR
    return REFUSED if _NO_SUCH_GRAPHS.search(error) else FAILS


def _may_be_the_machines(error: str) -> bool:
    """Tell if an engine's *error* may come from too little memory, space or time, or from who else is there."""
    return bool(HANG.search(error) or _OF_THE_MACHINE.search(error))


def _ranks(report: Report) -> Sequence[Any]:
    return report.exact.ranks if report.exact is not None else ()


def _finding(report: Report) -> str:
    if report.comparison is None:
        return str(report.error)
    if report.exact is not None and report.exact.detected:
        return next(finding for rank in report.exact.ranks for finding in rank.findings)
    if report.poison is not None and report.poison.detected:
        return report.poison.summary()
    if report.comparison.corrupt:
        return comparison_lines(report.comparison)[1]
    return "drafts are lost: the target rejects those of the draft model's graphs"


def _about(case: HuntCase, folder: Path, flags: Sequence[str], size: Size) -> dict[str, Any]:
    """Return what a result has on its case: also the command line that compares the same without a hunt."""
    variables = [f"{name}={value}" for name, value in _environment(case).items()]
    prompts = _prompts(folder, size.requests, ngrams=case.drafts_ngrams)
    ours = ("--twin", "--exact", "--poison", "--prompts", str(prompts), "--max-tokens", str(size.tokens))
    return {
        "case": case.name,
        "architecture": case.architecture,
        "settings": dict(case.settings),
        "command": shlex.join([*variables, "vllm-graphfix", "compare", str(_config(case, folder)), *ours, *flags]),
        "seconds": 0.0,
    }


def _config(case: HuntCase, folder: Path) -> Path:
    return folder / CONFIGS / f"{case.architecture}.json"


def line_of(row: dict[str, Any]) -> str:
    """Return one line on a result, for people."""
    replays = f", {row['replays']} replays ({row['compared']} compared)" if "replays" in row else ""
    why = f": {row['why']}" if row["why"] else ""
    return f"{row['case']}: {row['verdict']}{replays}, {row['seconds']:.0f} s{why}"
