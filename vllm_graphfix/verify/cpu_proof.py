"""Runs the scenarios in a stock and a patched process at the same time, and compares them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Fix, Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import PREFIX, is_ours
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.codec import from_builtins
from vllm_graphfix.verify.double import forks
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.measurement import Measurement, Watch
from vllm_graphfix.verify.proof import MODES_OF_A_PROOF, Proof
from vllm_graphfix.verify.report import Report
from vllm_graphfix.verify.trial import trial_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_FORKS = (sys.executable, "-m", forks.__name__)
_TIMEOUT = 900
"""Seconds for both processes; ten times what they take on two slow cores."""


def run(source: Source, fixes: Sequence[Fix], console: Console) -> Report:
    """Prove *fixes* on *source* with the CPU double. Progress goes to *console*.

    Raises `VerifyError`, `SourceError`.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    diagnoses = {fix.name: manifest.diagnose(fix, source) for fix in fixes}
    affected = [fix.name for fix in fixes if diagnoses[fix.name].verdict is Verdict.AFFECTED]
    others = [fix.name for fix in fixes if diagnoses[fix.name].verdict in (Verdict.FIXED, Verdict.ABSENT)]
    # A diagnosis of `fixed` in code of no stock release is run as well: nobody has reviewed that code.
    unrecognised = {
        name: diagnosis.tree
        for name, diagnosis in diagnoses.items()
        if diagnosis.verdict is Verdict.UNRECOGNISED or (diagnosis.verdict is Verdict.FIXED and not diagnosis.known)
    }
    columns = (TextColumn("{task.description:8}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
    # Without a terminal, transient bars leave an empty line.
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with _folder_on_disk(source) as folder, bars as progress, ExitStack() as undo:
        workers: list[_Worker] = []
        for kind in ("stock", "patched"):
            task = progress.add_task(kind, total=len(affected) + len(unrecognised) + 1, doing="imports vLLM")
            to_leave_alone = others if kind == "patched" else ()
            workers.append(_Worker(kind, affected, to_leave_alone, unrecognised, progress, task))
            undo.callback(workers[-1].close)
        process = undo.enter_context(_running(workers, folder))
        for worker in workers:
            worker.finish(process)
    stock, patched = workers
    return Report(
        source.version,
        source.label,
        "CPU double",
        tuple(_proof(fix, diagnoses[fix.name], stock, patched, unrecognised) for fix in fixes),
        environment={"torch": patched.torch, "Python": platform.python_version(), "modes": MODES_OF_A_PROOF},
    )


def _proof(fix: Fix, diagnosis: Diagnosis, stock: _Worker, patched: _Worker, unrecognised: Mapping[str, str]) -> Proof:
    name = fix.name
    workers = (stock, patched)
    return Proof(
        fix,
        diagnosis,
        stock.measured.get(name),
        patched.measured.get(name),
        stock.failed.get(name) or patched.failed.get(name),
        stock.states[name],
        patched.states[name],
        why_unwatched=trial_of(name).unwatched,
        was_run=name in unrecognised and diagnosis.verdict is Verdict.FIXED,
        poisoned={worker.kind: worker.poisoned[name] for worker in workers if name in worker.poisoned},
        watched={
            worker.kind: replace(watches[0], further=tuple(watches[1:]))
            for worker in workers
            if (watches := worker.watched.get(name))
        },
    )


class _Worker(threading.Thread):
    """Reads the results of a fork with the scenarios line by line."""

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        others: Sequence[str],
        unrecognised: Mapping[str, str],
        progress: Progress,
        task: TaskID,
    ) -> None:
        super().__init__(daemon=True)
        self.kind = kind
        self.measured: dict[str, Measurement] = {}
        self.failed: dict[str, str] = {}
        self.states: dict[str, tuple[str, str]] = {}
        self.watched: dict[str, list[Watch]] = {}
        self.poisoned: dict[str, tuple[str, ...]] = {}
        self.torch = "unknown"
        self._progress, self._task, self._names = progress, task, [*names, *unrecognised]
        self._code: int | None = None
        # Not deleted on close: the user needs the log if the process fails.
        self.log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix=f"graphfix-verify-{kind}-", suffix=".log", delete=False
        )
        reading, self._writing = os.pipe()
        self._results = os.fdopen(reading)
        self.job = forks.Job(
            [[*names], [*others], [*unrecognised]],
            _modes(kind, unrecognised),
            self._writing,
            self.log.fileno(),
        )

    def start(self) -> None:
        """Begin to read; the process that writes has been started."""
        self._close_writing()  # else there would be no end of file
        super().start()

    def run(self) -> None:
        with self._results:
            for line in self._results:
                self._read_result(json.loads(line))

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for this fork of *process*. Raises VerifyError if it did not finish."""
        self.join()
        self.log.close()
        code = process.wait() if self._code is None else self._code
        if code or self._code is None or not self.states:
            tail = Path(self.log.name).read_text(errors="replace").strip().splitlines()[-1:]
            raise VerifyError(
                f"the {self.kind} process ended with {code}: {' '.join(tail) or 'no message'}. "
                f"Use a Python that has torch and what vLLM imports; this one is {sys.executable}. The log is "
                f"{self.log.name}"
            )
        if not self.failed:
            Path(self.log.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close and remove all if there was no `finish`: the other fork failed, or the user interrupted."""
        if not self.log.closed:
            self._close_writing()
            if self.ident is None:
                self._results.close()
            else:
                self.join()
            self.log.close()
            Path(self.log.name).unlink(missing_ok=True)

    def _close_writing(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def _read_result(self, line: dict[str, Any]) -> None:
        event, name = line["event"], line.get("fix", "")
        if event == "registered":
            self.torch = line["torch"]
        elif event == "measured":
            self.measured[name] = from_builtins(line, Measurement)
        elif event == "ended":
            self._code = line["code"]
            return
        elif event == "failed":
            self.failed[name] = f"{line['error']} (in the {self.kind} process; log: {self.log.name})"
        elif event == "state":
            self.states[name] = (line["state"], line["reason"])
            return
        elif event == "poisoned":
            self.poisoned[name] = tuple(line["effects"])
            return
        elif event == "watched":
            self.watched.setdefault(name, []).append(from_builtins(line, Watch))
            return
        done = len(self.measured) + len(self.failed)
        following = self._names[done] if done < len(self._names) else "shadow check"
        self._progress.update(self._task, completed=done + 1, doing=following)


@contextmanager
def _running(workers: Sequence[_Worker], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that forks, and *workers*, which read; at the end, kill what still runs."""
    with (
        subprocess.Popen(
            [*_FORKS, str(folder), *(json.dumps(worker.job) for worker in workers)],
            cwd=PACKAGE,  # `-m` imports from there first, and the user's folder may hold a json.py of its own
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=workers[0].log,
            pass_fds=[descriptor for worker in workers for descriptor in (worker.job.results, worker.job.log)],
            start_new_session=True,  # so that its forks can be killed with it
        ) as process,
        ExitStack() as undo,
    ):
        undo.callback(_kill_unless_done, process, workers)
        timer = threading.Timer(_TIMEOUT, _kill, (process,))
        undo.callback(timer.cancel)
        timer.start()
        for worker in workers:
            worker.start()
        yield process


def _kill_unless_done(process: subprocess.Popen[bytes], workers: Sequence[_Worker]) -> None:
    # A fork may outlive the process.
    if process.poll() is None or any(worker.is_alive() for worker in workers):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _modes(kind: str, trees: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this plugin for the *kind* of process.

    The patched process patches unrecognised code where a patch fits; *trees* has its `Diagnosis.tree`, by fix.
    """
    return {
        PREFIX: "off" if kind == "stock" else "on",
        **dict.fromkeys(map(variable, BY_NAME), "auto"),  # also those that are observed by default
        **{variable(name): f"on:{tree}" for name, tree in trees.items() if tree},
    }


def _environment() -> dict[str, str]:
    """Return the user's environment without variables that would decide about fixes or devices."""
    inherited = {key: value for key, value in os.environ.items() if not is_ours(key)}
    # This very copy of the plugin comes first. The vLLM under test is an argument, since a path may hold a colon.
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return inherited | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # two processes share the machine, and the tensors are tiny
        "TQDM_DISABLE": "1",  # vLLM's bars over captures would mix with ours
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


@contextmanager
def _folder_on_disk(source: Source) -> Iterator[Path]:
    """Yield the folder that holds ``vllm/``; of a wheel file, a temporary one with its Python files."""
    if source.folder is not None:
        yield source.folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="graphfix-verify-") as folder, zipfile.ZipFile(source.label) as archive:
        for member in archive.infolist():
            if member.filename.endswith((".so", ".cu", ".h", "/")):
                continue
            archive.extract(member, folder)  # zipfile strips path components that lead out of the folder
        yield Path(folder)
