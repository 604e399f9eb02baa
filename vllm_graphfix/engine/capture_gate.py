"""The gate around a capture: it lets a rank pass if all ranks will do the same and every required fix is applied.

It changes vLLM in two ways: it may raise, and graphs in which a fix failed are not dispatched to. An error of the gate
itself is logged, or stops the engine if the user requires a fix. `capture_hooks` calls it from vLLM's functions.

A captured graph cannot be repaired: if a fix fails during the capture, the graph holds stock's defect. A rank that
aborted its capture would leave the others waiting in a collective. So every rank finishes the capture as stock does,
and then all ranks act alike on the failures of any.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.gate_reports import CAPTURED, WARM_UP, RankReports
from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.ranks import StoreLostError, common_store, host_in, world
from vllm_graphfix.settings import environment

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext
    from vllm_graphfix.engine.rank_agreement import Agreement
    from vllm_graphfix.engine.status_record import StatusRecord

STOPS = "vllm-graphfix stops this engine"
"""The beginning of each message that stops an engine."""
_BEFORE, _AFTER = f"{STOPS} before it captures its CUDA graphs", f"{STOPS} before it serves"
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_NOT_COMPARED = "whether its ranks agree is not known"
_EXIT_CODE = 70
_STOCK = "To serve stock vLLM, set VLLM_GRAPHFIX=off on all nodes."
_UNCHECKED = "To go on without this check, leave every fix at auto: VLLM_GRAPHFIX=on, and no fix on."
_WHAT_TO_DO = (
    f"Give all its nodes the same vllm-graphfix, the same VLLM_GRAPHFIX variables and, with {environment.ROLLOUT}, the "
    f"same {environment.ROLLOUT_KEY}; where something failed, repair it. {_STOCK} Ranks that run different code could "
    "hang or answer wrongly, and a fix that has already taken effect on the other ranks cannot be undone there."
)


class GraphfixError(RuntimeError):
    """The engine must not capture or serve: a required fix is not applied, or the ranks do not agree."""


class CaptureGate:
    """The gate of one process, which is a rank of an engine or hosts one."""

    def __init__(self, context: EngineContext, status_record: StatusRecord) -> None:
        self.context, self.status_record = context, status_record
        self.reports = RankReports(context, self._requires_a_fix)
        self.captures_here = False
        """This process has reached a capture."""
        self.has_graphs = False
        """The engine of this process uses graphs, or may use them."""
        self._has_captured = False
        """This process has captured graphs that serve. Elastic expert parallelism captures again."""
        self.captures = 0
        """Captures that are under way, one inside of the other."""
        self.serving: Callable[[], Any] = lambda: None
        """Returns the worker that has captured last; None before that, and once it is gone."""

    def before_capture(self, worker_or_runner: Any, stage: str) -> None:
        """Raise GraphfixError if the engine must not capture at *stage*, `PROFILING` or `WARM_UP`.

        That is the case if the ranks do not agree, if a required fix is needed and not applied, or if the gate itself
        fails and the user requires a fix.
        """
        problem: str | None = None
        failure: Exception | None = None
        consequence = _NOT_COMPARED
        try:
            self.captures_here = True
            self.reports.post_capture_group = self.status_record.unchecked = None
            self.has_graphs = self.status_record.graphs = _uses_graphs(worker_or_runner)
        except Exception as error:
            failure, self.has_graphs = error, True  # detectors must not miss a graph
        # Each step has its own handler: an error in one must not hide what another one finds.
        try:
            # A rank that is about to stop publishes no report: the others would go on, into a collective with it.
            if failure is None or not self._requires_a_fix():
                problem = self._compare_ranks(worker_or_runner, stage)
        except Exception as error:
            failure = failure or error
        try:
            problem = problem or self._unapplied_fixes(worker_or_runner)
        except Exception as error:
            if failure is None:
                failure, consequence = error, "the states of the fixes are not known"
        if failure is not None and problem is None:
            problem = self._problem_of_gate(_BEFORE, consequence, failure)
            if problem is not None:
                guarded(self.reports.publish_end)  # or the others would wait for this rank's report after the capture
                guarded(self.reports.publish_stop, stage, failure)
            elif self.status_record.unchecked is not None and not _is_elastic(worker_or_runner):
                guarded(self.reports.publish_unchecked, stage, failure)
        guarded(self._publish_outcome, problem)
        if problem is not None:
            if failure is not None:
                guarded(self._end_process, problem)
            guarded(self._end_if_executor_is_elsewhere, worker_or_runner, problem)
            raise GraphfixError(problem)

    def _end_if_executor_is_elsewhere(self, worker_or_runner: Any, problem: str) -> None:
        if _has_executor_elsewhere(worker_or_runner):
            self._end_process(problem)

    def _end_process(self, problem: str) -> None:
        """End the process of a rank other than 0, since vLLM's executor would not see the exception.

        After an error of this rank alone, the executor waits for rank 0 first, without limit, and rank 0 may wait in a
        collective with this rank; that a process has ended it sees at once. An executor on another node ends with that
        node, and this process would wait for its next order without limit.
        """
        rank, _ = world()
        if rank > 0:
            logger.error("graphfix: %s", problem)
            exit_process()

    def _publish_outcome(self, problem: str | None) -> None:
        """Publish the *problem* for which this rank stops, or None if the gate lets it pass."""
        status_record = self.status_record
        status_record.problem = problem
        status_record.publish()
        if problem is not None:
            status_record.flush()

    def _problem_of_gate(
        self, opening: str, consequence: str, error: Exception, *, ranks_depend: bool = False
    ) -> str | None:
        """Return the message by which an *error* of the gate itself stops the engine; None if the engine goes on.

        It goes on if the user requires no fix, and its record then has the reason under `unchecked`. *ranks_depend*:
        other ranks rely on this one to act alike, so it has to stop in any case.
        """
        logger.warning("graphfix: %s", consequence, exc_info=error)
        reason = f"{consequence} ({type(error).__name__}: {error})"
        decision = self.context.decision
        if not self.has_graphs or (decision is not None and decision.is_off):
            return None
        if self._requires_a_fix():
            return f"{opening}: {reason}. {_UNCHECKED} {_STOCK}"
        if ranks_depend:
            return f"{opening}: {reason}. {_STOCK}"
        self.status_record.unchecked = reason
        return None

    def _requires_a_fix(self) -> bool:
        """Tell if the user requires a fix, by the environment if the modes cannot be determined."""
        try:
            return self.context.manager.requires_any()
        except Exception:
            logger.exception("graphfix: could not determine the modes of the fixes")
            # Not False: an engine that must not run without a fix would start.
            import vllm_graphfix

            return vllm_graphfix._requires_a_fix()

    def _unapplied_fixes(self, worker_or_runner: Any, opening: str = _BEFORE) -> str | None:
        """Return the message by which required fixes that are not applied stop the engine, or None."""
        config = getattr(worker_or_runner, "vllm_config", None)
        model = getattr(config, "model_config", None) or getattr(worker_or_runner, "model_config", None)
        if getattr(model, "enforce_eager", False):
            if self.context.manager.requires_any() and not self._has_captured:
                logger.info("graphfix: this engine runs without CUDA graphs: no fix is needed, not even a required one")
            return None
        v2 = getattr(worker_or_runner, "use_v2_model_runner", None)
        if v2 is None and type(worker_or_runner).__module__ in RUNNERS:
            v2 = type(worker_or_runner).__module__ == RUNNERS[1]
        undone = self.context.manager.unapplied(v2=v2, recapture=self._has_captured)
        if not undone:
            return None
        return (
            f"{opening}: {'; '.join(undone)}. To serve without the fix, set its variable to off, "
            "or set VLLM_GRAPHFIX=on; `vllm-graphfix status` says more."
        )

    def _compare_ranks(self, worker_or_runner: Any, stage: str) -> str | None:
        """Compare the ranks; return the message that stops the engine, or None."""
        from vllm_graphfix.engine import rank_agreement

        early = self.reports.pending  # published before profiling and not compared
        if stage == WARM_UP:
            try:
                self.reports.publish_report(stage)  # first, before anything may fail: the others wait for it
            except Exception as error:
                self.reports.note_unpublished(error)  # raised below, if this rank is compared at all
        rank, world_size = self._record_rank(worker_or_runner)
        if world_size == 1:
            self._record_single_rank()
            return None
        if _is_elastic(worker_or_runner):
            logger.info(
                "graphfix: with --enable-elastic-ep ranks come and go, so they are not compared with each other"
            )
            return None
        if stage == WARM_UP:
            guarded(self._start_relay, rank, world_size)
        decision = self.context.decision
        stops = self.has_graphs and decision is not None and not decision.is_off
        if stage == WARM_UP and not stops and self.status_record.agreement is not None:
            return None  # a warning needs no second comparison: the one before profiling is recorded
        try:
            pending = self.reports.take(early, stops=stops)
            if pending is None:
                return None
            store, place, report = pending
            if stops and stage == WARM_UP:
                # Before the comparison, which may fail here: the others will wait for this rank's next report.
                self.reports.post_capture_group = store, rank, world_size
            # A warning is not worth minutes: the kill switch must bring a server up, also beside a rank without the
            # plugin.
            timeout = decision.agreement_timeout if decision and stops else rank_agreement.TIMEOUT_FOR_A_WARNING
            compare = functools.partial(rank_agreement.with_one_retry, rank_agreement.compare)
            agreement = self._agree(compare, (store, rank, world_size), place, report, timeout)
        except StoreLostError as error:
            agreement = self._record_lost_store(error)
        return self._difference(agreement)

    def _record_rank(self, worker_or_runner: Any) -> tuple[int, int]:
        """Put this process's place among the ranks into its record; return its rank and the world size."""
        parallel = worker_or_runner.vllm_config.parallel_config
        # A worker knows its local rank, a runner its device.
        local_rank = getattr(
            worker_or_runner, "local_rank", getattr(getattr(worker_or_runner, "device", None), "index", None)
        )
        rank, world_size = world()
        data_parallel_rank = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        self.status_record.rank = (rank, local_rank, world_size, data_parallel_rank)
        return rank, world_size

    def _start_relay(self, rank: int, world_size: int) -> None:
        self.status_record.start_relay(common_store(), rank, world_size)

    def _record_single_rank(self) -> None:
        """Record that the only rank agrees with itself."""
        from vllm_graphfix.engine.rank_agreement import Agreement

        report = self.reports.report()
        self.status_record.agreement = report and Agreement(report.token, report.engine, 1, 1, None, all_off=False)

    def _agree(
        self, compare: Callable[..., Agreement], group: tuple[Any, int, int], place: str, report: Any, timeout: float
    ) -> Agreement:
        """Compare the ranks of *group* (store, rank, world size), and record the result."""
        store, rank, world_size = group
        agreement = compare(
            store,
            place,
            rank,
            world_size,
            report,
            lambda text: logger.warning("graphfix: %s", text),
            host_of=lambda unresponsive: host_in(store, unresponsive, world_size),
            timeout=timeout,
        )
        # Before it is judged: the record has to show a difference that stops the engine.
        self.status_record.agreement = _with_earlier_followers(agreement, self.status_record.agreement)
        return agreement

    def _record_lost_store(self, error: StoreLostError) -> Agreement:
        """Record that the store is lost, and return that as a difference: to this rank all others are unresponsive."""
        from vllm_graphfix.engine.rank_agreement import Agreement

        report = self.reports.report()
        agreement = Agreement(report.token, None, world()[1], 1, str(error), all_off=report.off)
        self.status_record.agreement = agreement
        return agreement

    def _difference(self, agreement: Agreement) -> str | None:
        """Return the message by which a difference stops the engine; None if there is none, or if it is a warning.

        Raises RuntimeError if a rank goes on unchecked: the gate then acts as on an error of its own.
        """
        if agreement.difference is None:
            if agreement.unchecked:
                raise RuntimeError("; ".join(f"rank {other}: {why}" for other, why in agreement.unchecked.items()))
            return None
        message = f"the ranks of this engine do not agree. {agreement.difference}"
        if not self.has_graphs or agreement.all_off:
            logger.warning(
                "graphfix: %s The engine starts all the same, "
                "because it uses no CUDA graphs or because every fix is off.",
                message,
            )
            return None
        return f"{_BEFORE}: {message} {_WHAT_TO_DO}"

    def note_serving(self, worker: Any) -> None:
        """Take *worker* for the one whose graphs serve from now on."""
        self.serving = weakref.ref(worker)

    # -- after the capture -------------------------------------------------------------------------------------------

    def after_capture(self, worker_or_runner: Any) -> None:
        """Raise GraphfixError if a required fix failed in the capture, or if the ranks no longer agree."""
        problem = None
        try:
            problem = self._settle_capture(worker_or_runner) or self._unapplied_fixes(worker_or_runner, _AFTER)
            self._has_captured = True
        except Exception as error:
            guarded(self.reports.publish_end)  # or the others would wait for this rank's report
            # The others may take graphs out of dispatch without this rank, and would then wait for it in a collective.
            ranks_depend = self.reports.post_capture_group is not None
            consequence = "what failed while CUDA graphs were captured is not known"
            problem = problem or self._problem_of_gate(_AFTER, consequence, error, ranks_depend=ranks_depend)
            if problem is not None:
                guarded(self._publish_outcome, problem)  # first: the next line may end this process
                guarded(self._end_process, problem)
        guarded(self._publish_outcome, problem)
        if problem is not None:
            guarded(self._end_if_executor_is_elsewhere, worker_or_runner, problem)
            raise GraphfixError(problem)

    def _settle_capture(self, worker_or_runner: Any) -> str | None:
        """Compare the ranks, and act on failures of the capture; return the message that stops the engine, or None."""
        from vllm_graphfix.engine import rank_agreement
        from vllm_graphfix.engine.graph_dispatch import Dispatch
        from vllm_graphfix.engine.own_report import report_after_capture

        dispatch = Dispatch(getattr(worker_or_runner, "model_runner", None))
        failed = self.context.stop_recording_failures()
        group = self.reports.post_capture_group
        # Ranks that are not compared must not take graphs out of dispatch: all have to dispatch alike.
        may_leave_out = group is not None or (world()[1] == 1 and not _is_elastic(worker_or_runner))

        def name(graph: Any) -> str:
            """Return the name of *graph* on all ranks; "" if it cannot be left out."""
            return (may_leave_out and graph is not None and dispatch.name_of(graph)) or ""

        graphs = [(fix, name(graph)) for fix, errors in failed.items() for graph in errors]
        first_errors = {fix: next(iter(errors.values())) for fix, errors in failed.items()}
        report = report_after_capture(self.context, first_errors, graphs, can_leave_out=dispatch.can_leave_out)
        decision = self.context.decision
        if group is None or report is None or decision is None:
            return self._act_on_failures({world()[0]: report} if report and failed else {}, dispatch)
        store, rank, _ = group
        place = rank_agreement.publish(store, CAPTURED, rank, report)
        timeout = decision.agreement_timeout
        agreement = self._agree(rank_agreement.compare, group, place, report, timeout)
        self.status_record.unchecked = None  # compared after all
        if any(each.ended for each in agreement.failing.values()):
            return None  # an error of vLLM has ended the capture there, and will end the engine
        if agreement.difference is not None:
            return f"{_AFTER}: the ranks of this engine no longer agree. {agreement.difference} {_WHAT_TO_DO}"
        return self._act_on_failures(agreement.failing, dispatch)

    def _act_on_failures(self, failing: Mapping[int, Any], dispatch: Any) -> str | None:
        """Act on the failures of some ranks, alike on all; return the message that stops the engine, or None."""
        if not any(report.failed for report in failing.values()):
            return None
        from vllm_graphfix.engine.failed_graphs import settle_failures

        several_ranks = world()[1] > 1
        reasons = settle_failures(failing, dispatch, self.context.manager, several_ranks=several_ranks)
        if not reasons:
            return None
        return (
            f"{_AFTER}: {'; '.join(reasons)}. These graphs hold stock vLLM's defect for good. Start it again; if that "
            "happens again, set the variable of the fix to auto, which serves without these graphs, or to off, "
            "which serves them as stock does."
        )


def exit_process() -> None:
    """End this process without its clean-up, which could wait for a collective."""
    os._exit(_EXIT_CODE)


def _with_earlier_followers(agreement: Agreement, earlier: Agreement | None) -> Agreement:
    """Return *agreement* with the followers of an *earlier* comparison of the same engine.

    A rank that could not publish a report this time still belongs to the engine, and its record must be read.
    """
    if earlier is None or earlier.leader != agreement.leader:
        return agreement
    return agreement._replace(followers=tuple(sorted({*agreement.followers, *earlier.followers})))


def _uses_graphs(worker_or_runner: Any) -> bool:
    config = worker_or_runner.vllm_config
    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode.name != "NONE"


def _has_executor_elsewhere(worker_or_runner: Any) -> bool:
    """Tell if this rank is on a node of `--nnodes` without the executor of its ranks, as `--headless` ones are."""
    parallel = getattr(getattr(worker_or_runner, "vllm_config", None), "parallel_config", None)
    return bool(getattr(parallel, "node_rank_within_dp", 0) > 0)


def _is_elastic(worker_or_runner: Any) -> bool:
    """Tell if elastic expert parallelism may add and remove ranks such as this one."""
    parallel = getattr(getattr(worker_or_runner, "vllm_config", None), "parallel_config", None)
    return bool(getattr(parallel, "enable_elastic_ep", False))
