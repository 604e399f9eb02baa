"""Runs engines in processes of their own, side by side, and leaves none behind."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.verify.codec import from_builtins
from vllm_graphfix.verify.engine import worker
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.engine.job import Job, Said
from vllm_graphfix.verify.engine.preloaded import Preloaded, imported_with

_PLUGIN = "plugin"
_EXCEPTION = re.compile(
    r"(?:^|[\s\]])(?P<python>(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt): \S.*)|\bwhat\(\):\s+(?P<cpp>\S.*)"
)
_NO_FAILURE = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
"""vLLM's log of something that it tried and can do without."""
_SECONDHAND = re.compile(r"root cause|Engine core initialization failed|EngineDeadError|EngineCore encountered")
"""What vLLM says in the parent of the process that failed."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Colours, movements of the cursor, titles of windows."""


CRASH = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|launch fail|device-side assert"
    r"|kv_indptr.*non-negative"
    r"|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUDA error.{0,200}?: (invalid (configuration )?argument"
    r"|operation (not permitted|not supported on global/shared address space|failed|would))",
    re.IGNORECASE | re.DOTALL,
)
"""The crashes that defects of CUDA graphs lead to. An engine that ends in another error says nothing of its graphs: out
of memory, say."""
HANG = re.compile(r"did not finish in \d+ s")
"""The error of an engine that was ended from outside: by a defect's doing, or because the machine is slow."""


@dataclass(frozen=True)
class Ended:
    """How an engine's process ended."""

    job: Job
    said: Said | None
    """None if it did not finish."""
    error: str | None
    """The engine's own, first line; None if it came to its end."""
    log: Path
    seconds: float
    observed: dict[str, list[float]] = field(default_factory=dict)
    """What the probes had seen, also of an engine that crashed."""
    began: float = 0.0
    """Seconds from the start of the first engine of the run, or of what it is forked from."""
    forked: bool = False
    """Whether its process had imported vLLM before, as a part of another."""
    why_not_forked: str | None = None
    """Where it should have been."""

    @property
    def times(self) -> dict[str, Any]:
        """What an engine took, in seconds: where one failed, only what can be seen from outside."""
        said = self.said
        return {
            "name": self.job.name,
            "error": self.error,
            "forked": self.forked,
            "why_not_forked": self.why_not_forked,
            "began": round(self.began, 1),
            "seconds": round(self.seconds, 1),
            "imports": said.import_seconds if said else None,
            "start": round(said.start_seconds - said.import_seconds, 1) if said else None,
            "answers": said.answer_seconds if said else None,
            "cpu": said.cpu_seconds if said else None,
        }


class Process(Protocol):
    """What `subprocess.Popen` has of a process that leads a group."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Told = Callable[[Job, str], None]


class Engines:
    """All processes of one run of a command."""

    def __init__(
        self,
        folder: Path,
        timeout: float,
        doing: Told = lambda job, line: None,
        done: Told = lambda job, how: None,
        *,
        preload: bool = False,
        ended: Callable[[Ended], None] = lambda ended: None,
        limit: float | None = None,
    ) -> None:
        """Logs and results go to *folder*. *timeout*, in seconds, is for one engine from start to end.

        *ended* is called with each engine that has, in the thread that waited for it. No engine begins when *limit*
        seconds are over.

        *doing* is told the last line of an engine's log twice a second, *done* how it ended. With *preload* engines are
        forked from a process that has imported vLLM, where that works.
        """
        self._folder, self._timeout, self._doing, self._done = folder, timeout, doing, done
        self._preload, self._ended, self._limit = preload, ended, limit
        self._preloaded: list[tuple[dict[str, str], Preloaded]] = []
        self._running: dict[str, Process] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, jobs: Sequence[Job], parallel: int) -> dict[str, Ended]:
        """All *jobs*, *parallel* at a time, by name. If this is interrupted, no process stays."""
        _put_the_plugin_alone(self._folder / _PLUGIN)
        self._began = time.monotonic()
        with (
            terminated_like_interrupted(),
            _open_while_this_process_lives() as self._alive,
            ThreadPoolExecutor(max(1, parallel)) as pool,
        ):
            try:
                futures = [pool.submit(self._run, job) for job in jobs]
                return {job.name: future.result() for job, future in zip(jobs, futures, strict=True)}
            except BaseException:
                self._stop()
                raise
            finally:
                self._end_what_is_preloaded()

    def _run(self, job: Job) -> Ended:
        if self._limit is not None and time.monotonic() - self._began > self._limit:
            return Ended(job, None, "was not started: time was up", self._folder, 0.0)
        ended = self._engine(job, preload=self._preload)
        if ended.forked and ended.error and not (CRASH.search(ended.error) or HANG.fullmatch(ended.error)):
            # Whether that is because it was forked, another one tells.
            log = ended.log.rename(ended.log.with_suffix(".forked.log"))
            again = self._engine(job, preload=False)
            if again.error is None:
                self._preload = False
            ended = replace(again, why_not_forked=f"{ended.error} (log: {log})")
        parts = [f"{name} {ended.times[name]:.0f}" for name in ("imports", "start", "answers", "cpu") if ended.said]
        within = f" ({', '.join(parts)})" if parts else ""
        self._done(job, f"{ended.error or 'done'}, {ended.seconds:.0f} s{within}")
        self._ended(ended)
        return ended

    def _engine(self, job: Job, *, preload: bool) -> Ended:
        stem = re.sub(r"[^\w.-]+", "-", job.name)
        given, result, log = (self._folder / f"{stem}.{kind}" for kind in ("job", "json", "log"))
        job.write(given)
        log.write_bytes(b"")
        environment = _environment(job.environment, self._folder / _PLUGIN)
        preloaded = self._preloaded_for(environment) if preload else None
        forkable = preloaded is not None and preloaded.wait()
        started = time.monotonic()
        with self._lock:
            if self._stopped:
                return Ended(job, None, "was not started", log, 0.0)
            process: Process | None = None
            if preloaded is not None and forkable:
                process = preloaded.engine(given, result, log, environment)
            forked = process is not None
            process = process or self._start(given, result, log, environment)
            self._running[job.name] = process
        late = self._wait(job, process, result, log, started)
        _kill(process)
        code = process.wait()
        with self._lock:
            del self._running[job.name]
        ended = _result_of(job, code, result, log, time.monotonic() - started, late)
        why_not = preloaded.why_not if preloaded is not None else None
        return replace(ended, began=started - self._began, forked=forked, why_not_forked=why_not)

    def _start(self, given: Path, result: Path, log: Path, environment: Mapping[str, str]) -> Process:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(given), str(result), str(self._alive)],
                cwd=self._folder,  # `-m` looks there first, and the user's folder may hold a vLLM of its own
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(self._alive,),
                start_new_session=True,  # an engine starts processes; together they can be ended
            )

    def _preloaded_for(self, environment: Mapping[str, str]) -> Preloaded | None:
        """The process to fork an engine with this environment from; started if there is none."""
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

    def _end_what_is_preloaded(self) -> None:
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
        for process in running:  # all of them before any is waited for: whoever is impatient interrupts again
            _kill(process)
        for process in running:
            process.wait()


@contextmanager
def _open_while_this_process_lives() -> Iterator[int]:
    """The reading end of a pipe; the other end is closed when this process ends, however it does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _age(file: Path) -> float:
    """Seconds since *file* was written; 0 for one that was not."""
    with suppress(FileNotFoundError):
        return time.time() - file.stat().st_mtime
    return 0.0


def _kill(process: Process) -> None:
    """The process and all that it started: an engine's workers hold the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """`kill`, or a terminal that is closed, ends this process as Ctrl-C does: what it started is ended first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that is ignored stays so, as `nohup` wants it, and one that somebody handles stays his.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _put_the_plugin_alone(folder: Path) -> None:
    """Links this very copy and its metadata into *folder*.

    Where it is installed, another vLLM than the one asked for may lie beside it.
    """
    folder.mkdir(exist_ok=True)
    for part in PACKAGE.glob("vllm_graphfix*"):
        if not (folder / part.name).is_symlink():
            (folder / part.name).symlink_to(part)


def _environment(extra: Mapping[str, str | None], plugin: Path) -> dict[str, str]:
    changed = {**os.environ, **extra}
    merged = {name: value for name, value in changed.items() if value is not None}
    path = os.pathsep.join(filter(None, [str(plugin), merged.get("PYTHONPATH", "")]))
    # Engines that prove something are nobody's fleet: their records go with their folder.
    return merged | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", STATUS_DIR: str(plugin.parent)}


def _result_of(job: Job, code: int, result: Path, log: Path, seconds: float, late: str | None) -> Ended:
    written = json.loads(result.read_text()) if result.exists() else {}
    observed = written.get("observed", {})
    said = from_builtins(written, Said) if "passes" in written else None
    if said is not None and (code == 0 or said.poison_error is not None):
        if said.poison_error == "":
            said = replace(said, poison_error=late or _own_error("", code, log))
        return Ended(job, said, None, log, seconds, observed)
    return Ended(job, None, late or _own_error(written.get("error", ""), code, log), log, seconds, observed)


def _own_error(own: str, code: int, log: Path) -> str:
    """What an engine ended in, by its own words *own*, if it had any, its log, and its exit code."""
    if not own or _SECONDHAND.search(own):
        own = root_cause(log.read_text(errors="replace")) or own
    if not own:
        own = f"ended with signal {-code}" if code < 0 else (last_line(log) or f"ended with exit code {code}")
    return own


def root_cause(log: str) -> str | None:
    """The first exception of a log that is not about another process's."""
    lines = (line for line in _CONTROL.sub("", log).splitlines() if not _NO_FAILURE.search(line))
    found = ((match["python"] or match["cpp"]).strip() for line in lines if (match := _EXCEPTION.search(line)))
    return next((error for error in found if not _SECONDHAND.search(error)), None)


def last_line(log: Path) -> str:
    """For people to see that something goes on."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = re.split(r"[\r\n]+", _CONTROL.sub("", file.read().decode(errors="replace")).strip())
    return lines[-1].strip()
