"""The parent's side of `engine_worker.py`.

Engines run in processes of their own, all alive at once, and are asked one after the other.
"""

from __future__ import annotations

import ctypes
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
    """What a worker is to start."""

    arguments: dict[str, Any]
    """Keywords of `vllm.LLM`."""
    plugin: bool
    runner: str
    largest_batch: int
    where_known: NotRequired[dict[str, Any]]
    """More of the arguments, for releases that know them."""


class DiedError(Exception):
    """The engine is gone, or as good as; the message is its own error."""


@dataclass(frozen=True)
class Ready:
    """An engine that answers."""

    seconds: float
    """From the start of its process."""
    told: dict[str, Any]


class EngineProcess:
    """One engine. Whoever makes it ends it."""

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
                start_new_session=True,  # an engine starts processes; together they can be ended
            )
        self._started = time.monotonic()
        theirs.close()
        with suppress(OSError):  # it has ended already: `ready` says why, and `end` is called as for any other
            self._pipe.send(order)

    def ready(self, timeout: float) -> Ready:
        """Waits until the engine answers. Raises DiedError."""
        until = time.monotonic() + timeout
        moment = self._hear(until)
        return Ready(moment - self._started, self._hear(until))

    def tell(self, batch: int, tokens: int, shadow: str | None = None) -> None:
        """Lets the engine decode, with another rate of its shadow check if one is given; `hear` has its answer."""
        self._tell({"batch": batch, "tokens": tokens, "shadow": shadow})

    def hear(self, timeout: float) -> float:
        """Seconds of the decode steps that `tell` asked for. Raises DiedError."""
        return float(self._hear(time.monotonic() + timeout))

    def ask(self, asked: Mapping[str, Any], timeout: float) -> Any:
        """What the worker answers, *timeout* seconds from now at the latest. Raises DiedError."""
        self._tell(asked)
        return self._hear(time.monotonic() + timeout)

    def wait_for_answer(self, timeout: float) -> Any:
        """One more answer to what was asked last. Raises DiedError."""
        return self._hear(time.monotonic() + timeout)

    def end(self) -> None:
        """The process and all that it started: an engine's workers hold the GPU's memory."""
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tell(self, asked: Mapping[str, Any]) -> None:
        try:
            self._pipe.send(asked)
        except OSError:
            raise DiedError(self._why()) from None

    def _hear(self, until: float) -> Any:
        try:
            # One wait, in which this process sleeps; a pipe that ends is something to read, too.
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


class GpuMemory:
    """What NVML says is used on the GPU, by all processes together. Makes no CUDA context of its own."""

    class _Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def __init__(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        self._handle = ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            failed = nvml.nvmlInit_v2()
            if visible.startswith("GPU-"):
                failed = failed or nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(self._handle))
            else:
                number = int(visible) if visible.isdigit() else 0
                failed = failed or nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(self._handle))
        except (OSError, AttributeError):
            failed = 1
        self._nvml = None if failed else nvml

    def used(self) -> int | None:
        """Bytes, once they stay the same; None without NVML.

        A process that has ended leaves its memory a moment later.
        """
        last = self._read()
        for _ in range(20 if last is not None else 0):
            time.sleep(0.1)
            now = self._read()
            if now == last:
                break
            last = now
        return last

    def _read(self) -> int | None:
        memory = self._Memory()
        if self._nvml is None or self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            return None
        return int(memory.used)
