"""Functions that call a hook before each of their statements, so that each of these can be let fail."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HOOK = "_before_statement"


class _Calls(ast.NodeTransformer):
    """Puts a call of the hook before each statement of a function but `try`, in which nothing can fail but its body."""

    def __init__(self, module: str, leave_out: frozenset[str]) -> None:
        self._module, self._leave_out, self._inside = module, leave_out, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name in self._leave_out:
            return node
        before, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = before
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and self._inside:
                setattr(node, field, list(self._with_calls(statements)))
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        return node

    def _with_calls(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            if not _is_harmless(statement):
                call = ast.parse(f"{HOOK}({self._module!r}, {statement.lineno})").body[0]
                for part in ast.walk(call):
                    ast.copy_location(part, statement)
                yield call
            yield statement


def _is_harmless(statement: ast.stmt) -> bool:
    """Tell if nothing can fail in *statement* itself: it is about constants and local names alone, or ends in an error.

    A call of `guarded` catches what fails in the function that it calls, whose own statements are let fail.
    """
    if isinstance(statement, ast.If):
        parts: list[ast.AST] = [statement.test]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return isinstance(statement.value.func, ast.Name) and statement.value.func.id == "guarded"
    elif isinstance(statement, ast.Try | ast.Raise):
        return True
    elif isinstance(statement, ast.FunctionDef):  # its body is let fail when it is called
        parts = [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
    else:
        parts = [statement]
    harmless = (ast.Name, ast.Constant, ast.expr_context, ast.Is, ast.IsNot, ast.And, ast.Compare, ast.BoolOp)
    without_value = (ast.Nonlocal, ast.Pass, ast.Continue, ast.Break)
    kinds = (*harmless, *without_value, ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
    inside = [part for each in parts for part in ast.walk(each)]
    if isinstance(statement, ast.AnnAssign):  # that of a local name is not evaluated
        inside = [statement, statement.target, *(ast.walk(statement.value) if statement.value else ())]
    return all(isinstance(part, kinds) for part in inside)


def call_before_each_statement(
    patch: pytest.MonkeyPatch,
    modules: Iterable[ModuleType],
    hook: Callable[[str, int], None],
    *,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Lets every function of *modules* call *hook* with its module and the line before each of its statements.

    The functions stay the objects that they are, under whatever name they were imported. Those named in *leave_out*
    are as before.
    """
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        tree = _Calls(name, leave_out).visit(ast.parse(inspect.getsource(module)))
        compiled = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
        codes = dict(_codes(compiled, ()))
        patch.setattr(module, HOOK, hook, raising=False)
        for path, function in _functions(vars(module), module.__name__, ()):
            if path not in codes and "." in function.__qualname__:
                continue  # a method that a name of the module is bound to: it comes with its class
            patch.setattr(function, "__code__", codes[path])


def _codes(code: CodeType, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = (*path, constant.co_name)
            yield inner, constant
            yield from _codes(constant, inner)


def _functions(
    names: Mapping[str, object], module: str, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], FunctionType]]:
    for name, value in dict(names).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            function = inspect.unwrap(function)  # of a context manager
        if isinstance(function, FunctionType) and function.__module__ == module and function.__name__ == name:
            if function.__code__.co_filename.endswith(".py"):  # not what a named tuple makes
                yield (*path, name), function
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module, (*path, name))
