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
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT
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
    ended = False
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
            if _has_ended(process.pid) and (not open_ or not _read_rest(pipe, output)):
                break
            time.sleep(0.02)
        ended = _has_ended(process.pid)
    finally:
        with suppress(OSError):
            os.waitid(os.P_PID, process.pid, _LOOK)  # raises if it was reaped: its id may be another group's by now
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout:
            process.stdout.close()
    text = bytes(output[:_ANSWER]).decode("utf-8", "replace")
    if not ended:
        return f"did not answer within {_PATIENCE:g} s" if len(output) <= _ANSWER else "printed without end", text
    return ("answered" if process.returncode == 0 else f"ended with {process.returncode}"), text


def _has_ended(pid: int) -> bool:
    """Return True if the child *pid* has ended; it is not reaped, so that nothing else gets its id."""
    try:
        return os.waitid(os.P_PID, pid, _LOOK) is not None
    except ChildProcessError:  # reaped by the kernel, as where SIGCHLD is ignored
        return True


def _read_rest(pipe: int, output: bytearray) -> bool:
    """Read from *pipe* of a process that has ended; return False at its end."""
    with suppress(OSError):
        more = os.read(pipe, 4096)
        output += more
        return bool(more)
    return False
