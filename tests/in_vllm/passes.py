"""Which attention state vLLM's metadata builder built, and which pass of which model ran on it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context


class Event(NamedTuple):
    """One thing that happened: a state was ``built``, a pass on it ``began`` or ``returned``."""

    what: str
    state: int | None
    """Number of the state, in the order in which they were built; None for a pass without attention metadata."""
    recording: bool
    """While a graph was being captured."""


class Passes:
    """Keeps the events of a runner's metadata builder and of models; holds no state alive."""

    def __init__(self, runner: Any, *models: torch.nn.Module) -> None:
        self.events: list[Event] = []
        self.states: list[weakref.ref[Any]] = []
        """The attention metadata of the one group of layers, by the number of the state."""
        self.planned: set[int] = set()
        """States whose FlashMLA plan was there, or said to be, when a pass on them began."""
        self._build = runner.builder.build
        runner.builder.build = self._build_and_number
        for model in models:
            model.register_forward_pre_hook(self._began)
            model.register_forward_hook(self._returned)

    def of(self, what: str, *, recording: bool | None = None) -> list[int | None]:
        """The states of these events, in order."""
        return [e.state for e in self.events if e.what == what and recording in (None, e.recording)]

    def _build_and_number(self, *args: Any, **kwargs: Any) -> Any:
        metadata = self._build(*args, **kwargs)
        metadata.number = len(self.states)
        self.states.append(weakref.ref(metadata))
        self._add("built", metadata.number)
        return metadata

    def _began(self, model: torch.nn.Module, inputs: object) -> None:
        metadata = _current()
        if metadata is not None and metadata.decode.scheduler_metadata.have_initialized:
            self.planned.add(metadata.number)
        self._add("began", None if metadata is None else metadata.number)

    def _returned(self, model: torch.nn.Module, inputs: object, output: object) -> None:
        metadata = _current()
        self._add("returned", None if metadata is None else metadata.number)

    def _add(self, what: str, state: int | None) -> None:
        self.events.append(Event(what, state, torch.cuda.is_current_stream_capturing()))


def expected_of_full_graphs(count: int, first_state: int = 0) -> list[Event]:
    """For each graph: a state, the warm-up on it, and only then, outside the graph, a state for the recorded pass."""
    events = []
    for warm_up in range(first_state, first_state + 2 * count, 2):
        recorded = warm_up + 1
        events += [Event(what, warm_up, False) for what in ("built", "began", "returned")]
        events += [Event("built", recorded, False)]
        events += [Event(what, recorded, True) for what in ("began", "returned")]
    return events


def _current() -> Any:
    by_layer = get_forward_context().attn_metadata
    return next(iter(by_layer.values())) if by_layer else None
