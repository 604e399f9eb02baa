"""Passes of a capture: a warm-up outside the graph, then the pass that the graph records.

FlashMLA's metadata is lazy: the first kernel call that sees it runs the planner. A pass that is to record the planner
must therefore run on an attention state that no forward pass has touched. What is here hands each pass a state of its
own, built by vLLM's code, outside the graph, after the warm-up has returned; or only tells whether a plan was consumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

from vllm_graphfix.fix import Activity

# Descriptors, attention states and forward functions are vLLM's and differ by release; none of their insides is used
# here.
CreateForwardFn = Callable[..., Any]
ForwardFn = Callable[..., Any]

_DEEPEST, _MOST = 8, 4000
"""Levels below an attention state, and objects in all, among which a plan is looked for. Sparse FlashMLA's is five
levels down."""


def has_consumed_plan(state: object) -> bool:
    """Whether a lazy plan in *state*, or in what a forward function keeps, has already been made.

    If so, the pass that follows records no planner. `FlashMLASchedMeta` says so in ``have_initialized``. Attention
    metadata without a lazy plan have none. Reads attributes alone, no tensor and no property; never raises.
    """
    seen: dict[int, object] = {}
    level = [state]
    try:
        for _ in range(_DEEPEST):
            below: list[object] = []
            for found in level:
                if id(found) in seen or len(seen) >= _MOST:
                    continue
                seen[id(found)] = found
                parts = _parts(found)
                if parts is None:
                    continue
                if isinstance(parts, dict):
                    if parts.get("have_initialized") is True and not isinstance(found, dict):
                        return True
                    parts = parts.values()
                below.extend(parts)
            level = below
    except Exception:  # what is counted must not matter to vLLM; a container of a fork may refuse to be looked at
        return False
    return False


def _parts(found: object) -> Any:
    """What *found* is made of: values by name, or values; None for what no plan is in."""
    if isinstance(found, (dict, list, tuple)):
        return found
    if isinstance(found, FunctionType):
        return [
            held for held in map(_contents_of_cell, found.__closure__ or ()) if isinstance(held, (dict, list, tuple))
        ]
    # Tensors, modules of a model and whatever else torch's are have no plan, and some have much below them.
    if isinstance(found, (type, ModuleType)) or type(found).__module__.partition(".")[0] == "torch":
        return None
    return getattr(found, "__dict__", None)


def _contents_of_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class FactoryPerPass:
    """``create_forward_fn`` of `CudaGraphManager.capture` (0.18.0-0.22.1), asked for each pass of a FULL descriptor.

    Takes a descriptor, and what else the stock factory takes; returns what that returns: a forward function, or
    (0.21.0+) that and the attention state. What goes wrong in it is told to *activity*, and stock's factory
    decides; an error of stock's own comes out as it is.
    """

    def __init__(self, create: CreateForwardFn, activity: Activity) -> None:
        self._create = create
        self.activity = activity
        self._passes: dict[Any, _Passes] = {}
        self.consumed = 0
        """FULL descriptors so far, of whose first state the warm-up has consumed the plan: stock would have recorded
        with it."""
        self.recorded_states: dict[Any, Any] = {}
        """The state of the recorded pass by FULL descriptor, where the factory returns states."""

    @classmethod
    def around(cls, create: CreateForwardFn, activity: Activity) -> CreateForwardFn:
        """*create* itself if it is one already: two fixes may ask for the same."""
        try:
            return create if isinstance(create, cls) else cls(create, activity)
        except Exception as error:
            activity.failed(error)
            return create

    def __call__(self, *asked: Any, **asked_by_name: Any) -> Any:
        try:
            descriptor = _descriptor_asked_for(asked, asked_by_name)
            passes = self._passes.pop(descriptor, None)
            if passes is not None and passes.next is not None:
                return passes.next  # this capture asks for each pass by itself, as from 0.22.0 on
            create = functools.partial(self._create, *asked, **asked_by_name)
        except Exception as error:
            self.activity.failed(error)
            return self._create(*asked, **asked_by_name)
        made = self._create(*asked, **asked_by_name)
        try:
            if descriptor.cg_mode.name != "FULL":
                return made
            passes = _Passes(self, descriptor, made, create)
            returned = passes if passes.alone else (passes, *made[1:])
            self._passes[descriptor] = passes
        except Exception as error:
            self.activity.failed(error)
            return made
        return returned


class _Passes:
    """The forward function of one FULL descriptor: a warm-up and a recorded pass with different states.

    The warm-up has the state that was built first, the recorded pass a state of its own.
    """

    def __init__(self, factory: FactoryPerPass, descriptor: Any, made: Any, create: Callable[[], Any]) -> None:
        self._factory, self._descriptor, self._create = factory, descriptor, create
        self.alone = callable(made)
        """The factory makes a forward function, and hands no state on beside it."""
        self._first = made  # until its pass is over: two states at a time take twice the memory
        self.next: Any = None
        """What the factory has made for the recorded pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # No call of our own until the pass has run: what fails before it would leave the graph without one.
        made, warms_up = self.next, self.next is None
        if warms_up:
            made = self._first if self._first is not None else self._create()
        self._first = self.next = None
        result = (made if self.alone else made[0])(*args, **kwargs)
        if warms_up:
            self._prepare_recorded_pass(made)
        return result

    def _prepare_recorded_pass(self, warmed_up: Any) -> None:
        """Prepares the state of the recorded pass after the warm-up.

        If it were built before, the state's views of builder-owned buffers could be overwritten (PR 48261).
        """
        try:
            self._factory.consumed += has_consumed_plan(warmed_up)
            made = self._create()
            if not self.alone:
                self._factory.recorded_states[self._descriptor] = made[1]
            self.next = made
        except Exception as error:
            self._factory.activity.failed(error)
            self.next = warmed_up


def _descriptor_asked_for(asked: tuple[Any, ...], asked_by_name: dict[str, Any]) -> Any:
    """What a factory was asked for: its first argument."""
    return asked[0] if asked else next(iter(asked_by_name.values()), None)


class WatchedFactory:
    """``create_forward_fn`` that returns what the stock one makes and inspects it after its passes.

    It hands on the very objects that the stock one makes.
    """

    def __init__(self, create: CreateForwardFn) -> None:
        self._create = create
        self._made: Any = None
        self.consumed = 0
        """FULL descriptors so far, counted as in `FactoryPerPass`. Both passes have run on the one state; the plan went
        to the first."""

    def __call__(self, *asked: Any, **asked_by_name: Any) -> Any:
        self.look()
        made = self._create(*asked, **asked_by_name)
        if is_full(_descriptor_asked_for(asked, asked_by_name)):
            self._made = made
        return made

    def look(self) -> None:
        """To be called after the capture too, for the last descriptor."""
        made, self._made = self._made, None
        self.consumed += has_consumed_plan(made)


def is_full(descriptor: Any) -> bool:
    """Never raises."""
    try:
        return bool(descriptor.cg_mode.name == "FULL")
    except Exception:
        return False


class RebuildableStates(dict[Any, Any]):
    """What `CudaGraphManager.capture` returns (0.21.0-0.22.1), and a way to build the states again.

    That is a mapping from descriptor to attention state.
    """

    def __init__(self, states: dict[Any, Any], create: CreateForwardFn) -> None:
        super().__init__(states)
        self.create = create

    def copy(self) -> RebuildableStates:
        return RebuildableStates(self, self.create)

    __copy__ = copy

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        # A factory is a closure, which does not pickle. What is in the states may: it goes as the dict that stock
        # returns.
        return dict, (dict(self),)


class UntouchedStates(dict[Any, Any]):
    """A mapping from descriptor to attention state that has untouched states for FULL descriptors.

    For a FULL descriptor every look-up builds a state that no forward pass has touched.
    """

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
"""The capture that is running was started by one that wants a state for each pass."""


class CaptureSession:
    """One descriptor of `capture_graph` (0.15.0-0.17.1).

    Keeps how its attention state was built, and whether a pass has had it.
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._outer: CaptureSession | None = None
        self._build: Callable[[], tuple[Any, Any]] | None = None
        self._state: tuple[Any, Any] = (None, None)
        self._handed_over = False

    def begin(self) -> None:
        """From now on this is the `current_session`, until `end`."""
        self._outer = _session.get()
        _session.set(self)

    def end(self) -> None:
        try:
            _session.set(self._outer)
        except Exception as error:
            self._activity.failed(error)

    def built(self, build: Callable[[], tuple[Any, Any]], state: tuple[Any, Any]) -> None:
        """*build* made *state* (attention metadata, slot mappings) and can make one like it."""
        self._build, self._state, self._handed_over = build, state, False

    def concerns(self, *given: object) -> bool:
        """Whether the attention metadata that were built are among *given*."""
        return self._state[0] is not None and any(each is self._state[0] for each in given)

    def for_next_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[Any, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, positional or keyword, with the state that was built replaced.

        *state*, or the state of the next pass, takes its place.
        """
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
        pairs = [(built, given) for built, given in zip(self._state, state, strict=True) if built is not None]

        def exchanged(argument: object) -> Any:
            return next((given for built, given in pairs if argument is built), argument)

        return tuple(map(exchanged, args)), {name: exchanged(argument) for name, argument in kwargs.items()}

    def state_for_next_pass(self) -> tuple[Any, Any]:
        """The state that was built, for the first pass; a new one after that. Not to be called inside a graph."""
        if self._handed_over and self._build is not None:
            try:
                return self._build()
            except Exception as error:
                self._activity.failed(error)
        self._handed_over = True
        return self._state

    def consumed(self) -> bool:
        """Whether the warm-up has consumed the plan of the state that was built first.

        Stock would have recorded the graph with that plan. Never raises.
        """
        try:
            return has_consumed_plan(self._state)
        except Exception as error:
            self._activity.failed(error)
            return False


_session: ContextVar[CaptureSession | None] = ContextVar("graphfix_capture_session", default=None)


def current_session() -> CaptureSession | None:
    return _session.get()
