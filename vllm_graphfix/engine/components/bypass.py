"""Fixes that are in place and not on the path of graphs, by `engine/bypass.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.fix import Code, State

if TYPE_CHECKING:
    from vllm_graphfix.engine.bypass import BypassWatch
    from vllm_graphfix.patching.applied_fix import FixState, Policy
    from vllm_graphfix.settings.decision import Decision


class BypassComponent(Component):
    """Owns the `BypassWatch` of this process, which is made where a rank captures graphs with fixes."""

    name = "bypass"
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.watch: BypassWatch | None = None
        self._is_on = False

    def start(self, decision: Decision, policy: Policy) -> None:
        self._is_on = decision.watches_calls
        if self.watch is not None:
            self.watch.forked()

    def begin_capture(self, worker: Any) -> None:
        if not self._is_on:
            return
        if self.watch is None:
            from vllm_graphfix.engine import bypass, live_deployment

            concerns = live_deployment.concerns
            self.watch = bypass.BypassWatch(self.services.proofs, concerns, self.services.publish)
        self.watch.begin_capture(worker)

    def end_capture(self) -> None:
        if self.watch is not None:
            self.watch.end_capture()

    def on_captured(self, worker: Any, graphs: bool) -> None:
        if self.watch is not None and self._is_on and graphs:
            self.watch.on_captured(worker)

    def poll(self) -> None:
        if self.watch is not None:
            self.watch.poll()

    def overrule(self, states: Mapping[str, FixState]) -> Mapping[str, FixState]:
        bypassed = self.watch.bypassed if self.watch is not None else {}
        return {
            name: state._replace(state=State.BYPASSED, reason=bypassed[name], code=Code.NOT_CALLED)
            for name, state in states.items()
            if name in bypassed and state.state in (State.ACTIVE, State.OBSERVING)
        }

    def after_fork(self) -> None:
        if self.watch is not None:
            self.watch.forked()


COMPONENT = BypassComponent
