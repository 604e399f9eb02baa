"""Compares the arguments of compiled models with those that torch.compile traced.

vLLM's `support_torch_compile` traces a model's `forward` in its first call and drops all guards on Python values. What
is None or a constant among the arguments then is part of the compiled code, whatever later calls bring. Arguments that
the traced code did not read do not matter; the guards that torch.compile hands to vLLM to be dropped name the others.
Of code that vLLM loads from its cache no guard is seen, and all arguments of the first call count.

It is off by default. A replay of a full graph calls no model, so nothing is compared there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import wrap
from vllm_graphfix.patching.sites import own_wrappers
from vllm_graphfix.records.record import SHORT, TracedArgument
from vllm_graphfix.text import PAGES

if TYPE_CHECKING:
    from types import ModuleType

NAME = "traced"
"""Its name in records and metrics, which hold its counts like those of a fix."""
MODULE = "vllm.compilation.wrapper"
_LISTED = 5
"""Limit of arguments that a record names."""
_MOST_LAYOUTS = 64
"""Limit of layouts of arguments that are remembered of a model: an integer may differ in each call."""
_DEEPEST = 3
_CONSTANTS = (bool, int, float, str)
_TENSOR = ("tensor",)
Kind = tuple[Any, ...]
"""A part of the guard that torch.compile would make for a value.

A constant has its type and value, a container its type and the kinds of its parts, anything else its type alone.
"""


class TracedCheck:
    """Watches the calls of compiled models in one process."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when an argument differs."""
        self._publish = publish
        self._is_on = False
        self._failures = 0
        self._compared: int | None = None
        """Calls that were compared; None before a model is traced."""
        self._differing = 0
        self._first: dict[tuple[str, str], TracedArgument] = {}
        self._read: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        """Names of the local variables that have a guard in the traced code, by model."""
        self._traces: WeakKeyDictionary[Any, _Trace] = WeakKeyDictionary()

    def begin(self, *, is_on: bool) -> None:
        """Watch the models that are made from now on, or none."""
        if is_on is not self._is_on:
            self.reset()
        self._is_on = is_on

    def watch(self, wrapper: ModuleType) -> None:
        """Wrap the constructor that each compiled model calls, in vLLM's module *wrapper*."""
        wrap(wrapper.TorchCompileWithNoGuardsWrapper, "__init__", self._make)

    def _make(self, stock: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        """Construct *model*, which vLLM may also do again, to have it compiled anew."""
        noted = contextlib.ExitStack()
        if self._is_on:
            self._try(lambda: noted.enter_context(self._guards_noted(model)))
        with noted:
            stock(model, *args, **kwargs)
        if self._is_on:
            self._try(self._watch_calls, model)

    @contextlib.contextmanager
    def _guards_noted(self, model: Any) -> Iterator[None]:
        """Note which variables have guards, when the code that `torch.compile` is called for within is traced."""
        import torch

        stock, read = torch.compile, set[str]()
        self._traces.pop(model, None)
        self._read[model] = read

        def compiled(*args: Any, options: Any = None, **kwargs: Any) -> Any:
            if isinstance(options, dict) and (chosen := options.get("guard_filter_fn")) is not None:

                def noting(guards: Any) -> Any:
                    self._try(lambda: read.update(_variable_of(each.name) for each in guards))
                    return chosen(guards)

                # In place: the dictionary may be one of vLLM's config, from which torch takes this entry out again.
                options["guard_filter_fn"] = noting
            return stock(*args, options=options, **kwargs)

        # Another thread that compiles meanwhile has the same function called, with the same options.
        setattr(torch, "compile", compiled)  # noqa: B010 - mypy knows it as a function
        try:
            yield
        finally:
            setattr(torch, "compile", stock)  # noqa: B010

    def _watch_calls(self, model: Any) -> None:
        """Wrap `__call__` of the class of *model*, once."""
        from torch.compiler import is_compiling

        owner = next(kind for kind in type(model).__mro__ if "__call__" in vars(kind))
        stock = vars(owner)["__call__"]
        if stock in own_wrappers:
            return

        @functools.wraps(stock)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # First, and alone: inside of another model torch.compile traces this function, too.
            if is_compiling():
                return stock(self, *args, **kwargs)
            return check._call(stock, self, args, kwargs)

        check = self
        own_wrappers.add(call)
        setattr(owner, "__call__", call)  # noqa: B010 - to mypy it is a method

    def _call(self, stock: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self._is_on or self._failures:
            return stock(model, *args, **kwargs)
        if _is_compiled(model):
            self._try(self._compare, model, args, kwargs)  # before the call, which may end in an error
            return stock(model, *args, **kwargs)
        result = stock(model, *args, **kwargs)
        if _is_compiled(model):
            self._try(self._note_trace, model, args, kwargs)
        return result

    def _note_trace(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kinds = _kinds_by_name(model, args, kwargs)
        read = self._read.pop(model, set())
        # `check_invariants_and_forward` is compiled for unbacked shapes, and has the arguments in two variables.
        all_count = not read & {*kinds}
        self._traces[model] = _Trace({name: kind for name, kind in kinds.items() if all_count or name in read})
        self._compared = self._compared or 0

    def _compare(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        trace = self._traces.get(model)
        if trace is None or _skips_compiled():
            return
        layout = (*map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
        differs = trace.differs.get(layout)
        if differs is None:
            now = _kinds_by_name(model, args, kwargs)
            others = [name for name, kind in trace.kinds.items() if now.get(name) != kind]
            for name in others:
                self._report(type(model).__name__, name, trace.kinds[name], now[name])
            differs = bool(others)
            if len(trace.differs) < _MOST_LAYOUTS:
                trace.differs[layout] = differs
        self._compared = (self._compared or 0) + 1
        self._differing += differs

    def _report(self, model: str, argument: str, traced: Kind, now: Kind) -> None:
        if (model, argument) in self._first or len(self._first) >= _LISTED:
            return
        changed = TracedArgument(model[:SHORT], argument[:SHORT], _text(traced)[:SHORT], _text(now)[:SHORT])
        self._first[model, argument] = changed
        logger.warning(
            "graphfix: %s of %s is %s, and was %s when torch.compile traced the model, whose answers may be wrong. "
            "Serve with -cc.mode=0. See %s/detectors.md#traced-constants",
            *(changed.argument, changed.model, changed.now, changed.traced, PAGES),
        )
        self._publish()

    def _try(self, function: Callable[..., Any], *args: Any) -> None:
        if self._failures:
            return
        try:
            function(*args)
        except Exception as error:
            self._failures += 1
            logger.warning(
                "graphfix: arguments of compiled models are not compared: %s: %s", type(error).__name__, error
            )

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events for a record; empty before a model is traced."""
        if self._compared is None and not self._failures:
            return {}
        counted = {"compared": self._compared or 0, "differing": self._differing, "failures": self._failures}
        return {NAME: counted}

    def findings(self) -> tuple[TracedArgument, ...]:
        """Return the first arguments that differ, for a record."""
        return tuple(self._first.values())

    def reset(self) -> None:
        """Discard models and findings: in a forked child, or when the setting changes."""
        self._failures, self._compared, self._differing, self._first = 0, None, 0, {}
        self._read, self._traces = WeakKeyDictionary(), WeakKeyDictionary()


class _Trace:
    """The arguments that one model's compiled code depends on."""

    def __init__(self, kinds: dict[str, Kind]) -> None:
        self.kinds = kinds
        self.differs: dict[Kind, bool] = {}
        """Tells of calls by the layout of their arguments if they differ."""


def _is_compiled(model: Any) -> bool:
    own = vars(model)
    return bool(own.get("compiled")) or own.get("aot_compiled_fn") is not None


def _skips_compiled() -> bool:
    """Tell if vLLM runs models of this step without their compiled code (0.15.0 and later)."""
    context = getattr(sys.modules.get("vllm.forward_context"), "_forward_context", None)
    return bool(getattr(context, "skip_compiled", False))


def _variable_of(guard: str) -> str:
    """Return the variable that a guard's name begins with, such as ``x`` of ``x.tensors['a']``; empty for none."""
    match = re.match(r"(?:L\[['\"])?(\w+)", guard)
    return match[1] if match else ""


def _kinds_by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Kind]:
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return {name: _kind(value) for name, value in [*bound.arguments.items()][1:]}


def _kind(value: Any, depth: int = 0) -> Kind:
    if value is None or isinstance(value, _CONSTANTS):
        return (type(value).__name__, value)
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return _TENSOR
    parts = getattr(value, "tensors", value)  # of vLLM's `IntermediateTensors`
    if depth < _DEEPEST and isinstance(parts, (dict, list, tuple)):
        items = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return (type(value).__name__, *((str(key), _kind(part, depth + 1)) for key, part in items))
    return (type(value).__name__,)


def _text(kind: Kind) -> str:
    if kind == _TENSOR:
        return "a tensor"
    if len(kind) == 2 and (kind[1] is None or isinstance(kind[1], _CONSTANTS)):
        return repr(kind[1])
    return f"{kind[0]}({', '.join(f'{key}: {_text(part)}' for key, part in kind[1:])})"
