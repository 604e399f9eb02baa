"""Compares what builders of attention metadata do with drafts to what they claim, by `engine/claims.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.settings.environment import Claims

if TYPE_CHECKING:
    from vllm_graphfix.engine.claims import ClaimCheck
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class ClaimComponent(Component):
    """Owns the `ClaimCheck` of this process, which is made where a rank captures."""

    name = "claims"
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.check: ClaimCheck | None = None
        self._is_on = False

    def start(self, decision: Decision, policy: Policy) -> None:
        self._is_on = decision.checks is Claims.REPORT
        if self.check is not None:
            self.check.begin(is_on=self._is_on)

    def begin_capture(self, worker: Any) -> None:
        if self.check is None and not self._is_on:
            return
        if self.check is None:
            from vllm_graphfix.engine.claims import ClaimCheck

            self.check = ClaimCheck(self.services.publish)
            self.check.begin(is_on=True)
        self.check.begin_capture(worker)

    def end_capture(self) -> None:
        if self.check is not None:
            self.check.end_capture()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.check.counts() if self.check is not None else {}

    def findings(self) -> Mapping[str, Any]:
        return {"claims": self.check.not_true()} if self.check is not None else {}

    def after_fork(self) -> None:
        if self.check is not None:
            self.check.forked()


COMPONENT = ClaimComponent
