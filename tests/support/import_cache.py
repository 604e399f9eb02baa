"""Finds out once what each process that imports a vLLM would find out anew: three tenths of such an import.

- Where a function ends. Each kernel of Triton looks for its own source when its module is imported, for which
  `inspect.getblock` takes the rest of the file apart, token by token.
- Which file is whose. Each operator of torch looks for the module that registers it, for which `inspect.getmodule`
  resolves the path of every module that there is.
- The code in a file of bytecode, where a process says which files its forks will read.
- The code of a text. Before the plugin patches a module, it compiles the source that it has diagnosed, to compare it
  with what runs.

A process that is forked imports this and calls `remember`. What its forks find they keep in a folder, where later ones
look. The same lines have the same end, and the same text of the same file has the same code, whoever asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib._bootstrap_external
import inspect
import marshal
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

_DIGITS = 32
_getblock = inspect.getblock
_compile = SourceFileLoader.source_to_code
_loaded = importlib._bootstrap_external._compile_bytecode  # type: ignore[attr-defined]

_folder = ""
_releases = ""
"""Only the code of their files is kept: a copy that a test edits is another one each time."""
_lengths: dict[str, int] = {}
"""By a digest of the lines: how many of them the block at their beginning has."""
_read = 0
"""Bytes of the file of lengths that are known here."""
_codes: dict[str, CodeType] = {}
"""By a digest of text and path."""
_bytecode: dict[str, tuple[bytes, CodeType | None]] = {}
"""By the path of the source: the bytecode, and what is in it."""
_new_lengths: dict[str, int] = {}
_new_codes: dict[str, CodeType] = {}


def remember(folder: str, releases: str) -> None:
    """From here on this process and its forks find each of these once, and keep it in *folder*."""
    global _folder, _releases
    _folder, _releases = folder, os.path.join(releases, "")  # noqa: PTH118 - forks of this ask often
    _read_on()
    setattr(inspect, "getblock", _block)  # noqa: B010 - a function, to mypy
    setattr(SourceFileLoader, "source_to_code", _source_to_code)  # noqa: B010
    setattr(importlib._bootstrap_external, "_compile_bytecode", _code_of)  # noqa: B010
    know_modules()


def forget() -> None:
    """From here on this process finds out all of it itself, as one of vLLM's does: for who looks at what it does."""
    setattr(inspect, "getblock", _getblock)  # noqa: B010
    setattr(SourceFileLoader, "source_to_code", _compile)  # noqa: B010
    setattr(importlib._bootstrap_external, "_compile_bytecode", _loaded)  # noqa: B010


def know_modules() -> None:
    """Forks need not resolve the paths of the modules that are here; `inspect` remembers them."""
    inspect.getmodule(sys._getframe())


def know_code(file: str) -> None:
    """Forks need not read the code of *file* either."""
    with open(file, "rb") as text:  # noqa: PTH123
        _source_to_code(SourceFileLoader("", file), text.read(), file)


def know_bytecode(module: str, file: str) -> None:
    """Forks need not take the code of *module* out of the bytecode of *file*, if that is still the same then."""
    _bytecode[file] = (b"", None)
    with contextlib.suppress(OSError, ImportError, SyntaxError, ValueError):
        SourceFileLoader(module, file).get_code(module)


def _code_of(data: Any, name: Any = None, bytecode_path: Any = None, source_path: Any = None) -> CodeType:
    """Compares all of the bytecode: a file that was written anew may have the size and the time of the old one."""
    bytecode, code = _bytecode.get(source_path, (None, None))
    if code is None or bytecode != bytes(data):  # views are compared byte by byte
        code = _loaded(data, name, bytecode_path, source_path)
        if bytecode == b"":  # asked for by `know_bytecode`
            _bytecode[source_path] = (bytes(data), code)
    return code


def keep() -> None:
    """Writes down what was found, once nothing of the program that has run here looks on."""
    with contextlib.suppress(OSError):  # a cache that is only to be read
        if _new_lengths or _new_codes:
            os.makedirs(_folder, exist_ok=True)  # noqa: PTH103
        if _new_lengths:
            lines = "".join(f"{digest} {length}\n" for digest, length in _new_lengths.items())
            _new_lengths.clear()
            appending = os.open(f"{_folder}/blocks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(appending, lines.encode())  # at once: others append, too
            finally:
                os.close(appending)
        while _new_codes:
            digest, code = _new_codes.popitem()
            with open(half := f"{_folder}/{digest}.{os.getpid()}", "wb") as stream:  # noqa: PTH123
                marshal.dump(code, stream)
            os.replace(half, f"{_folder}/{digest}.code")  # noqa: PTH105


def _block(lines: list[str]) -> list[str]:
    digest = hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
    if digest not in _lengths:
        _read_on()
    if digest not in _lengths:
        _lengths[digest] = _new_lengths[digest] = len(_getblock(lines))
    return lines[: _lengths[digest]]


def _read_on() -> None:
    """Reads what whole lines have been added to the file of lengths since."""
    global _read  # noqa: PLW0603
    with contextlib.suppress(OSError):
        file = f"{_folder}/blocks"
        if os.stat(file).st_size == _read:  # noqa: PTH116
            return
        with open(file, "rb") as stream:  # noqa: PTH123
            stream.seek(_read)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        _read += len(whole)
        for line in whole.decode("ascii", errors="replace").splitlines():
            digest, _, length = line.partition(" ")
            if len(digest) == _DIGITS and length.isdecimal():
                _lengths[digest] = int(length)


def _source_to_code(loader: Any, data: Any, path: Any, **rest: Any) -> CodeType:
    if not isinstance(data, bytes) or rest or not str(path).startswith(_releases):
        return _compile(loader, data, path, **rest)
    digest = hashlib.sha256(f"{path}\n".encode() + data).hexdigest()[:_DIGITS]
    if digest not in _codes:
        file = f"{_folder}/{digest}.code"
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError), open(file, "rb") as stream:  # noqa: PTH123
            _codes[digest] = marshal.load(stream)  # noqa: S302 - written above
    if digest not in _codes:
        _codes[digest] = _new_codes[digest] = _compile(loader, data, path)
    return _codes[digest]
