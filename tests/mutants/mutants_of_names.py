"""Operators on names and signatures."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator

from mutants_draft import Draft, Edit, Operator, code, expression, names


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
    for keyword in call.keywords:
        if keyword.arg == old:
            keyword.arg = new


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
        positional = [argument.arg for argument in arguments.args if argument.arg != "self"]
        draft.calls.append(functools.partial(_called_by_keyword, len(positional), [argument.arg for argument in moved]))

    for count in range(1, len(draft.node.args.args)):
        yield draft.node.args.args[-count].arg, functools.partial(edit, count)


def _called_by_keyword(positional: int, moved: list[str], call: ast.Call) -> None:
    if not any(isinstance(argument, ast.Starred) for argument in call.args):
        named = {name: ast.keyword(name, value) for name, value in zip(moved, call.args[positional:], strict=False)}
        others = [argument for argument in call.keywords if argument.arg not in named]
        call.args, call.keywords = call.args[:positional], [*named.values(), *others]


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
            call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
            del call.args[place : place + 1]

        draft.calls.append(drop)

    used = names(draft.node.body, ast.Load)
    without_default = len(draft.node.args.args) - len(draft.node.args.defaults)
    for argument in draft.node.args.args[:without_default]:
        if argument.arg not in used | {"self"}:
            yield argument.arg, functools.partial(edit, argument.arg)


def _parameters_swapped(draft: Draft) -> Iterator[tuple[str, Edit]]:
    def edit(where: int, draft: Draft) -> None:
        parameters = draft.node.args.args
        parameters[where], parameters[where + 1] = parameters[where + 1], parameters[where]
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


_TRACED = (
    "def _traced(wrapped):{}\n    def traced(*args, **kwargs):\n        return wrapped(*args, **kwargs)\n"
    "    return traced"
)


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
    for text in [ast.unparse(decorator) for decorator in draft.node.decorator_list]:
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

    words = {
        part.attr
        for part in ast.walk(draft.node)
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
    }
    words |= {
        part.func.id for part in ast.walk(draft.node) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
    }
    for word in sorted(words & draft.module | {draft.node.name} - {"__init__"}):
        yield word, functools.partial(edit, word)


OPERATORS: dict[str, Operator] = {
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
