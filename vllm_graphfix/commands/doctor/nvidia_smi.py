"""nvidia-smi is asked once, and nobody waits for it for long."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

_PATIENCE = 10.0
"""Seconds for nvidia-smi, which hangs where a GPU or its driver does."""
_ANSWER = 64 * 1024
_QUERY = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")


def ask(program: str) -> tuple[str, str]:
    """How nvidia-smi ended, and what it said.

    It may hang in a way in which it cannot be ended: nobody waits for it longer than `_PATIENCE`.
    """
    try:
        process = subprocess.Popen(
            [program, *_QUERY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what it starts is ended with it
        )
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}", ""
    said = bytearray()
    try:
        pipe = process.stdout.fileno() if process.stdout else -1
        os.set_blocking(pipe, False)
        end = time.monotonic() + _PATIENCE
        open_ = True
        while time.monotonic() < end and len(said) <= _ANSWER:
            if open_:
                with suppress(BlockingIOError):
                    more = os.read(pipe, 4096)
                    said += more
                    open_ = bool(more)
                    if more:
                        continue
            if process.poll() is not None and (not open_ or not _read_rest(pipe, said)):
                break
            time.sleep(0.02)
        code = process.poll()
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout:
            process.stdout.close()
    text = bytes(said[:_ANSWER]).decode("utf-8", "replace")
    if code is None:
        return f"did not answer within {_PATIENCE:g} s" if len(said) <= _ANSWER else "printed without end", text
    return ("answered" if code == 0 else f"ended with {code}"), text


def _read_rest(pipe: int, said: bytearray) -> bool:
    """Whether something is left in the pipe of a process that has ended."""
    with suppress(OSError):
        more = os.read(pipe, 4096)
        said += more
        return bool(more)
    return False
