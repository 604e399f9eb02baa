"""Engines in processes of their own, all alive at once: the parent's end of the pipe to `engine_worker.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import NotRequired

from vllm_graphfix.verify.engine import processes

WORKER = Path(__file__).with_name("engine_worker.py")


class Order(TypedDict):
    """The engine that a worker starts."""

    arguments: dict[str, Any]
    """Keywords of `vllm.LLM`."""
    plugin: bool
    runner: str
    largest_batch: int
    where_known: NotRequired[dict[str, Any]]
    """More keywords, which are passed on releases that know them."""


class DiedError(Exception):
    """The engine ended or does not answer; the message is its own error."""


@dataclass(frozen=True)
class Ready:
    """The first answer of an engine."""

    seconds: float
    """From the start of its process."""
    answer: dict[str, Any]


class EngineProcess:
    """One engine; the caller must call `end`."""

    def __init__(self, order: Order, environment: Mapping[str, str], log: Path, worker: Path | None = None) -> None:
        self._log = log
        self._pipe, theirs = Pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(worker or WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=log.parent,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, so that `end` kills what the engine started, too
            )
        self._started = time.monotonic()
        theirs.close()
        with suppress(OSError):  # the process has ended already: `ready` raises its error
            self._pipe.send(order)

    def ready(self, timeout: float) -> Ready:
        """Wait until the engine answers. Raises DiedError."""
        until = time.monotonic() + timeout
        moment = self._receive(until)
        return Ready(moment - self._started, self._receive(until))

    def tell(self, batch: int, tokens: int) -> None:
        """Start a decode; `hear` returns its time."""
        self._send({"batch": batch, "tokens": tokens})

    def hear(self, timeout: float) -> float:
        """Return the seconds of the decode that `tell` started. Raises DiedError."""
        return float(self._receive(time.monotonic() + timeout))

    def ask(self, request: Mapping[str, Any], timeout: float) -> Any:
        """Send *request* and return its answer. Raises DiedError, also after *timeout* seconds."""
        self._send(request)
        return self._receive(time.monotonic() + timeout)

    def end(self) -> None:
        """Kill the process and all that it started: an engine's workers hold the GPU's memory."""
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            self._pipe.send(request)
        except OSError:
            raise DiedError(self._why()) from None

    def _receive(self, until: float) -> Any:
        try:
            # One long wait and no polling, which would take time from engines; a closed pipe ends it, too.
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
                raise DiedError(f"did not answer in time; its log ends in: {processes.last_line(self._log)}")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise DiedError(self._why()) from None
        if isinstance(answer, dict) and "error" in answer:
            raise DiedError(self._why(answer["error"]))
        return answer

    def _why(self, own: str = "") -> str:
        self.end()
        if own and "root cause" not in own:  # what vLLM says in the parent of the process that failed
            return own
        code = self._process.returncode
        cause = processes.root_cause(self._log.read_text(errors="replace"))
        return cause or own or (f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}")


def used_gpu_memory() -> int | None:
    """Bytes in use on the first visible GPU by all processes, once they stay the same; None without nvidia-smi.

    A process that has ended gives its memory back a moment later. nvidia-smi counts in MiB and makes no CUDA context.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={visible or 0}"]
    last = None
    for _ in range(20):
        try:
            used = int(subprocess.run(query, capture_output=True, check=True).stdout) << 20
        except (OSError, ValueError, subprocess.CalledProcessError):
            return None
        if used == last:
            break
        last = used
        time.sleep(0.1)
    return last
