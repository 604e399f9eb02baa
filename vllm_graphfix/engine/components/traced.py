"""Compiled models that are called with other arguments than were traced, by `engine/traced.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.patching.hooks import when_imported

if TYPE_CHECKING:
    from vllm_graphfix.engine.traced import TracedCheck
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class TracedComponent(Component):
    """Owns the `TracedCheck` of this process, which is imported only if a setting needs it."""

    name = "traced"
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.check: TracedCheck | None = None

    def start(self, decision: Decision, policy: Policy) -> None:
        is_on = decision.compares_traces
        if self.check is None and is_on:
            from vllm_graphfix.engine import traced

            self.check = traced.TracedCheck(self.services.publish)
            when_imported(traced.MODULE, self.check.watch)
        if self.check is not None:
            self.check.begin(is_on=is_on)

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.check.counts() if self.check is not None else {}

    def findings(self) -> Mapping[str, Any]:
        return {"traced": self.check.differences()} if self.check is not None else {}

    def after_fork(self) -> None:
        if self.check is not None:
            self.check.forked()


COMPONENT = TracedComponent
