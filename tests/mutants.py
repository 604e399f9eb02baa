"""Mutants of functions of vLLM: what upstream could do to them, as edits of the syntax trees of real releases.

An operator lists edits of one function, each with a label; an edit is carried out on a `Draft`, a copy of that function.
Deterministic: the same source gives the same edits in the same order under the same labels.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

Statements = list[ast.stmt]


class Draft:
    """A function that is being edited, and what has to come with it."""

    def __init__(self, node: ast.FunctionDef, owner: str | None, module: frozenset[str]) -> None:
        self.node = copy.deepcopy(node)
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
OPERATORS: dict[str, Operator] = {}
"""By the kind of change."""


def edits(kind: str, draft: Draft) -> dict[str, Edit]:
    """All edits of this kind, by labels that stay the same as long as the place that they are about does."""
    found: dict[str, Edit] = {}
    for text, edit in OPERATORS[kind](draft):
        first = " ".join(text.split())[:70]
        label = next(name for name in _numbered(first) if name not in found)
        found[label] = edit
    return found


def _numbered(text: str) -> Iterator[str]:
    yield text
    number = 2
    while True:
        yield f"{text} #{number}"
        number += 1


# -- places, and what is read and written there ------------------------------------------------------------------------


def places(root: ast.AST) -> list[tuple[Statements, int]]:
    """Every statement below *root* as its block and its position there, in source order; no docstrings."""
    found: list[tuple[Statements, int]] = []
    for field in ("body", "handlers", "orelse", "finalbody"):
        block = getattr(root, field, None)
        if not isinstance(block, list):
            continue
        for position, child in enumerate(block):
            docstring = position == 0 and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.stmt) and not docstring:
                found.append((block, position))
            found += places(child)
    return found


def names(node: ast.AST | Statements, kind: type[ast.expr_context]) -> set[str]:
    roots = node if isinstance(node, list) else [node]
    found = {
        part.id
        for root in roots
        for part in ast.walk(root)
        if isinstance(part, ast.Name) and isinstance(part.ctx, kind)
    }
    if kind is ast.Store:
        found |= {part.name for root in roots for part in ast.walk(root) if isinstance(part, ast.FunctionDef)}
    return found


def _bound_before(draft: Draft, statement: ast.stmt) -> set[str]:
    """Parameters, of functions inside too, and what is assigned above *statement*."""
    bound = {part.arg for part in ast.walk(draft.node) if isinstance(part, ast.arg)}
    for block, position in places(draft.node):
        if block[position] is statement:
            return bound
        bound |= names(_head(block[position]), ast.Store)
    return bound


def _head(statement: ast.stmt) -> ast.stmt:
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


def _leaves(node: ast.AST) -> bool:
    """Whether control leaves the place otherwise than at its end."""
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


def call_of(draft: Draft, helper: str, given: list[str], *, method: bool) -> ast.Call:
    arguments = [name for name in given if not (method and name == "self")]
    return expression(f"{'self.' if method else ''}{helper}({', '.join(arguments)})")  # type: ignore[no-any-return]


def function(name: str, parameters: list[str], body: Statements) -> ast.FunctionDef:
    made = code(f"def {name}({', '.join(parameters)}): pass")[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = body
    return made


# -- operators on statements -------------------------------------------------------------------------------------------


def _on_statements(kind: str, fits: Callable[[Draft, Statements, int], bool]) -> Callable[[Any], Any]:
    """Makes an operator of an edit of one statement, for those that *fits* chooses."""

    def register(change: Callable[[Draft, Statements, int], None]) -> object:
        def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
            for number, (block, position) in enumerate(places(draft.node)):
                if fits(draft, block, position):
                    yield ast.unparse(_head(block[position])), functools.partial(_at, number)

        def _at(number: int, draft: Draft) -> None:
            change(draft, *places(draft.node)[number])

        OPERATORS[kind] = operator
        return change

    return register


def _any(draft: Draft, block: Statements, position: int) -> bool:
    return not isinstance(block[position], (ast.Import, ast.ImportFrom))


def _no_definition(draft: Draft, block: Statements, position: int) -> bool:
    return not isinstance(block[position], (ast.FunctionDef, ast.Import, ast.ImportFrom, ast.Return))


def _simple(draft: Draft, block: Statements, position: int) -> bool:
    return isinstance(block[position], (ast.Assign, ast.Expr, ast.Assert, ast.AugAssign, ast.AnnAssign))


def _named_assignment(draft: Draft, block: Statements, position: int) -> bool:
    found = block[position]
    return isinstance(found, ast.Assign) and len(found.targets) == 1 and isinstance(found.targets[0], ast.Name)


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
    if _leaves(one) or _leaves(other) or isinstance(one, ast.FunctionDef) or isinstance(other, ast.FunctionDef):
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
    return _no_definition(draft, block, position) and not _leaves(block[position])


def _extract(draft: Draft, block: Statements, position: int, *, method: bool) -> None:
    taken = block[position]
    before = _bound_before(draft, taken)
    given = sorted((names(taken, ast.Load) | names(taken, ast.Store)) & before - draft.module)
    made = sorted(names(taken, ast.Store))
    helper = "_step_of_" + draft.node.name.strip("_")
    body = [taken, *code(f"return {', '.join(made)}")] if made else [taken]
    parameters = ["self", *(name for name in given if name != "self")] if method else given
    (draft.beside if method else draft.appended).append(function(helper, parameters, body))
    called = call_of(draft, helper, given, method=method)
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
    found = block[position]
    return isinstance(found, ast.Assign) and isinstance(found.targets[0], ast.Tuple) and len(found.targets) == 1


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
    found: Any = block[position]
    if isinstance(found, ast.If):
        found.test, found.body, found.orelse = ast.UnaryOp(ast.Not(), found.test), found.orelse, found.body


@_on_statements("with split", lambda draft, block, position: len(getattr(block[position], "items", ())) > 1)
def _with_split(draft: Draft, block: Statements, position: int) -> None:
    found: Any = block[position]
    found.items, rest = found.items[:1], found.items[1:]
    found.body = [ast.With(rest, found.body)]


def _nested_with(draft: Draft, block: Statements, position: int) -> bool:
    found = block[position]
    return isinstance(found, ast.With) and len(found.body) == 1 and isinstance(found.body[0], ast.With)


@_on_statements("with merged", _nested_with)
def _with_merged(draft: Draft, block: Statements, position: int) -> None:
    found: Any = block[position]
    found.items, found.body = [*found.items, *found.body[0].items], found.body[0].body


_IN_PLACE = {"copy_": "{}", "fill_": "{}", "zero_": "0"}


def _writes_in_place(draft: Draft, block: Statements, position: int) -> bool:
    found = block[position]
    called = found.value.func if isinstance(found, ast.Expr) and isinstance(found.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in _IN_PLACE


@_on_statements("x.copy_(y) made x[:] = y", _writes_in_place)
def _made_assignment(draft: Draft, block: Statements, position: int) -> None:
    call: Any = block[position].value  # type: ignore[attr-defined]
    given = ast.unparse(call.args[0]) if call.args else ""
    block[position : position + 1] = code(
        f"{ast.unparse(call.func.value)}[:] = {_IN_PLACE[call.func.attr].format(given)}"
    )


def _assigns_part(draft: Draft, block: Statements, position: int) -> bool:
    found = block[position]
    return isinstance(found, ast.Assign) and isinstance(found.targets[0], ast.Subscript)


@_on_statements("x[:n] = y made x[:n].copy_(y)", _assigns_part)
def _made_copy(draft: Draft, block: Statements, position: int) -> None:
    found: Any = block[position]
    how = "fill_" if isinstance(found.value, ast.Constant) else "copy_"
    block[position : position + 1] = code(f"{ast.unparse(found.targets[0])}.{how}({ast.unparse(found.value)})")


@_on_statements(
    "lambda made a function",
    lambda draft, block, position: isinstance(getattr(block[position], "value", None), ast.Lambda),
)
def _lambda(draft: Draft, block: Statements, position: int) -> None:
    assignment: Any = block[position]
    made = function(assignment.targets[0].id, [], [ast.Return(assignment.value.body)])
    made.args = assignment.value.args
    block[position] = made


# -- operators on expressions ------------------------------------------------------------------------------------------


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
    if isinstance(part, ast.Call) and part.keywords and all(given.arg for given in part.keywords):
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
        found: Any = block[position]
        value, found.value = found.value, ast.Name("outcome", ast.Load())
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
        draft.node.body[_after_docstring(draft.node) : 0] = []
        draft.node.body.insert(_after_docstring(draft.node), code(f"kept = {attribute}")[0])

    loaded = [part for part in ast.walk(draft.node) if isinstance(part, ast.Attribute)]
    written = {ast.unparse(part) for part in loaded if isinstance(part.ctx, ast.Store)}
    for text in dict.fromkeys(ast.unparse(part) for part in loaded if ast.unparse(part.value) == "self"):
        if text not in written:
            yield text, functools.partial(edit, text)


def _after_docstring(node: ast.FunctionDef) -> int:
    return int(ast.get_docstring(node, clean=False) is not None)


OPERATORS["argument given a local"] = _argument_named
OPERATORS["result given a local"] = _result_named
OPERATORS["attribute hoisted"] = _hoisted


# -- operators on names and signatures ---------------------------------------------------------------------------------


def _rename(root: ast.AST, old: str, new: str) -> None:
    for part in ast.walk(root):
        if isinstance(part, ast.Name) and part.id == old:
            part.id = new
        elif isinstance(part, ast.arg) and part.arg == old:
            part.arg = new
        elif isinstance(part, ast.FunctionDef) and part.name == old:
            part.name = new


def _local_renamed(draft: Draft) -> Iterator[tuple[str, Edit]]:
    parameters = {argument.arg for argument in _arguments(draft.node)}
    for name in sorted(names(draft.node.body, ast.Store) - parameters - {"_"}):
        yield name, lambda draft, name=name: _rename(draft.node, name, f"new_{name}")  # type: ignore[misc]


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _parameter_renamed(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(name: str, draft: Draft) -> None:
        _rename(draft.node, name, f"new_{name}")
        draft.calls.append(functools.partial(_keyword_renamed, name, f"new_{name}"))

    for argument in _arguments(draft.node):
        if argument.arg not in ("self", "cls"):
            yield argument.arg, functools.partial(edit, argument.arg)


def _keyword_renamed(old: str, new: str, call: ast.Call) -> None:
    for given in call.keywords:
        if given.arg == old:
            given.arg = new


def _made_keyword_only(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(count: int, draft: Draft) -> None:
        arguments = draft.node.args
        first = len(arguments.args) - count
        moved = arguments.args[first:]
        arguments.args = arguments.args[:first]
        defaults: list[ast.expr | None] = [None] * (len(moved) - len(arguments.defaults)) + list(arguments.defaults)
        arguments.kw_defaults = [*defaults[-len(moved) :], *arguments.kw_defaults]
        arguments.kwonlyargs = [*moved, *arguments.kwonlyargs]
        arguments.defaults = arguments.defaults[: max(0, len(arguments.defaults) - count)]
        given = [argument.arg for argument in arguments.args if argument.arg != "self"]
        draft.calls.append(functools.partial(_called_by_keyword, len(given), [argument.arg for argument in moved]))

    for count in range(1, len(draft.node.args.args)):
        yield draft.node.args.args[-count].arg, functools.partial(edit, count)


def _called_by_keyword(positional: int, moved: list[str], call: ast.Call) -> None:
    if not any(isinstance(given, ast.Starred) for given in call.args):
        named = {name: ast.keyword(name, value) for name, value in zip(moved, call.args[positional:], strict=False)}
        kept = [given for given in call.keywords if given.arg not in named]
        call.args, call.keywords = call.args[:positional], [*named.values(), *kept]


def _parameter_added(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def last(draft: Draft) -> None:
        draft.node.args.args.append(ast.arg("extra"))
        draft.node.args.defaults.append(ast.Constant(None))

    def keyword(draft: Draft) -> None:
        draft.node.args.kwonlyargs.append(ast.arg("extra"))
        draft.node.args.kw_defaults.append(ast.Constant(None))

    def keyword_needed(draft: Draft) -> None:
        draft.node.args.kwonlyargs.append(ast.arg("extra"))
        draft.node.args.kw_defaults.append(None)
        draft.calls.append(lambda call: call.keywords.append(ast.keyword("extra", ast.Constant(None))))

    def first(draft: Draft) -> None:
        draft.node.args.args.insert(int(draft.owner is not None), ast.arg("extra"))
        draft.calls.append(lambda call: call.args.insert(0, ast.Constant(None)))

    def second(draft: Draft) -> None:
        draft.node.args.args.insert(1 + int(draft.owner is not None), ast.arg("extra"))
        draft.calls.append(lambda call: call.args.insert(1, ast.Constant(None)))

    def anything(draft: Draft) -> None:
        draft.node.args.kwarg = draft.node.args.kwarg or ast.arg("more")

    def any_number(draft: Draft) -> None:
        draft.node.args.vararg = draft.node.args.vararg or ast.arg("others")

    yield from {
        "last, with a default": last,
        "by keyword, with a default": keyword,
        "by keyword": keyword_needed,
        "first": first,
        "second": second,
        "**more": anything,
        "*others": any_number,
    }.items()


def _parameter_removed(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """One that is not used."""

    def edit(name: str, draft: Draft) -> None:
        arguments = draft.node.args
        where = next(number for number, argument in enumerate(arguments.args) if argument.arg == name)
        place = where - int(draft.owner is not None)
        del arguments.args[where]

        def drop(call: ast.Call) -> None:
            call.keywords = [given for given in call.keywords if given.arg != name]
            del call.args[place : place + 1]

        draft.calls.append(drop)

    used = names(draft.node.body, ast.Load)
    without_default = len(draft.node.args.args) - len(draft.node.args.defaults)
    for argument in draft.node.args.args[:without_default]:
        if argument.arg not in used | {"self"}:
            yield argument.arg, functools.partial(edit, argument.arg)


def _parameters_swapped(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, draft: Draft) -> None:
        given = draft.node.args.args
        given[where], given[where + 1] = given[where + 1], given[where]
        place = where - int(draft.owner is not None)

        def swap(call: ast.Call) -> None:
            if len(call.args) > place + 1:
                call.args[place], call.args[place + 1] = call.args[place + 1], call.args[place]

        draft.calls.append(swap)

    without_default = len(draft.node.args.args) - len(draft.node.args.defaults)
    for where in range(int(draft.owner is not None), without_default - 1):
        yield draft.node.args.args[where].arg, functools.partial(edit, where)


def _default_changed(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, value: ast.expr, draft: Draft) -> None:
        draft.node.args.defaults[where] = value

    def added(draft: Draft) -> None:
        draft.node.args.defaults.insert(0, ast.Constant(None))

    for where, default in enumerate(draft.node.args.defaults):
        if isinstance(default, ast.Constant):
            new = ast.Constant(1) if default.value is None else ast.Constant(None)
            yield ast.unparse(default), functools.partial(edit, where, new)
    if len(draft.node.args.defaults) < len(draft.node.args.args) - 1:
        yield "added", added


def _annotation_changed(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, draft: Draft) -> None:
        argument = _arguments(draft.node)[where]
        argument.annotation = None if argument.annotation else ast.Constant("object")

    for where, argument in enumerate(_arguments(draft.node)):
        if argument.arg != "self":
            yield argument.arg, functools.partial(edit, where)
    yield "what it returns", lambda draft: setattr(draft.node, "returns", ast.Constant("object"))


_TRACED = "def _traced(wrapped):{}\n    def traced(*args, **kwargs):\n        return wrapped(*args, **kwargs)\n    return traced"


def _decorated(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(text: str, draft: Draft) -> None:
        draft.node.decorator_list.insert(0, expression(text))

    def own(wraps: bool, draft: Draft) -> None:
        inside = "\n    import functools\n    @functools.wraps(wrapped)" if wraps else ""
        draft.beside += code(_TRACED.format(inside))
        draft.node.decorator_list.insert(0, expression("_traced"))

    for text in ("torch.inference_mode()", "torch.no_grad()", "staticmethod", "classmethod", "property"):
        yield text, functools.partial(edit, text)
    yield "its own, with functools.wraps", functools.partial(own, True)
    yield "its own, without", functools.partial(own, False)
    for text in [ast.unparse(given) for given in draft.node.decorator_list]:
        yield f"{text} taken away", lambda draft: draft.node.decorator_list.clear()


def _made_async(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(draft: Draft) -> None:
        made = ast.AsyncFunctionDef(**{field: getattr(draft.node, field) for field in draft.node._fields})
        draft.node = made  # type: ignore[assignment]

    yield draft.node.name, edit


def _returns_otherwise(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """Another form of what is returned; whoever calls the function is told."""

    def edit(pattern: str, caller: str | None, draft: Draft) -> None:
        for part in list(ast.walk(draft.node)):
            if isinstance(part, ast.Return) and part.value is not None and not _inside_another(draft.node, part):
                part.value = expression(pattern.format(ast.unparse(part.value)))
        if caller is not None:
            draft.calls.append(functools.partial(_wrap_call, caller))

    def named(draft: Draft) -> None:
        draft.appended += code("import collections\n_Returned = collections.namedtuple('_Returned', 'first second')")
        edit("_Returned(*{})", None, draft)

    if any(isinstance(part, ast.Return) and part.value is not None for part in draft.node.body):
        yield "one element more", functools.partial(edit, "(*{}, None)", "{}[:-1]")
        yield "in a tuple", functools.partial(edit, "({},)", "{}[0]")
        yield "in a dict", functools.partial(edit, "{{'result': {}}}", "{}['result']")
        if any(isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple) for part in draft.node.body):
            yield "a named tuple", named
    else:
        yield "something", lambda draft: draft.node.body.extend(code("return True"))
    yield "itself", lambda draft: draft.node.body.extend(code("return self" if draft.owner else "return None"))


def _inside_another(root: ast.AST, part: ast.AST) -> bool:
    inner = [node for node in ast.walk(root) if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not root]
    return any(part is below for node in inner for below in ast.walk(node))


def _wrap_call(pattern: str, call: ast.Call) -> None:
    """In place: the call node becomes the pattern's expression, as a call of an identity, so that it stays a call."""
    inner = copy.deepcopy(call)
    call.func, call.args, call.keywords = (
        expression("(lambda answer: answer)"),
        [expression(pattern.format(ast.unparse(inner)))],
        [],
    )


def _renamed_words(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """An attribute of the object, or a function of the module, under another name in all files."""

    def edit(word: str, draft: Draft) -> None:
        draft.renamed[word] = f"{word}_by_another_name"

    found = {
        part.attr
        for part in ast.walk(draft.node)
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
    }
    found |= {
        part.func.id for part in ast.walk(draft.node) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
    }
    for word in sorted(found & draft.module | {draft.node.name} - {"__init__"}):
        yield word, functools.partial(edit, word)


OPERATORS |= {
    "local renamed": _local_renamed,
    "parameter renamed": _parameter_renamed,
    "parameter made keyword-only": _made_keyword_only,
    "parameter added": _parameter_added,
    "parameter removed": _parameter_removed,
    "parameters swapped": _parameters_swapped,
    "default changed": _default_changed,
    "annotation changed": _annotation_changed,
    "decorated": _decorated,
    "made async": _made_async,
    "returns otherwise": _returns_otherwise,
    "attribute or helper renamed": _renamed_words,
}


# -- operators on where the function is --------------------------------------------------------------------------------


def _split(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, draft: Draft) -> None:
        rest = draft.node.body[where:]
        given = sorted(names(rest, ast.Load) & _bound_before(draft, rest[0]) - draft.module - {"self"})
        helper = f"_rest_of_{draft.node.name.strip('_')}"
        method = draft.owner is not None
        (draft.behind if method else draft.appended).append(function(helper, [*["self"][: int(method)], *given], rest))
        draft.node.body[where:] = [ast.Return(call_of(draft, helper, given, method=method))]

    for where in range(_after_docstring(draft.node) + 1, len(draft.node.body)):
        yield ast.unparse(draft.node.body[where]), functools.partial(edit, where)


def _forwarding(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def implemented(draft: Draft) -> None:
        """The name stays and calls the one that has the code."""
        other = copy.deepcopy(draft.node)
        other.name, other.decorator_list = f"_{draft.node.name.strip('_')}_impl", []
        draft.behind.append(other)
        method = draft.owner is not None
        body = f"return {'self.' if method else ''}{other.name}(*args, **kwargs)"
        taking = function(draft.node.name, [*["self"][: int(method)], "*args", "**kwargs"], code(body))
        taking.decorator_list = draft.node.decorator_list
        draft.node = taking

    def same_signature(draft: Draft) -> None:
        other = copy.deepcopy(draft.node)
        other.name, other.decorator_list = f"_{draft.node.name.strip('_')}_impl", []
        draft.behind.append(other)
        draft.node.body = [ast.Return(_forwarded(draft, other.name))]

    def alias(draft: Draft) -> None:
        """The name is assigned."""
        old, draft.node.name = draft.node.name, f"new_{draft.node.name.strip('_')}"
        draft.behind += code(f"{old} = {draft.node.name}")

    def conditional(draft: Draft) -> None:
        wrapper: Any = code("if __debug__:\n    pass")[0]
        wrapper.body = [copy.deepcopy(draft.node)]
        draft.behind.append(wrapper)
        draft.node = function(f"_unused_{draft.node.name.strip('_')}", [], [ast.Pass()])

    def twice(draft: Draft) -> None:
        """An older definition above it, which is not to be called: it raises."""
        older = copy.deepcopy(draft.node)
        older.body = code("raise NotImplementedError")
        older.decorator_list = []
        draft.beside.append(older)

    def twice_reversed(draft: Draft) -> None:
        """The one that counts is below, and other: it raises, so such a vLLM is broken, whatever is said of it."""
        later = copy.deepcopy(draft.node)
        later.body = code("raise NotImplementedError")
        later.decorator_list = []
        draft.behind.append(later)

    def outside(draft: Draft) -> None:
        """Set on its class from outside."""
        moved = copy.deepcopy(draft.node)
        moved.name = f"_{draft.node.name.strip('_')}_of_{draft.owner}"
        draft.appended += [moved, *code(f"{draft.owner}.{draft.node.name} = {moved.name}")]
        draft.node = function(f"_unused_{draft.node.name.strip('_')}", [], [ast.Pass()])

    yield "forwards everything", implemented
    yield "forwards its parameters", same_signature
    yield "is an alias", alias
    yield "is defined under a condition", conditional
    yield "is defined twice", twice
    yield "is defined twice, and the other one counts", twice_reversed
    if draft.owner is not None:
        yield "is set from outside", outside


def _forwarded(draft: Draft, helper: str) -> ast.Call:
    arguments = draft.node.args
    method = draft.owner is not None
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][int(method) :]
    named = [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    starred = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    starred += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return call_of(draft, helper, [*positional, *named, *starred], method=method)


OPERATORS["split in two"] = _split
OPERATORS["forwarded or redefined"] = _forwarding
