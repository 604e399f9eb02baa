"""Watches the tensors whose addresses graphs hold, by `engine/addresses.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.addresses import NAME, AddressWatch
from vllm_graphfix.engine.components import Component, Services

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import Policy
    from vllm_graphfix.settings.decision import Decision


class AddressComponent(Component):
    """Owns the `AddressWatch` of this process."""

    name = NAME
    has_state = False

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.watch = AddressWatch(services.publish)

    def start(self, decision: Decision, policy: Policy) -> None:
        self.watch.begin(decision.watches)

    def on_captured(self, worker: Any, graphs: bool) -> None:
        if graphs:
            self.watch.on_captured(worker)

    def poll(self) -> None:
        self.watch.poll()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return self.watch.counts()

    def findings(self) -> Mapping[str, Any]:
        return {"moved": self.watch.moved()}

    def compared(self, decision: Decision) -> str:
        return decision.addresses.value

    def after_fork(self) -> None:
        self.watch.forked()


COMPONENT = AddressComponent
