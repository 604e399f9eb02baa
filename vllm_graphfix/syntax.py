"""Functions in syntax trees: parts that match a pattern, and fingerprints."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_LONGEST_INTEGER = 10_000
"""Bits; of more than 4,300 decimal digits Python writes none."""


class Function(NamedTuple):
    """A function, method or class found in a source file."""

    path: str
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    @property
    def where(self) -> str:
        return f"{self.path}:{self.node.lineno}"

    @property
    def parameters(self) -> tuple[str, ...]:
        if isinstance(self.node, ast.ClassDef):
            return ()
        arguments = self.node.args
        return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    @property
    def takes(self) -> str:
        """The parameters without annotations and defaults: ``self, a, /, b, *rest, c, **more``."""
        if isinstance(self.node, ast.ClassDef):
            return ""
        given = self.node.args
        marked = [
            *(a.arg for a in given.posonlyargs),
            *("/" for _ in given.posonlyargs[:1]),
            *(a.arg for a in given.args),
        ]
        if given.vararg or given.kwonlyargs:
            marked.append(f"*{given.vararg.arg if given.vararg else ''}")
        marked += [a.arg for a in given.kwonlyargs]
        return ", ".join([*marked, *([f"**{given.kwarg.arg}"] if given.kwarg else [])])

    def find(self, pattern: str) -> list[ast.stmt | ast.expr]:
        """The parts that equal *pattern*, Python code in which ``...`` stands for anything; in source order.

        ``f(...)`` is a call of ``f`` with any arguments.
        """
        wanted = _pattern(pattern)
        found = [
            node for node in ast.walk(self.node) if isinstance(node, (ast.stmt, ast.expr)) and _matches(node, wanted)
        ]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def only(self, pattern: str) -> ast.stmt | ast.expr | None:
        """The part that equals *pattern*, if there is one and no other."""
        found = self.find(pattern)
        return found[0] if len(found) == 1 else None

    def each(self, *patterns: str) -> list[ast.stmt | ast.expr]:
        """The parts that equal *patterns*, in their order, if there is one for each and no other."""
        found = [self.only(pattern) for pattern in patterns]
        return [part for part in found if part is not None and None not in found]

    def gives(self, call: str, keyword: str) -> bool:
        """Whether the only *call*, ``f(...)``, has the argument *keyword*, ``name=value``."""
        given = getattr(self.only(call), "keywords", [])
        return any(
            _matches(each, wanted) for each in given for wanted in getattr(_pattern(f"f({keyword})"), "keywords", [])
        )

    def mentions(self, /, **times: int) -> bool:
        """Whether these variables are read or assigned so many times: another time says that there is more to it than what was found."""
        counted = Counter(node.id for node in ast.walk(self.node) if isinstance(node, ast.Name))
        return all(counted[name] == number for name, number in times.items())

    def assignments(self, name: str, value: str) -> list[ast.Assign]:
        """Those of *value*, a pattern, to *name* alone or first: ``name = f(...)``, ``name, other = f(...)``; in source order."""
        wanted = _pattern(value)
        return [
            node
            for node in self.find("...")
            if isinstance(node, ast.Assign) and _first_target(node) == name and _matches(node.value, wanted)
        ]

    def entering(self, context: str) -> list[ast.With]:
        """The ``with`` statements that enter *context*, a pattern, alone or among others."""
        wanted = _pattern(context)
        return [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.With) and any(_matches(item.context_expr, wanted) for item in node.items)
        ]

    def in_one_block(self, *parts: ast.stmt | ast.expr, at_once: bool = False) -> bool:
        """Whether these, statements or expressions that are one, follow each other in one block; *at_once*: with nothing between."""
        for node in ast.walk(self.node):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                places = _places(block, parts) if isinstance(block, list) else []
                if len(places) == len(parts):
                    last = places[0] + len(places) - 1
                    return places == sorted(places) and (not at_once or places[-1] == last)
        return False

    def loops_over(self, iterated: str) -> list[ast.For]:
        """The ``for`` loops over *iterated*, a pattern."""
        wanted = _pattern(iterated)
        return [node for node in ast.walk(self.node) if isinstance(node, ast.For) and _matches(node.iter, wanted)]

    def loops(self) -> int:
        """How many loops the function has."""
        return sum(isinstance(node, (ast.For, ast.AsyncFor, ast.While)) for node in ast.walk(self.node))

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def fingerprint(self) -> str:
        """Hash of the syntax tree without positions, comments and docstrings; the same under every Python."""
        import hashlib

        return hashlib.sha256(_canonical(self.node).encode()).hexdigest()[:24]


def _first_target(node: ast.Assign) -> str | None:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) and len(node.targets) == 1 else None


def _places(block: list[ast.stmt], parts: tuple[ast.stmt | ast.expr, ...]) -> list[int]:
    """Where in *block* each of *parts* is, as far as it is there."""
    return [
        position
        for part in parts
        for position, statement in enumerate(block)
        if statement is part or (isinstance(statement, ast.Expr) and statement.value is part)
    ]


@functools.cache
def _pattern(text: str) -> ast.AST:
    node: ast.AST = ast.parse(text).body[0]
    return node.value if isinstance(node, ast.Expr) else node


def _is_anything(pattern: object) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is Ellipsis


def _matches(node: object, pattern: object) -> bool:
    if _is_anything(pattern):
        return True
    if isinstance(pattern, ast.AST):
        if type(node) is not type(pattern):
            return False
        if (
            isinstance(pattern, ast.Call)
            and len(pattern.args) == 1
            and _is_anything(pattern.args[0])
            and not pattern.keywords
        ):
            return _matches(getattr(node, "func", None), pattern.func)
        return all(
            _matches(getattr(node, field, None), getattr(pattern, field, None))
            for field in pattern._fields
            if field not in ("ctx", "type_comment", "kind")
        )
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_anything(pattern[0].value):
            return True  # the body of a statement
        return isinstance(node, list) and len(node) == len(pattern) and all(map(_matches, node, pattern))
    return bool(node == pattern)


def _canonical(node: object) -> str:
    """Like `ast.dump`, whose text differs between Python releases; empty fields and docstrings left out."""
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({','.join(_canonical_fields(node))})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    if isinstance(node, int) and node.bit_length() > _LONGEST_INTEGER:
        return hex(node)
    return repr(node)


def _canonical_fields(node: ast.AST) -> Iterator[str]:
    for field in node._fields:
        value = getattr(node, field, None)
        if field in ("ctx", "kind", "type_comment"):
            continue
        if field == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            value = node.body[ast.get_docstring(node, clean=False) is not None :]
        if value is None or value == []:
            continue
        yield f"{field}={_canonical(value)}"
