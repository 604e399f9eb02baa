"""Hypothesis strategies for what somebody else may have written.

These are texts, JSON, files and what stands in a file's place.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from stock import release_root
from vllm_graphfix.fixes import FIXES
from watched import answer

TEXT = st.text(st.characters(), max_size=60) | st.sampled_from(
    [
        "\x1b[2J",
        "a\nb",
        "\ud800",
        "\udcff",
        "\u202e",
        "[/]",
        "[/nothing]",
        "[bold",
        "\\",
        "\x00",
        "~nobody-has-this",
        "%s%n",
        "/../../x",
    ]
)
"""Surrogates, control characters and rich's markup among it."""


class _LongText(str):
    """One that hypothesis shows in few words."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self[:40]!r} and so on, {len(self)} characters>"


LONG_TEXT = TEXT | st.builds(lambda text, times: _LongText(text * times), TEXT, st.sampled_from([50, 2_000, 30_000]))
"""Up to a million characters and more."""


def _can_be_an_argument(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


ARGUMENTS = LONG_TEXT.filter(_can_be_an_argument)
"""Bytes that are no UTF-8 among them, as Python decodes them."""

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 2**53, 2**63, 2**64, 10**300])
    | st.floats()
    | TEXT
    | st.sampled_from(["@huge", "@deep"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
_DEEP = 3000


def dumped(value: Any) -> str:
    """*value* as JSON, with a number of 5,000 digits and a deep nesting where it says so.

    NaN and lone surrogates are as Python's json writes them.
    """
    text = json.dumps(value).replace('"@huge"', "9" * 5000)
    return text.replace('"@deep"', "[" * _DEEP + "]" * _DEEP)


@st.composite
def changed(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """*valid* with one to three of its values, at any depth, exchanged, or gone, or doubled under another name."""
    value: dict[str, Any] = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        inner = value
        while True:
            key = draw(st.sampled_from(sorted(inner)))
            if not (isinstance(inner[key], dict) and inner[key]) or draw(st.booleans()):
                break
            inner = inner[key]
        act = draw(st.sampled_from(["change", "change", "change", "remove", "rename"]))
        before = inner.pop(key)
        if act == "change":
            inner[key] = draw(JSON)
        elif act == "rename":
            inner[draw(TEXT)] = before
        if not inner or not value:
            break
    return value


KINDS = ["file", "folder", "fifo", "socket", "loop", "dangling", "zero", "kernel", "outside", "hard", "unreadable"]


def plant(path: Path, kind: str, content: bytes, outside: Path) -> None:
    """Puts at *path* a file of *content*, or something else than a file; *outside* is a file elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(b"/proc/self/fd/%d/%s" % (folder, os.fsencode(path.name)))
        os.close(folder)
    elif kind in ("file", "unreadable"):
        path.write_bytes(content)
        if kind == "unreadable":
            path.chmod(0)
    elif kind == "hard":
        path.hardlink_to(outside)
    else:
        target = {
            "loop": path,
            "dangling": path.parent / "nowhere",
            "zero": Path("/dev/zero"),
            "kernel": Path("/proc/kmsg"),  # a regular file, that says what comes for as long as one reads
            "outside": outside,
        }[kind]
        path.symlink_to(target)


def share(percent: int) -> settings:
    """So many of the profile's examples: for a property that costs more than others."""
    return settings(max_examples=max(settings.default.max_examples * percent // 100, 10))  # type: ignore[union-attr]


# -- a vLLM ------------------------------------------------------------------------------------------------------

READ = sorted({path for fix in FIXES for path in fix.inspected_files})
METADATA = "vllm-0.18.1.dist-info/METADATA"
metadata = st.binary(max_size=60) | TEXT.map(lambda text: f"Version: {text}\n".encode("utf-8", "replace"))


class Files(dict[str, bytes]):
    """Contents by path, which hypothesis shows in few words."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{len(self)} files"


def stock_files() -> Files:
    """Return the files that `status` reads of a stock release, judged once.

    Forks of this process inherit their syntax trees (`conftest.py`) with what is cached on these, and parse only what
    a test changes.
    """
    root = release_root("0.18.1")
    files = {path: (root / path).read_bytes() for path in READ if (root / path).is_file()}
    files |= {"vllm/__init__.py": b"raise SystemExit('imported')", METADATA: b"Name: vllm\nVersion: 0.18.1\n"}
    with tempfile.TemporaryDirectory() as folder:
        assert answer("status", f"--vllm={made(Path(folder), files)}", "--check").code == 0
    return Files(files)


def made(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def zipped(path: Path, files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return path
