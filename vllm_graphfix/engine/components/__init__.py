"""What watches an engine in each of its processes, or acts on what was found: one module each, known by being here.

The engine, its records and the comparison of its ranks know none of them by name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import FixState, Policy
    from vllm_graphfix.patching.manager import FixManager
    from vllm_graphfix.settings.decision import Decision
    from vllm_graphfix.settings.shadow_rate import Abort


class Services(NamedTuple):
    """What a process does for its components. No call waits for the disk, `end` for a moment aside."""

    publish: Callable[[], None]
    """Write the record anew, soon."""
    keep: Callable[[], None]
    """Keep the record up to date from now on."""
    end: Callable[[str], None]
    """Write why this process ends, which it does now."""
    abort_for: Callable[[str], Abort | None]
    """What ends requests for the detector of that name; None where nobody does."""


class Component:
    """One of them. It does nothing but what it overrides; vLLM and torch are imported by `on_captured` at the earliest.

    A process may make one engine after the other, so `start` is called for each, also with what switches it off.
    """

    name: ClassVar[str]
    """Its name in records, `fleet` and metrics."""
    has_state: ClassVar[bool] = True
    """It has one in records; an error of another one is a count, or it is never off."""
    starts_first: ClassVar[bool] = False
    """Others ask it for something when they start."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def start(self, decision: Decision, policy: Policy) -> None:
        """Begin, go on, or end, for the engine of *decision*."""

    def on_captured(self, worker: Any, graphs: bool) -> None:
        """Begin to watch *worker*, which serves from now on; *graphs*: whether it has captured any."""

    def poll(self) -> None:
        """Look for what no wrapped call reports; the heartbeat's thread calls this every few seconds."""

    def managers(self) -> tuple[FixManager, ...]:
        """Return what manages its wrappers, where it has some."""
        return ()

    def states(self, *, diagnose: bool) -> Mapping[str, FixState]:
        """Return its state in the form of a fix's, by its name; nothing where it is off."""
        return {}

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return how often each of its events happened, by its name, or by that of the detector that they belong to."""
        return {}

    def findings(self) -> Mapping[str, Any]:
        """Return fields of a `Record`."""
        return {}

    def compared(self, decision: Decision) -> str | None:
        """Return the setting that all ranks must have alike."""
        return None

    def abort_for(self, detector: str) -> Abort | None:
        """Return what ends requests for *detector*, if this does so."""
        return None

    def after_fork(self) -> None:
        """Forget, in a forked child, what is the parent's."""


def find(services: Services) -> tuple[Component, ...]:
    """Make one of each module in this folder: those first that others need."""
    kinds = sorted(_kinds(), key=lambda kind: (not kind.starts_first, kind.name))
    return tuple(kind(services) for kind in kinds)


def _kinds() -> Iterator[type[Component]]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        kind: type[Component] = import_module(module.name).COMPONENT
        yield kind
