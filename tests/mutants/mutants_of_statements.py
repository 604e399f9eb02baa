"""Operators on statements."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from mutants_draft import (
    Draft,
    Edit,
    Operator,
    Statements,
    bound_before,
    call_of,
    code,
    expression,
    function,
    head,
    leaves,
    names,
    places,
    replaced,
)

OPERATORS: dict[str, Operator] = {}
"""By the kind of change."""


def _on_statements(kind: str, fits: Callable[[Draft, Statements, int], bool]) -> Callable[[Any], Any]:
    """Makes an operator of an edit of one statement, for those that *fits* chooses."""

    def register(change: Callable[[Draft, Statements, int], None]) -> object:
        def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
            for number, (block, position) in enumerate(places(draft.node)):
                if fits(draft, block, position):
                    yield ast.unparse(head(block[position])), functools.partial(_at, number)

        def _at(number: int, draft: Draft) -> None:
            change(draft, *places(draft.node)[number])

        OPERATORS[kind] = operator
        return change

    return register


def _any(draft: Draft, block: Statements, position: int) -> bool:
    return not isinstance(block[position], (ast.Import, ast.ImportFrom))


def _no_definition(draft: Draft, block: Statements, position: int) -> bool:
    return not isinstance(block[position], (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Return))


def _named_assignment(draft: Draft, block: Statements, position: int) -> bool:
    statement = block[position]
    return (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    )


@_on_statements("statement removed", _any)
def _removed(draft: Draft, block: Statements, position: int) -> None:
    block[position : position + 1] = [] if len(block) > 1 else [ast.Pass()]


@_on_statements("statement duplicated", _no_definition)
def _duplicated(draft: Draft, block: Statements, position: int) -> None:
    block.insert(position, copy.deepcopy(block[position]))


def _wrapping(kind: str, text: str) -> None:
    @_on_statements(kind, _no_definition)
    def _wrapped(draft: Draft, block: Statements, position: int) -> None:
        wrapper: Any = code(text)
        wrapper[-1].body = [block[position]]
        block[position : position + 1] = wrapper


_wrapping("wrapped in if", "if __debug__:\n    pass")
_wrapping("wrapped in try", "try:\n    pass\nexcept Exception:\n    raise")
_wrapping("wrapped in with", "import contextlib\nwith contextlib.nullcontext():\n    pass")
_wrapping("wrapped in for", "for _ in range(1):\n    pass")


def _inserting(kind: str, text: str, *, needs: str | None = None) -> None:
    def fits(draft: Draft, block: Statements, position: int) -> bool:
        return needs is None or needs in draft.module or needs in {a.arg for a in draft.node.args.args}

    @_on_statements(kind, fits)
    def _inserted(draft: Draft, block: Statements, position: int) -> None:
        block[position:position] = code(text)


_inserting("log line added", "logger.debug('about to go on')", needs="logger")
_inserting("assertion added", "assert self is not None", needs="self")
_inserting("early return added", "if not __debug__:\n    return None")
_inserting(
    "early return that is taken once in a while", "if getattr(self, 'paused', False):\n    return None", needs="self"
)


def _independent(one: ast.stmt, other: ast.stmt) -> bool:
    if leaves(one) or leaves(other) or isinstance(one, ast.FunctionDef) or isinstance(other, ast.FunctionDef):
        return False
    written, written_too = names(one, ast.Store), names(other, ast.Store)
    return not (
        written & (names(other, ast.Load) | written_too)
        or written_too & names(one, ast.Load)
        or {ast.unparse(part) for part in _stored_parts(one)} & {ast.unparse(part) for part in _stored_parts(other)}
    )


def _stored_parts(statement: ast.stmt) -> list[ast.expr]:
    return [
        part
        for part in ast.walk(statement)
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store)
    ]


def _can_swap(draft: Draft, block: Statements, position: int) -> bool:
    return position + 1 < len(block) and _independent(block[position], block[position + 1])


@_on_statements("independent statements swapped", _can_swap)
def _swapped(draft: Draft, block: Statements, position: int) -> None:
    block[position], block[position + 1] = block[position + 1], block[position]


@_on_statements("statement moved down", lambda draft, block, position: position + 2 < len(block))
def _moved_down(draft: Draft, block: Statements, position: int) -> None:
    last = len(block) - 1 - isinstance(block[-1], ast.Return)
    block.insert(last, block.pop(position))


@_on_statements("statement moved up", lambda draft, block, position: position > 1)
def _moved_up(draft: Draft, block: Statements, position: int) -> None:
    block.insert(position - 2, block.pop(position))


def _can_extract(draft: Draft, block: Statements, position: int) -> bool:
    return _no_definition(draft, block, position) and not leaves(block[position])


def _extract(draft: Draft, block: Statements, position: int, *, method: bool) -> None:
    taken = block[position]
    before = bound_before(draft, taken)
    arguments = sorted((names(taken, ast.Load) | names(taken, ast.Store)) & before - draft.module)
    made = sorted(names(taken, ast.Store))
    helper = "_step_of_" + draft.node.name.strip("_")
    body = [taken, *code(f"return {', '.join(made)}")] if made else [taken]
    parameters = ["self", *(name for name in arguments if name != "self")] if method else arguments
    (draft.beside if method else draft.appended).append(function(helper, parameters, body))
    called = call_of(draft, helper, arguments, method=method)
    block[position] = code(f"{', '.join(made)} = {ast.unparse(called)}")[0] if made else ast.Expr(called)


@_on_statements("extracted into a function", _can_extract)
def _extracted_function(draft: Draft, block: Statements, position: int) -> None:
    _extract(draft, block, position, method=False)


@_on_statements(
    "extracted into a method",
    lambda draft, block, position: draft.owner is not None and _can_extract(draft, block, position),
)
def _extracted_method(draft: Draft, block: Statements, position: int) -> None:
    _extract(draft, block, position, method=True)


def _used_once(draft: Draft, block: Statements, position: int) -> bool:
    if not _named_assignment(draft, block, position):
        return False
    name = block[position].targets[0].id  # type: ignore[attr-defined]
    uses = [part for part in ast.walk(draft.node) if isinstance(part, ast.Name) and part.id == name]
    return len(uses) == 2


@_on_statements("local inlined", _used_once)
def _inlined(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block.pop(position)
    name = assignment.targets[0].id
    use = next(part for part in ast.walk(draft.node) if isinstance(part, ast.Name) and part.id == name)
    replaced(draft.node, use, assignment.value)


@_on_statements("assignment annotated", _named_assignment)
def _annotated(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block[position]
    block[position] = ast.AnnAssign(assignment.targets[0], ast.Constant("torch.Tensor"), assignment.value, simple=1)


@_on_statements("assigned by :=", _named_assignment)
def _walrus(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block[position]
    block[position] = ast.Expr(ast.NamedExpr(assignment.targets[0], assignment.value))


def _unpacks(draft: Draft, block: Statements, position: int) -> bool:
    statement = block[position]
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Tuple)
        and len(statement.targets) == 1
    )


@_on_statements("unpacked by index", _unpacks)
def _by_index(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block[position]
    parts = [
        ast.Assign([target], expression(f"answer[{number}]"), lineno=1)
        for number, target in enumerate(assignment.targets[0].elts)
    ]
    block[position : position + 1] = [ast.Assign([ast.Name("answer", ast.Store())], assignment.value, lineno=1), *parts]


@_on_statements("branches swapped", lambda draft, block, position: bool(getattr(block[position], "orelse", None)))
def _branches(draft: Draft, block: Statements, position: int) -> None:
    statement: Any = block[position]
    if isinstance(statement, ast.If):
        statement.test, statement.body, statement.orelse = (
            ast.UnaryOp(ast.Not(), statement.test),
            statement.orelse,
            statement.body,
        )


@_on_statements("with split", lambda draft, block, position: len(getattr(block[position], "items", ())) > 1)
def _with_split(draft: Draft, block: Statements, position: int) -> None:
    statement: Any = block[position]
    statement.items, rest = statement.items[:1], statement.items[1:]
    statement.body = [ast.With(rest, statement.body)]


def _nested_with(draft: Draft, block: Statements, position: int) -> bool:
    statement = block[position]
    return isinstance(statement, ast.With) and len(statement.body) == 1 and isinstance(statement.body[0], ast.With)


@_on_statements("with merged", _nested_with)
def _with_merged(draft: Draft, block: Statements, position: int) -> None:
    statement: Any = block[position]
    statement.items, statement.body = [*statement.items, *statement.body[0].items], statement.body[0].body


_IN_PLACE = {"copy_": "{}", "fill_": "{}", "zero_": "0"}


def _writes_in_place(draft: Draft, block: Statements, position: int) -> bool:
    statement = block[position]
    called = statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in _IN_PLACE


@_on_statements("x.copy_(y) made x[:] = y", _writes_in_place)
def _made_assignment(draft: Draft, block: Statements, position: int) -> None:
    call: Any = block[position].value  # type: ignore[attr-defined]
    value = ast.unparse(call.args[0]) if call.args else ""
    block[position : position + 1] = code(
        f"{ast.unparse(call.func.value)}[:] = {_IN_PLACE[call.func.attr].format(value)}"
    )


def _assigns_part(draft: Draft, block: Statements, position: int) -> bool:
    statement = block[position]
    return isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript)


@_on_statements("x[:n] = y made x[:n].copy_(y)", _assigns_part)
def _made_copy(draft: Draft, block: Statements, position: int) -> None:
    statement: Any = block[position]
    how = "fill_" if isinstance(statement.value, ast.Constant) else "copy_"
    block[position : position + 1] = code(f"{ast.unparse(statement.targets[0])}.{how}({ast.unparse(statement.value)})")


@_on_statements(
    "lambda made a function",
    lambda draft, block, position: isinstance(getattr(block[position], "value", None), ast.Lambda),
)
def _lambda(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block[position]
    made = function(assignment.targets[0].id, [], [ast.Return(assignment.value.body)])
    made.args = assignment.value.args
    block[position] = made
