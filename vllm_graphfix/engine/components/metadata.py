"""Full graphs that replay on other attention metadata than their captures read, by `engine/metadata.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services

if TYPE_CHECKING:
    from vllm_graphfix.engine.metadata import MetadataCheck
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class MetadataComponent(Component):
    """Owns the `MetadataCheck` of this process, which is made where a rank captures."""

    name = "metadata"
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.check: MetadataCheck | None = None
        self._is_on = False

    def start(self, decision: Decision, policy: Policy) -> None:
        self._is_on = decision.compares_metadata
        if self.check is not None:
            self.check.begin(is_on=self._is_on)

    def begin_capture(self, worker: Any) -> None:
        if self.check is None and self._is_on:
            from vllm_graphfix.engine.metadata import MetadataCheck

            self.check = MetadataCheck(self.services.publish)
            self.check.begin(is_on=True)
        if self.check is not None:
            self.check.begin_capture()

    def end_capture(self) -> None:
        if self.check is not None:
            self.check.end_capture()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.check.counts() if self.check is not None else {}

    def findings(self) -> Mapping[str, Any]:
        return {"metadata": self.check.differences()} if self.check is not None else {}

    def after_fork(self) -> None:
        if self.check is not None:
            self.check.forked()


COMPONENT = MetadataComponent
