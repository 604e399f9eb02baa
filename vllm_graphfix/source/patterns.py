"""Patterns, Python code in which ``...`` stands for anything, and a canonical text of syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

_LONGEST_INTEGER = 10_000
"""Bits; Python refuses to write integers of more than 4,300 decimal digits."""


@functools.cache
def parsed_pattern(text: str) -> ast.stmt | ast.expr:
    """Return the first statement of *text*, or its expression. Raises SyntaxError."""
    node = ast.parse(text).body[0]
    return node.value if isinstance(node, ast.Expr) else node


def is_anything(pattern: object) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is Ellipsis


def _allows_more_arguments(pattern: ast.Call) -> bool:
    last = pattern.args[-1] if pattern.args else None
    return isinstance(last, ast.Starred) and is_anything(last.value)


def matches(node: object, pattern: object) -> bool:
    """Tell if *node*, or a list of nodes, equals *pattern*; see `Function.find` for what ``...`` stands for."""
    if is_anything(pattern):
        return True
    if isinstance(pattern, ast.AST):
        if type(node) is not type(pattern):
            return False
        if (
            isinstance(pattern, ast.Call)
            and len(pattern.args) == 1
            and is_anything(pattern.args[0])
            and not pattern.keywords
        ):
            return matches(getattr(node, "func", None), pattern.func)
        if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _allows_more_arguments(pattern):
            first = pattern.args[:-1]
            return (
                matches(node.func, pattern.func)
                and matches(node.args[: len(first)], first)
                and all(any(matches(keyword, wanted) for keyword in node.keywords) for wanted in pattern.keywords)
            )
        return all(
            matches(getattr(node, field, None), getattr(pattern, field, None))
            for field in pattern._fields
            if field not in ("ctx", "type_comment", "kind")
        )
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and is_anything(pattern[0].value):
            return True  # the body of a statement
        return isinstance(node, list) and len(node) == len(pattern) and all(map(matches, node, pattern))
    return bool(node == pattern)


def matches_any(node: ast.AST, patterns: Iterable[str]) -> bool:
    """Tell if *node*, a statement or an expression, equals one of *patterns*."""
    node = node.value if isinstance(node, ast.Expr) else node
    kind = type(node)  # few patterns have it: comparing the others would take most of the time
    wanted = map(parsed_pattern, patterns)
    return any(matches(node, pattern) for pattern in wanted if type(pattern) is kind)


def canonical(node: object) -> str:
    """Dump *node* without empty fields and docstrings, in the same text under every Python, unlike `ast.dump`."""
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({','.join(_canonical_fields(node))})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
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
        yield f"{field}={canonical(value)}"
