"""Compares what builders of attention metadata do with drafts to what they claim, by `engine/claims.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.engine.components import CaptureComponent
from vllm_graphfix.settings.environment import Claims

if TYPE_CHECKING:
    from vllm_graphfix.engine.claims import ClaimCheck
    from vllm_graphfix.settings.decision import Decision


class ClaimComponent(CaptureComponent):
    """Owns the `ClaimCheck` of this process."""

    name = "claims"

    def is_on(self, decision: Decision) -> bool:
        return decision.checks is Claims.REPORT

    def make(self) -> ClaimCheck:
        from vllm_graphfix.engine.claims import ClaimCheck

        return ClaimCheck(self.services.publish)


COMPONENT = ClaimComponent
