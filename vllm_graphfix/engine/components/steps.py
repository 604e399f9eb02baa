"""A step that does not end: `engine/steps.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.engine.steps import StepClock

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class StepComponent(Component):
    """The `StepClock` of this process, whatever the settings are."""

    name = "steps"
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.clock = StepClock()
        self._watches = False

    def start(self, decision: Decision, policy: Policy) -> None:
        if not self._watches:
            self._watches = True
            self.clock.watch()

    def findings(self) -> Mapping[str, Any]:
        return {"in_step_since": self.clock.stuck_since()}

    def after_fork(self) -> None:
        self.clock.forked()


COMPONENT = StepComponent
