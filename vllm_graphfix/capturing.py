"""Passes of a capture: a warm-up outside the graph, then the pass that the graph records.

FlashMLA's metadata is lazy: the first kernel call that sees it runs the planner. A pass that is to record the planner
must therefore run on an attention state that no forward pass has touched. What is here hands each pass a state of its
own, built by vLLM's code, outside the graph, after the warm-up has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Descriptors, attention states and forward functions are vLLM's and differ by release; none of their insides is used here.
CreateForwardFn = Callable[[Any], Any]
ForwardFn = Callable[..., Any]


class FactoryPerPass:
    """``create_forward_fn`` of `CudaGraphManager.capture` (0.18.0-0.22.1), asked for each pass of a FULL descriptor.

    Takes a descriptor; returns what the stock factory returns: a forward function, or (0.21.0+) that and the attention state.
    """

    def __init__(self, create: CreateForwardFn) -> None:
        self._create = create
        self._warm_up: dict[Any, ForwardFn] = {}
        self._recorded: dict[Any, Any] = {}
        self.recorded_states: dict[Any, Any] = {}
        """The state of the recorded pass by FULL descriptor, where the factory returns states."""

    @classmethod
    def around(cls, create: CreateForwardFn) -> FactoryPerPass:
        """*create* itself if it is one already: two fixes may ask for the same."""
        return create if isinstance(create, cls) else cls(create)

    def __call__(self, descriptor: Any) -> Any:
        if descriptor.cg_mode.name != "FULL":
            return self._create(descriptor)
        if descriptor in self._recorded:
            return self._recorded.pop(descriptor)  # this capture asks for each pass by itself, as from 0.22.0 on
        made = self._create(descriptor)

        def forward_fn(*args: Any, **kwargs: Any) -> Any:
            return self._run(descriptor, *args, **kwargs)

        if isinstance(made, tuple):
            self._warm_up[descriptor], state = made
            return forward_fn, state
        self._warm_up[descriptor] = made
        return forward_fn

    def _run(self, descriptor: Any, *args: Any, **kwargs: Any) -> Any:
        if descriptor in self._recorded:
            made = self._recorded.pop(descriptor)
            return (made[0] if isinstance(made, tuple) else made)(*args, **kwargs)
        result = self._warm_up.pop(descriptor)(*args, **kwargs)
        # Only now: built before the warm-up, its views of builder-owned buffers could be overwritten (PR 48261).
        made = self._recorded[descriptor] = self._create(descriptor)
        if isinstance(made, tuple):
            self.recorded_states[descriptor] = made[1]
        return result


class RebuildableStates(dict[Any, Any]):
    """What `CudaGraphManager.capture` returns (0.21.0-0.22.1), descriptor to attention state, and a way to build them again."""

    def __init__(self, states: dict[Any, Any], create: CreateForwardFn) -> None:
        super().__init__(states)
        self.create = create

    def copy(self) -> RebuildableStates:
        return RebuildableStates(self, self.create)

    __copy__ = copy

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        # A factory is a closure, which does not pickle. What is in the states may: it goes as the dict that stock returns.
        return dict, (dict(self),)


class UntouchedStates(dict[Any, Any]):
    """Descriptor to attention state; for a FULL descriptor every look-up builds one that no forward pass has touched."""

    def __init__(self, states: RebuildableStates) -> None:
        super().__init__(states)
        self._create = states.create

    def __getitem__(self, descriptor: Any) -> Any:
        if descriptor.cg_mode.name != "FULL":
            return super().__getitem__(descriptor)
        return self._create(descriptor)[1]


asks_per_pass: ContextVar[bool] = ContextVar("graphfix_asks_per_pass", default=False)
"""The capture that is running was started by one that wants a state for each pass."""


class CaptureSession:
    """One descriptor of `capture_graph` (0.15.0-0.17.1): how its attention state was built, and whether a pass has had it."""

    def __init__(self) -> None:
        self._build: Callable[[], tuple[Any, Any]] | None = None
        self._state: tuple[Any, Any] = (None, None)
        self._handed_over = False

    def built(self, build: Callable[[], tuple[Any, Any]], state: tuple[Any, Any]) -> None:
        """*build* made *state* (attention metadata, slot mappings) and can make one like it."""
        self._build, self._state, self._handed_over = build, state, False

    def concerns(self, attn_metadata: object) -> bool:
        return attn_metadata is not None and attn_metadata is self._state[0]

    def state_for_next_pass(self) -> tuple[Any, Any]:
        """The state that was built, for the first pass; a new one after that. Not to be called inside a graph."""
        if self._handed_over and self._build is not None:
            return self._build()
        self._handed_over = True
        return self._state


_session: ContextVar[CaptureSession | None] = ContextVar("graphfix_capture_session", default=None)


def current_session() -> CaptureSession | None:
    return _session.get()


@contextmanager
def capture_session() -> Iterator[CaptureSession]:
    session = CaptureSession()
    token = _session.set(session)
    try:
        yield session
    finally:
        _session.reset(token)
