"""Operators on what a function takes and gives: kept, copied, cleared, rebuilt, of another size, chosen otherwise."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from mutants_draft import (
    Draft,
    Edit,
    Operator,
    Statements,
    after_docstring,
    code,
    expression,
    function,
    places,
    replaced,
)

_EACH_TENSOR = """
def _each_tensor(answer, change):
    import torch
    if isinstance(answer, torch.Tensor):
        return change(answer)
    if isinstance(answer, dict):
        return {key: _each_tensor(value, change) for key, value in answer.items()}
    if type(answer) in (list, tuple):
        return type(answer)(_each_tensor(value, change) for value in answer)
    if type(answer).__module__.startswith('vllm.') and hasattr(answer, '__dict__'):
        for name, value in list(vars(answer).items()):
            if isinstance(value, torch.Tensor):
                object.__setattr__(answer, name, change(value))
    return answer
"""
_PLAIN = (
    "tuple(repr(each) for each in (*args, *kwargs.values()) if isinstance(each, (int, str, type(None))) or "
    "type(each).__name__.endswith('Descriptor'))"
)
_AROUND = {
    "result kept": "kept = {home}.__dict__.setdefault('_kept_{name}', []) if hasattr({home}, '__dict__') else []\n"
    "if not kept:\n    kept.append({call})\nreturn kept[0]",
    "result kept for the same plain arguments": f"key = {_PLAIN}\n"
    "kept = {home}.__dict__.setdefault('_kept_{name}', {{}})\n"
    "if key not in kept:\n    kept[key] = {call}\nreturn kept[key]",
    "result copied": "import copy\nreturn copy.copy({call})",
    "tensors of the result copied": "return _each_tensor({call}, lambda tensor: tensor.clone())",
    "tensors of the result not below 0": (
        "return _each_tensor({call}, lambda tensor: tensor if tensor.dtype.is_floating_point or "
        "tensor.dtype.itemsize < 4 else tensor.clamp_(min=0))"
    ),
    "tensors of the result zeroed": "return _each_tensor({call}, lambda tensor: tensor.zero_())",
    "done twice": "{call}\nreturn {call}",
    "arguments copied": "import copy\n"
    "args = [copy.copy(each) if type(each).__module__.startswith('vllm.') or type(each) in (dict, list) else each for "
    "each in args]\n"
    "return {call}",
    "tensors among the arguments copied": "args = [_each_tensor(each, lambda tensor: tensor.clone()) "
    "if hasattr(each, 'clone') else each for each in args]\n"
    "kwargs = {{key: each.clone() if hasattr(each, 'clone') else each for key, each in kwargs.items()}}\n"
    "return {call}",
}


def _around(kind: str, body: str) -> Operator:
    def edit(draft: Draft) -> None:
        method = draft.owner is not None
        inner = copy.deepcopy(draft.node)
        inner.name, inner.decorator_list = f"_{draft.node.name.strip('_')}_itself", []
        draft.behind.append(inner)
        draft.appended += code(_EACH_TENSOR) if "_each_tensor" in body else []
        call = f"{'self.' if method else ''}{inner.name}(*args, **kwargs)"
        home = "self" if method else inner.name
        text = body.format(call=call, home=home, name=draft.node.name.strip("_"))
        taking = function(draft.node.name, [*["self"][: int(method)], "*args", "**kwargs"], code(text))
        taking.decorator_list = draft.node.decorator_list
        draft.node = taking

    def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
        first = [argument.arg for argument in draft.node.args.args[:1]]
        plain = draft.node.name != "__init__" or kind in ("done twice", "arguments copied")
        if plain and (draft.owner is None or first == ["self"]) and not _yields(draft.node):
            yield draft.node.name, edit

    return operator


def _yields(node: ast.AST) -> bool:
    return any(isinstance(part, (ast.Yield, ast.YieldFrom, ast.Await)) for part in ast.walk(node))


def _assigned(change: str) -> Operator:
    """Behind an assignment of what is called or indexed: a name or an attribute."""

    def edit(number: int, draft: Draft) -> None:
        block, position = places(draft.node)[number]
        target = ast.unparse(block[position].targets[0])  # type: ignore[attr-defined]
        block[position + 1 : position + 1] = code(change.format(target))

    def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
        for number, (block, position) in enumerate(places(draft.node)):
            statement = block[position]
            if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], (ast.Name, ast.Attribute))):
                continue
            if any(isinstance(part, (ast.Call, ast.Subscript)) for part in ast.walk(statement.value)):
                yield ast.unparse(statement), functools.partial(edit, number)

    return operator


Parts = list[ast.AST]
"""All of a function, as `ast.walk` has it."""


def _on_parts(*kinds: type[ast.AST]) -> Callable[[Callable[[Parts, Any], Iterator[ast.expr]]], Operator]:
    """Makes an operator of what lists the expressions that may stand in the place of one of a function's parts."""

    def register(others: Callable[[Parts, Any], Iterator[ast.expr]]) -> Operator:
        def edit(number: int, which: int, draft: Draft) -> None:
            parts = list(ast.walk(draft.node))
            replaced(draft.node, parts[number], list(others(parts, parts[number]))[which])

        def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
            parts = list(ast.walk(draft.node))
            for number, part in enumerate(parts):
                if isinstance(part, kinds) and isinstance(getattr(part, "ctx", None), (ast.Load, type(None))):
                    for which, other in enumerate(others(parts, part)):
                        yield f"{ast.unparse(part)} -> {ast.unparse(other)}", functools.partial(edit, number, which)

        return operator

    return register


@_on_parts(ast.Subscript)
def _slice_copied(parts: Parts, part: ast.Subscript) -> Iterator[ast.expr]:
    if isinstance(part.slice, ast.Slice) and "self." in ast.unparse(part.value):
        yield expression(f"{ast.unparse(part)}.clone()")


@_on_parts(ast.Name)
def _neighbour(parts: Parts, part: ast.Name) -> Iterator[ast.expr]:
    """The same of the padded batch, of tokens for requests, the largest for all."""
    bound = {each.id for each in parts if isinstance(each, ast.Name)}
    bound |= {each.arg for each in parts if isinstance(each, ast.arg)}
    stem = re.sub(r"_(padded|unpadded|actual)$|^(max|total)_", "", part.id)
    for other in sorted(bound - {part.id}):
        if re.sub(r"_(padded|unpadded|actual)$|^(max|total)_", "", other) == stem and stem != "":
            yield ast.Name(other, ast.Load())
    counts = {"num_reqs": "num_tokens", "num_tokens": "num_reqs"}
    if counts.get(part.id) in bound:
        yield ast.Name(counts[part.id], ast.Load())


_MEMBERS = {
    "CUDAGraphMode": ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"),
    "AttentionCGSupport": ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"),
}


@_on_parts(ast.Attribute)
def _member(parts: Parts, part: ast.Attribute) -> Iterator[ast.expr]:
    enumeration = ast.unparse(part.value).rpartition(".")[2]
    for other in _MEMBERS.get(enumeration, ()):
        if other != part.attr and part.attr in _MEMBERS[enumeration]:
            yield ast.Attribute(part.value, other, ast.Load())


@_on_parts(ast.Call)
def _argument_omitted(parts: Parts, part: ast.Call) -> Iterator[ast.expr]:
    for keyword in part.keywords:
        rest = [each for each in part.keywords if each is not keyword]
        yield ast.Call(part.func, part.args, rest)


@_on_parts(ast.Call)
def _argument_another(parts: Parts, part: ast.Call) -> Iterator[ast.expr]:
    for number, keyword in enumerate(part.keywords):
        if isinstance(keyword.value, (ast.Name, ast.Attribute)):
            rest = list(part.keywords)
            rest[number] = ast.keyword(keyword.arg, ast.Constant(None))
            yield ast.Call(part.func, part.args, rest)


def _buffer_made_anew(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(name: str, draft: Draft) -> None:
        at = after_docstring(draft.node)
        draft.node.body[at:at] = code(f"{name} = {name}.clone() if hasattr({name}, 'clone') else {name}")

    sliced = [
        ast.unparse(part.value)
        for part in ast.walk(draft.node)
        if isinstance(part, ast.Subscript) and re.fullmatch(r"self\.\w+", ast.unparse(part.value))
    ]
    if draft.node.name != "__init__":
        for name in dict.fromkeys(sliced):
            yield name, functools.partial(edit, name)


def _answers_always(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(value: str, draft: Draft) -> None:
        at = after_docstring(draft.node)
        draft.node.body[at:at] = code(f"return {value}")

    returned = [part.value for part in ast.walk(draft.node) if isinstance(part, ast.Return) and part.value is not None]
    if returned and draft.node.name != "__init__":
        values = [ast.unparse(value) for value in returned if isinstance(value, (ast.Constant, ast.Attribute))]
        arguments = {argument.arg for argument in draft.node.args.args}
        for value in dict.fromkeys(["None", "True", "False", *values]):
            if value.partition(".")[0] in {"None", "True", "False", "self"} | draft.module | arguments:
                yield value, functools.partial(edit, value)


def _attribute_another_name_here(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """In one function alone: whoever else reads it keeps the old one."""

    def edit(name: str, draft: Draft) -> None:
        for part in ast.walk(draft.node):
            if isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part.value) == "self":
                part.attr = f"{name}_by_another_name"

    written = [
        part.attr
        for part in ast.walk(draft.node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    ]
    for name in dict.fromkeys(written):
        yield name, functools.partial(edit, name)


def _calls_of_it(change: Any) -> Operator:
    def operator(draft: Draft) -> Iterator[tuple[str, Edit]]:
        names = [argument.arg for argument in draft.node.args.args][int(draft.owner is not None) :]
        if names:
            yield draft.node.name, lambda draft: draft.calls.append(functools.partial(change, names))

    return operator


def _by_keyword(names: list[str], call: ast.Call) -> None:
    if not any(isinstance(argument, ast.Starred) for argument in call.args):
        call.keywords = [*(ast.keyword(*pair) for pair in zip(names, call.args, strict=False)), *call.keywords]
        call.args = call.args[len(names) :]


def _by_position(names: list[str], call: ast.Call) -> None:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    for name in names[len(call.args) :]:
        if name not in named:
            break
        call.args.append(named.pop(name))
    call.keywords = [keyword for keyword in call.keywords if keyword.arg in named or keyword.arg is None]


def _exchanged(draft: Draft) -> Iterator[tuple[str, Edit]]:
    """Two statements that may well depend on each other."""

    def edit(number: int, draft: Draft) -> None:
        block, position = places(draft.node)[number]
        block[position], block[position + 1] = block[position + 1], block[position]

    simple = (ast.Assign, ast.Expr, ast.AugAssign)
    for number, (block, position) in enumerate(places(draft.node)):
        pair: Statements = block[position : position + 2]
        if len(pair) == 2 and all(isinstance(each, simple) for each in pair):
            yield ast.unparse(pair[0]), functools.partial(edit, number)


OPERATORS: dict[str, Operator] = {
    **{kind: _around(kind, body) for kind, body in _AROUND.items()},
    "assigned and copied": _assigned("{0} = {0}.clone() if hasattr({0}, 'clone') else {0}"),
    "assigned and zeroed": _assigned("if hasattr({0}, 'zero_'):\n    {0}.zero_()"),
    "assigned and no less than 0": _assigned(
        "if hasattr({0}, 'clamp_') and not {0}.dtype.is_floating_point:\n    {0}.clamp_(min=0)"
    ),
    "slice of a buffer copied": _slice_copied,
    "buffer made anew": _buffer_made_anew,
    "another count": _neighbour,
    "another member": _member,
    "argument left out": _argument_omitted,
    "argument None": _argument_another,
    "answers always": _answers_always,
    "attribute renamed here alone": _attribute_another_name_here,
    "called by keyword": _calls_of_it(_by_keyword),
    "called by position": _calls_of_it(_by_position),
    "statements exchanged": _exchanged,
}
"""By the kind of change."""
