"""Names of the GPUs of this machine, and their compute capabilities, without a driver library or a new process."""

from __future__ import annotations

import os
import re
import stat
from itertools import islice
from pathlib import Path

PROC = Path("/proc/driver/nvidia")
_MOST_GPUS = 64
_LARGEST = 64 * 1024
"""Bytes of a file about the driver or the system; they have a few hundred."""

_GENERATIONS = (
    (12, r"RTX 50\d\d|RTX PRO \d{4}.* Blackwell|GB10\b"),
    (10, r"\b[BG]?B[123]00\b"),
    (9, r"\bG?H(100|200|800|20)\b"),
    (8, r"\b[AL](2|4|10|10G|16|20|30|40|40S|100|100X|800)\b|RTX (A|[2-6]000 Ada)|RTX [34]0\d\d"),
    (7, r"\b(V100\w*|T4|TITAN (V|RTX))\b|RTX 20\d\d|Quadro RTX"),
)
"""Major compute capability by what is in the names that NVIDIA gives its GPUs."""
CAPABILITY = re.compile(r"\s*(?:sm_?)?(\d{1,2})\.?\d[af]?\s*", re.IGNORECASE)
"""A compute capability in place of a name: ``9.0``, ``sm90``."""
_OTHERS = re.compile(r"\b(AMD|Instinct|Radeon|MI[2-4]\d\d\w*|Intel|Gaudi|TPU)\b", re.IGNORECASE)


def small_text(path: Path) -> str | None:
    """Return the first 64 KiB of a regular file as text; None if it cannot be read. Never raises."""
    data = first_bytes(path, _LARGEST)
    return None if data is None else data.decode("utf-8", "replace")


def first_bytes(path: Path, most: int) -> bytes | None:
    """Return at most *most* bytes of a regular file; None if it cannot be read.

    Never raises, and never waits for the other end of a FIFO.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return file.read(most) or b""
    except OSError:
        return None


def gpus(proc: Path = PROC) -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that the kernel's driver lists."""
    try:
        with os.scandir(proc / "gpus") as entries:
            folders = sorted(entry.path for entry in islice(entries, _MOST_GPUS))
    except OSError:
        return ()
    models = (
        re.search(r"^Model:\s*(.+)$", small_text(Path(folder, "information")) or "", re.MULTILINE) for folder in folders
    )
    return tuple(match[1].strip() for match in models if match)


def capability(name: str) -> int | None:
    """Return the major compute capability of the GPU *name*: 0 for other vendors', None for an unknown name.

    *name* may also be a compute capability: ``9.0``, ``sm90``.
    """
    name = name[:200]
    if plain := CAPABILITY.fullmatch(name):
        return int(plain[1])
    if _OTHERS.search(name):
        return 0
    return next((major for major, pattern in _GENERATIONS if re.search(pattern, name, re.IGNORECASE)), None)
