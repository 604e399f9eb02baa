"""Runs the scenarios in a stock and a patched process at the same time, and compares them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from vllm_graphfix.verify.engine.device import PACKAGE
from vllm_graphfix.verify.measurement import Measurement, Watch
from vllm_graphfix.verify.proof import MODES_OF_A_PROOF, Proof
from vllm_graphfix.verify.report import Report
from vllm_graphfix.verify.trial import trial_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_WORKER = (sys.executable, "-m", "vllm_graphfix.verify.double.worker")
_TIMEOUT = 900
"""Seconds for one process; ten times what one takes on two slow cores."""


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
    with _folder_on_disk(source) as folder, bars as progress:
        workers: list[_Worker] = []
        try:
            for kind in ("stock", "patched"):
                task = progress.add_task(kind, total=len(affected) + len(unrecognised) + 1, doing="imports vLLM")
                to_leave_alone = others if kind == "patched" else ()
                workers.append(_Worker(kind, folder, affected, to_leave_alone, unrecognised, progress, task))
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.stop()
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
    """Starts a process with the scenarios and reads its results line by line."""

    def __init__(
        self,
        kind: str,
        folder: Path,
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
        # Not deleted on close: the user needs the log if the process fails.
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix=f"graphfix-verify-{kind}-", suffix=".log", delete=False
        )
        with ExitStack() as undo:
            undo.callback(Path(self._log.name).unlink)
            undo.enter_context(self._log)
            self._process = subprocess.Popen(
                [*_WORKER, str(folder), *names, "--", *others, "--", *unrecognised],
                cwd=PACKAGE,  # `-m` imports from there first, and the user's folder may hold a json.py of its own
                env=_environment(kind, unrecognised),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            undo.enter_context(self._process)
            undo.callback(self._process.kill)
            self._timer = threading.Timer(_TIMEOUT, self._process.kill)
            undo.callback(self._timer.cancel)
            self._timer.start()
            self.start()
            undo.pop_all()  # nothing has failed

    def run(self) -> None:
        try:
            with self._process:
                for line in self._process.stdout or ():
                    self._read_result(json.loads(line))
        finally:  # also after a line that is no JSON: a running timer would keep this process alive
            self._timer.cancel()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process. Raises VerifyError if it did not finish."""
        super().join(timeout)
        self._log.close()
        if self._process.returncode or not self.states:
            tail = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-1:]
            raise VerifyError(
                f"the {self.kind} process ended with {self._process.returncode}: {' '.join(tail) or 'no message'}. "
                f"Use a Python that has torch and what vLLM imports; this one is {sys.executable}. The log is "
                f"{self._log.name}"
            )
        if not self.failed:
            Path(self._log.name).unlink(missing_ok=True)

    def stop(self) -> None:
        """Kill a process that was not waited for, because the other one failed or the user interrupted."""
        if not self._log.closed:
            self._process.kill()
            super().join()
            self._log.close()
            Path(self._log.name).unlink(missing_ok=True)

    def _read_result(self, line: dict[str, Any]) -> None:
        event, name = line["event"], line.get("fix", "")
        if event == "registered":
            self.torch = line["torch"]
        elif event == "measured":
            self.measured[name] = from_builtins(line, Measurement)
        elif event == "failed":
            self.failed[name] = f"{line['error']} (in the {self.kind} process; log: {self._log.name})"
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


def _environment(kind: str, trees: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment without variables that would decide about fixes or devices.

    The patched process patches unrecognised code where a patch fits; *trees* has its `Diagnosis.tree`, by fix.
    """
    inherited = {key: value for key, value in os.environ.items() if not is_ours(key)}
    # This very copy of the plugin comes first. The vLLM under test is an argument, since a path may hold a colon.
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return inherited | {
        PREFIX: "off" if kind == "stock" else "on",
        **dict.fromkeys(map(variable, BY_NAME), "auto"),  # also those that are observed by default
        **{variable(name): f"on:{tree}" for name, tree in trees.items() if tree},
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
