"""Forks engines from a process that has imported vLLM, so that vLLM is imported once for all of them.

    python -m vllm_graphfix.verify.engine.preloaded READY PIPE

imports vLLM, writes to the file READY the reason why it cannot be forked, or nothing, and then forks an engine for each
line of JSON on its standard input. It writes the pid and the exit code of each engine to files. PIPE is as in `worker`.

vLLM's own front end forks its engine in the same way, after the same imports. Before it forks, the process must have
neither touched the GPU nor started the plugin, which reads an environment that each engine has for itself.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.verify.engine import worker

_READ_BY_ENGINES = re.compile(
    rf"{PREFIX}\w*|VLLM_USE_V2_MODEL_RUNNER|VLLM_DISABLE_COMPILE_CACHE"
    r"|VLLM_ENABLE_V1_MULTIPROCESSING|VLLM_CACHE_ROOT"
)
"""Variables that nothing reads while vLLM is imported: engines that differ only in these share a process."""
_FORK_TIMEOUT = 30.0
"""Seconds until an engine is forked; `Engines` may have to wait for this while it ends all engines."""
_IMPORT_TIMEOUT = 180.0
"""Seconds; a slow disk takes most of a minute."""
_GPU_TIMEOUT = 60
"""Seconds for a first use of the GPU, which takes two; several processes may do so at the same time."""


class Forked:
    """A grandchild process, with `poll` and `wait` as `subprocess.Popen` has them."""

    def __init__(self, parent: subprocess.Popen[bytes], stem: Path) -> None:
        self._parent, self._code = parent, stem.with_name(f"{stem.name}.code")
        self.pid = int(stem.with_name(f"{stem.name}.pid").read_text())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        orphaned = self._parent.poll() is not None  # before the file is read: it may be the parent's last act
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        elif self.returncode is None and orphaned:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code


class Preloaded:
    """A process that imports vLLM with *environment*, in *folder*, and forks engines."""

    def __init__(self, folder: Path, name: str, environment: Mapping[str, str], alive: int) -> None:
        self._ready = folder / f"{name}.ready"
        self.why_not: str | None = None
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._ready), str(alive)],
                cwd=folder,
                env=imported_with(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(alive,),
                start_new_session=True,
            )
        self._asking = threading.Lock()

    def wait(self) -> bool:
        """Wait until vLLM is imported; return False, with the reason in `why_not`, if the process cannot be forked."""
        deadline = time.monotonic() + _IMPORT_TIMEOUT
        while self.why_not is None and not self._ready.exists():
            if self.process.poll() is not None:
                self.why_not = "ended while it imported vLLM"
            elif time.monotonic() > deadline:
                self.why_not = f"had not imported vLLM after {_IMPORT_TIMEOUT:.0f} s"
            time.sleep(0.05)
        if self.why_not is None:
            self.why_not = self._ready.read_text() or None
        return self.why_not is None

    def engine(self, job: Path, result: Path, log: Path, environment: Mapping[str, str]) -> Forked | None:
        """Fork an engine; return None if the process has ended."""
        stem = result.with_suffix("")
        order = {"job": str(job), "result": str(result), "log": str(log), "environment": dict(environment)}
        assert self.process.stdin is not None  # noqa: S101 - started with a pipe
        with self._asking:
            try:
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                self.process.stdin.flush()
            except OSError:
                return None
            deadline = time.monotonic() + _FORK_TIMEOUT
            while not stem.with_name(f"{stem.name}.pid").exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    return None
                time.sleep(0.01)
        return Forked(self.process, stem)


def imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of *environment* that affects an import of vLLM."""
    return {name: value for name, value in environment.items() if not _READ_BY_ENGINES.fullmatch(name)}


def _serve(ready: Path, alive: int) -> None:
    why_not = _why_not_forkable()
    gc.collect()
    gc.freeze()  # else the first collection in each engine would write to, and so copy, every page
    engines: dict[int, Path] = {}
    signal.signal(signal.SIGCHLD, functools.partial(_write_exit_codes, engines))
    worker.write_at_once(ready, why_not or "")
    while line := sys.stdin.readline():
        order = json.loads(line)
        # SIGCHLD waits until `engines` has the pid: an engine may end at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            _become_engine(order, alive)
        with suppress(OSError):
            os.setpgid(pid, pid)  # here and in the engine, so that it holds whichever runs first
        stem = Path(order["result"]).with_suffix("")
        engines[pid] = stem
        worker.write_at_once(stem.with_name(f"{stem.name}.pid"), str(pid))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _why_not_forkable() -> str | None:
    from vllm_graphfix import _engine_process
    from vllm_graphfix.verify.engine import device

    try:
        from vllm import LLM  # noqa: F401
    except BaseException as error:
        traceback.print_exc()
        return f"could not import vLLM ({type(error).__name__}: {error})"
    if device.is_touched():
        return "has touched the GPU while it imported vLLM"
    if _engine_process.cache_info().currsize:
        return "has begun with the plugin while it imported vLLM"
    return None if _fork_can_use_gpu() else "was forked, and the fork could not use the GPU"


def _fork_can_use_gpu() -> bool:
    """Try once, so that no engine fails or hangs because of it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(_GPU_TIMEOUT)
            import torch

            if torch.cuda.is_available():
                torch.ones(2, device="cuda").sum().item()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _write_exit_codes(engines: dict[int, Path], number: int, frame: object) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if (stem := engines.pop(pid, None)) is not None:
                worker.write_at_once(stem.with_name(f"{stem.name}.code"), str(os.waitstatus_to_exitcode(status)))


def _become_engine(order: Mapping[str, Any], alive: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)  # one group with the processes that it starts, so that all can be killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.environ.clear()
        os.environ.update(order["environment"])
        code = worker.engine_process(Path(order["job"]), Path(order["result"]), alive)
    finally:  # also after an error: this child must not go on in its parent's loop
        os._exit(code)


if __name__ == "__main__":
    worker.exit_with_pipe(os.dup(int(sys.argv[2])))
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
