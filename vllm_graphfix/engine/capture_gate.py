"""The gate around a capture, where ranks agree.

A rank goes on if all ranks will do the same, and if every fix that the user insists on is there.

Wrapped are the functions in which ranks leave their reports for each other, in which they capture, and in which an
engine core ends what the gate has stopped. These wrappers change nothing that vLLM does, but that the gate may raise,
and that graphs in which a fix failed are not dispatched to; what goes wrong in them stays in them.

A graph cannot be mended: where a fix fails while it is captured, it holds stock's defect. A rank that left the capture
then would leave the others waiting in what they exchange there. So every rank captures on as stock does, and afterwards
all of them do the same about what failed on any.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graphfix.engine.role import host_name
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.ranks import common_store, host_in, world
from vllm_graphfix.settings import environment

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext
    from vllm_graphfix.engine.status_record import StatusRecord
    from vllm_graphfix.patching.applied_fix import FixState

STOPS = "vllm-graphfix stops this engine"
"""How every message begins that stops an engine."""
_BEFORE, _AFTER = f"{STOPS} before it captures its CUDA graphs", f"{STOPS} before it serves"
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_CAPTURE, _CAPTURED = "compile_or_warm_up_model", "captured"
"""The method of a worker that captures the graphs which serve, and the stage at which ranks are compared when it
has."""
_TELL_WHY = (State.FAILED, State.CONFLICT, State.INCOMPATIBLE)
"""States that nobody chose."""


_STOCK = "To serve stock vLLM, set VLLM_GRAPHFIX=off on all nodes."
_WHAT_TO_DO = (
    f"Give all its nodes the same vllm-graphfix, the same VLLM_GRAPHFIX variables and, with {environment.ROLLOUT}, the "
    f"same {environment.ROLLOUT_KEY}; where something failed, repair it. {_STOCK} Ranks that run different code could "
    "hang or answer wrongly, and a fix that has already taken effect on the other ranks cannot be undone there."
)
_MOST_LISTED = 8


class GraphfixError(RuntimeError):
    """The engine must not capture its graphs.

    Either a fix that the user insists on is not applied, or the ranks do not agree.
    """


class CaptureGate:
    """The gate of one process, which is a rank of an engine or hosts one."""

    def __init__(self, context: EngineContext, status_record: StatusRecord) -> None:
        self._context, self._status_record = context, status_record
        self._left: tuple[Any, str, Any] | None = None
        """Store, stage and report that this rank has left there and not compared yet."""
        self.captures_here = False
        """This process has come to a capture."""
        self._captures = False
        """The engine of this process uses graphs."""
        self._has_captured = False
        """It has been through one whose graphs serve. Elastic expert parallelism captures again."""
        self._compared: tuple[Any, int, int] | None = None
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
            return result

        if "_initialize_kv_caches" in vars(core.EngineCore):
            wrap(core.EngineCore, "_initialize_kv_caches", around)

    def _watch_profiling(self, owner: str, module: Any) -> None:
        """Around what every rank does before the first of them may capture a graph.

        Some ranks capture while they measure memory, and others do not (a start-up plan, 0.30.0 and later; a later
        pipeline stage that is still compiling): a rank that waits for the others must find their reports there already.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self.leave, "profiling")
            return stock(subject, *args, **kwargs)

        if "determine_available_memory" in vars(getattr(module, owner)):
            wrap(getattr(module, owner), "determine_available_memory", around)

    def _watch_capture(self, owner: str, method: str, module: Any) -> None:
        """Around a method that is about to capture graphs: late enough to know everything.

        On top of whatever is there: the gate changes nothing, and a conflict must not open it.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_capture(subject, method)
            if self._captures:
                guarded(self._context.begin_capture)
            try:
                result = stock(subject, *args, **kwargs)
                if self._captures and method == _CAPTURE:
                    self.after_capture(subject)
            except GraphfixError:
                raise
            except BaseException:  # vLLM tells of it; but ranks that wait for this one's report need not
                guarded(self._leave_an_end)
                raise
            finally:
                guarded(self._context.forget_capture)
            if method == _CAPTURE:
                guarded(self._status_record.started)
                guarded(self._status_record.keep)
                guarded(self._context.serve, subject, self._captures)
            return result

        found = getattr(module, owner, None)
        if found is not None and method in vars(found):  # before 0.18.0 no runner measures its graphs
            wrap(found, method, around)

    def before_capture(self, subject: Any, stage: str) -> None:
        """Raises GraphfixError if the engine must not capture.

        That is so if the ranks do not agree, or if a fix that the user insists on is needed and not applied.
        """
        problem = None
        try:
            self.captures_here, self._captures, self._compared = True, False, None
            early = self._left
            if stage == _CAPTURE:
                self.leave("warm-up")  # before anything else may fail: others wait for it
            self._captures = self._status_record.graphs = _uses_graphs(subject)
            config = getattr(subject, "vllm_config", None)
            # A worker knows its local rank, a runner its device.
            local_rank = getattr(subject, "local_rank", getattr(getattr(subject, "device", None), "index", None))
            problem = self._compare(config, stage, local_rank, early)
        except Exception:
            logger.exception("graphfix: could not compare the ranks of this engine")
        if problem is None:
            problem = self._undone_or_unknown(subject)
        status_record = self._status_record
        status_record.problem = problem
        guarded(status_record.tell)
        if problem is not None:
            guarded(status_record.finish)
            raise GraphfixError(problem)

    def _undone_or_unknown(self, subject: Any) -> str | None:
        try:
            return self._undone(subject)
        except Exception as error:
            logger.exception("graphfix: could not determine the states of the fixes")
            if not self._context.manager.insisted():
                return None
            return (
                f"{_BEFORE}: the states of the fixes are not known ({type(error).__name__}: {error}). Set "
                "VLLM_GRAPHFIX=off to serve without the fixes."
            )

    def _undone(self, subject: Any, stops: str = _BEFORE) -> str | None:
        config = getattr(subject, "vllm_config", None)
        model = getattr(config, "model_config", None) or getattr(subject, "model_config", None)
        if getattr(model, "enforce_eager", False):
            if self._context.manager.insisted() and not self._has_captured:
                logger.info("graphfix: this engine runs without CUDA graphs: no fix is needed, whatever is insisted on")
            return None
        v2 = getattr(subject, "use_v2_model_runner", None)
        if v2 is None and type(subject).__module__ in _RUNNERS:
            v2 = type(subject).__module__ == _RUNNERS[1]
        undone = self._context.manager.left_undone(v2=v2, again=self._has_captured)
        if not undone:
            return None
        return (
            f"{stops}: {'; '.join(undone)}. To serve without the fix, set its variable to off, "
            "or set VLLM_GRAPHFIX=on; `vllm-graphfix status` says more."
        )

    def leave(self, stage: str) -> None:
        """Leaves this rank's report for the others."""
        from vllm_graphfix.engine import rank_agreement

        rank, world_size = world()
        report = self.report() if world_size > 1 else None
        if report is not None:
            store = common_store()
            self._left = store, rank_agreement.leave(store, stage, rank, report), report

    def _compare(
        self, config: Any, stage: str, local_rank: int | None, early: tuple[Any, str, Any] | None
    ) -> str | None:
        """Compares the ranks; returns what stops the engine, or None.

        *early* is what was left before profiling and not compared.
        """
        from vllm_graphfix.engine import rank_agreement

        decision, status_record = self._context.decision, self._status_record
        parallel = config.parallel_config
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
        stops = self._captures and decision is not None and not decision.is_off
        if stage == _CAPTURE and not stops and status_record.agreement is not None:
            return None
        # Between profiling and here hosts may go apart by minutes. Where a difference is a warning at most, nobody
        # waits: what was said before is there already.
        left = early if early is not None and not stops else self._left
        self._left = None
        if left is None:
            return None
        store, place, report = left
        if (
            stops and stage == _CAPTURE
        ):  # also where comparing fails here: the others will wait for this rank's next report
            self._compared = store, rank, world_size
        found = status_record.agreement = rank_agreement.at_the_second_try(
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
        if found.difference is None:
            return None
        message = f"the ranks of this engine do not agree. {found.difference}"
        if not self._captures or found.all_off:
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
            problem = self._settle_capture(subject) or self._undone(subject, _AFTER)
        except Exception as error:
            logger.exception("graphfix: could not find out what failed in the capture")
            guarded(self._leave_an_end)  # or the others wait for this rank's report
            # Others may take graphs out of dispatch that this rank does not know of, and then wait for it in a
            # collective.
            if self._compared is not None or self._context.manager.insisted():
                problem = (
                    f"{_AFTER}: what failed while CUDA graphs were captured is not known ({type(error).__name__}: "
                    f"{error}). {_STOCK}"
                )
        self._has_captured = True
        if problem is not None:
            status_record = self._status_record
            status_record.problem = problem
            guarded(status_record.tell)
            guarded(status_record.finish)
            raise GraphfixError(problem)

    def _settle_capture(self, subject: Any) -> str | None:
        from vllm_graphfix.engine import rank_agreement
        from vllm_graphfix.engine.graph_dispatch import Dispatch

        dispatch = Dispatch(getattr(subject, "model_runner", None))
        failed = self._context.failed_in_capture()
        # Where ranks cannot tell each other, none may dispatch otherwise than the rest.
        together = self._compared is not None or (world()[1] == 1 and not _comes_and_goes(subject))
        graphs = [
            (fix, (together and graph is not None and dispatch.name_of(graph)) or "")
            for fix, reasons in failed.items()
            for graph in reasons
        ]
        report = self._report_after_capture({fix: next(iter(why.values())) for fix, why in failed.items()}, graphs)
        report = report and report._replace(can_leave_out=dispatch.can_leave_out)
        decision = self._context.decision
        if self._compared is None or report is None or decision is None:
            return self._go_by({world()[0]: report} if report and failed else {}, dispatch)
        store, rank, world_size = self._compared
        found = self._status_record.agreement = rank_agreement.compare(
            store,
            rank_agreement.leave(store, _CAPTURED, rank, report),
            rank,
            world_size,
            report,
            lambda text: logger.warning("graphfix: %s", text),
            silent_host=lambda silent: host_in(store, silent, world_size),
            timeout=decision.agreement_timeout,
        )
        if any(said.ended for said in found.failing.values()):
            return None  # an error of vLLM's own has ended the capture there, and will end the engine
        if found.difference is not None:
            return f"{_AFTER}: the ranks of this engine no longer agree. {found.difference} {_WHAT_TO_DO}"
        return self._go_by(found.failing, dispatch)

    def _report_after_capture(self, failed: Mapping[str, str], graphs: Sequence[tuple[str, str]]) -> Any:
        from vllm_graphfix.engine import rank_agreement

        report, named = self.report(), list(dict.fromkeys(graphs))
        if len(named) > rank_agreement.MOST_GRAPHS:
            named = [(fix, "") for fix in failed]
        return report and report._replace(
            failed={fix: rank_agreement.one_line(why) for fix, why in failed.items()}, graphs=named
        )

    def _leave_an_end(self) -> None:
        """Tells the ranks that wait for this one's report that its capture has ended in an error."""
        from vllm_graphfix.engine import rank_agreement

        report = self.report()
        if self._compared is not None and report is not None:
            store, rank, _ = self._compared
            rank_agreement.leave_an_end(
                store, rank_agreement.leave(store, _CAPTURED, rank, report._replace(ended=True))
            )

    def _go_by(self, failing: Mapping[int, Any], dispatch: Any) -> str | None:
        """Does the same on all ranks about what failed on some of them; returns what stops the engine, or None.

        Either the engine stops, or these graphs are left out of dispatch, or all ranks say that the fix failed.
        """
        from vllm_graphfix.engine import rank_agreement

        process, stopped = self._context.manager, []
        for fix in dict.fromkeys(fix for report in failing.values() for fix in report.failed):
            ranks = [rank for rank, report in failing.items() if fix in report.failed]
            graphs = sorted({name for rank in ranks for of, name in failing[rank].graphs if of == fix}, key=_by_size)
            where = f" on {rank_agreement.with_hosts(ranks, failing)}" if world()[1] > 1 else ""
            why = f"{failing[ranks[0]].failed[fix].rstrip('.')}{where} while CUDA graphs were captured"
            if process.required(fix):
                stopped.append(
                    f"{fix} failed{where} while CUDA graphs were captured ({_listed(graphs)}): "
                    f"{failing[ranks[0]].failed[fix]}"
                )
            elif "" in graphs or not all(report.can_leave_out for report in failing.values()):
                logger.warning(
                    "graphfix: %s failed: %s. The graphs that stock vLLM captures are served, with its defect", fix, why
                )
                process.settle_capture(fix, f"{why}; the graphs that stock captures are served", failed=True)
            else:
                dispatch.leave_out(graphs)
                what = f"not used, for it failed in them: {_listed(graphs)}; {why}"
                logger.warning(
                    "graphfix: %s failed: %s. Graphs that are not used for that, on any rank: %s",
                    fix,
                    why,
                    _listed(graphs),
                )
                process.settle_capture(fix, what, failed=False)
        if not stopped:
            return None
        return (
            f"{_AFTER}: {'; '.join(stopped)}. These graphs hold stock vLLM's defect for good. Start it again; if that "
            "happens again, set the variable of the fix to auto, which serves without these graphs, or to off, "
            "which serves them as stock does."
        )

    def report(self) -> Any:
        """What this rank says of itself; None before there is a decision."""
        from vllm_graphfix.engine.rank_agreement import RankReport, new_token, one_line

        decision, shadow = self._context.decision, self._context.shadow
        if decision is None:
            return None
        states: dict[str, FixState] = {}
        fault = ""
        try:
            states = self._context.manager.states() | (shadow.states() if shadow is not None else {})
        except Exception as error:
            logger.exception("graphfix: could not report the states of the fixes to the other ranks")
            fault = one_line(f"{type(error).__name__}: {error}")
        return RankReport(
            host=_or_else("an unknown host", host_name),
            pid=os.getpid(),
            engine=decision.engine,
            graphfix=decision.graphfix,
            vllm=decision.vllm,
            canary=decision.canary,
            master=decision.master.value,
            off=decision.is_off,
            misconfigured=decision.misconfigured,
            modes={name: mode.value for name, mode in decision.modes.items()}
            | {"shadow": f"{decision.shadow}, {decision.shadow_action.value}", "addresses": decision.addresses.value},
            states={name: _compared(state).value for name, state in states.items()},
            token=_or_else(decision.engine, new_token),
            reasons={name: one_line(state.reason) for name, state in states.items() if _compared(state) in _TELL_WHY},
            fault=fault,
        )


def _uses_graphs(subject: Any) -> bool:
    config = subject.vllm_config
    return config.compilation_config.cudagraph_mode.name != "NONE" and not config.model_config.enforce_eager


def _comes_and_goes(subject: Any) -> bool:
    """Whether this rank is one of those that elastic expert parallelism adds and takes away."""
    parallel = getattr(getattr(subject, "vllm_config", None), "parallel_config", None)
    return bool(getattr(parallel, "enable_elastic_ep", False))


def _compared(told: FixState) -> State:
    """The state that the ranks are compared by.

    A fix that was taken back for want of a companion stays where the companion's code is not imported: on the first
    stages of a pipeline whose last one has the drafter. That concerns how each rank captures its own graphs, and no
    other rank.
    """
    taken_back = (
        told.state is State.INCOMPATIBLE and told.diagnosis is not None and told.diagnosis.verdict is Verdict.AFFECTED
    )
    return State.WAITING if taken_back else told.state


def _by_size(graph: str) -> tuple[str, int]:
    manager_and_mode, _, tokens = graph.rpartition(" ")
    return manager_and_mode, int(tokens or 0)


def _listed(graphs: Sequence[str]) -> str:
    """Names of graphs for people, not all of many."""
    named = [name or "one or more that cannot be told" for name in graphs]
    more = len(named) - _MOST_LISTED
    return ", ".join(named[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _or_else(otherwise: str, make: Callable[[], str]) -> str:
    """What *make* makes, or *otherwise*: nothing that ranks have to agree about."""
    try:
        return make()
    except Exception:
        logger.exception("graphfix: reporting %r to the other ranks instead", otherwise)
        return otherwise
