"""Operators on expressions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

from mutants_draft import Draft, Edit, Operator, after_docstring, code, expression, places, replaced

OPERATORS: dict[str, Operator] = {}
"""By the kind of change."""


def _on_expressions(kind: str, new: Callable[[Draft, Any], ast.expr | None]) -> None:
    """An operator that puts ``new(draft, expression)`` in the place of each expression that it has an answer for."""

    def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
        for number, part in enumerate(ast.walk(draft.node)):
            if isinstance(part, ast.expr) and new(draft, part) is not None:
                yield ast.unparse(part), functools.partial(_at, number)

    def _at(number: int, draft: Draft) -> None:
        part = list(ast.walk(draft.node))[number]
        answer = new(draft, part)
        assert answer is not None
        replaced(draft.node, part, answer)

    OPERATORS[kind] = operator


def _constant(draft: Draft, part: Any) -> ast.expr | None:
    if isinstance(part, ast.Constant) and isinstance(part.value, bool):
        return ast.Constant(not part.value)
    if isinstance(part, ast.Constant) and isinstance(part.value, int):
        return ast.Constant(part.value + 1)
    return None


def _minus_one(draft: Draft, part: Any) -> ast.expr | None:
    return ast.Constant(0) if isinstance(part, ast.UnaryOp) and ast.unparse(part) == "-1" else None


def _comparison_turned(draft: Draft, part: Any) -> ast.expr | None:
    turned: dict[type[ast.cmpop], type[ast.cmpop]] = {
        ast.Lt: ast.Gt,
        ast.Gt: ast.Lt,
        ast.LtE: ast.GtE,
        ast.GtE: ast.LtE,
    }
    if isinstance(part, ast.Compare) and len(part.ops) == 1 and type(part.ops[0]) in turned:
        return ast.Compare(part.comparators[0], [turned[type(part.ops[0])]()], [part.left])
    return None


def _comparison_changed(draft: Draft, part: Any) -> ast.expr | None:
    changed: dict[type[ast.cmpop], type[ast.cmpop]] = {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    }
    if isinstance(part, ast.Compare) and len(part.ops) == 1 and type(part.ops[0]) in changed:
        return ast.Compare(part.left, [changed[type(part.ops[0])]()], part.comparators)
    return None


def _allocated(draft: Draft, part: Any) -> ast.expr | None:
    other = {"zeros": "empty", "empty": "zeros", "empty_like": "zeros_like", "zeros_like": "empty_like"}
    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "torch" and part.attr in other:
        return ast.Attribute(part.value, other[part.attr], ast.Load())
    return None


def _tuple_made_list(draft: Draft, part: Any) -> ast.expr | None:
    return ast.List(part.elts, ast.Load()) if isinstance(part, ast.Tuple) and isinstance(part.ctx, ast.Load) else None


def _through_dict(draft: Draft, part: Any) -> ast.expr | None:
    if isinstance(part, ast.Call) and part.keywords and all(keyword.arg for keyword in part.keywords):
        return ast.Call(
            part.func, part.args, [ast.keyword(None, ast.Call(ast.Name("dict", ast.Load()), [], part.keywords))]
        )
    return None


def _through_class(draft: Draft, part: Any) -> ast.expr | None:
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and ast.unparse(part.func.value) == "self":
        return ast.Call(expression(f"type(self).{part.func.attr}"), [expression("self"), *part.args], part.keywords)
    return None


def _through_getattr(draft: Draft, part: Any) -> ast.expr | None:
    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load) and ast.unparse(part.value) == "self":
        return expression(f"getattr(self, {part.attr!r})")  # type: ignore[no-any-return]
    return None


def _slice_from_zero(draft: Draft, part: Any) -> ast.expr | None:
    return ast.Slice(ast.Constant(0), part.upper, None) if isinstance(part, ast.Slice) and not part.lower else None


def _cast(draft: Draft, part: Any) -> ast.expr | None:
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id != "cast":
        return expression(f"(lambda answer: answer)({ast.unparse(part)})")  # type: ignore[no-any-return]
    return None


for _kind, _new in {
    "constant changed": _constant,
    "-1 made 0": _minus_one,
    "comparison turned round": _comparison_turned,
    "comparison changed": _comparison_changed,
    "torch.zeros made torch.empty": _allocated,
    "tuple made list": _tuple_made_list,
    "keywords through a dict": _through_dict,
    "method called through the class": _through_class,
    "attribute through getattr": _through_getattr,
    "slice written out": _slice_from_zero,
    "call passed through": _cast,
}.items():
    _on_expressions(_kind, _new)


def _on_tests(kind: str, pattern: str) -> None:
    """An operator on conditions; *pattern* has the condition as ``{}``."""

    def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
        for number, part in enumerate(ast.walk(draft.node)):
            if isinstance(part, (ast.If, ast.IfExp, ast.Assert)):
                yield ast.unparse(part.test), functools.partial(_at, number)

    def _at(number: int, draft: Draft) -> None:
        part: Any = list(ast.walk(draft.node))[number]
        part.test = expression(pattern.format(ast.unparse(part.test)))

    OPERATORS[kind] = operator


_on_tests("condition negated", "not ({})")
_on_tests("condition strengthened", "({}) and __debug__")
_on_tests("condition weakened", "({}) or not __debug__")
_on_tests("condition made true", "({}) or True")


def _argument_named(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """A call that is an argument gets a local of its own."""

    def edit(number: int, which: int, draft: Draft) -> None:
        block, position = places(draft.node)[number]
        inner = _inner_calls(block[position])[which]
        replaced(block[position], inner, ast.Name("intermediate", ast.Load()))
        block.insert(position, ast.Assign([ast.Name("intermediate", ast.Store())], inner, lineno=1))

    for number, (block, position) in enumerate(places(draft.node)):
        for which, inner in enumerate(_inner_calls(block[position])):
            yield ast.unparse(inner), functools.partial(edit, number, which)


def _inner_calls(statement: ast.stmt) -> list[ast.Call]:
    if not isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) or statement.value is None:
        return []
    inside = [part for part in ast.walk(statement.value) if part is not statement.value]
    if any(isinstance(part, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.comprehension)) for part in ast.walk(statement)):
        return []
    return [part for part in inside if isinstance(part, ast.Call)]


def _result_named(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """``return f(x)`` and ``x = f(y)`` through a local."""

    def edit(number: int, draft: Draft) -> None:
        block, position = places(draft.node)[number]
        statement: Any = block[position]
        value, statement.value = statement.value, ast.Name("outcome", ast.Load())
        block.insert(position, ast.Assign([ast.Name("outcome", ast.Store())], value, lineno=1))

    for number, (block, position) in enumerate(places(draft.node)):
        if (
            isinstance(block[position], (ast.Return, ast.Assign))
            and getattr(block[position], "value", None) is not None
        ):
            yield ast.unparse(block[position]), functools.partial(edit, number)


def _hoisted(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """An attribute that is only read gets a local at the top."""

    def edit(attribute: str, draft: Draft) -> None:
        for part in list(ast.walk(draft.node)):
            if isinstance(part, ast.Attribute) and ast.unparse(part) == attribute:
                replaced(draft.node, part, ast.Name("kept", ast.Load()))
        draft.node.body[after_docstring(draft.node) : 0] = []
        draft.node.body.insert(after_docstring(draft.node), code(f"kept = {attribute}")[0])

    loaded = [part for part in ast.walk(draft.node) if isinstance(part, ast.Attribute)]
    written = {ast.unparse(part) for part in loaded if isinstance(part.ctx, ast.Store)}
    for text in dict.fromkeys(ast.unparse(part) for part in loaded if ast.unparse(part.value) == "self"):
        if text not in written:
            yield text, functools.partial(edit, text)


OPERATORS["argument given a local"] = _argument_named
OPERATORS["result given a local"] = _result_named
OPERATORS["attribute hoisted"] = _hoisted
