"""Finds code that takes the place of what a verdict rests on, or acts on it, in files that a fix does not read.

In its place: a subclass that overrides a method, a second definition of a function, an assignment to either. On it, in
a fork of a known release: what its functions call, what calls or names them, base classes; of a new release that would
be nearly all code. Only files that no known release has are looked into: a stock vLLM costs their sizes and no more.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.source import slices
from vllm_graphfix.source.files import SourceError
from vllm_graphfix.source.functions import DEFINITIONS, Definition, Function, canonical

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.part import Slice

KNOWN_FILES = Path(__file__).parents[1] / "known_files.bin"
"""Digests of path and size of each Python file of the known releases, sorted. Who changes a file to do something else
without changing its size is not looked for."""
KNOWN_CODE = KNOWN_FILES.with_name("known_code.bin")
"""The same of path and code without comments. Read where many sizes are new: of a licence in each file."""
KNOWN_FUNCTIONS = KNOWN_FILES.with_name("known_functions.bin")
"""Digests of each function of the known releases, sorted. Nine times as many: read for a fork."""
_REGISTERED = "vllm/model_executor/models/"
"""A registry names the classes of these files, as text."""
_FORK = 10
"""A tree of which less than one file in so many is unknown is a fork of a known release."""
_MOST_NEW = 2 / 3
"""A tree of which more is unknown is like no release, as a fork formatted anew. Of a new release it is 26 to 52 %."""
_DIGEST = 5
_LONGEST_NAME = 200
_OWN_GRAPHS = {"CUDAGraph"}
"""Of a fork that captures graphs of its own nothing is known."""
_LARGEST_CODE = 256 * 1024 * 1024
"""Bytes of unknown files; a whole vLLM has 50 MB."""

_CHOICE = "get_builder_cls"
"""In a new release a subclass that overrides it has another builder, which is looked at by itself."""
_CLASS = re.compile(rb"class[ \t]+(\w+)[ \t]*(?:\(([^)]*)\))?")
_FUNCTION = re.compile(rb"def[ \t]+(\w+)")
_ALIAS = re.compile(rb" as (\w+)")
_NAME = re.compile(rb"\n[ \t]*(\w+)[ \t]*=(?!=)")
_ATTRIBUTE = re.compile(rb"\.(\w+)[ \t]*=(?!=)")
_SETATTR = re.compile(rb"setattr\([^,()]*,\s*[\"'](\w+)")
_WORD = re.compile(rb"\w+")
_COMMENT = re.compile(rb"(?m)[ \t]*(?:#[^\n]*)?$")
"""The end of a line: blanks, and a comment. A header consists of such lines."""
_BLANK_LINES = re.compile(rb"\n+")
_DESCRIPTION = re.compile(r"Expr\(value=Constant\(value=(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\)\),?")
"""A string that stands alone, in canonical text: it describes an attribute."""


class Replacement(NamedTuple):
    """Code in one file that may run in place of a slice."""

    where: str
    """``path:line``."""
    value: str
    """Hash of the slice of it, wherever it is."""


class Reach(NamedTuple):
    """The names by which code elsewhere acts on the functions that a verdict rests on."""

    called: frozenset[str]
    """What they call, or construct."""
    own: frozenset[str]
    """Their own names, and those of their classes."""
    bases: frozenset[str]
    """Of the bases of their classes."""
    foreign: frozenset[str]
    """What they call that vLLM does not define."""


class _Names(NamedTuple):
    """The names that one file binds, as regular expressions find them: too many rather than too few."""

    bases: dict[str, frozenset[str]]
    """Of each class that it defines."""
    bound: frozenset[str]
    """Of functions, aliases and variables of the module."""
    attributes: frozenset[str]
    """Which it assigns, of whatever object."""


def digest(path: str, size: int) -> bytes:
    """Digest of one file of a release, which has *size* bytes."""
    return hashlib.blake2b(f"{path} {size}".encode(), digest_size=_DIGEST).digest()


def code_digest(path: str, content: bytes) -> bytes:
    """Digest of one file of a release without comments and blank lines."""
    code = _BLANK_LINES.sub(b"\n", b"\n" + _COMMENT.sub(b"", content))
    return hashlib.blake2b(path.encode() + code, digest_size=_DIGEST).digest()


@functools.cache
def known(path: Path) -> frozenset[bytes]:
    """The digests in one of the three files."""
    content = path.read_bytes()
    return frozenset(content[start : start + _DIGEST] for start in range(0, len(content), _DIGEST))


class Search:
    """Looks for replacements in files of one vLLM. Raises `SourceError` where these are more than any vLLM has."""

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
            self.paths = tuple(path for path in self.paths if not self._has_known_code(path))
            self.is_fork = self._are_few()
        self.is_like_no_release = len(self.paths) > _MOST_NEW * len(source.sizes)
        self._trees: dict[str, ast.Module | None] = {}

    def _are_few(self) -> bool:
        return len(self.paths) * _FORK < len(self._source.sizes)

    def _has_known_code(self, path: str) -> bool:
        try:
            return code_digest(path, self._source.read(path) or b"") in known(KNOWN_CODE)
        except SourceError:
            return False

    @functools.cached_property
    def names(self) -> dict[str, _Names | None]:
        """The names that each file binds; None of a file that cannot be read."""
        return {path: self._names(path) for path in self.paths}

    def replacements(
        self, parts: Sequence[Slice], left_out: Collection[str], subclasses: Mapping[str, Collection[str]]
    ) -> Iterator[tuple[Slice, Replacement]]:
        """The code that may run in place of one of *parts*, which are those of one fix.

        Statements that equal one of the patterns *left_out* do no harm. *subclasses* has the names of known
        subclasses, direct or not, of a class.
        """
        own = [each for part in parts for each in _functions_of(self._source, part)]
        hierarchies = [names.bases for names in self.names.values() if names]
        wanted = _Wanted(own, subclasses, hierarchies, is_fork=self.is_fork)
        for path, names in self.names.items():
            if names is not None and not wanted.may_be_in(names):
                continue
            tree = self._tree(path) if names is not None else None
            if tree is None:
                yield from ((part, Replacement(f"{path}:1", "unreadable")) for part in parts[:1])
                continue
            for part, node, definition in wanted.found_in(tree, path):
                if definition is None:
                    text = ast.unparse(node)
                else:
                    text = _text(Function(path, "", definition), part, left_out)
                if text:
                    value = hashlib.sha256(f"{part.function}\n{text}".encode()).hexdigest()[:10]
                    yield part, Replacement(f"{path}:{getattr(node, 'lineno', 1)}", value)

    def in_reach(
        self, reach: Reach, parts: Sequence[Slice], data: Collection[Slice] = (), distant: str = ""
    ) -> Iterator[tuple[str, str, bytes]]:
        """The functions, and the other statements of classes and modules, that act on *parts*, which have this *reach*.

        Also by the names of *data*, in other files of these slices' folders, and by those in *distant*; an import that
        gives one of these another name counts, too. The name by which they do, the place, ``path:line``, and a digest
        that does not depend on it. Not those of which *parts* are slices, nor methods of a class that is one as a
        whole, but where *distant* names them.
        """
        places = {each.place for part in parts for each in _functions_of(self._source, part)}
        classes = {f"{part.place}." for part in parts if part.function}
        # `self` or `out` may be anybody's.
        names_of_data = {name for part in data for name in part.names.split() if "_" in name or not name.islower()}
        read = {part.path for part in data}
        folders, everywhere = set(map(_folder, read)), _OWN_GRAPHS.union(distant.split())
        for path, names in self.names.items():
            is_near = _folder(path) in folders and path not in read
            wanted = everywhere | (names_of_data if is_near else set())
            if names is None or not (_may_reach(reach, names, self.words(path)) or wanted & self.words(path)):
                continue
            if self._tree(path) is None:
                yield "a file that cannot be parsed", f"{path}:1", b""
            for name, line in _renamed_by_imports(self._tree(path)):
                if name in wanted:
                    yield name, f"{path}:{line}", b""
            for owner, node, value in self.units(path):
                own = ".".join(filter(None, (owner, getattr(node, "name", ""))))
                place = f"{path}::{own}"
                is_sliced = place in places or f"{path}::{owner}." in classes
                if is_sliced and getattr(node, "name", "") not in everywhere:
                    continue
                own_words = (word for word in (owner, *_words_of(node)) if word in wanted)
                if (by := _acts_by(reach, owner, node) or next(own_words, None)) is not None:
                    yield by, f"{path}:{getattr(node, 'lineno', 1)}", value

    def units(self, path: str) -> Iterator[tuple[str, ast.AST, bytes]]:
        """The functions and other statements of one file: its class, the node, and a digest of both."""
        tree = self._tree(path)
        for owner, node in _units(tree) if tree is not None else ():
            text = _DESCRIPTION.sub("", f"{owner}.{getattr(node, 'name', '')} {canonical(node)}")
            yield owner, node, hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()

    @functools.cache  # noqa: B019 - one search at a time is kept
    def words(self, path: str) -> frozenset[str]:
        """All words of the file."""
        return frozenset(word.decode("ascii", "replace") for word in _WORD.findall(self._source.read(path) or b""))

    def forget(self) -> None:
        """Drop the syntax trees, which take up to a thousand times as much memory as the code."""
        self._trees.clear()

    def _names(self, path: str) -> _Names | None:
        try:
            content = self._source.read(path)
        except SourceError:
            return None
        return _names_of(content or b"")

    def _tree(self, path: str) -> ast.Module | None:
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self._source.read(path) or b"")
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._trees[path] = None
        return self._trees[path]


def family(names: Collection[str], hierarchies: Iterable[Mapping[str, Collection[str]]]) -> frozenset[str]:
    """*names* of classes, with those of all their subclasses."""
    derived: dict[str, set[str]] = defaultdict(set)
    for bases in hierarchies:
        for name, of_it in bases.items():
            for base in of_it:
                derived[base].add(name)
    known, new = set(names), set(names)
    while new:
        new = {each for name in new for each in derived.get(name, ())} - known
        known |= new
    return frozenset(known)


def reach_of(
    source: Source,
    parts: Iterable[Slice],
    users: Iterable[Slice],
    ancestors: Mapping[str, Collection[str]],
    defined: Collection[str],
    common: Collection[str],
) -> Reach:
    """The reach of *parts* in *source*.

    *users* are slices of functions that use what *parts* leave. *defined* are the names that vLLM itself defines,
    *common* those of so many functions that they say nothing, and *ancestors* the bases of its classes, of any degree.
    """
    called: set[str] = set()
    own: set[str] = set()
    bases: set[str] = set()
    for part in itertools.chain.from_iterable(_functions_of(source, each) for each in parts):
        function = source.function(part.path, part.function) if part.function else None
        if function is None:
            continue
        called.update(_last(node.func) for node in ast.walk(function.node) if isinstance(node, ast.Call))
        owner, _, name = part.function.rpartition(".")
        own.update((owner, name))
        bases.update(ancestors.get(owner, ()))
        module = source.module(part.path) if part.path.startswith(_REGISTERED) else None
        own.update(node.name for node in (module.node.body if module else ()) if isinstance(node, ast.ClassDef))
    called.update(part.function.rpartition(".")[2] for part in users)
    own, bases = (names.difference(common, {""}) for names in (own, bases))
    foreign = called.difference(defined, {""})
    return Reach(*map(frozenset, (called - foreign - set(common), own, bases & set(defined), foreign)))


def _may_reach(reach: Reach, names: _Names, words: frozenset[str]) -> bool:
    return not (
        (reach.called | reach.own).isdisjoint(words)
        and reach.bases.isdisjoint(names.bases)
        and reach.foreign.isdisjoint(names.attributes)
    )


def _units(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The functions and methods of a file, each with its class, and what else is in a class or in the file."""
    rest: dict[str, list[ast.stmt]] = {"": []}
    for statement in _of_the_module(tree.body):
        if isinstance(statement, ast.ClassDef):
            within = rest.setdefault(statement.name, [])
            for each in statement.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield statement.name, each
                else:
                    within.append(each)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "", statement
        elif not isinstance(statement, (ast.If, ast.Try, ast.With, ast.Import, ast.ImportFrom)):
            rest[""].append(statement)
    for owner, statements in rest.items():
        yield from ((owner, statement) for statement in statements if not _is_text(statement))


def _is_text(node: ast.stmt) -> bool:
    """Tell if *node* is a docstring: of a class, or behind an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _acts_by(reach: Reach, owner: str, node: ast.AST) -> str | None:
    """The name by which *node*, of the class *owner*, acts on what has this *reach*; None where it does not."""
    name = getattr(node, "name", "") if isinstance(node, DEFINITIONS) else ""
    if name in reach.called or owner in reach.called or owner in reach.bases:
        return owner or name
    either = reach.own | reach.called
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            if _last(each.func) in reach.own:
                return _last(each.func)
            named = [keyword.arg for keyword in each.keywords if keyword.arg in either]
            if named and _last(each.func) in {"update", "partial", "dict", "patch", "setattr"}:
                return named[0]
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value) < _LONGEST_NAME:
            last = re.split(r"[.:]", each.value)[-1]
            if last in either:
                return last
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and each.attr in either | reach.foreign
            and _last(each.value) != "self"
        ):
            return each.attr
    return None


def _words_of(node: ast.AST) -> Iterator[str]:
    """Yield the names in *node*, and the strings that may be names."""
    for each in ast.walk(node):
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(each, field, None)
            if isinstance(word, str):
                yield word


def _renamed_by_imports(tree: ast.Module | None) -> Iterator[tuple[str, int]]:
    """Yield each name that an import binds to another one, under which functions then use it, and the line."""
    for statement in _of_the_module(tree.body) if tree is not None else ():
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


class _Wanted:
    """The functions, methods and classes that slices are of, by their names."""

    def __init__(
        self,
        parts: Sequence[Slice],
        subclasses: Mapping[str, Collection[str]],
        hierarchies: Sequence[Mapping[str, Collection[str]]],
        *,
        is_fork: bool,
    ) -> None:
        self._is_fork = is_fork
        self._methods: dict[str, list[tuple[str, Slice]]] = defaultdict(list)
        self._functions: dict[str, list[Slice]] = defaultdict(list)
        self._places = {part.place for part in parts}
        for part in parts:
            owner, _, name = part.function.rpartition(".")
            if owner:
                self._methods[owner].append((name, part))
            elif name:
                self._functions[name].append(part)
        self._families = {owner: family({owner, *subclasses.get(owner, ())}, hierarchies) for owner in self._methods}
        self._classes: frozenset[str] = frozenset().union(*self._families.values(), self._functions)
        self._attributes = frozenset(self._functions).union(
            name for of_one in self._methods.values() for name, _ in of_one
        )

    def may_be_in(self, names: _Names) -> bool:
        return not (
            self._classes.isdisjoint(names.bases)
            and self._classes.isdisjoint(names.bound)
            and self._attributes.isdisjoint(names.attributes)
        )

    def found_in(self, tree: ast.Module, path: str) -> Iterator[tuple[Slice, ast.AST, Definition | None]]:
        """What stands for a slice elsewhere: the node and, where it is one, the definition."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from self._overridden(node, path)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute):
                        yield from self._assigned(node, _last(target.value), target.attr)
            elif isinstance(node, ast.Call) and _last(node.func) == "setattr" and len(node.args) == 3:
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    yield from self._assigned(node, _last(node.args[0]), str(name.value))
        for statement in _of_the_module(tree.body):
            if isinstance(statement, DEFINITIONS):
                for part in self._functions.get(statement.name, ()):
                    if part.place != f"{path}::{statement.name}":
                        yield part, statement, statement
            for bound in _names_bound_by(statement):
                yield from ((part, statement, None) for part in self._functions.get(bound, ()))
                for owner, parts in self._methods.items():
                    if bound in self._families[owner]:
                        yield from ((part, statement, None) for _, part in parts)

    def _overridden(self, node: ast.ClassDef, path: str) -> Iterator[tuple[Slice, ast.AST, Definition | None]]:
        own = {node.name, *map(_last, node.bases)}
        for owner, parts in self._methods.items():
            if own.isdisjoint(self._families[owner]):
                continue
            for name, part in parts:
                if name == _CHOICE and node.name != owner and not self._is_fork:
                    continue
                for each in node.body:
                    if isinstance(each, DEFINITIONS) and each.name == name:
                        if f"{path}::{node.name}.{name}" not in self._places:
                            yield part, each, each
                    elif name in _names_bound_by(each):
                        yield part, each, None

    def _assigned(self, node: ast.AST, owner: str, name: str) -> Iterator[tuple[Slice, ast.AST, None]]:
        if owner != "self":  # an attribute of an object, which has the name of a function by chance
            yield from ((part, node, None) for part in self._functions.get(name, ()))
        for each, parts in self._methods.items():
            if owner in self._families[each]:
                yield from ((part, node, None) for method, part in parts if method == name)


def _of_the_module(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that a module executes when it is imported, those under conditions included."""
    for node in statements:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody", "handlers"):
                for each in getattr(node, block, ()):
                    yield from _of_the_module(each.body if isinstance(each, ast.ExceptHandler) else [each])


def _names_bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds to something else: by assignment, or by an import under another name."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname for each in node.names if each.asname not in (None, each.name))


def _last(node: ast.AST) -> str:
    """The last part of a dotted name; "" of anything else."""
    if isinstance(node, ast.Subscript):  # Base[Parameter]
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(function: Function, part: Slice, left_out: Collection[str] = ()) -> str:
    """The slice *part* of *function*; "" where it names none of the data."""
    return "\n".join(slices.lines_of(function, part, left_out)) if part.names else function.fingerprint()


def _names_of(content: bytes) -> _Names:
    def texts(*patterns: re.Pattern[bytes]) -> frozenset[str]:
        return frozenset(each.decode("ascii", "replace") for pattern in patterns for each in pattern.findall(content))

    bases = {
        name.decode("ascii", "replace"): frozenset(each.decode("ascii", "replace") for each in _WORD.findall(inside))
        for name, inside in _CLASS.findall(content)
    }
    return _Names(bases, texts(_FUNCTION, _ALIAS, _NAME), texts(_ATTRIBUTE, _SETATTR))
