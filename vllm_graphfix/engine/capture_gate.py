"""The gate around a capture, where ranks agree.

A rank goes on if all ranks will do the same, and if every fix that the user insists on is there.

Wrapped are the functions in which ranks leave their reports for each other, in which they capture, and in which an
engine core ends what the gate has stopped. These wrappers change nothing that vLLM does, but that the gate may raise,
and that graphs in which a fix failed are not dispatched to; what goes wrong in them stays in them, or stops the engine
where the user insists on a fix: a gate that could not look lets nobody through.

A graph cannot be mended: where a fix fails while it is captured, it holds stock's defect. A rank that left the capture
then would leave the others waiting in what they exchange there. So every rank captures on as stock does, and afterwards
all of them do the same about what failed on any.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.ranks import common_store, host_in, world
from vllm_graphfix.settings import environment

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext
    from vllm_graphfix.engine.rank_agreement import Agreement
    from vllm_graphfix.engine.status_record import StatusRecord

STOPS = "vllm-graphfix stops this engine"
"""How every message begins that stops an engine."""
_BEFORE, _AFTER = f"{STOPS} before it captures its CUDA graphs", f"{STOPS} before it serves"
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_CAPTURE, _CAPTURED = "compile_or_warm_up_model", "captured"
"""The method of a worker that captures the graphs which serve, and the stage at which ranks are compared when it
has."""
_PROFILING, _WARM_UP = "profiling", "warm-up"
"""The stages at which ranks are compared before a capture: one that measures graphs, and the one that serves."""
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
    """The engine must not capture its graphs.

    Either a fix that the user insists on is not applied, or the ranks do not agree.
    """


class CaptureGate:
    """The gate of one process, which is a rank of an engine or hosts one."""

    def __init__(self, context: EngineContext, status_record: StatusRecord) -> None:
        self._context, self._status_record = context, status_record
        self._pending: tuple[Any, str, Any] | None = None
        """Store, stage and report that this rank has left there and not compared yet."""
        self._leave_error: Exception | None = None
        """The error that kept this rank from leaving its last report."""
        self.captures_here = False
        """This process has come to a capture."""
        self._has_graphs = False
        """The engine of this process uses graphs, or may use them."""
        self._has_captured = False
        """It has been through one whose graphs serve. Elastic expert parallelism captures again."""
        self._to_compare_again: tuple[Any, int, int] | None = None
        """Store, rank and number of the ranks that were compared before this capture, and are compared again after
        it."""

    def watch(self) -> None:
        """Hooks the imports of the modules whose functions are wrapped."""
        when_imported("vllm.v1.engine.core", self._watch_start)
        for worker, owner in _WORKERS.items():
            when_imported(worker, functools.partial(self._watch_profiling, owner))
            when_imported(worker, functools.partial(self._watch_capture, owner, _CAPTURE))
        for runner in _RUNNERS:
            # V1 captures and discards graphs to learn their size (0.18.0 and later), before the worker captures those
            # that it keeps.
            when_imported(runner, functools.partial(self._watch_capture, "GPUModelRunner", "profile_cudagraph_memory"))

    def _watch_start(self, core: Any) -> None:
        """Around the part of an engine core's start in which ranks may stop it.

        A silent rank is by then in a collective with ranks that have stopped. The core would wait for it at its own
        end, without limit; vLLM's own way to end an executor ends its processes.
        """

        def around(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = stock(engine, *args, **kwargs)
            except Exception as error:
                if STOPS in str(error):
                    guarded(engine.model_executor.shutdown)
                raise
            guarded(self._status_record.started)
            guarded(self._status_record.keep)  # from now on it may be stuck in a step
            return result

        if "_initialize_kv_caches" in vars(core.EngineCore):
            wrap(core.EngineCore, "_initialize_kv_caches", around)

    def _watch_profiling(self, owner: str, module: Any) -> None:
        """Around what every rank does before the first of them may capture a graph.

        Some ranks capture while they measure memory, and others do not (a start-up plan, 0.30.0 and later; a later
        pipeline stage that is still compiling): a rank that waits for the others must find their reports there already.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self.leave, _PROFILING)
            return stock(subject, *args, **kwargs)

        if "determine_available_memory" in vars(getattr(module, owner)):
            wrap(getattr(module, owner), "determine_available_memory", around)

    def _watch_capture(self, owner: str, method: str, module: Any) -> None:
        """Around a method that is about to capture graphs: late enough to know everything.

        On top of whatever is there: the gate changes nothing, and a conflict must not open it.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_capture(subject, method)
            if self._has_graphs:
                guarded(self._context.begin_capture)
            try:
                result = stock(subject, *args, **kwargs)
                if self._has_graphs and method == _CAPTURE:
                    self.after_capture(subject)
            except GraphfixError:
                raise
            except BaseException:  # vLLM tells of it; but ranks that wait for this one's report need not
                guarded(self._leave_end)
                raise
            finally:
                guarded(self._context.forget_capture)
            if method == _CAPTURE:
                guarded(self._status_record.started)
                guarded(self._status_record.keep)
                guarded(self._context.serve, subject, self._has_graphs)
            return result

        found = getattr(module, owner, None)
        if found is not None and method in vars(found):  # before 0.18.0 no runner measures its graphs
            wrap(found, method, around)

    def before_capture(self, subject: Any, stage: str) -> None:
        """Raises GraphfixError if the engine must not capture.

        That is so if the ranks do not agree, if a fix that the user insists on is needed and not applied, or if the
        gate itself fails and the user insists on a fix.
        """
        problem: str | None = None
        failure: Exception | None = None
        consequence = _NOT_COMPARED
        try:
            self.captures_here = True
            self._to_compare_again = self._status_record.unchecked = None
            self._has_graphs = self._status_record.graphs = _uses_graphs(subject)
        except Exception as error:
            failure, self._has_graphs = error, True  # what watches graphs must not miss any
        try:
            # A rank that is going to stop leaves no report: by it the others would go on, into a collective with it.
            if failure is None or not self._insists():
                problem = self._compare_ranks(subject, stage)
        except Exception as error:
            failure = failure or error
        try:
            problem = problem or self._unapplied_fixes(subject)
        except Exception as error:
            if failure is None:
                failure, consequence = error, "the states of the fixes are not known"
        if failure is not None and problem is None:
            problem = self._stop_or_go_on(_BEFORE, consequence, failure)
            if problem is not None:
                guarded(self._leave_end)  # or the others wait for this rank's report after the capture
                guarded(self._leave_stop, _WARM_UP if stage == _CAPTURE else _PROFILING, failure)
            elif self._status_record.unchecked is not None and not _is_elastic(subject):
                guarded(self._leave_unchecked, _WARM_UP if stage == _CAPTURE else _PROFILING, failure)
        guarded(self._say, problem)
        if problem is not None:
            if failure is not None:
                guarded(self._end_process, problem)
            raise GraphfixError(problem)

    def _end_process(self, problem: str) -> None:
        """End the process of a rank that stops because of an error of its own, which the other ranks do not share.

        To raise is not enough: vLLM's executor takes the ranks' results in their order and waits without limit for rank
        0, which may have gone on into a collective with this rank. It notices at once that a process has ended.
        """
        rank, _ = world()
        if rank > 0:
            logger.error("graphfix: %s", problem)
            exit_process()

    def _say(self, problem: str | None) -> None:
        """Puts into the record that the gate lets this rank through, or the *problem* for which it stops."""
        status_record = self._status_record
        status_record.problem = problem
        status_record.tell()
        if problem is not None:
            status_record.finish()

    def _stop_or_go_on(self, stops: str, consequence: str, error: Exception, *, together: bool = False) -> str | None:
        """Deals with an *error* of the gate's own; returns what stops the engine, or None.

        Where nobody insists on a fix the engine goes on, and its record says so, if there is something to agree about.
        """
        logger.warning("graphfix: %s", consequence, exc_info=error)
        reason = f"{consequence} ({type(error).__name__}: {error})"
        decision = self._context.decision
        if not self._has_graphs or (decision is not None and decision.is_off):
            return None
        if self._insists():
            return f"{stops}: {reason}. {_UNCHECKED} {_STOCK}"
        if together:
            return f"{stops}: {reason}. {_STOCK}"
        self._status_record.unchecked = reason
        return None

    def _insists(self) -> bool:
        """Tell if the user insists on a fix; where this process cannot tell, the environment does."""
        try:
            return self._context.manager.requires_any()
        except Exception:
            logger.exception("graphfix: could not determine the modes of the fixes")
            import vllm_graphfix

            return vllm_graphfix._requires_a_fix()

    def _unapplied_fixes(self, subject: Any, stops: str = _BEFORE) -> str | None:
        config = getattr(subject, "vllm_config", None)
        model = getattr(config, "model_config", None) or getattr(subject, "model_config", None)
        if getattr(model, "enforce_eager", False):
            if self._context.manager.requires_any() and not self._has_captured:
                logger.info("graphfix: this engine runs without CUDA graphs: no fix is needed, whatever is insisted on")
            return None
        v2 = getattr(subject, "use_v2_model_runner", None)
        if v2 is None and type(subject).__module__ in _RUNNERS:
            v2 = type(subject).__module__ == _RUNNERS[1]
        undone = self._context.manager.unapplied(v2=v2, again=self._has_captured)
        if not undone:
            return None
        return (
            f"{stops}: {'; '.join(undone)}. To serve without the fix, set its variable to off, "
            "or set VLLM_GRAPHFIX=on; `vllm-graphfix status` says more."
        )

    def leave(self, stage: str) -> None:
        """Leaves this rank's report for the others."""
        try:
            from vllm_graphfix.engine import rank_agreement

            self._pending = self._leave_error = None
            rank, world_size = world()
            report = self.report() if world_size > 1 else None
            if report is not None:
                store = common_store()
                self._pending = store, rank_agreement.leave(store, stage, rank, report), report
        except Exception as error:
            self._pending, self._leave_error = None, error
            if stage == _PROFILING:  # this rank may come to the gate only after another one that waits for it there
                guarded(self._leave_unchecked, stage, error)
            raise

    def _leave_unchecked(self, stage: str, error: Exception) -> None:
        """Lets the other ranks go on, too, where they wait at *stage* for a report that this one could not leave.

        Whoever goes on compares again after the capture, when all of them have to do the same about what failed in it.
        """
        from vllm_graphfix.engine import rank_agreement

        rank, world_size = world()
        if world_size == 1 or self._insists():  # a rank that is going to stop lets nobody go on
            return
        store = common_store()
        if stage == _WARM_UP:
            self._to_compare_again = store, rank, world_size
        rank_agreement.leave_unchecked(store, stage, rank, f"{type(error).__name__}: {error}")

    def _leave_stop(self, stage: str, error: Exception) -> None:
        """Stop the other ranks that wait at *stage* for a report that this one has not left."""
        from vllm_graphfix.engine import rank_agreement

        rank, world_size = world()
        if world_size > 1:
            rank_agreement.leave_stop(common_store(), stage, rank, f"{type(error).__name__}: {error}")

    def _compare_ranks(self, subject: Any, stage: str) -> str | None:
        """Compares the ranks; returns what stops the engine, or None."""
        from vllm_graphfix.engine import rank_agreement

        early = self._pending  # left before profiling and not compared
        if stage == _CAPTURE:
            try:
                self.leave(_WARM_UP)  # before anything else may fail: others wait for it
            except Exception as error:  # it is raised below, where it matters
                self._leave_error = error
        decision, status_record = self._context.decision, self._status_record
        parallel = subject.vllm_config.parallel_config
        # A worker knows its local rank, a runner its device.
        local_rank = getattr(subject, "local_rank", getattr(getattr(subject, "device", None), "index", None))
        rank, world_size = world()
        status_record.rank = (rank, local_rank, world_size, int(getattr(parallel, "data_parallel_rank", 0) or 0))
        if world_size == 1:
            report = self.report()
            status_record.agreement = report and rank_agreement.Agreement(
                report.token, report.engine, 1, 1, None, all_off=False
            )
            return None
        if getattr(parallel, "enable_elastic_ep", False):
            logger.info(
                "graphfix: with --enable-elastic-ep ranks come and go, so they are not compared with each other"
            )
            return None
        stops = self._has_graphs and decision is not None and not decision.is_off
        if stage == _CAPTURE and not stops and status_record.agreement is not None:
            return None
        # Between profiling and here hosts may go apart by minutes. Where a difference is a warning at most, nobody
        # waits: what was said before is there already.
        left = early if early is not None and not stops else self._pending
        self._pending = None
        if left is None:
            if self._leave_error is not None:
                raise self._leave_error
            return None
        store, place, report = left
        if (
            stops and stage == _CAPTURE
        ):  # also where comparing fails here: the others will wait for this rank's next report
            self._to_compare_again = store, rank, world_size
        found = rank_agreement.with_one_retry(
            rank_agreement.compare,
            store,
            place,
            rank,
            world_size,
            report,
            lambda text: logger.warning("graphfix: %s", text),
            silent_host=lambda silent: host_in(store, silent, world_size),
            # What is a warning at most is not worth minutes: the kill switch brings a server up, also beside a rank
            # without the plugin.
            timeout=decision.agreement_timeout if decision and stops else rank_agreement.TIMEOUT_FOR_A_WARNING,
        )
        status_record.agreement = _with_earlier_followers(found, status_record.agreement)
        if found.difference is None:
            if found.unchecked:  # as if it had happened here: all ranks go on unchecked, or stop
                raise RuntimeError("; ".join(f"rank {other}: {why}" for other, why in found.unchecked.items()))
            return None
        message = f"the ranks of this engine do not agree. {found.difference}"
        if not self._has_graphs or found.all_off:
            logger.warning(
                "graphfix: %s The engine starts all the same, "
                "because it uses no CUDA graphs or because every fix is off.",
                message,
            )
            return None
        return f"{_BEFORE}: {message} {_WHAT_TO_DO}"

    # -- after the capture -------------------------------------------------------------------------------------------

    def after_capture(self, subject: Any) -> None:
        """Raises GraphfixError if the engine must not serve.

        That is so if a fix that the user insists on failed in the capture, or if the ranks no longer agree.
        """
        problem = None
        try:
            problem = self._settle_capture(subject) or self._unapplied_fixes(subject, _AFTER)
            self._has_captured = True
        except Exception as error:
            guarded(self._leave_end)  # or the others wait for this rank's report
            # Others may take graphs out of dispatch that this rank does not know of, and then wait for it in a
            # collective.
            together = self._to_compare_again is not None
            consequence = "what failed while CUDA graphs were captured is not known"
            problem = problem or self._stop_or_go_on(_AFTER, consequence, error, together=together)
            if problem is not None:
                guarded(self._say, problem)
                guarded(self._end_process, problem)
        guarded(self._say, problem)
        if problem is not None:
            raise GraphfixError(problem)

    def _settle_capture(self, subject: Any) -> str | None:
        from vllm_graphfix.engine import rank_agreement
        from vllm_graphfix.engine.graph_dispatch import Dispatch
        from vllm_graphfix.engine.own_report import report_after_capture

        dispatch = Dispatch(getattr(subject, "model_runner", None))
        failed = self._context.failures_in_capture()
        # Where ranks cannot tell each other, none may dispatch otherwise than the rest.
        together = self._to_compare_again is not None or (world()[1] == 1 and not _is_elastic(subject))
        graphs = [
            (fix, (together and graph is not None and dispatch.name_of(graph)) or "")
            for fix, reasons in failed.items()
            for graph in reasons
        ]
        first_errors = {fix: next(iter(errors.values())) for fix, errors in failed.items()}
        report = report_after_capture(self._context, first_errors, graphs, can_leave_out=dispatch.can_leave_out)
        decision = self._context.decision
        if self._to_compare_again is None or report is None or decision is None:
            return self._act_on_failures({world()[0]: report} if report and failed else {}, dispatch)
        store, rank, world_size = self._to_compare_again
        found = rank_agreement.compare(
            store,
            rank_agreement.leave(store, _CAPTURED, rank, report),
            rank,
            world_size,
            report,
            lambda text: logger.warning("graphfix: %s", text),
            silent_host=lambda silent: host_in(store, silent, world_size),
            timeout=decision.agreement_timeout,
        )
        self._status_record.agreement = _with_earlier_followers(found, self._status_record.agreement)
        self._status_record.unchecked = None  # compared after all
        if any(said.ended for said in found.failing.values()):
            return None  # an error of vLLM's own has ended the capture there, and will end the engine
        if found.difference is not None:
            return f"{_AFTER}: the ranks of this engine no longer agree. {found.difference} {_WHAT_TO_DO}"
        return self._act_on_failures(found.failing, dispatch)

    def _leave_end(self) -> None:
        """Tells the ranks that wait for this one's report that its capture has ended in an error."""
        from vllm_graphfix.engine import rank_agreement

        report = self.report()
        if self._to_compare_again is not None and report is not None:
            store, rank, _ = self._to_compare_again
            rank_agreement.leave_an_end(
                store, rank_agreement.leave(store, _CAPTURED, rank, report._replace(ended=True))
            )

    def _act_on_failures(self, failing: Mapping[int, Any], dispatch: Any) -> str | None:
        """Does the same on all ranks about what failed on some of them; returns what stops the engine, or None."""
        if not any(report.failed for report in failing.values()):
            return None
        from vllm_graphfix.engine.failed_graphs import settle_failures

        several_ranks = world()[1] > 1
        reasons = settle_failures(failing, dispatch, self._context.manager, several_ranks=several_ranks)
        if not reasons:
            return None
        return (
            f"{_AFTER}: {'; '.join(reasons)}. These graphs hold stock vLLM's defect for good. Start it again; if that "
            "happens again, set the variable of the fix to auto, which serves without these graphs, or to off, "
            "which serves them as stock does."
        )

    def report(self) -> Any:
        """What this rank says of itself; None before there is a decision."""
        from vllm_graphfix.engine.own_report import own_report

        return own_report(self._context)


def exit_process() -> None:
    """End this process without its clean-up, which may wait for a collective."""
    os._exit(_EXIT_CODE)


def _with_earlier_followers(found: Agreement, earlier: Agreement | None) -> Agreement:
    """Return *found* with the followers of an *earlier* comparison of the same engine.

    A rank that could leave no report this time is one of the engine's all the same, and its record must be read.
    """
    if earlier is None or earlier.leader != found.leader:
        return found
    return found._replace(followers=tuple(sorted({*found.followers, *earlier.followers})))


def _uses_graphs(subject: Any) -> bool:
    config = subject.vllm_config
    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode.name != "NONE"


def _is_elastic(subject: Any) -> bool:
    """Whether this rank is one of those that elastic expert parallelism adds and takes away."""
    parallel = getattr(getattr(subject, "vllm_config", None), "parallel_config", None)
    return bool(getattr(parallel, "enable_elastic_ep", False))
