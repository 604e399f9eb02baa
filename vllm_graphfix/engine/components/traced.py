"""Compiled models that are called with other arguments than were traced, by `engine/traced.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.engine.components import CheckComponent
from vllm_graphfix.patching.hooks import when_imported

if TYPE_CHECKING:
    from vllm_graphfix.engine.traced import TracedCheck
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class TracedComponent(CheckComponent):
    """Owns the `TracedCheck` of this process."""

    name = "traced"
    check: TracedCheck | None

    def start(self, decision: Decision, policy: Policy) -> None:
        is_on = decision.compares_traces
        if self.check is None and is_on:
            from vllm_graphfix.engine import traced

            self.check = traced.TracedCheck(self.services.publish)
            when_imported(traced.MODULE, self.check.watch)
        if self.check is not None:
            self.check.begin(is_on=is_on)


COMPONENT = TracedComponent
