"""What the gate and the record need of a process of an engine: its part in the engine, the decision, and the fixes."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.addresses import AddressWatch
from vllm_graphfix.engine.role import Role
from vllm_graphfix.engine.steps import StepClock
from vllm_graphfix.fix import Activity, Fix
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.settings.decision import Decision

if TYPE_CHECKING:
    from vllm_graphfix.engine.abort import Aborts
    from vllm_graphfix.engine.graph_dispatch import Graph
    from vllm_graphfix.marks.process import Marks


class EngineContext:
    """One process, as the parts of the plugin in it see it."""

    def __init__(self, fixes: tuple[Fix, ...], environment: MutableMapping[str, str], manager: FixManager) -> None:
        self.fixes = fixes
        self.environment = environment
        self.manager = manager
        self.shadow: FixManager | None = None
        """What the shadow check has put around vLLM's functions; None where nothing was ever to be checked."""
        self.addresses = AddressWatch()
        self.steps = StepClock()
        self.marks: Marks | None = None
        """None where nothing was ever to be marked."""
        self.aborts: Aborts | None = None
        """What has requests ended; None where nothing ever was to."""
        self.role = Role.FRONT_END
        self.decision: Decision | None = None
        self.inherited = False
        """Whether the decision was handed on to this process."""
        self.model: str | None = None
        """The model of the engine that this process is a part of, or configured last."""

    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """The states of every fix, and of the shadow check, the marks and their action `abort` where they are on."""
        found = self.manager.states(diagnose=diagnose)
        if self.marks is not None:
            found |= self.marks.states()
        if self.aborts is not None:
            found |= self.aborts.states()
        if self.shadow is None:
            return found
        from vllm_graphfix.shadow import process

        return found | {process.NAME: process.state(self.shadow.states(diagnose=diagnose))}

    def events(self) -> dict[str, dict[str, int]]:
        """How often each event of a fix happened in this process; of what watches graphs, too, where it is on."""
        from vllm_graphfix.shadow import process

        marks = self.marks.counts() if self.marks is not None else {}
        found = self.manager.counts() | process.counts() | self.addresses.counts() | marks
        # Requests count where they end: for a detector that perhaps runs in another process.
        if self.aborts is not None:
            for name, counts in self.aborts.counts().items():
                if name in found or name not in self.aborts.ended or any(counts.values()):
                    found[name] = {**found.get(name, {}), **counts}
        return found

    def look(self) -> None:
        """Looks, now and then, at what no call that is wrapped tells of."""
        self.addresses.look()
        if self.aborts is not None:
            self.aborts.look()

    def serve(self, worker: Any, graphs: bool) -> None:
        """Begins what watches graphs, if there are *graphs*: *worker* has captured, and now it serves."""
        if graphs:
            self.addresses.serve(worker)
        if self.aborts is not None:
            self.aborts.serve()
        if self.marks is not None:
            self.marks.serve(worker)
        if self.shadow is not None:
            from vllm_graphfix.shadow import process

            process.serve(worker)

    def begin_capture(self) -> None:
        """Notes from now on in which graph a fix fails."""
        from vllm_graphfix.engine.graph_dispatch import graph_being_captured

        for manager in filter(None, (self.manager, self.shadow)):
            manager.begin_capture(graph_being_captured)

    def failures_in_capture(self) -> dict[str, dict[Graph | None, str]]:
        """The graphs in which a fix failed since, by the name of the fix.

        What the shadow check has put around a capture changes no graph.
        """
        if self.shadow is not None:
            for name, graphs in self.shadow.failures_in_capture().items():
                self.shadow.settle_capture(name, next(iter(graphs.values())), failed=True)
        return self.manager.failures_in_capture()

    def forget_capture(self) -> None:
        """Ends that: what failed has been dealt with, or was in graphs that are not kept."""
        for manager in filter(None, (self.manager, self.shadow)):
            manager.forget_capture()

    def forked(self) -> None:
        """Resets locks, counters and failures, which a forked child has copies of; it is called in that child."""
        for manager in filter(None, (self.manager, self.shadow)):
            manager.forked()
        self.addresses.forked()
        self.steps.forked()
        if self.marks is not None:
            self.marks.forked()
        if self.aborts is not None:
            self.aborts.forked()
        Activity.capturing = None
