"""The identity of this process, and the existence of others on this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A process, unique despite PID reuse. Without /proc, start_ticks is 0, and boot and pid_namespace are empty."""

    host: str
    pid: int
    start_ticks: int
    boot: str
    pid_namespace: str


def identity() -> Identity:
    pid = os.getpid()
    seen = seen_by_system(pid)
    boot = namespace = ""
    with suppress(OSError, ValueError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return Identity(reduced(os.uname().nodename), pid, seen.start_ticks if seen else 0, boot, namespace)


class Seen(NamedTuple):
    """A process as /proc describes it."""

    state: str
    """A letter: ``Z`` and ``X`` are dead."""
    start_ticks: int
    """Clock ticks from the boot to its start: the same ID belongs to another process later."""


def seen_by_system(pid: int) -> Seen | None:
    """Return what /proc holds about the process *pid*; None if it holds nothing."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The name of the program is in brackets and may hold anything, brackets and spaces included.
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
        return Seen(fields[0].decode("ascii"), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(descriptor)


def owner_of(pid: int) -> int | None:
    """Return the effective user of the process *pid*; None if /proc does not say.

    Not the owner of its folder in /proc, which is root if the process cannot be dumped.
    """
    with suppress(OSError, ValueError):
        # As bytes: the name of the program may not be UTF-8.
        match = re.search(rb"^Uid:\s+\d+\s+(\d+)", Path(f"/proc/{pid}/status").read_bytes(), re.MULTILINE)
        return int(match[1]) if match else None
    return None


def exists(pid: int) -> bool:
    """Tell if there is a process with this ID, including one that /proc hides (hidepid)."""
    if pid < 1:  # to `kill`, these are groups of processes
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def reduced(host: str) -> str:
    """Return *host* as a part of the name of a file: at most 64 characters of `[A-Za-z0-9._-]`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)[:64] or "unknown"
