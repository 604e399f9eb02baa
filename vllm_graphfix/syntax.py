"""Functions in syntax trees: parts that match a pattern, and fingerprints."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple


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

    def find(self, pattern: str) -> list[ast.stmt | ast.expr]:
        """The parts that equal *pattern*, Python code in which ``...`` stands for anything; in source order.

        ``f(...)`` is a call of ``f`` with any arguments.
        """
        wanted = _pattern(pattern)
        found = [
            node for node in ast.walk(self.node) if isinstance(node, (ast.stmt, ast.expr)) and _matches(node, wanted)
        ]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def loops(self) -> int:
        """How many loops the function has."""
        return sum(isinstance(node, (ast.For, ast.AsyncFor, ast.While)) for node in ast.walk(self.node))

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def fingerprint(self) -> str:
        """Hash of the syntax tree without positions, comments and docstrings; the same under every Python."""
        import hashlib

        return hashlib.sha256(_canonical(self.node).encode()).hexdigest()[:24]


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
