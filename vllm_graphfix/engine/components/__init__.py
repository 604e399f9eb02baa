"""Detectors and actions in the processes of an engine: one component for each module of this package.

Engine, records and comparison of ranks refer to none of them by name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import FixState, Policy, Proof
    from vllm_graphfix.patching.manager import FixManager
    from vllm_graphfix.patching.sites import Site
    from vllm_graphfix.settings.decision import Decision
    from vllm_graphfix.settings.shadow_rate import Abort


class Services(NamedTuple):
    """Functions that a process offers its components. Only `end` waits for the disk, for a moment."""

    publish: Callable[[], None]
    """Write the record anew, soon."""
    start_heartbeat: Callable[[], None]
    """Renew the record every few seconds from now on."""
    end: Callable[[str], None]
    """Write the reason for which this process ends now."""
    abort_for: Callable[[str], Abort | None]
    """Return the `Abort` for the detector of that name; None if requests are not ended."""
    proofs: Callable[[], Mapping[str, Sequence[tuple[Site, Proof]]]]
    """Return the sites of each applied fix at which a call proves that it is on the path of graphs."""


class Component:
    """A detector or an action; a subclass overrides the calls that it needs.

    It imports vLLM and torch in `begin_capture` at the earliest. A process may make one engine after the other: `start`
    is called for each, also to switch it off.
    """

    name: ClassVar[str]
    """Its name in records, `fleet` and metrics."""
    has_state: ClassVar[bool] = True
    """Records hold a state of it. Without one, its errors are only counted."""
    starts_first: ClassVar[bool] = False
    """Other components use it when they start."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def start(self, decision: Decision, policy: Policy) -> None:
        """Begin, continue or stop, for the engine of *decision*."""

    def begin_capture(self, worker: Any) -> None:
        """Prepare for the capture of *worker*, which begins now, of the graphs that serve."""

    def end_capture(self) -> None:
        """Undo what `begin_capture` did: a capture has ended, or failed."""

    def on_captured(self, worker: Any, graphs: bool) -> None:
        """Start to watch *worker*, which serves from now on; *graphs*: it has captured some."""

    def poll(self) -> None:
        """Poll for changes that no wrapped call reports; called by the heartbeat's thread every few seconds."""

    def managers(self) -> tuple[FixManager, ...]:
        """Return the managers of its wrappers, if it has some."""
        return ()

    def states(self, *, diagnose: bool) -> Mapping[str, FixState]:
        """Return its state in the form of a fix's, by its name; nothing if it is off."""
        return {}

    def overrule(self, states: Mapping[str, FixState]) -> Mapping[str, FixState]:
        """Return those of the *states* of fixes, by name, about which it knows better, corrected."""
        return {}

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Count its events, by its name or by that of the detector that they belong to."""
        return {}

    def findings(self) -> Mapping[str, Any]:
        """Return fields of a `Record`."""
        return {}

    def compared(self, decision: Decision) -> str | None:
        """Return the setting that all ranks must have alike."""
        return None

    def abort_for(self, detector: str) -> Abort | None:
        """Return the `Abort` for *detector*, if this component ends requests."""
        return None

    def after_fork(self) -> None:
        """Discard the parent's state; called in a forked child."""


class CheckComponent(Component):
    """Owns a check, which is imported and made only if a setting needs it; a `Record` has its findings by its name."""

    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.check: Any = None

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        counted: Mapping[str, Mapping[str, int]] = self.check.counts() if self.check is not None else {}
        return counted

    def findings(self) -> Mapping[str, Any]:
        return {self.name: self.check.findings()} if self.check is not None else {}

    def after_fork(self) -> None:
        if self.check is not None:
            self.check.reset()


class CaptureComponent(CheckComponent):
    """Owns a check that watches captures, and is made where a rank captures."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._is_on = False

    def is_on(self, decision: Decision) -> bool:
        raise NotImplementedError("each subclass has a setting of its own")

    def make(self) -> Any:
        raise NotImplementedError("each subclass imports its check")

    def start(self, decision: Decision, policy: Policy) -> None:
        was_on, self._is_on = self._is_on, self.is_on(decision)
        if self.check is not None and self._is_on is not was_on:
            self.check.reset()

    def begin_capture(self, worker: Any) -> None:
        if not self._is_on:
            return
        if self.check is None:
            self.check = self.make()
        self.check.begin_capture(worker)

    def end_capture(self) -> None:
        if self.check is not None:
            self.check.end_capture()


def make_all(services: Services) -> tuple[Component, ...]:
    """Make the component of each module in this package, those first that others use."""
    kinds = sorted(_kinds(), key=lambda kind: (not kind.starts_first, kind.name))
    return tuple(kind(services) for kind in kinds)


def _kinds() -> Iterator[type[Component]]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        kind: type[Component] = import_module(module.name).COMPONENT
        yield kind
