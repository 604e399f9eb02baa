"""Ends requests whose answers would be wrong, by `engine/abort.py`, which is imported only if a setting needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services

if TYPE_CHECKING:
    from vllm_graphfix.engine.abort import Aborts
    from vllm_graphfix.patching.applied_fix import FixState, Policy
    from vllm_graphfix.settings.decision import Decision
    from vllm_graphfix.settings.shadow_rate import Abort


class AbortComponent(Component):
    """Owns the `Aborts` of this process."""

    name = "abort"
    starts_first = True

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.aborts: Aborts | None = None

    def start(self, decision: Decision, policy: Policy) -> None:
        if self.aborts is None and not decision.aborts:
            return
        if self.aborts is None:
            from vllm_graphfix.engine.abort import Aborts

            self.aborts = Aborts(self.services.start_heartbeat)
            self.aborts.watch()
        self.aborts.begin(decision.engine if decision.aborts else "")

    def on_captured(self, worker: Any, graphs: bool) -> None:
        if self.aborts is not None:
            self.aborts.on_captured()

    def poll(self) -> None:
        if self.aborts is not None:
            self.aborts.poll()

    def states(self, *, diagnose: bool) -> Mapping[str, FixState]:
        return self.aborts.states() if self.aborts is not None else {}

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Count verdicts, and by detector the requests ended in this process, if it has the scheduler."""
        all_counts = self.aborts.counts() if self.aborts is not None else {}
        return {name: counts for name, counts in all_counts.items() if name == self.name or any(counts.values())}

    def abort_for(self, detector: str) -> Abort | None:
        return self.aborts.of(detector) if self.aborts is not None else None

    def after_fork(self) -> None:
        if self.aborts is not None:
            self.aborts.forked()


COMPONENT = AbortComponent
