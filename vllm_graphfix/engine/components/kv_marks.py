"""Checksums of finished cache blocks, by `marks/process.py`, which is imported only if a setting needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.settings.shadow_rate import MarksAction, parse

if TYPE_CHECKING:
    from vllm_graphfix.marks.process import Marks
    from vllm_graphfix.patching.applied_fix import FixState, Policy
    from vllm_graphfix.settings.decision import Decision


class MarksComponent(Component):
    """Owns the `Marks` of this process."""

    name = "kv-marks"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.marks: Marks | None = None

    def start(self, decision: Decision, policy: Policy) -> None:
        every = parse(decision.marks).every
        if self.marks is None and every is None:
            return
        from vllm_graphfix.marks.process import Marks

        self.marks = self.marks or Marks(self.services.publish)
        ends = decision.kv_marks_action is MarksAction.ABORT
        self.marks.start(every, self.services.abort_for(self.name) if ends else None)

    def on_captured(self, worker: Any, graphs: bool) -> None:
        if self.marks is not None:
            self.marks.on_captured(worker)

    def states(self, *, diagnose: bool) -> Mapping[str, FixState]:
        return self.marks.states() if self.marks is not None else {}

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.marks.counts() if self.marks is not None else {}

    def findings(self) -> Mapping[str, Any]:
        return {"overwritten": self.marks.overwritten()} if self.marks is not None else {}

    def compared(self, decision: Decision) -> str:
        return f"{decision.kv_marks}, {decision.kv_marks_action.value}"

    def after_fork(self) -> None:
        if self.marks is not None:
            self.marks.after_fork()


COMPONENT = MarksComponent
