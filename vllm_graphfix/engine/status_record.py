"""The status record of a process of an engine: its decision, and the state of its fixes and components."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import logger

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext

_MAKING_REPORTER = threading.Lock()
"""Made with the module: an error in the constructor would keep the plugin from starting, for the sake of a record."""


class StatusRecord:
    """Builds and publishes the record of this process."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._making_reporter = _MAKING_REPORTER
        self._reset()

    def _reset(self) -> None:
        self.forked = False
        """This process is a forked child whose role in an engine is not known yet."""
        self.rank: tuple[int, int | None, int, int] | None = None
        """Rank, local rank, world size, data-parallel rank."""
        self.agreement: Any = None
        self.problem: str | None = None
        self.unchecked: str | None = None
        """The reason for which the gate could not check this rank, which has captured nevertheless."""
        self.serves_metrics = False
        self.ranks_here: int | None = None
        """Ranks that the engine configured by this process starts on this host; None if that is not known."""
        self.starting = False
        self.graphs: bool | None = None
        """This rank captures CUDA graphs; None until that is known."""
        self._reporter: Any = None
        self._relay: Any = None
        self._has_heartbeat = False

    def reset_in_child(self) -> None:
        """Discard the parent's state; called in a forked child."""
        # With the reporter, whose threads are not in the child; one of them may hold the lock.
        self._making_reporter = threading.Lock()
        self._reset()
        self.forked = True

    def base(self) -> Any:
        from vllm_graphfix import records

        return records.base_folder(self._context.environment)

    def publish(self) -> None:
        """Have the record written, without waiting for the disk."""
        record = self.record()
        if record is None:
            return
        if self.rank is not None and not self._has_heartbeat:
            # A front-end that runs the model itself has not called `publish_start`, and its capture may take long.
            self._reporter_here().keep(lambda: None)
        self._reporter_here().publish(record)

    def publish_start(self) -> None:
        """Publish that this process's part of an engine starts, and touch the record every few seconds from now on."""
        self.starting = True
        if not self._has_heartbeat:
            # Touch only: building a record takes a lock that hooks on imports hold.
            self._reporter_here().keep(lambda: None)
        self.publish()

    def publish_started(self) -> None:
        """Publish that this process's part of the engine is up."""
        self.starting = False
        self.publish()

    def start_heartbeat(self) -> None:
        """Rebuild and publish the record every few seconds from now on."""
        if not self._has_heartbeat:
            self._has_heartbeat = True
            self._reporter_here().keep(self._renewed)

    def _renewed(self) -> Any:
        """Poll the components, then build the record."""
        self._context.poll()
        return self.record()

    def start_relay(self, store: Any, rank: int, world_size: int) -> None:
        """Relay the records of ranks on other machines to rank 0 from now on, through *store*."""
        if self._relay is None:
            from multiprocessing.util import Finalize

            from vllm_graphfix.engine.record_relay import RecordRelay

            reporter = self._reporter_here()
            relay = RecordRelay(self.base(), lambda: reporter.newest, store, rank, world_size)
            relay.start()  # first: a thread that could not be started cannot be joined at the end
            self._relay = relay
            Finalize(None, relay.close, exitpriority=0)

    def flush(self) -> None:
        """Wait a moment for the record to be written, before the process ends."""
        self._reporter_here().flush()

    def publish_end(self, problem: str) -> None:
        """Publish the *problem* for which this process ends now."""
        self.problem = problem
        self.publish()
        self.flush()

    def _reporter_here(self) -> Any:
        with self._making_reporter:  # a step's thread and the heartbeat's may publish at once
            if self._reporter is None:
                from multiprocessing.util import Finalize

                from vllm_graphfix import records

                self._reporter = records.Reporter(self.base(), lambda text: logger.warning("graphfix: %s", text))
                # Not atexit, which the children that multiprocessing forks do not run.
                Finalize(None, self._reporter.close, exitpriority=0)
            return self._reporter

    def record(self) -> Any:
        """Build the record; None before there is a decision."""
        from vllm_graphfix import records

        context = self._context
        decision = context.decision
        if decision is None:
            return None
        agreed = self.agreement
        here = records.identity()
        # Only a rank reads the source: other processes may import no code that a fix concerns.
        captures = self.rank is not None
        return records.Record(
            graphfix=decision.graphfix,
            vllm=decision.vllm,
            engine=decision.engine,
            **here._asdict(),
            role=context.role.value,
            model=context.model,
            rank=records.Rank(*self.rank) if self.rank is not None else None,
            decision=records.Decided(
                canary=decision.canary,
                bucket=decision.bucket,
                percentage=decision.rollout / 100 if decision.rollout is not None else None,
                master=decision.master.value,
                inherited=context.inherited,
            ),
            fixes={
                name: records.FixReport(state.mode.value, state.state.value, state.reason, state.code.value)
                for name, state in context.states(diagnose=captures).items()
            },
            events=context.events(),
            agreement=records.AgreementReport(agreed.group, agreed.world_size, agreed.agreeing, agreed.difference)
            if agreed
            else None,
            leader=agreed.leader if agreed else None,
            followers=agreed.followers[: records.MOST_FOLLOWERS] if agreed else (),
            problem=self.problem,
            unchecked=self.unchecked,
            serves_metrics=self.serves_metrics,
            ranks_here=self.ranks_here,
            misconfigured=decision.misconfigured,
            graphs=self.graphs,
            starting=self.starting,
            written=time.time(),
            # While it starts, a long step is no finding: the first one compiles and loads.
            **({} if self.starting else context.findings()),
        )
