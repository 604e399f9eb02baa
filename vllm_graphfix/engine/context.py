"""What the gate and the record need of a process of an engine: its part in the engine, the decision, and the fixes."""

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
    """One process, as the parts of the plugin in it see it."""

    def __init__(self, fixes: tuple[Fix, ...], environment: MutableMapping[str, str], manager: FixManager) -> None:
        self.fixes = fixes
        self.environment = environment
        self.manager = manager
        self.components: tuple[Component, ...] = ()
        """What watches this process, or acts on it."""
        self.not_begun: dict[str, str] = {}
        """Components that were to begin in this process and could not, each with its error."""
        self.role = Role.FRONT_END
        self.decision: Decision | None = None
        self.inherited = False
        """Whether the decision was handed on to this process."""
        self.model: str | None = None
        """The model of the engine that this process is a part of, or configured last."""

    def make_components(self, publish: Any, keep: Any, end: Any) -> None:
        """Make the components; the arguments are those of `Services`."""
        self.components = components.find(Services(publish, keep, end, self._abort_for))

    def component(self, name: str) -> Any:
        """Return the component of that name, whose kind the caller knows. Raises StopIteration."""
        return next(each for each in self.components if each.name == name)

    def _abort_for(self, detector: str) -> Abort | None:
        return next(filter(None, (each.abort_for(detector) for each in self.components)), None)

    def managers(self) -> tuple[FixManager, ...]:
        """Return what manages wrappers: of the fixes, and of the components."""
        return (self.manager, *(manager for each in self.components for manager in each.managers()))

    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """Return the states of every fix, and of the components that are on."""
        found = self.manager.states(diagnose=diagnose)
        for each in self.components:
            found |= each.states(diagnose=diagnose)
        # Last: what one says of itself that is not whole means nothing.
        for name, error in self.not_begun.items():
            reason = f"it could not begin: {error}"
            found[name] = FixState(name, Mode.AUTO, None, State.FAILED, reason, Code.ERROR)
        return found

    def events(self) -> dict[str, dict[str, int]]:
        """Return how often each event of a fix and of a component happened in this process."""
        found: defaultdict[str, dict[str, int]] = defaultdict(dict, self.manager.counts())
        for each in self.components:
            for name, counts in each.counts().items():
                # Added up: a request counts where it ends, for a detector that perhaps runs in another process.
                before = found[name]
                found[name] = before | {event: before.get(event, 0) + count for event, count in counts.items()}
        return dict(found)

    def findings(self) -> dict[str, Any]:
        """Return what components have to say in a record, by its fields."""
        return {field: value for each in self.components for field, value in each.findings().items()}

    def look(self) -> None:
        """Look, now and then, for what no wrapped call reports."""
        for each in self.components:
            guarded(each.poll)

    def serve(self, worker: Any, graphs: bool) -> None:
        """Begin what watches *worker*, which serves from now on; *graphs*: whether it has captured any."""
        for each in self.components:
            guarded(each.on_captured, worker, graphs)

    def begin_capture(self) -> None:
        """Notes from now on in which graph a fix fails."""
        from vllm_graphfix.engine.graph_dispatch import graph_being_captured

        for manager in self.managers():
            manager.begin_capture(graph_being_captured)

    def failures_in_capture(self) -> dict[str, dict[Graph | None, str]]:
        """The graphs in which a fix failed since, by the name of the fix.

        What components have put around a capture changes no graph.
        """
        own, *others = self.managers()
        for manager in others:
            for name, graphs in manager.failures_in_capture().items():
                manager.settle_capture(name, next(iter(graphs.values())), failed=True)
        return own.failures_in_capture()

    def forget_capture(self) -> None:
        """Ends that: what failed has been dealt with, or was in graphs that are not kept."""
        for manager in self.managers():
            manager.forget_capture()

    def forked(self) -> None:
        """Resets locks, counters and failures, which a forked child has copies of; it is called in that child."""
        for manager in self.managers():
            manager.forked()
        for each in self.components:
            each.after_fork()
        Activity.capturing = None
