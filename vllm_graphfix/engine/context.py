"""The state of one process of an engine that gate and record share: its role, the decision, fixes and components."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine import components
from vllm_graphfix.engine.components import Component, Services
from vllm_graphfix.engine.role import Role
from vllm_graphfix.fix import Activity, Code, Fix, Mode, State
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.settings.decision import Decision

if TYPE_CHECKING:
    from vllm_graphfix.engine.graph_dispatch import Graph
    from vllm_graphfix.settings.shadow_rate import Abort


class EngineContext:
    """Fixes, components, role and decision of one process."""

    def __init__(self, fixes: tuple[Fix, ...], environment: MutableMapping[str, str], manager: FixManager) -> None:
        self.fixes = fixes
        self.environment = environment
        self.manager = manager
        self.components: tuple[Component, ...] = ()
        """Detectors and actions in this process."""
        self.not_begun: dict[str, str] = {}
        """Components that could not start in this process, each with its error."""
        self.role = Role.FRONT_END
        self.decision: Decision | None = None
        self.inherited = False
        """The decision was made by another process, and handed on to this one."""
        self.model: str | None = None
        """Served name of the model of this process's engine, or of the one that it configured last."""

    def make_components(self, publish: Any, start_heartbeat: Any, end: Any) -> None:
        """Make the components; the arguments are fields of `Services`."""
        self.components = components.make_all(
            Services(publish, start_heartbeat, end, self._abort_for, self.manager.proofs)
        )

    def component(self, name: str) -> Any:
        """Return the component of that name. Raises StopIteration if there is none."""
        return next(each for each in self.components if each.name == name)

    def _abort_for(self, detector: str) -> Abort | None:
        return next(filter(None, (each.abort_for(detector) for each in self.components)), None)

    def managers(self) -> tuple[FixManager, ...]:
        """Return the managers of wrappers: of the fixes first, then of the components."""
        return (self.manager, *(manager for each in self.components for manager in each.managers()))

    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """Return the state of every fix, and of each component that is on."""
        states = self.manager.states(diagnose=diagnose)
        for each in self.components:
            states |= {**each.overrule(states), **each.states(diagnose=diagnose)}
        # Last, to overrule the state that a component reports although its start failed.
        for name, error in self.not_begun.items():
            reason = f"it could not begin: {error}"
            states[name] = FixState(name, Mode.AUTO, None, State.FAILED, reason, Code.ERROR)
        return states

    def events(self) -> dict[str, dict[str, int]]:
        """Count the events of fixes and components in this process, by name and event."""
        events: defaultdict[str, dict[str, int]] = defaultdict(dict, self.manager.counts())
        for each in self.components:
            for name, counts in each.counts().items():
                # Summed: `abort` counts requests that it ended under the name of the detector, which may run elsewhere.
                before = events[name]
                events[name] = before | {event: before.get(event, 0) + count for event, count in counts.items()}
        return dict(events)

    def findings(self) -> dict[str, Any]:
        """Return the findings of components, by field of a `Record`."""
        return {field: value for each in self.components for field, value in each.findings().items()}

    def poll(self) -> None:
        """Poll for changes that no wrapped call reports."""
        for each in self.components:
            guarded(each.poll)

    def on_captured(self, worker: Any, graphs: bool) -> None:
        """Start to watch *worker*, which serves from now on; *graphs*: it has captured some."""
        for each in self.components:
            guarded(each.on_captured, worker, graphs)

    def begin_capture(self, worker: Any | None) -> None:
        """Record from now on in which graph a fix fails. *worker* is None where the graphs are only measured."""
        from vllm_graphfix.engine.graph_dispatch import graph_being_captured

        for manager in self.managers():
            manager.begin_capture(graph_being_captured)
        for each in self.components if worker is not None else ():
            guarded(each.begin_capture, worker)

    def stop_recording_failures(self) -> dict[str, dict[Graph | None, str]]:
        """Stop recording failures; return the errors of fixes since `begin_capture`, by name of the fix and graph.

        Failures of components are settled here: their wrappers change no graph.
        """
        own, *others = self.managers()
        for manager in others:
            for name, graphs in manager.stop_recording_failures().items():
                manager.settle_capture(name, next(iter(graphs.values())), failed=True)
        return own.stop_recording_failures()

    def end_capture(self) -> None:
        """End the capture, of fixes and components: failures have been settled, or their graphs are discarded."""
        for manager in self.managers():
            manager.discard_failures()
        for each in self.components:
            guarded(each.end_capture)

    def forked(self) -> None:
        """Reset locks, counters and failures in a forked child, which has copies of them."""
        for manager in self.managers():
            manager.forked()
        for each in self.components:
            each.after_fork()
        Activity.capturing = None
