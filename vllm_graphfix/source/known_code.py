"""Digests of the files and functions of the known releases, by which new code is told from known code."""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

KNOWN_FILES = Path(__file__).parents[1] / "known_files.bin"
"""Digests of path and size of each Python file of the known releases, sorted. Changes that keep the size go
unnoticed. Also of each extension module, without suffix, by size 0."""
KNOWN_CODE = KNOWN_FILES.with_name("known_code.bin")
"""Digests of path and code without comments. Read where many sizes are new, as with a licence in each file."""
KNOWN_FUNCTIONS = KNOWN_FILES.with_name("known_functions.bin")
"""Digests of each function of the known releases that a verdict on a fork may depend on: read for a fork only."""
DIGEST = 5
"""Bytes. A new function or file passes for a known one by a chance of n / 2**40: 3e-8 for 30,000 digests. Nobody who
edits a vLLM means to deceive, so that only this chance counts, and it has to meet the one edit that matters. Four bytes
would make it 7e-6."""
_COUNTS = struct.Struct("<256H")
_BLANK_LINES = re.compile(rb"\n+")
_USUAL_EXTENSION = re.compile(r"(?:\w*_)?C(?:_\w+)?")
"""Names of extension modules of vLLM's builds, other platforms' included: ``_C``, ``_rocm_C``."""


def digest(path: str, size: int) -> bytes:
    """Hash the path and the *size*, in bytes, of one file."""
    return hashlib.blake2b(f"{path} {size}".encode(), digest_size=DIGEST).digest()


def module_path(path: str) -> str:
    """Return the *path* of an extension module without the suffixes for Python, ABI and platform."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def is_known_extension(path: str) -> bool:
    """Tell if the extension module at *path* has a name of a known release, or a usual one."""
    module = module_path(path)
    return bool(_USUAL_EXTENSION.fullmatch(module.rpartition("/")[2])) or digest(module, 0) in known(KNOWN_FILES)


def code_digest(path: str, content: bytes) -> bytes:
    """Hash the path and the *content* of one file without comments and blank lines."""
    # A regular expression that cuts the ends of lines takes ten times as long.
    lines = [line.partition(b"#")[0].rstrip(b" \t") for line in content.split(b"\n")]
    code = _BLANK_LINES.sub(b"\n", b"\n" + b"\n".join(lines))
    return hashlib.blake2b(path.encode() + code, digest_size=DIGEST).digest()


@functools.cache
def known(path: Path) -> frozenset[bytes]:
    """Return the digests in *path*, one of the three files. Raises OSError."""
    content, rest = path.read_bytes(), DIGEST - 1
    digests: list[bytes] = []
    start = _COUNTS.size
    for first, number in enumerate(_COUNTS.unpack_from(content)):
        head, end = bytes([first]), start + number * rest
        digests += [head + content[at : at + rest] for at in range(start, end, rest)]
        start = end
    return frozenset(digests)


def packed(digests: Iterable[bytes]) -> bytes:
    """Return the content of a file with *digests*, sorted: how many begin with each byte, and then their other bytes.

    Digests do not compress; without their first bytes they take a fifth less.
    """
    ordered = sorted(digests)
    numbers = Counter(each[0] for each in ordered)
    return _COUNTS.pack(*(numbers[first] for first in range(256))) + b"".join(each[1:] for each in ordered)
