"""Events of a process in a given order, each order in a process of its own, and what came of it.

The text of this file runs in a fork of a warm process of a release (`warm_release.py`), with a call of `run` at its
end. It imports nothing of this folder, and of the plugin nothing before an event does.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

_LIMIT = 240
"""Seconds for one process."""


class Process:
    """One process: what it does at each event, by its letter, and what it is like afterwards."""

    def __init__(self, task: Mapping[str, Any], taken_back: list[str]) -> None:
        self._task = task
        self._taken_back = taken_back
        self._registered = False
        self._stock: dict[tuple[str, str], object] = {}
        self._subclasses: dict[str, Any] = {}
        self._aliases: dict[str, Any] = {}
        self.children: dict[str, Any] = {}
        self.spawn_double: Callable[[Any], Any] | None = None
        self.events = {
            "T": self.import_targets,
            "R": self.register,
            "A": self.import_aliases,
            "F": self.fork,
            "S": self.spawn,
            "V": self.revert,
        }
        sys.meta_path.insert(0, self)
        if find_spec("torchvision") is None:  # as `image_processors` does: models with images import these
            for name in ("image_processing_qwen2_vl", "video_processing_qwen2_vl"):
                path = f"transformers.models.qwen2_vl.{name}"
                stand_in = sys.modules.setdefault(path, ModuleType(path))
                vars(stand_in).update(smart_resize=None, Qwen2VLVideoProcessor=None)

    # -- events ----------------------------------------------------------------------------------------------------

    def import_targets(self) -> None:
        for module in self._task["modules"]:
            importlib.import_module(module)

    def register(self) -> None:
        """Registers as vLLM does, which is once a process; the second time by hand."""
        if self._registered:
            import vllm_graphfix

            vllm_graphfix.register()
        else:
            importlib.import_module("vllm.plugins").load_general_plugins()
            self._registered = True

    def import_aliases(self) -> None:
        """Classes and functions of the targets' modules, as vLLM's importers have them.

        Those of the last module come first.
        """
        for module, name in reversed(self._task["targets"]):
            top = name.split(".")[0]
            scope: dict[str, Any] = {}
            exec(f"from {module} import {top} as found", scope)  # noqa: S102 - a line as of any importer
            if top == name:
                self._aliases[f"{module}:{name}"] = scope["found"]
            else:
                self._subclasses[f"{module}:{name}"] = type(f"Own{top}", (scope["found"],), {})

    def fork(self) -> None:
        """The child goes on as an engine's process does."""

        def child(_: object) -> Any:
            self.register()
            self.register()
            self.import_targets()
            return self.report()

        self.children["forked"] = _in_child(child)(None)

    def spawn(self) -> None:
        """In the double the environment goes to a process that has waited for it since before the first event."""
        start = self.spawn_double or self._really_spawn
        self.children["spawned"] = start(dict(os.environ))

    def revert(self) -> None:
        import vllm_graphfix

        for name in self._taken_back:
            vllm_graphfix._this_process().manager.revert(name)

    def _really_spawn(self, _: Mapping[str, str]) -> Any:
        spawn = multiprocessing.get_context("spawn")
        mine, theirs = spawn.Pipe()
        scope = {"__name__": "orders", "task": dict(self._task), "answer": theirs}
        code = f"{self._task['text']}\nanswer.send(spawned(task))"
        child = spawn.Process(target=exec, args=(code, scope))
        child.start()
        theirs.close()
        answer = mine.recv()  # EOFError if it has failed: what it printed says why
        child.join()
        return answer

    # -- what it is like -------------------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Keeps what a target is when its module has been executed: no hook on the import has been called by then."""
        spec = PathFinder.find_spec(name, path) if name in self._task["modules"] else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                for of_module, target_name in self._task["targets"]:
                    if of_module == name:
                        # A name may have come from another target's module, where it has its layer already.
                        _, stock = _taken_apart(_member(module, target_name))
                        self._stock[name, target_name] = stock

            setattr(spec.loader, "exec_module", executed)  # noqa: B010 - a method, to mypy
        return spec

    def report(self) -> dict[str, Any]:
        """States with their reasons; and the layers on each target, the outermost first.

        It also says whether stock's function is below them.
        """
        import vllm_graphfix

        layers, through_subclasses = {}, True
        for module, name in self._task["targets"]:
            function = _member(sys.modules[module], name)
            on_it, below = _taken_apart(function)
            layers[f"{module}:{name}"] = on_it if below is self._stock[module, name] else [*on_it, "not stock"]
            subclass = self._subclasses.get(f"{module}:{name}")
            through_subclasses &= subclass is None or getattr(subclass, name.split(".")[-1]) is function
        aliases = {}
        for place, alias in self._aliases.items():
            on_it, below = _taken_apart(alias)
            module, name = place.split(":")
            aliases[place] = on_it if below is self._stock[module, name] else [*on_it, "not stock"]
        return {
            "states": {
                name: [state.state.value, _in_order(state.reason)] for name, state in vllm_graphfix.states().items()
            },
            "layers": layers,
            "aliases": aliases,
            "elsewhere": [place for place in _layered(self._task["modules"]) if place not in layers],
            "subclasses see the same": through_subclasses,
            "load_general_plugins": sys.modules["vllm.plugins"].load_general_plugins.__globals__["__name__"],
        }


def _in_order(reason: str) -> str:
    """*reason* in one order: of targets in several modules, the first to be imported is named first."""
    for done in ("applied to ", "counts at "):
        if reason.startswith(done):
            return done + ", ".join(sorted(reason.removeprefix(done).split(", ")))
    return reason


def spawned(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run a spawned process; return its report then."""
    process = Process(task, [])
    process.register()
    process.import_targets()
    return process.report()


def _member(module: Any, name: str) -> Any:
    *classes, attribute = name.split(".")
    for each in classes:
        module = getattr(module, each)
    return vars(module)[attribute]


def _layered(modules: list[str]) -> list[str]:
    """Whatever has a layer in these modules."""
    owners: dict[str, Mapping[str, Any]] = {f"{name}:": vars(sys.modules[name]) for name in modules}
    for name in modules:
        classes = [each for each in vars(sys.modules[name]).values() if isinstance(each, type)]
        owners |= {f"{name}:{each.__qualname__}.": vars(each) for each in classes if each.__module__ == name}
    return [
        f"{owner}{name}"
        for owner, members in owners.items()
        for name, each in members.items()
        if isinstance(each, FunctionType) and _taken_apart(each)[0]
    ]


def _shared_by(function: Any) -> str | None:
    """The module of the fix whose events *function* counts, if it comes from a module that several fixes share."""
    if not function.__globals__["__name__"].rpartition(".")[2].startswith(("_", "authoring")):
        return None
    contents = {id(cell.cell_contents) for cell in function.__closure__ or ()}
    import vllm_graphfix
    from vllm_graphfix.fixes import BY_NAME

    manager = vllm_graphfix._this_process().manager
    names = [name for name in BY_NAME if id(manager.activity(name)) in contents]
    return names[0].replace("-", "_") if names else None


def _taken_apart(function: Any) -> tuple[list[str], object]:
    """The plugin's layers on *function*, by the name of their module, and what is below."""
    layers = []
    while (module := function.__globals__["__name__"]).startswith("vllm_graphfix."):
        layers.append((_shared_by(function) or module).rpartition(".")[2])
        function = function.__wrapped__
    # The gate before captures is on targets of fixes, too, and stays.
    return [layer for layer in layers if layer != "hooks"], function


def _in_child(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Forks now; what is returned hands the child its argument, and returns what *work* does with it there."""
    ask_child, ask = os.pipe()
    answer, answer_child = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(_LIMIT)
            os.close(ask)
            with os.fdopen(ask_child) as incoming, os.fdopen(answer_child, "w") as answering:
                try:
                    answering.write(json.dumps(work(json.load(incoming))))
                except BaseException:
                    answering.write(json.dumps({"error": traceback.format_exc()}))
        finally:
            os._exit(0)
    os.close(ask_child)
    os.close(answer_child)

    def hand_over(argument: Any) -> Any:
        with os.fdopen(ask, "w") as asking:
            json.dump(argument, asking)
        with os.fdopen(answer) as answered:
            result = json.loads(answered.read() or '{"error": "ended without a word"}')
        os.waitpid(child, 0)
        return result

    return hand_over


def _one(argument: tuple[Mapping[str, Any], str, list[str]]) -> dict[str, Any]:
    """In a process of its own."""
    task, order, taken_back = argument

    def spawned_double(environment: Mapping[str, str]) -> dict[str, Any]:
        os.environ.clear()
        os.environ.update(environment)
        return spawned(task)

    double = None if task["really spawn"] else _in_child(spawned_double)
    process = Process(task, taken_back)
    process.spawn_double = double
    for event in order:
        process.events[event]()
    return {"ended": process.report(), **process.children}


def run(task: Mapping[str, Any]) -> None:
    """Prints a line of JSON for each order."""
    if early := [name for name in sys.modules if name.startswith("vllm_graphfix") or name in task["modules"]]:
        raise RuntimeError(f"imported before the first event: {', '.join(early)}")
    for order, taken_back in task["orders"]:
        result = _in_child(_one)([task, order, taken_back])
        print("ORDER", json.dumps([order, taken_back, result]), flush=True)  # noqa: T201 - for whoever started this
