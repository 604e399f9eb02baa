"""Operators on where the function is."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator
from typing import Any

from mutants_draft import Draft, Edit, Operator, after_docstring, bound_before, call_of, code, function, names


def _split(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, draft: Draft) -> None:
        rest = draft.node.body[where:]
        parameters = sorted(names(rest, ast.Load) & bound_before(draft, rest[0]) - draft.module - {"self"})
        helper = f"_rest_of_{draft.node.name.strip('_')}"
        method = draft.owner is not None
        (draft.behind if method else draft.appended).append(
            function(helper, [*["self"][: int(method)], *parameters], rest)
        )
        draft.node.body[where:] = [ast.Return(call_of(draft, helper, parameters, method=method))]

    for where in range(after_docstring(draft.node) + 1, len(draft.node.body)):
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


OPERATORS: dict[str, Operator] = {"split in two": _split, "forwarded or redefined": _forwarding}
