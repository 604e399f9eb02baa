"""Search for code that replaces the slices of a verdict, or acts on them, in files that the fix does not read.

Replacing are overrides, second definitions and assignments. Acting, in a fork of a known release, are the functions
that a slice's function calls, its callers, whatever names it, and base classes; in a new release that would be nearly
all code. Only files that no known release has are searched: a stock vLLM costs a comparison of sizes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.source import slices
from vllm_graphfix.source.files import SourceError, parse
from vllm_graphfix.source.functions import DEFINITIONS, Function, cached_on, walk
from vllm_graphfix.source.known_code import (
    DIGEST,
    KNOWN_CODE,
    KNOWN_FILES,
    KNOWN_FUNCTIONS,
    code_digest,
    digest,
    is_known_extension,
    known,
    module_path,
)
from vllm_graphfix.source.patterns import canonical
from vllm_graphfix.source.replacements import (
    WORD,
    Names,
    Targets,
    executed_statements,
    last_name,
    names_of,
)

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.part import Slice

_REGISTERED = "vllm/model_executor/models/"
"""The registry names the classes of these files in strings."""
_FORK = 10
"""A tree is a fork of a known release if fewer than one file in 10 are unknown."""
_MOST_NEW = 2 / 3
"""A tree with a larger share of unknown files, such as a reformatted fork, is like no release. New releases have 26 to
52 %."""
_LONGEST_NAME = 200
_NAMING = ("id", "attr", "arg", "name", "value")
"""Fields of syntax trees with names, and with strings that may be names."""
_OWN_GRAPHS = {"CUDAGraph"}
"""A fork that captures graphs of its own is not recognised."""
_LARGEST_CODE = 256 * 1024 * 1024
"""Bytes of unknown files; a whole vLLM has 50 MB."""

_DESCRIPTION = re.compile(r"Expr\(value=Constant\(value=(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\)\),?")
"""A docstring of an attribute, in canonical text."""


class Replacement(NamedTuple):
    """Code in one file that may run in place of a slice."""

    where: str
    """``path:line``."""
    value: str
    """Hash of its slice, independent of its place."""


class Reach(NamedTuple):
    """The names by which code elsewhere acts on the functions that a verdict rests on."""

    called: frozenset[str]
    """Functions that they call, and classes that they construct."""
    own: frozenset[str]
    """Their own names, and those of their classes."""
    bases: frozenset[str]
    """Base classes of their classes."""
    foreign: frozenset[str]
    """Functions that they call and vLLM does not define."""


class Search:
    """A search in the files of one vLLM. Raises `SourceError` where these are larger than any vLLM's."""

    def __init__(self, source: Source, paths: Iterable[str] | None = None) -> None:
        """Search *paths*, or all files that no known release has."""
        files = known(KNOWN_FILES)
        self._source = source
        self.paths: tuple[str, ...] = tuple(
            sorted(path for path, size in source.sizes.items() if digest(path, size) not in files)
            if paths is None
            else paths
        )
        if sum(source.sizes[path] for path in self.paths) > _LARGEST_CODE:
            raise SourceError(f"the code of {source.label} is larger than that of any vLLM; is it the right one?")
        self.is_fork = self._are_few()
        if not self.is_fork and paths is None:
            self.paths = tuple(path for path in self.paths if not self.has_known_code(path))
            self.is_fork = self._are_few()
        self.is_like_no_release = len(self.paths) > _MOST_NEW * len(source.sizes)
        # Caches of this instance: one of a method would keep every search, and its trees, for good.
        self._trees: dict[str, ast.Module | None] = {}
        self._words: dict[str, frozenset[str]] = {}
        self._new_code: dict[str, bool] = {}

    def _are_few(self) -> bool:
        return len(self.paths) * _FORK < len(self._source.sizes)

    def has_known_code(self, path: str) -> bool:
        """Tell if the file is, but for comments, one of a known release."""
        try:
            return code_digest(path, self._source.read(path) or b"") in known(KNOWN_CODE)
        except SourceError:
            return False

    @functools.cached_property
    def foreign_binary(self) -> str | None:
        """The path of code without source that may run in place of other code, or that no known release has."""
        for path in self._source.compiled:
            has_source = f"{module_path(path)}.py" in self._source.sizes
            if path.endswith(".pyc"):
                is_foreign = not has_source  # with source beside it Python runs that, and not this bytecode
            else:
                # A new release may have one more.
                is_foreign = has_source or (self.is_fork and not is_known_extension(path))
            if is_foreign:
                return path
        return None

    @functools.cached_property
    def names(self) -> dict[str, Names | None]:
        """The names that each file binds; None for a file that cannot be read."""
        return {path: self._names(path) for path in self.paths}

    def replacements(
        self, parts: Sequence[Slice], excluded: Collection[str], subclasses: Mapping[str, Collection[str]]
    ) -> Iterator[tuple[Slice, Replacement]]:
        """Yield the code that may run in place of one of *parts*, the slices of one fix.

        Statements that equal one of the patterns *excluded* are harmless. *subclasses* has the known subclasses,
        direct or not, by class.
        """
        own = [each for part in parts for each in _functions_of(self._source, part)]
        hierarchies = [names.bases for names in self.names.values() if names]
        wanted = Targets(own, subclasses, hierarchies, is_fork=self.is_fork)
        for path, names in self.names.items():
            if names is not None and not wanted.may_be_in(names):
                continue
            tree = self._tree(path) if names is not None else None
            if tree is None:
                yield from ((part, Replacement(f"{path}:1", "unreadable")) for part in parts)
                continue
            for part, node, definition in wanted.replacements_in(tree, path):
                if definition is None:
                    text = ast.unparse(node)
                else:
                    text = _text(Function(path, "", definition), part, excluded)
                if text:
                    value = hashlib.sha256(f"{part.function}\n{text}".encode()).hexdigest()[:10]
                    yield part, Replacement(f"{path}:{getattr(node, 'lineno', 1)}", value)

    def in_reach(
        self, reach: Reach, parts: Sequence[Slice], data: Collection[Slice] = (), distant: str = ""
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield the functions, and other statements of classes and modules, that act on *parts*, of this *reach*.

        Each comes as the name by which it acts, its place ``path:line``, and a digest that is independent of the place.
        A function acts, too, if it mentions a name of *data* in a file of the folders of these slices, or a name in
        *distant* anywhere; so does an import that renames one. Functions of *parts* themselves, and methods of a
        class that is one of them, count only if *distant* names them.
        """
        places = {each.place for part in parts for each in _functions_of(self._source, part)}
        classes = {f"{part.place}." for part in parts if part.function}
        # Names such as `self` or `out` are too common.
        names_of_data = {name for part in data for name in part.names.split() if "_" in name or not name.islower()}
        folders, everywhere = {_folder(part.path) for part in data}, _OWN_GRAPHS.union(distant.split())
        for path, names in self.names.items():
            # A slice of the whole file is judged with its own statements.
            sliced = {name for part in parts if part.place == f"{path}::" for name in part.names.split()}
            wanted = everywhere | (names_of_data - sliced if _folder(path) in folders else set())
            if names is None:
                yield "a file that cannot be read", f"{path}:1", b""
                continue
            if not (_may_reach(reach, names, self.words(path)) or wanted & self.words(path)):
                continue
            tree = self._tree(path)
            if tree is None:
                yield "a file that cannot be parsed", f"{path}:1", b""
                continue
            for name, line in _renamed_by_imports(tree):
                if name in wanted:
                    yield name, f"{path}:{line}", b""
            for owner, node in _units(tree):
                defined = getattr(node, "name", "")
                place = f"{path}::{'.'.join(filter(None, (owner, defined)))}"
                is_sliced = place in places or f"{path}::{owner}." in classes
                if is_sliced and defined not in everywhere:
                    continue
                own_words = (word for word in itertools.chain((owner,), _words_of(node)) if word in wanted)
                if (by := _acts_by(reach, owner, node) or next(own_words, None)) is not None:
                    yield by, f"{path}:{getattr(node, 'lineno', 1)}", _digest(owner, node)

    def units(self, path: str) -> Iterator[tuple[str, ast.AST, bytes]]:
        """Yield the functions and other statements of one file: the class, the node, and a digest of both."""
        tree = self._tree(path)
        for owner, node in _units(tree) if tree is not None else ():
            yield owner, node, _digest(owner, node)

    def has_new_code(self, path: str) -> bool:
        """Return True unless known releases have the file, or each of its functions and statements, in any layout."""
        if path not in self._new_code:
            self._new_code[path] = not (self.has_known_code(path) or self._has_known_functions(path))
        return self._new_code[path]

    def _has_known_functions(self, path: str) -> bool:
        known_functions = known(KNOWN_FUNCTIONS)
        return self._tree(path) is not None and all(value in known_functions for *_, value in self.units(path))

    def words(self, path: str) -> frozenset[str]:
        """Return all words of the file. Raises `SourceError` for one that has no `names`."""
        if path not in self._words:
            content = self._source.read(path) or b""
            self._words[path] = frozenset(word.decode("ascii", "replace") for word in WORD.findall(content))
        return self._words[path]

    def forget(self) -> None:
        """Drop the syntax trees, which take up to a thousand times as much memory as the code."""
        self._trees.clear()

    def _names(self, path: str) -> Names | None:
        try:
            content = self._source.read(path)
        except SourceError:
            return None
        return names_of(content or b"")

    def _tree(self, path: str) -> ast.Module | None:
        if path not in self._trees:
            try:
                self._trees[path] = parse(self._source.read(path) or b"")
            except (SourceError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._trees[path] = None
        return self._trees[path]


def reach_of(
    source: Source,
    parts: Iterable[Slice],
    users: Iterable[Slice],
    ancestors: Mapping[str, Collection[str]],
    defined: Collection[str],
    common: Collection[str],
) -> Reach:
    """Collect the reach of *parts* in *source*.

    *users* are slices of functions that use the results of *parts*. *defined* are the names that vLLM itself defines,
    *common* those that too many files define, and *ancestors* the bases, direct or not, by class.
    """
    called: set[str] = set()
    own: set[str] = set()
    bases: set[str] = set()
    for part in itertools.chain.from_iterable(_functions_of(source, each) for each in parts):
        function = source.function(part.path, part.function) if part.function else None
        if function is None:
            continue
        called.update(last_name(node.func) for node in walk(function.node) if isinstance(node, ast.Call))
        owner, _, name = part.function.rpartition(".")
        own.update((owner, name))
        bases.update(ancestors.get(owner, ()))
        module = source.module(part.path) if part.path.startswith(_REGISTERED) else None
        own.update(node.name for node in (module.node.body if module else ()) if isinstance(node, ast.ClassDef))
    called.update(part.function.rpartition(".")[2] for part in users)
    own, bases = (names.difference(common, {""}) for names in (own, bases))
    foreign = called.difference(defined, {""})
    return Reach(*map(frozenset, (called - foreign - set(common), own, bases & set(defined), foreign)))


def _may_reach(reach: Reach, names: Names, words: frozenset[str]) -> bool:
    return not (
        (reach.called | reach.own).isdisjoint(words)
        and reach.bases.isdisjoint(names.bases)
        and reach.foreign.isdisjoint(names.attributes)
    )


def _units(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions and methods of a file, each with its class, and the other statements of classes and file.

    Of a condition or context around statements of the file only its expressions: the statements come by themselves.
    """
    rest: dict[str, list[ast.AST]] = {"": []}
    for statement in executed_statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            within = rest.setdefault(statement.name, [])
            for each in statement.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield statement.name, each
                else:
                    within.append(each)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "", statement
        elif isinstance(statement, ast.If):
            rest[""].append(statement.test)
        elif isinstance(statement, ast.With):
            rest[""] += [item.context_expr for item in statement.items]
        elif not isinstance(statement, (ast.Try, ast.Import, ast.ImportFrom)):
            rest[""].append(statement)
    for owner, statements in rest.items():
        yield from ((owner, statement) for statement in statements if not _is_text(statement))


def _digest(owner: str, node: ast.AST) -> bytes:
    """Hash *node*, of the class *owner*; cached on it."""

    def hashed() -> bytes:
        text = _DESCRIPTION.sub("", f"{owner}.{getattr(node, 'name', '')} {canonical(node)}")
        return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()

    return cached_on(node, "graphfix_digest", hashed)


def _is_text(node: ast.AST) -> bool:
    """Tell if *node* is a docstring of a class or an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _acts_by(reach: Reach, owner: str, node: ast.AST) -> str | None:
    """Return the name by which *node*, of the class *owner*, acts on slices of this *reach*; None if it does not."""
    name = getattr(node, "name", "") if isinstance(node, DEFINITIONS) else ""
    if name in reach.called or owner in reach.called or owner in reach.bases:
        return owner or name
    either = reach.own | reach.called
    for each in _acting(node):
        if isinstance(each, ast.Call):
            if last_name(each.func) in reach.own:
                return last_name(each.func)
            named = [keyword.arg for keyword in each.keywords if keyword.arg in either]
            if named and last_name(each.func) in {"update", "partial", "dict", "patch", "setattr"}:
                return named[0]
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value) < _LONGEST_NAME:
            last = re.split(r"[.:]", each.value)[-1]
            if last in either:
                return last
        elif (
            isinstance(each, ast.Attribute) and each.attr in either | reach.foreign and last_name(each.value) != "self"
        ):
            return each.attr
    return None


def _acting(node: ast.AST) -> list[ast.AST]:
    """Return the parts of *node* that may act on others, cached on it: calls, strings, and attributes that are set."""
    return cached_on(node, "graphfix_acting", lambda: list(filter(_may_act, walk(node))))


def _may_act(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Call) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _words_of(node: ast.AST) -> Collection[str]:
    """Return the names in *node*, and the strings that may be names, each once, cached on it."""

    def words() -> dict[str, None]:
        parts = (getattr(each, field, None) for each in walk(node) for field in _NAMING if field in each._fields)
        return dict.fromkeys(word for word in parts if isinstance(word, str))

    return cached_on(node, "graphfix_words", words)


def _renamed_by_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that an import binds under another name, and the line."""
    for statement in executed_statements(tree.body):
        if isinstance(statement, ast.ImportFrom):
            yield from (
                (each.name, statement.lineno) for each in statement.names if each.asname not in (None, each.name)
            )


def _folder(path: str) -> str:
    return "/".join(path.split("/")[:3])


def _functions_of(source: Source, part: Slice) -> Iterator[Slice]:
    """Yield a slice of each function that *part*, of a file or a class, is a slice of."""
    whole = source.function(part.path, part.function) if part.function else source.module(part.path)
    if whole is None or not isinstance(whole.node, ast.ClassDef):
        yield part
        return
    for node in whole.node.body:
        if isinstance(node, DEFINITIONS):
            name = ".".join(filter(None, [part.function, node.name]))
            if _text(Function(part.path, name, node), part):
                yield from _functions_of(source, part._replace(function=name))


def _text(function: Function, part: Slice, excluded: Collection[str] = ()) -> str:
    """Return the slice *part* of *function*; "" where it mentions none of the data."""
    return "\n".join(slices.lines_of(function, part, excluded)) if part.names else function.fingerprint()
