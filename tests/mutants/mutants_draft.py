"""A function that is being edited, its places, and what is read and written there."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

Statements = list[ast.stmt]


@cache
def _pickled(node: ast.FunctionDef) -> bytes:
    """To be copied some thousand times; `copy.deepcopy` took half of the time that all mutants take."""
    return pickle.dumps(node)


class Draft:
    """A function that is being edited, and what has to come with it."""

    def __init__(self, node: ast.FunctionDef, owner: str | None, module: frozenset[str]) -> None:
        self.node: ast.FunctionDef = pickle.loads(_pickled(node))
        self.owner = owner
        """Its class."""
        self.module = module
        """The names that its module binds."""
        self.beside: Statements = []
        """Goes into its class, or module, in front of it."""
        self.behind: Statements = []
        """Goes there behind it."""
        self.appended: Statements = []
        """Goes to the end of the module."""
        self.calls: list[Callable[[ast.Call], None]] = []
        """To be done to every call of the function elsewhere."""
        self.renamed: dict[str, str] = {}
        """Words that have another name in every file now, and in what drives vLLM."""


Edit = Callable[[Draft], None]
Operator = Callable[[Draft], Iterator[tuple[str, Edit]]]


def places(root: ast.AST) -> list[tuple[Statements, int]]:
    """Every statement below *root* as its block and its position there, in source order; no docstrings."""
    statements: list[tuple[Statements, int]] = []
    for field in ("body", "handlers", "orelse", "finalbody"):
        block = getattr(root, field, None)
        if not isinstance(block, list):
            continue
        for position, child in enumerate(block):
            docstring = position == 0 and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.stmt) and not docstring:
                statements.append((block, position))
            statements += places(child)
    return statements


def names(node: ast.AST | Statements, kind: type[ast.expr_context]) -> set[str]:
    roots = node if isinstance(node, list) else [node]
    identifiers = {
        part.id
        for root in roots
        for part in ast.walk(root)
        if isinstance(part, ast.Name) and isinstance(part.ctx, kind)
    }
    if kind is ast.Store:
        identifiers |= {part.name for root in roots for part in ast.walk(root) if isinstance(part, ast.FunctionDef)}
    return identifiers


def bound_before(draft: Draft, statement: ast.stmt) -> set[str]:
    """Parameters, of functions inside too, and what is assigned above *statement*."""
    bound = {part.arg for part in ast.walk(draft.node) if isinstance(part, ast.arg)}
    for block, position in places(draft.node):
        if block[position] is statement:
            return bound
        bound |= names(head(block[position]), ast.Store)
    return bound


def head(statement: ast.stmt) -> ast.stmt:
    """The statement without the blocks in it."""
    if isinstance(statement, ast.FunctionDef):
        return ast.FunctionDef(statement.name, statement.args, [], [], lineno=1)
    head: Any = copy.copy(statement)
    for field in ("body", "orelse", "handlers", "finalbody"):
        if hasattr(head, field):
            setattr(head, field, [])
    if isinstance(head, ast.Try):
        head.handlers = [ast.ExceptHandler(None, None, [])]
    return head  # type: ignore[no-any-return]


def leaves(node: ast.AST) -> bool:
    """Return whether control leaves the place otherwise than at its end."""
    kinds = (ast.Return, ast.Yield, ast.YieldFrom, ast.Break, ast.Continue, ast.Nonlocal, ast.Global, ast.Await)
    return any(isinstance(part, kinds) for part in ast.walk(node))


def code(text: str) -> Statements:
    return ast.parse(text).body


def expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


def replaced(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    Replacing().visit(root)


def call_of(draft: Draft, helper: str, parameters: list[str], *, method: bool) -> ast.Call:
    arguments = [name for name in parameters if not (method and name == "self")]
    return expression(f"{'self.' if method else ''}{helper}({', '.join(arguments)})")  # type: ignore[no-any-return]


def function(name: str, parameters: list[str], body: Statements) -> ast.FunctionDef:
    made = code(f"def {name}({', '.join(parameters)}): pass")[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = body
    return made


def after_docstring(node: ast.FunctionDef) -> int:
    return int(ast.get_docstring(node, clean=False) is not None)
