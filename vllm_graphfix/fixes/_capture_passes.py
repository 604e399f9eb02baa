"""Passes of a capture: a warm-up outside the graph, then the pass that the graph records.

FlashMLA's metadata is lazy: the first kernel call that uses it runs the planner. A pass that has to record the planner
must run on an attention state that no forward pass has used. The classes here give each pass a state of its own, built
by vLLM's code outside the graph, after the warm-up has returned; or they only detect that a plan was consumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

from vllm_graphfix.fix import Activity

# Descriptors, attention states and forward functions of vLLM differ by release; their internals are not used here.
CreateForwardFn = Callable[..., Any]

_DEEPEST, _MOST = 8, 4000
"""Limits of the search for a plan: levels below an attention state, and objects. Sparse FlashMLA's is at level five."""


def has_consumed_plan(state: object) -> bool:
    """Tell if a lazy plan in *state*, or in the closure of a forward function, has been made already.

    If so, the next pass records no planner. `FlashMLASchedMeta` has the flag ``have_initialized``. Reads attributes
    only, no tensor and no property; never raises.
    """
    seen: dict[int, object] = {}
    level = [state]
    try:
        for _ in range(_DEEPEST):
            below: list[object] = []
            for part in level:
                if id(part) in seen or len(seen) >= _MOST:
                    continue
                seen[id(part)] = part
                parts = _parts(part)
                if parts is None:
                    continue
                if isinstance(parts, dict):
                    if parts.get("have_initialized") is True and not isinstance(part, dict):
                        return True
                    parts = parts.values()
                below.extend(parts)
            level = below
    except Exception:  # counting must not affect vLLM; a container of a fork may raise
        return False
    return False


def _parts(part: object) -> Any:
    """Return the parts of *part*, values by name or values; None where no plan can be in it."""
    if isinstance(part, (dict, list, tuple)):
        return part
    if isinstance(part, FunctionType):
        return [
            held for held in map(_contents_of_cell, part.__closure__ or ()) if isinstance(held, (dict, list, tuple))
        ]
    # Objects of torch, such as tensors and modules, have no plan, and some have many parts.
    if isinstance(part, (type, ModuleType)) or type(part).__module__.partition(".")[0] == "torch":
        return None
    return getattr(part, "__dict__", None)


def _contents_of_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class FactoryPerPass:
    """``create_forward_fn`` of `CudaGraphManager.capture` (0.18.0-0.22.1): a state for each pass of a FULL descriptor.

    Stock calls it once per FULL descriptor, from 0.22.0 on once per pass.

    Takes a descriptor and further arguments of stock's factory; returns what that returns: a forward function, or
    (0.21.0+) that and the attention state. On an error of its own it reports to *activity* and falls back to stock's
    factory, whose errors pass through.
    """

    def __init__(self, create: CreateForwardFn, activity: Activity) -> None:
        self._create = create
        self.activity = activity
        self._passes: dict[Any, _Passes] = {}
        self.consumed = 0
        """The number of FULL descriptors whose first state had its plan consumed by the warm-up: stock would have
        recorded with that state."""
        self.recorded_states: dict[Any, Any] = {}
        """The state of the recorded pass by FULL descriptor, where the factory returns states."""

    @classmethod
    def around(cls, create: CreateForwardFn, activity: Activity) -> CreateForwardFn:
        """Wrap *create*, unless it is wrapped already: two fixes may do so."""
        try:
            return create if isinstance(create, cls) else cls(create, activity)
        except Exception as error:
            activity.failed(error)
            return create

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            descriptor = _requested_descriptor(args, kwargs)
            passes = self._passes.pop(descriptor, None)
            if passes is not None and passes.next is not None:
                return passes.next  # this capture calls the factory for each pass, as from 0.22.0 on
            create = functools.partial(self._create, *args, **kwargs)
        except Exception as error:
            self.activity.failed(error)
            return self._create(*args, **kwargs)
        made = self._create(*args, **kwargs)
        try:
            if descriptor.cg_mode.name != "FULL":
                return made
            passes = _Passes(self, descriptor, made, create)
            returned = passes if passes.is_stateless else (passes, *made[1:])
            self._passes[descriptor] = passes
        except Exception as error:
            self.activity.failed(error)
            return made
        return returned


class _Passes:
    """The forward function of one FULL descriptor: the warm-up uses the first state, the recorded pass its own."""

    def __init__(self, factory: FactoryPerPass, descriptor: Any, made: Any, create: Callable[[], Any]) -> None:
        self._factory, self._descriptor, self._create = factory, descriptor, create
        self.is_stateless = callable(made)
        """True if the factory returns a forward function without a state."""
        self._first = made  # dropped with its pass: two states take twice the memory
        self.next: Any = None
        """The result of the factory for the recorded pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # No call of our own before the pass has run: if that failed, the graph would record no pass.
        made, warms_up = self.next, self.next is None
        if warms_up:
            # `_create` only from a third call on, which starts over.
            made = self._first if self._first is not None else self._create()
        self._first = self.next = None
        result = (made if self.is_stateless else made[0])(*args, **kwargs)
        if warms_up:
            self._prepare_recorded_pass(made)
        return result

    def _prepare_recorded_pass(self, warmed_up: Any) -> None:
        """Build the state of the recorded pass after the warm-up.

        Built before, its views of the builders' buffers could be overwritten (PR 48261).
        """
        try:
            self._factory.consumed += has_consumed_plan(warmed_up)
            made = self._create()
            if not self.is_stateless:
                self._factory.recorded_states[self._descriptor] = made[1]
            self.next = made
        except Exception as error:
            self._factory.activity.failed(error)
            self.next = warmed_up


def _requested_descriptor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument of a factory's call, by position or name."""
    return args[0] if args else next(iter(kwargs.values()), None)


class WatchedFactory:
    """``create_forward_fn`` that returns stock's objects as they are, and inspects them after their passes."""

    def __init__(self, create: CreateForwardFn) -> None:
        self._create = create
        self._made: Any = None
        self.consumed = 0
        """The count of `FactoryPerPass`. Both passes ran on one state, whose plan the first consumed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inspect_last()
        made = self._create(*args, **kwargs)
        if is_full(_requested_descriptor(args, kwargs)):
            self._made = made
        return made

    def inspect_last(self) -> None:
        """Inspect the state of the last descriptor. To be called after the capture, too."""
        made, self._made = self._made, None
        self.consumed += has_consumed_plan(made)


def is_full(descriptor: Any) -> bool:
    """Tell if *descriptor* is one of a full graph. Never raises."""
    try:
        return bool(descriptor.cg_mode.name == "FULL")
    except Exception:
        return False


class RebuildableStates(dict[Any, Any]):
    """The states by descriptor that `CudaGraphManager.capture` returns (0.21.0-0.22.1), with their factory."""

    def __init__(self, states: dict[Any, Any], create: CreateForwardFn) -> None:
        super().__init__(states)
        self.create = create

    def copy(self) -> RebuildableStates:
        return RebuildableStates(self, self.create)

    __copy__ = copy

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        # The factory is a closure, which cannot be pickled: pickle as the dict that stock returns.
        return dict, (dict(self),)


class UntouchedStates(dict[Any, Any]):
    """Attention states by descriptor, of which each look-up of a FULL descriptor builds a new one."""

    def __init__(self, states: RebuildableStates, activity: Activity) -> None:
        super().__init__(states)
        self._create = states.create
        self._activity = activity

    def __getitem__(self, descriptor: Any) -> Any:
        try:
            if descriptor.cg_mode.name == "FULL":
                return self._create(descriptor)[1]
        except Exception as error:
            self._activity.failed(error)
        return super().__getitem__(descriptor)


asks_per_pass: ContextVar[bool] = ContextVar("graphfix_asks_per_pass", default=False)
"""True while a capture runs that needs a state for each pass."""


class CaptureSession:
    """The capture of one descriptor by `capture_graph` (0.15.0-0.17.1), with its state and the way to build another."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._outer: CaptureSession | None = None
        self._build: Callable[[], tuple[Any, Any]] | None = None
        self._state: tuple[Any, Any] = (None, None)
        self._handed_over = False

    def begin(self) -> None:
        """Make this the `current_session` until `end`."""
        self._outer = _session.get()
        _session.set(self)

    def end(self) -> None:
        try:
            _session.set(self._outer)
        except Exception as error:
            self._activity.failed(error)

    def built(self, build: Callable[[], tuple[Any, Any]], state: tuple[Any, Any]) -> None:
        """Record that *build* made *state*, attention metadata and slot mappings, and can make another one."""
        self._build, self._state, self._handed_over = build, state, False

    def concerns(self, *arguments: object) -> bool:
        """Tell if the attention metadata of this session are among *arguments*."""
        return self._state[0] is not None and any(each is self._state[0] for each in arguments)

    def for_next_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[Any, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the session's state among the arguments of a call by *state*, or by that of the next pass."""
        try:
            if not self.concerns(*args, *kwargs.values()):
                return args, kwargs
            return self._with_state(self.state_for_next_pass() if state is None else state, args, kwargs)
        except Exception as error:
            self._activity.failed(error)
            return args, kwargs

    def _with_state(
        self, state: tuple[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs = [
            (built, replacement) for built, replacement in zip(self._state, state, strict=True) if built is not None
        ]

        def exchanged(argument: object) -> Any:
            return next((replacement for built, replacement in pairs if argument is built), argument)

        return tuple(map(exchanged, args)), {name: exchanged(argument) for name, argument in kwargs.items()}

    def state_for_next_pass(self) -> tuple[Any, Any]:
        """Return the session's state for the first pass, a new one for each later pass. Not inside a graph."""
        if self._handed_over and self._build is not None:
            try:
                return self._build()
            except Exception as error:
                self._activity.failed(error)
        self._handed_over = True
        return self._state

    def consumed(self) -> bool:
        """Tell if the warm-up has consumed the plan of the first state, with which stock would record. Never raises."""
        try:
            return has_consumed_plan(self._state)
        except Exception as error:
            self._activity.failed(error)
            return False


_session: ContextVar[CaptureSession | None] = ContextVar("graphfix_capture_session", default=None)


def current_session() -> CaptureSession | None:
    return _session.get()
