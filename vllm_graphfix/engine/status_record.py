"""What a process of an engine tells others about itself: its record, from what it decided and did."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import logger

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext


class StatusRecord:
    """What this process tells others about itself: its record."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._reset()

    def _reset(self) -> None:
        self.forked = False
        """Whether this process is a forked child whose part in an engine is not known yet."""
        self.rank: tuple[int, int | None, int, int] | None = None
        """Rank, local rank, world size, data-parallel rank."""
        self.agreement: Any = None
        self.problem: str | None = None
        self.unchecked: str | None = None
        """The reason for which the gate could not check this rank, which has captured all the same."""
        self.serves_metrics = False
        self.ranks_here: int | None = None
        """The number of ranks that the engine which this process has configured starts on this host; None where that
        is not known."""
        self.starting = False
        self.graphs: bool | None = None
        """Whether this rank captures CUDA graphs; None as long as that is not known."""
        self._reporter: Any = None
        self._keeps_record = False

    def reset_in_child(self) -> None:
        """Forgets what the process told that this one was forked from; it is called in the child."""
        self._reset()
        self.forked = True

    def base(self) -> Any:
        from vllm_graphfix import records

        return records.base_folder(self._context.environment)

    def tell(self) -> None:
        """Hands the record over; nobody waits for the disk."""
        record = self.record()
        if record is None:
            return
        if self.rank is not None and not self._keeps_record:
            # A front-end that runs the model itself has not begun: its capture may be long.
            self._reporter_here().keep(lambda: None)
        self._reporter_here().publish(record)

    def begin(self) -> None:
        """This process takes part in an engine that starts.

        That may take long: from now on it is heard of every few seconds.
        """
        self.starting = True
        if not self._keeps_record:
            # Its record is only touched: making one takes a lock that hooks on imports hold.
            self._reporter_here().keep(lambda: None)
        self.tell()

    def started(self) -> None:
        """What this process runs of the engine is up."""
        self.starting = False
        self.tell()

    def keep(self) -> None:
        """From now on the record is kept up to date."""
        if not self._keeps_record:
            self._keeps_record = True
            self._reporter_here().keep(self._renewed)

    def _renewed(self) -> Any:
        """The record, after a look at what only a heartbeat sees."""
        self._context.look()
        return self.record()

    def finish(self) -> None:
        """Waits a little for the record to be written: the process is about to end, and its record says why."""
        self._reporter_here().flush()

    def tell_why_it_ends(self, problem: str) -> None:
        """The process ends now: *problem* says why."""
        self.problem = problem
        self.tell()
        self.finish()

    def _reporter_here(self) -> Any:
        if self._reporter is None:
            from multiprocessing.util import Finalize

            from vllm_graphfix import records

            self._reporter = records.Reporter(self.base(), lambda text: logger.warning("graphfix: %s", text))
            # Not atexit, which the children that multiprocessing forks do not run.
            Finalize(None, self._reporter.close, exitpriority=0)
        return self._reporter

    def record(self) -> Any:
        from vllm_graphfix import records

        context = self._context
        decision = context.decision
        if decision is None:
            return None
        agreed = self.agreement
        here = records.identity()
        captures = self.rank is not None
        return records.Record(
            graphfix=decision.graphfix,
            vllm=decision.vllm,
            engine=decision.engine,
            host=here.host,
            pid=here.pid,
            start_ticks=here.start_ticks,
            boot=here.boot,
            pid_namespace=here.pid_namespace,
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
            **({} if self.starting else context.findings()),  # a first step compiles and loads
        )
