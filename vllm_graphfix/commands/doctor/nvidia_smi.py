"""Runs nvidia-smi once, with a time limit that holds even if it cannot be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

_PATIENCE = 10.0
"""Seconds; nvidia-smi hangs if a GPU or its driver does."""
_ANSWER = 64 * 1024
_QUERY = ("--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader")


def ask(program: str) -> tuple[str, str]:
    """Run nvidia-smi at *program*; return its end in words, and its output.

    Not `subprocess.run`, which waits for the process after it has killed it: one that hangs in the driver does not end.
    A child of nvidia-smi that keeps the pipe open does not delay the answer either.
    """
    try:
        process = subprocess.Popen(
            [program, *_QUERY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # its own children are killed with it
        )
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}", ""
    output = bytearray()
    try:
        pipe = process.stdout.fileno() if process.stdout else -1
        os.set_blocking(pipe, False)
        end = time.monotonic() + _PATIENCE
        open_ = True
        while time.monotonic() < end and len(output) <= _ANSWER:
            if open_:
                with suppress(BlockingIOError):
                    more = os.read(pipe, 4096)
                    output += more
                    open_ = bool(more)
                    if more:
                        continue
            if process.poll() is not None and (not open_ or not _read_rest(pipe, output)):
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
    text = bytes(output[:_ANSWER]).decode("utf-8", "replace")
    if code is None:
        return f"did not answer within {_PATIENCE:g} s" if len(output) <= _ANSWER else "printed without end", text
    return ("answered" if code == 0 else f"ended with {code}"), text


def _read_rest(pipe: int, output: bytearray) -> bool:
    """Read from *pipe* of a process that has ended; return False at its end."""
    with suppress(OSError):
        more = os.read(pipe, 4096)
        output += more
        return bool(more)
    return False
