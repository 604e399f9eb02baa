"""Slices: the statements of a function that a defect's data pass through, and their fingerprints.

A verdict rests on the code around a defect as much as on the defect itself. Whole functions change in every release of
vLLM; the statements that name the data in question seldom do. A slice is those statements, with the conditions and
loops that they stand in, and with whatever returns, or leaves their loop, between the first and the last of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.source.functions import DEFINITIONS, LOOPS, Function, names_below, parameters_of
from vllm_graphfix.source.patterns import canonical, matches_any, parsed_pattern

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.part import Slice

MISSING = "missing"
"""The fingerprint of a slice whose file or function is missing."""
EMPTY = "empty"
"""The fingerprint of a slice whose function mentions none of the data."""
_EXITS = (ast.Return, ast.Break, ast.Continue)
"""Statements that leave a block silently. An exception is not silent."""
_WITHOUT_GRADIENTS = ("torch.no_grad()", "torch.inference_mode()")
"""Decorators that do not change what a function does."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def fingerprint(source: Source, part: Slice, excluded: Collection[str] = ()) -> str:
    """Hash the slice *part* of *source*, without the statements that equal one of the patterns *excluded*.

    Positions, comments and docstrings do not matter, nor does an argument of a call that names none of the data, nor
    such a keyword of a context that the data are in. Returns 16 hexadecimal digits, 24 for a whole function, `MISSING`
    or `EMPTY`. Raises `SourceError` where the file cannot be parsed.
    """
    function = _function(source, part)
    if function is None:
        return MISSING
    if part.function and not part.names:
        return function.fingerprint()
    # Cached on the syntax tree, which trees with the same file share.
    digests: dict[tuple[str, tuple[str, ...]], str] = vars(function.node).setdefault("graphfix_slices", {})
    key = part.names, tuple(excluded)
    if key not in digests:
        text = "\n".join(_Slicer(frozenset(part.names.split()), excluded).lines(function))
        digests[key] = hashlib.sha256(text.encode()).hexdigest()[:16] if text else EMPTY
    return digests[key]


def lines(source: Source, part: Slice, excluded: Collection[str] = (), *, readable: bool = False) -> list[str] | None:
    """Return the statements of the slice *part*, a line each; None where there is no such code.

    They are written as they are hashed or, with *readable*, as Python.
    """
    function = _function(source, part)
    slicer = _ReadableSlicer if readable else _Slicer
    return None if function is None else slicer(frozenset(part.names.split()), excluded).lines(function)


def lines_of(function: Function, part: Slice, excluded: Collection[str]) -> list[str]:
    """Return the statements of *function* that mention the data of *part*, even if that is a slice of another."""
    return _Slicer(frozenset(part.names.split()), excluded).lines(function)


def _function(source: Source, part: Slice) -> Function | None:
    return source.function(part.path, part.function) if part.function else source.module(part.path)


def joined(values: dict[str, str], whole: dict[str, str]) -> str:
    """Hash all slices, *values*, and the *whole* functions of these, by place; "" if all are missing or empty."""
    if all(value in (MISSING, EMPTY) for value in values.values()):
        return ""
    text = "\n".join(f"{place} {values[place]} {whole.get(place, '')}" for place in sorted(values))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Line(NamedTuple):
    """A statement of a slice, on one line."""

    headers: str
    """The conditions, loops and definitions that it stands in."""
    is_exit: bool
    """It only leaves its block, and mentions none of the data."""
    text: str


class _Slicer:
    """Write the statements that mention one of the names, one a line, each behind the headers that it stands in.

    Use once: each excluded pattern is consumed.
    """

    def __init__(self, names: frozenset[str], excluded: Collection[str]) -> None:
        self._names = names
        self._excluded = [(pattern, _names_in(pattern)) for pattern in excluded]

    def lines(self, function: Function) -> list[str]:
        if not self._mentions(function.node):  # most functions of a class
            return []
        named = filter(self._mentions, parameters_of(function.node))
        parts = [Line("", False, self._pruned(argument)) for argument in named] + self._block(function.node.body)
        return [f"{each.headers}{each.text}" for each in _between_uses(parts, from_start="return" in self._names)]

    def _block(self, statements: list[ast.stmt]) -> list[Line]:
        return [line for statement in statements for line in self._statement(statement)]

    def _statement(self, node: ast.AST) -> Iterator[Line]:
        """Yield the lines of one statement."""
        recognised = self._recognised(node)
        if recognised is not None:
            if _matches_any_body(recognised):
                yield from (Line("", False, self._pruned(each)) for each in ast.walk(node) if self._changes(each))
            return
        blocks = [(name, block) for name in _BLOCKS if isinstance(block := getattr(node, name, None), list) and block]
        if not blocks:
            if self._mentions(node):
                yield Line("", False, self._pruned(node))
            elif isinstance(node, _EXITS):
                yield Line("", True, type(node).__name__)
            return
        in_blocks = {id(each) for _, block in blocks for each in block}
        header = [child for child in ast.iter_child_nodes(node) if id(child) not in in_blocks]
        if isinstance(node, DEFINITIONS):  # of its parameters only those that are named
            decorators = [each for each in node.decorator_list if not matches_any(each, _WITHOUT_GRADIENTS)]
            header = [*decorators, *filter(self._mentions, parameters_of(node)), *getattr(node, "bases", ())]
        if any(map(self._mentions, header)):
            yield Line("", False, f"{type(node).__name__}({','.join(map(self._pruned, header))})")
        inside = [
            Line(f".{key}: {line.headers}", line.is_exit, line.text)
            for key, block in blocks
            for line in self._block(block)
        ]
        if isinstance(node, DEFINITIONS):
            inside = _between_uses(inside)
        elif isinstance(node, LOOPS) and all(line.is_exit for line in inside):
            inside = [line for line in inside if line.text == ast.Return.__name__]  # the others leave this loop only
        if inside:  # most statements have none, and writing headers takes most of the time
            name = getattr(node, "name", "") or ""
            within = f"{type(node).__name__} {name}({','.join(map(self._whole, header))})"
            yield from (Line(f"{within}{line.headers}", line.is_exit, line.text) for line in inside)

    def _recognised(self, node: ast.AST) -> str | None:
        """Return the pattern that *node* equals, and drop it; None if it equals none."""
        names = names_below(node)
        for number, (pattern, its_own) in enumerate(self._excluded):
            # Few statements have all names of a pattern: comparing the others would take most of the time.
            if its_own <= names and matches_any(node, [pattern]):
                # Once: a second pass, or a remedy that stands twice, is more than was recognised.
                del self._excluded[number]
                return pattern
        return None

    def _whole(self, node: ast.AST) -> str:
        """Write a header that mentions none of the data; of a context that is entered, without keywords."""
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call):
            call, named = node.context_expr, node.optional_vars
            keywords = [each for each in call.keywords if each.arg is None or self._mentions(each)]
            return ",".join(map(canonical, (call.func, call.args, keywords, named)))
        return canonical(node)

    def _changes(self, node: ast.AST) -> bool:
        """Tell if the statement *node* changes the data, in place or by an expression of them.

        A call with them as arguments that assigns its result to them does not count: the pattern stands for it.
        """
        if isinstance(node, ast.AugAssign):
            return self._mentions(node.target)
        if not isinstance(node, (ast.Assign, ast.Expr)):
            return False
        value = node.value.func if isinstance(node.value, ast.Call) else node.value
        if isinstance(node, ast.Expr):
            return isinstance(value, ast.Attribute) and value.attr.endswith("_") and self._mentions(value.value)
        return any(
            self._mentions(target) and (isinstance(target, ast.Subscript) or self._mentions(value))
            for target in node.targets
        )

    def _mentions(self, node: ast.AST) -> bool:
        return not self._names.isdisjoint(names_below(node))

    def _pruned(self, node: object) -> str:
        """Write *node* without the arguments of calls and the targets of tuples that mention none of the data.

        Constants stay where a method of the data is called: ``lengths.clamp(min=0)`` is not ``lengths.clamp(min=1)``.
        """
        if isinstance(node, ast.Call) and self._mentions(node):
            of_the_data = isinstance(node.func, ast.Attribute) and self._mentions(node.func.value)

            def matters(argument: ast.expr) -> bool:
                return self._mentions(argument) or (of_the_data and _is_constant(argument))

            arguments = [f"{place}:{self._pruned(each)}" for place, each in enumerate(node.args) if matters(each)]
            keywords = [
                f"{each.arg}={self._pruned(each.value)}"
                for each in node.keywords
                if each.arg is None or each.arg in self._names or matters(each.value)
            ]
            return f"{self._pruned(node.func)}({','.join([*arguments, *sorted(keywords)])})"
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and self._mentions(node):
            return f"({','.join(self._pruned(each) for each in node.elts if self._mentions(each))})"
        if isinstance(node, ast.AST):
            fields = (
                (name, getattr(node, name, None))
                for name in node._fields
                if name not in {"ctx", "kind", "type_comment", "annotation", "returns"}
            )
            return (
                f"{type(node).__name__}({','.join(f'{n}={self._pruned(v)}' for n, v in fields if v not in (None, []))})"
            )
        if isinstance(node, list):
            return f"[{','.join(map(self._pruned, node))}]"
        return canonical(node)


class _ReadableSlicer(_Slicer):
    """Write Python, for people; its text differs between Python releases."""

    def _pruned(self, node: object) -> str:
        return ast.unparse(node) if isinstance(node, ast.AST) else str(node)

    def _whole(self, node: ast.AST) -> str:
        return ast.unparse(node)


def _matches_any_body(pattern: str) -> bool:
    """Tell if *pattern* is of a compound statement, and matches it whatever its body."""
    return pattern.endswith(":\n    ...")


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def _between_uses(lines: list[Line], *, from_start: bool = False) -> list[Line]:
    """Drop the exits of a function before its first use of the data and after its last: they separate no uses.

    With *from_start* those before the first stay: it may not be reached.
    """
    uses = [number for number, line in enumerate(lines) if not line.is_exit]
    return lines[0 if from_start else uses[0] : uses[-1] + 1] if uses else []


@functools.cache
def _names_in(pattern: str) -> frozenset[str]:
    """Return the names that each node which equals *pattern* mentions."""
    return names_below(parsed_pattern(pattern))
