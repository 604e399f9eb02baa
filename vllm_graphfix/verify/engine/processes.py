"""Runs engines in processes of their own, several at a time, and ends all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.verify.codec import from_builtins
from vllm_graphfix.verify.engine import worker
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.engine.job import EngineResult, Job
from vllm_graphfix.verify.engine.llm import FlagError
from vllm_graphfix.verify.engine.preloaded import Preloaded, imported_with

_PLUGIN = "plugin"
_EXCEPTION = re.compile(
    r"(?:^|[\s\]])(?P<python>(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt): \S.*)|\bwhat\(\):\s+(?P<cpp>\S.*)"
)
_NO_FAILURE = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
"""A line of vLLM's log about an optional step that failed."""
_SECONDHAND = re.compile(r"root cause|Engine core initialization failed|EngineDeadError|EngineCore encountered")
"""Messages of the parent of the process that failed."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Colours, cursor movements, window titles."""


CRASH = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|launch fail|device-side assert"
    r"|kv_indptr.*non-negative"
    r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUDA error.{0,200}?: (invalid (configuration )?argument"
    r"|operation (not permitted|not supported on global/shared address space|failed|would))",
    re.IGNORECASE | re.DOTALL,
)
"""Crashes that defects of CUDA graphs cause. Another error, such as out of memory, proves nothing about graphs."""
HANG = re.compile(r"did not finish in \d+ s")
"""Error of an engine that was killed at its time limit: because of a defect, or because the machine is slow."""


@dataclass(frozen=True)
class JobResult:
    """Outcome of a job: the engine's result, or the error that ended its process."""

    job: Job
    result: EngineResult | None
    """None if the engine did not finish."""
    error: str | None
    """First line of the engine's error; None if it finished."""
    log: Path
    seconds: float
    observed: dict[str, list[float]] = field(default_factory=dict)
    """Observations of the probes, also of an engine that crashed."""
    began: float = 0.0
    """Start of the process, in seconds from the start of the run."""
    forked: bool = False
    """True if the process was forked from one that had imported vLLM."""
    why_not_forked: str | None = None
    """Reason for a fresh process where a forked one was asked for."""

    @property
    def times(self) -> dict[str, Any]:
        """Times in seconds; an engine that failed has only those measured from outside."""
        result = self.result
        return {
            "name": self.job.name,
            "error": self.error,
            "forked": self.forked,
            "why_not_forked": self.why_not_forked,
            "began": round(self.began, 1),
            "seconds": round(self.seconds, 1),
            "imports": result.import_seconds if result else None,
            "start": round(result.start_seconds - result.import_seconds, 1) if result else None,
            "answers": result.answer_seconds if result else None,
            "cpu": result.cpu_seconds if result else None,
        }


class Process(Protocol):
    """The part of `subprocess.Popen` that is needed of the leader of a process group."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Progress = Callable[[Job, str], None]


class Engines:
    """All engines of one run of a command."""

    def __init__(
        self,
        folder: Path,
        timeout: float,
        doing: Progress = lambda job, line: None,
        done: Progress = lambda job, how: None,
        *,
        preload: bool = False,
        ended: Callable[[JobResult], None] = lambda ended: None,
        limit: float | None = None,
        retry: bool = True,
    ) -> None:
        """Write logs and results to *folder*. *timeout*, in seconds, limits one engine from start to end.

        *doing* gets the last line of an engine's log twice a second, *done* a line on its end, and *ended* its result,
        in the thread that waited for it. With *preload*, engines are forked from a process that has imported vLLM, if
        that works; with *retry*, a fresh process repeats a forked engine that failed. No engine starts after *limit*
        seconds.
        """
        self._folder, self._timeout, self._doing, self._done = folder, timeout, doing, done
        self._preload, self._ended, self._limit, self._retry = preload, ended, limit, retry
        self._preloaded: list[tuple[dict[str, str], Preloaded]] = []
        self._running: dict[str, Process] = {}
        self._alive = -1
        """A pipe by whose end engines learn that this process has ended; negative outside a session."""
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, jobs: Sequence[Job], parallel: int) -> dict[str, JobResult]:
        """Run all *jobs*, *parallel* at a time, and return their results by name. An interrupt kills every process."""
        with self.open(parallel) as submit:
            futures = [submit(job) for job in jobs]
            return {job.name: future.result() for job, future in zip(jobs, futures, strict=True)}

    @contextmanager
    def open(self, parallel: int) -> Iterator[Callable[[Job], Future[JobResult]]]:
        """Yield a function that runs a job as soon as fewer than *parallel* run. An interrupt kills every process."""
        with self.session(), ThreadPoolExecutor(max(1, parallel)) as pool:
            try:
                yield lambda job: pool.submit(self._run, job)
            except BaseException:
                self._stop()
                raise

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the process from which engines are forked for every `run` in this context."""
        if self._alive >= 0:
            yield
            return
        _link_plugin(self._folder / _PLUGIN)
        self._began = time.monotonic()
        with terminated_like_interrupted(), _pipe_closed_at_exit() as pipe:
            self._alive = pipe
            try:
                yield
            finally:
                self._end_preloaded()
                self._alive = -1

    def _run(self, job: Job) -> JobResult:
        if self._limit is not None and time.monotonic() - self._began > self._limit:
            return JobResult(job, None, "was not started: time was up", self._folder, 0.0)
        ended = self._engine(job, preload=self._preload)
        if self._retry and ended.forked and ended.error and not _is_of_the_engine(ended.error):
            # A fresh process tells an error of the engine from one of forking.
            log = ended.log.rename(ended.log.with_suffix(".forked.log"))
            fresh = self._engine(job, preload=False)
            if fresh.error is None:
                self._preload = False
            ended = replace(fresh, why_not_forked=f"{ended.error} (log: {log})")
        parts = [f"{name} {ended.times[name]:.0f}" for name in ("imports", "start", "answers", "cpu") if ended.result]
        within = f" ({', '.join(parts)})" if parts else ""
        self._done(job, f"{ended.error or 'done'}, {ended.seconds:.0f} s{within}")
        self._ended(ended)
        return ended

    def _engine(self, job: Job, *, preload: bool) -> JobResult:
        stem = re.sub(r"[^\w.-]+", "-", job.name)
        job_file, result, log = (self._folder / f"{stem}.{kind}" for kind in ("job", "json", "log"))
        job.write(job_file)
        log.write_bytes(b"")
        for kind in ("json", "code", "pid"):  # of an earlier job of this name, which would be taken for this one's
            (self._folder / f"{stem}.{kind}").unlink(missing_ok=True)
        environment = _environment(job.environment, self._folder / _PLUGIN)
        preloaded = self._preloaded_for(environment) if preload else None
        forkable = preloaded is not None and preloaded.wait()
        started = time.monotonic()
        with self._lock:
            if self._stopped:
                return JobResult(job, None, "was not started", log, 0.0)
            process: Process | None = None
            if preloaded is not None and forkable:
                process = preloaded.engine(job_file, result, log, environment)
            forked = process is not None
            process = process or self._start(job_file, result, log, environment)
            self._running[job.name] = process
        late = self._wait(job, process, result, log, started)
        _kill(process)
        code = process.wait()
        with self._lock:
            del self._running[job.name]
        ended = _result_of(job, code, result, log, time.monotonic() - started, late)
        why_not = preloaded.why_not if preloaded is not None else None
        return replace(ended, began=started - self._began, forked=forked, why_not_forked=why_not)

    def _start(self, job_file: Path, result: Path, log: Path, environment: Mapping[str, str]) -> Process:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(job_file), str(result), str(self._alive)],
                cwd=self._folder,  # `-m` imports from there first, and the user's folder may hold a vLLM of its own
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self._alive,),
                start_new_session=True,  # one group with the processes that it starts, so that all can be killed
            )

    def _preloaded_for(self, environment: Mapping[str, str]) -> Preloaded | None:
        """Return the process from which engines with this environment are forked; start it if there is none."""
        decisive = imported_with(environment)
        with self._lock:
            for known, preloaded in self._preloaded:
                if known == decisive:
                    return preloaded
            if self._stopped:
                return None
            preloaded = Preloaded(self._folder, f"preloaded-{len(self._preloaded)}", environment, self._alive)
            self._preloaded.append((decisive, preloaded))
            return preloaded

    def _end_preloaded(self) -> None:
        with self._lock:
            ending = [preloaded.process for _, preloaded in self._preloaded]
            self._preloaded = []
        for process in ending:
            _kill(process)
        for process in ending:
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()

    def _wait(self, job: Job, process: Process, result: Path, log: Path, started: float) -> str | None:
        while process.poll() is None:
            took = time.monotonic() - started
            if took > self._timeout or (job.seconds is not None and _age(result) > job.seconds):
                return f"did not finish in {took:.0f} s"
            self._doing(job, last_line(log))
            time.sleep(0.5)
        return None

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = [*(preloaded.process for _, preloaded in self._preloaded), *self._running.values()]
        for process in running:  # kill all before waiting for any: a second interrupt may come meanwhile
            _kill(process)
        for process in running:
            process.wait()


@contextmanager
def _pipe_closed_at_exit() -> Iterator[int]:
    """Yield the reading end of a pipe; the kernel closes the writing end when this process ends, even by SIGKILL."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _is_of_the_engine(error: str) -> bool:
    """Return True if a fresh process would end in *error*, too, as by vLLM's refusal of a flag."""
    return bool(CRASH.search(error) or HANG.fullmatch(error)) or error.startswith(f"{FlagError.__name__}: ")


def _age(file: Path) -> float:
    """Return the seconds since *file* was written, or 0 if it does not exist."""
    with suppress(FileNotFoundError):
        return time.time() - file.stat().st_mtime
    return 0.0


def _kill(process: Process) -> None:
    """Kill the whole process group: an engine's workers hold the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that engines are ended as after Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # An ignored signal stays ignored, as under `nohup`, and a handler of the caller stays in place.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _link_plugin(folder: Path) -> None:
    """Link this copy of the package and its metadata into *folder*, for the engines' import path.

    The folder in which it is installed may hold another vLLM than the requested one.
    """
    folder.mkdir(exist_ok=True)
    for part in PACKAGE.glob("vllm_graphfix*"):
        if not (folder / part.name).is_symlink():
            (folder / part.name).symlink_to(part)


def _environment(extra: Mapping[str, str | None], plugin: Path) -> dict[str, str]:
    changed = {**os.environ, **extra}
    merged = {name: value for name, value in changed.items() if value is not None}
    path = os.pathsep.join(filter(None, [str(plugin), merged.get("PYTHONPATH", "")]))
    # Engines of a proof are no part of a fleet: their records are deleted with their folder.
    return merged | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", STATUS_DIR: str(plugin.parent)}


def _result_of(job: Job, code: int, file: Path, log: Path, seconds: float, late: str | None) -> JobResult:
    written = json.loads(file.read_text()) if file.exists() else {}
    observed = written.get("observed", {})
    result = from_builtins(written, EngineResult) if "passes" in written else None
    if result is not None and (code == 0 or result.poison_error is not None):
        if result.poison_error == "":
            result = replace(result, poison_error=late or _own_error("", code, log))
        return JobResult(job, result, None, log, seconds, observed)
    return JobResult(job, None, late or _own_error(written.get("error", ""), code, log), log, seconds, observed)


def _own_error(own: str, code: int, log: Path) -> str:
    """Return the engine's error: *own*, the one that it reported, or one from its log, or its exit code."""
    if not own or _SECONDHAND.search(own):
        own = root_cause(log.read_text(errors="replace")) or own
    if not own:
        own = f"ended with signal {-code}" if code < 0 else (last_line(log) or f"ended with exit code {code}")
    return own


def root_cause(log: str) -> str | None:
    """Return the first exception in *log* that does not report the failure of another process."""
    lines = (line for line in _CONTROL.sub("", log).splitlines() if not _NO_FAILURE.search(line))
    matches = ((match["python"] or match["cpp"]).strip() for line in lines if (match := _EXCEPTION.search(line)))
    return next((error for error in matches if not _SECONDHAND.search(error)), None)


def last_line(log: Path) -> str:
    """Return the last line of *log*, to show progress."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = re.split(r"[\r\n]+", _CONTROL.sub("", file.read().decode(errors="replace")).strip())
    return lines[-1].strip()
