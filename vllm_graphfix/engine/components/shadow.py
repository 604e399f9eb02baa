"""The shadow check, by `shadow/process.py`, which is imported only if a setting needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.fix import Mode
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.settings.environment import Master
from vllm_graphfix.settings.shadow_rate import OFF, ShadowGraphs, parse

if TYPE_CHECKING:
    from vllm_graphfix.patching.applied_fix import FixState, Policy
    from vllm_graphfix.settings.decision import Decision


class ShadowComponent(Component):
    """The shadow check of this process, and the manager of its wrappers."""

    name = "shadow"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.manager: FixManager | None = None

    def start(self, decision: Decision, policy: Policy) -> None:
        rate = parse(decision.shadow if decision.canary and decision.master is not Master.OFF else OFF)
        if self.manager is None and not rate:
            return
        from vllm_graphfix.shadow import process
        from vllm_graphfix.shadow.runners import RUNNERS

        pieces = decision.shadow_graphs is ShadowGraphs.ALL
        process.start(
            rate, decision.shadow_action, self.services.end, self.services.abort_for(self.name), pieces=pieces
        )
        watched = {each.name for each in RUNNERS if rate and (pieces or not each.name.endswith(process.UNLESS_FULL))}
        wanted = policy._replace(modes={each.name: Mode.AUTO if each.name in watched else Mode.OFF for each in RUNNERS})
        self.manager = self.manager or FixManager(RUNNERS, wanted)
        self.manager.start(wanted)

    def on_captured(self, worker: Any, graphs: bool) -> None:
        if self.manager is not None:
            from vllm_graphfix.shadow import process

            process.on_captured(worker)

    def managers(self) -> tuple[FixManager, ...]:
        return (self.manager,) if self.manager is not None else ()

    def states(self, *, diagnose: bool) -> Mapping[str, FixState]:
        if self.manager is None:
            return {}
        from vllm_graphfix.shadow import process

        return {self.name: process.state(self.manager.states(diagnose=diagnose))}

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        if self.manager is None:
            return {}
        from vllm_graphfix.shadow import process

        return process.counts()

    def findings(self) -> Mapping[str, Any]:
        if self.manager is None:
            return {}
        from vllm_graphfix.shadow import process

        return {"wrong": process.wrong()}

    def compared(self, decision: Decision) -> str:
        graphs = ", all graphs" if decision.shadow_graphs is ShadowGraphs.ALL else ""
        return f"{decision.shadow}, {decision.shadow_action.value}{graphs}"


COMPONENT = ShadowComponent
