"""Runs the CPU double's scenarios with the fixes active, one call of our layers raising at a time, or two.

They run in forks of one process.

The calls are found, not listed: the modules of the layers are compiled with every call going through `_called`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.abc
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

LAYERS = "vllm_graphfix.fixes."
"""Modules whose functions run inside vLLM's."""
STOCKS = {
    "stock",
    "generate_fn",
    "flash_attn_varlen_func kernel",
    "made if self.is_stateless else made[0]",
    "__call__ self._create",
}
"""Calls that stock makes too: what they raise is vLLM's."""

CALLBACKS = {"self._create", "self._build"}
"""vLLM's functions, kept by objects of ours."""
OURS = (
    "self._",
    "cls",
    "self.next",
    "self.activity",
    "self.is_stateless",
    "self.consumed",
    "self.recorded_states",
    "session.",
    "factory.",
    "states.create",
    "stock.",
)
"""Objects of the package's own."""
PYTHONS = ("super()", "kept.", "arguments.", "signature.", "returned.", "_session.")
"""Objects of the standard library's own."""

_seen: set[str] = set()
_failing: frozenset[str] = frozenset()


class Planted(Exception):  # noqa: N818 - no error of anybody's
    pass


def _called(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    _seen.add(place)
    return functools.partial(_raise, place) if place in _failing else function


def _raise(place: str, /, *args: object, **kwargs: object) -> None:
    raise Planted(place)


def _read(place: str, subject: Any, name: str) -> Any:
    _seen.add(place)
    if place in _failing:
        raise AttributeError(f"{Planted.__name__}: {place}")
    return getattr(subject, name)


class _ThroughUs(ast.NodeTransformer):
    """Calls of what is neither the package's nor a builtin, and reads of attributes of what vLLM hands over."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self._module = module.rpartition(".")[2]
        defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        self._ours = {*vars(builtins), "activity", "functools", "inspect", *(node.name for node in defined)}
        self._ours |= {alias.name for node in imported for alias in node.names}

        self._function = ""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Leave out the code below a fix's record, which is its trial's and runs in no layer."""
        records = (
            at
            for at, each in enumerate(node.body)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "FIX"
        )
        end = next(records, len(node.body))
        node.body[:end] = [self.visit(statement) for statement in node.body[:end]]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._function = self._function, node.name
        node.body = [self.visit(statement) for statement in node.body]
        self._function = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node.func)
        is_stocks = bool({text, f"{self._function} {text}"} & STOCKS)
        if not is_stocks and (text in CALLBACKS or not self._is_ours(text)):
            place = self._place(node, text)
            if isinstance(node.func, ast.Attribute):
                node.func.value = self.visit(node.func.value)
            node.func = ast.Call(ast.Name("_called", ast.Load()), [place, node.func], [])
            node.args = [self.visit(argument) for argument in node.args]
            node.keywords = [self.visit(argument) for argument in node.keywords]
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or self._is_ours(text):
            return node
        return ast.Call(
            ast.Name("_read", ast.Load()), [self._place(node, text), node.value, ast.Constant(node.attr)], []
        )

    def _is_ours(self, text: str) -> bool:
        return text.split(".", 1)[0] in self._ours or text.startswith((*OURS, *PYTHONS))

    def _place(self, node: ast.expr, text: str) -> ast.Constant:
        return ast.Constant(f"{self._module}:{node.lineno}:{node.col_offset} {text}")


@functools.cache
def _code(name: str, path: str) -> CodeType:
    tree = ast.parse(Path(path).read_bytes())
    code: CodeType = compile(
        ast.fix_missing_locations(_ThroughUs(name, tree).visit(tree)), path, "exec", dont_inherit=True
    )
    return code


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return _code(fullname, self.get_filename(fullname))

    def exec_module(self, module: Any) -> None:
        module._called, module._read = _called, _read
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith(LAYERS) else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def main(names: list[str], every: int = 1) -> None:
    """Prints a line of JSON for each fix of *names* and each call that its layers make in its scenario.

    What they call only where another call has failed, fails together with that one. With *every* it takes every nth
    call only. Two further runs have no failing call.
    """
    sys.meta_path.insert(0, _Finder())
    import vllm_graphfix
    from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
    from vllm_graphfix.verify.double.worker import load_scenario

    install_flashmla_stand_ins()
    importlib.import_module("vllm.v1.worker.gpu_model_runner")
    for name in names:
        load_scenario(name)
    for path in (Path(vllm_graphfix.__file__).parent / "fixes").glob("*.py"):
        _code(f"{LAYERS}{path.stem}", str(path))  # or each fork would do it
    os.environ["VLLM_GRAPHFIX"] = "off"
    stocks = {name: _in_fork(name) for name in names}
    os.environ["VLLM_GRAPHFIX"] = "on"
    vllm_graphfix.register()  # once: to patch all that is imported takes as long as many a scenario
    for name, stock in stocks.items():
        right = _in_fork(name)
        print(json.dumps({"fix": name, "stock": stock, "right": right}), flush=True)  # noqa: T201 - the result
        for call in _own(name, right)[::every]:
            outcome = _in_fork(name, call)
            print(json.dumps({"fix": name, "call": call} | outcome), flush=True)  # noqa: T201 - the result
            for other in _own(name, outcome):
                if other not in right["calls"]:
                    outcome = {"fix": name, "call": f"{call}, {other}"} | _in_fork(name, call, other)
                    print(json.dumps(outcome), flush=True)  # noqa: T201 - the result


def _own(name: str, outcome: dict[str, Any]) -> list[str]:
    """The calls that layers of the fix *name* have made."""
    modules = ("_capture_passes", "_claims", name.replace("-", "_"))
    return [call for call in outcome.get("calls", ()) if call.partition(":")[0] in modules]


def _in_fork(name: str, *failing: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w") as result:
            try:
                json.dump(_run(name, frozenset(failing)), result)
            except BaseException as error:
                json.dump({"escaped": f"{type(error).__name__}: {error}"}, result)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        outcome: dict[str, Any] = json.load(result)
    os.waitpid(child, 0)
    return outcome


def _run(name: str, failing: frozenset[str]) -> dict[str, Any]:
    global _failing  # noqa: PLW0603 - what fails in this fork
    import vllm_graphfix
    from vllm_graphfix.verify.double.worker import load_scenario

    vllm_graphfix.register()
    scenario = load_scenario(name)
    before = vllm_graphfix.states()[name].state.value
    _seen.clear()
    _failing = failing
    measurement = scenario()
    calls, _failing = sorted(_seen), frozenset()
    state = vllm_graphfix.states()[name]
    return {
        "numbers": repr((measurement.graphed, measurement.error)),  # as text, in which NaN equals NaN
        "calls": calls,
        "before": before,
        "state": state.state.value,
        "reason": state.reason,
    }
