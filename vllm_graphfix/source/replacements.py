"""Code that may run in place of a slice: overrides, second definitions of a function, assignments to either."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.source.functions import DEFINITIONS, Definition, cached_on, walk

if TYPE_CHECKING:
    from vllm_graphfix.source.part import Slice

_BUILDER_CHOICE = "get_builder_cls"
"""In a new release, a subclass that overrides it has another builder, which is judged by itself."""
_CLASS = re.compile(rb"class[ \t]+(\w+)[ \t]*(?:\(([^)]*)\))?")
_FUNCTION = re.compile(rb"def[ \t]+(\w+)")
_ALIAS = re.compile(rb" as (\w+)")
_NAME = re.compile(rb"\n[ \t]*(\w+)[ \t]*=(?!=)")
_ATTRIBUTE = re.compile(rb"\.(\w+)[ \t]*=(?!=)")
_SETATTR = re.compile(rb"setattr\([^,()]*,\s*[\"'](\w+)")
WORD = re.compile(rb"\w+")


class Names(NamedTuple):
    """The names that one file binds, by regular expressions: rather too many than too few."""

    bases: dict[str, frozenset[str]]
    """The names of base classes, by the class that the file defines."""
    bound: frozenset[str]
    """Functions, aliases and variables of the module."""
    attributes: frozenset[str]
    """Attributes, of any object, that it assigns."""


def names_of(content: bytes) -> Names:
    """Return the names that a file of this *content* binds."""

    def texts(*patterns: re.Pattern[bytes]) -> frozenset[str]:
        return frozenset(each.decode("ascii", "replace") for pattern in patterns for each in pattern.findall(content))

    bases = {
        name.decode("ascii", "replace"): frozenset(each.decode("ascii", "replace") for each in WORD.findall(inside))
        for name, inside in _CLASS.findall(content)
    }
    return Names(bases, texts(_FUNCTION, _ALIAS, _NAME), texts(_ATTRIBUTE, _SETATTR))


def family(names: Collection[str], hierarchies: Iterable[Mapping[str, Collection[str]]]) -> frozenset[str]:
    """Return *names* of classes with those of all their subclasses, direct or not."""
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


class Targets:
    """The functions, methods and classes that slices belong to, by their names."""

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

    def may_be_in(self, names: Names) -> bool:
        """Tell if a file that binds *names* has to be parsed."""
        return not (
            self._classes.isdisjoint(names.bases)
            and self._classes.isdisjoint(names.bound)
            and self._attributes.isdisjoint(names.attributes)
        )

    def replacements_in(self, tree: ast.Module, path: str) -> Iterator[tuple[Slice, ast.AST, Definition | None]]:
        """Yield the nodes of *tree* that may replace a slice, each with its definition if it is one."""
        for node in _replacing(tree):
            if isinstance(node, ast.ClassDef):
                yield from self._overridden(node, path)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute):
                        yield from self._assigned(node, last_name(target.value), target.attr)
            elif isinstance(node, ast.Call) and last_name(node.func) == "setattr" and len(node.args) == 3:
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    yield from self._assigned(node, last_name(node.args[0]), str(name.value))
        for statement in executed_statements(tree.body):
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
        own = {node.name, *map(last_name, node.bases)}
        for owner, parts in self._methods.items():
            if own.isdisjoint(self._families[owner]):
                continue
            for name, part in parts:
                if name == _BUILDER_CHOICE and node.name != owner and not self._is_fork:
                    continue
                for each in node.body:
                    if isinstance(each, DEFINITIONS) and each.name == name:
                        if f"{path}::{node.name}.{name}" not in self._places:
                            yield part, each, each
                    elif name in _names_bound_by(each):
                        yield part, each, None

    def _assigned(self, node: ast.AST, holder: str, name: str) -> Iterator[tuple[Slice, ast.AST, None]]:
        if holder != "self":  # an attribute of `self` has the name of a function by chance
            yield from ((part, node, None) for part in self._functions.get(name, ()))
        for owner, parts in self._methods.items():
            if holder in self._families[owner]:
                yield from ((part, node, None) for method, part in parts if method == name)


def _replacing(tree: ast.Module) -> list[ast.AST]:
    """Return the classes, assignments and calls in *tree*, cached on it: each fix asks for those of a new file."""
    kinds = (ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Call)
    return cached_on(tree, "graphfix_replacing", lambda: [node for node in walk(tree) if isinstance(node, kinds)])


def executed_statements(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that a module may execute when it is imported, those under conditions included."""
    for node in statements:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody", "handlers"):
                for each in getattr(node, block, ()):
                    yield from executed_statements(each.body if isinstance(each, ast.ExceptHandler) else [each])


def _names_bound_by(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds, by assignment or by an import under another name."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname for each in node.names if each.asname not in (None, each.name))


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for anything else."""
    if isinstance(node, ast.Subscript):  # Base[Parameter]
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
