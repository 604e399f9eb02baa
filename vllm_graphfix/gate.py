"""The gate before a capture: a rank goes on if all ranks will do the same, and if every fix that the user insists on is there.

Wrapped are the functions in which ranks leave their words for each other, in which they capture, and in which an engine core ends what the
gate has stopped. These wrappers change nothing that vLLM does, but that the gate may raise; what goes wrong in them stays in them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix import settings
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.hooks import guarded, when_imported, wrap
from vllm_graphfix.log import logger
from vllm_graphfix.role import host_name

if TYPE_CHECKING:
    from vllm_graphfix.membership import Membership
    from vllm_graphfix.progress import FixState

STOPS = "vllm-graphfix stops this engine before it captures its CUDA graphs"
"""How every message begins that stops an engine."""
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_TELL_WHY = (State.FAILED, State.CONFLICT, State.INCOMPATIBLE)
"""States that nobody chose."""


class GraphfixError(RuntimeError):
    """The engine must not capture its graphs: a fix that the user insists on is not applied, or the ranks do not agree."""


class Gate:
    """Of one process, which is a rank of an engine or hosts one."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._left: tuple[Any, str, Any] | None = None
        """Store, stage and word that this rank has left there and not compared yet."""
        self.captures_here = False
        """This process has come to a capture."""

    def watch(self) -> None:
        """Hooks the imports of the modules whose functions are wrapped."""
        when_imported("vllm.v1.engine.core", self._watch_start)
        for worker, owner in _WORKERS.items():
            when_imported(worker, functools.partial(self._watch_profiling, owner))
            when_imported(worker, functools.partial(self._watch_capture, owner, "compile_or_warm_up_model"))
        for runner in _RUNNERS:
            # V1 captures and discards graphs to learn their size (0.18.0 and later), before the worker captures those that it keeps.
            when_imported(runner, functools.partial(self._watch_capture, "GPUModelRunner", "profile_cudagraph_memory"))

    def _watch_start(self, core: Any) -> None:
        """Around the part of an engine core's start in which ranks may stop it.

        A silent rank is by then in a collective with ranks that have stopped. The core would wait for it at its own end, without limit;
        vLLM's own way to end an executor ends its processes.
        """

        def around(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = stock(engine, *args, **kwargs)
            except Exception as error:
                if STOPS in str(error):
                    guarded(engine.model_executor.shutdown)
                raise
            guarded(self._membership.telling.started)
            return result

        if "_initialize_kv_caches" in vars(core.EngineCore):
            wrap(core.EngineCore, "_initialize_kv_caches", around)

    def _watch_profiling(self, owner: str, module: Any) -> None:
        """Around what every rank does before the first of them may capture a graph.

        Some ranks capture while they measure memory, and others do not (a start-up plan, 0.30.0 and later; a later pipeline stage that is
        still compiling): a rank that waits for the others must find their words there already.
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
            result = stock(subject, *args, **kwargs)
            if method == "compile_or_warm_up_model":
                guarded(self._membership.telling.started)
                guarded(self._membership.telling.keep)
                guarded(self._membership.serve, subject)
            return result

        found = getattr(module, owner, None)
        if found is not None and method in vars(found):  # before 0.18.0 no runner measures its graphs
            wrap(found, method, around)

    def before_capture(self, subject: Any, stage: str) -> None:
        """Raises GraphfixError if the ranks do not agree, or if a fix that the user insists on is needed and not applied."""
        problem = None
        try:
            self.captures_here = True
            early = self._left
            if stage == "compile_or_warm_up_model":
                self.leave("warm-up")  # before anything else may fail: others wait for it
            config = getattr(subject, "vllm_config", None)
            # A worker knows its local rank, a runner its device.
            local_rank = getattr(subject, "local_rank", getattr(getattr(subject, "device", None), "index", None))
            problem = self._compare(config, stage, local_rank, early)
        except Exception:
            logger.exception("graphfix: could not compare the ranks of this engine")
        if problem is None:
            problem = self._undone_or_unknown(subject)
        telling = self._membership.telling
        telling.problem = problem
        guarded(telling.tell)
        if problem is not None:
            guarded(telling.finish)
            raise GraphfixError(problem)

    def _undone_or_unknown(self, subject: Any) -> str | None:
        try:
            return self._undone(subject)
        except Exception as error:
            logger.exception("graphfix: could not determine the states of the fixes")
            if not self._membership.process.insisted():
                return None
            return f"{STOPS}: the states of the fixes are not known ({type(error).__name__}: {error}). Set VLLM_GRAPHFIX=off to serve without the fixes."

    def _undone(self, subject: Any) -> str | None:
        config = getattr(subject, "vllm_config", None)
        model = getattr(config, "model_config", None) or getattr(subject, "model_config", None)
        if getattr(model, "enforce_eager", False):  # no graphs, none of these defects
            return None
        v2 = getattr(subject, "use_v2_model_runner", None)
        if v2 is None and type(subject).__module__ in _RUNNERS:
            v2 = type(subject).__module__ == _RUNNERS[1]
        undone = self._membership.process.left_undone(v2=v2)
        if not undone:
            return None
        return (
            f"{STOPS}: {'; '.join(undone)}. To serve without the fix, set its variable to off, "
            "or set VLLM_GRAPHFIX=on; `vllm-graphfix status` says more."
        )

    def leave(self, stage: str) -> None:
        """Leaves this rank's word for the others."""
        from vllm_graphfix import agreement

        rank, world_size = _world()
        word = self.word() if world_size > 1 else None
        if word is not None:
            store = agreement.common_store()
            self._left = store, agreement.leave(store, stage, rank, word), word

    def _compare(
        self, config: Any, stage: str, local_rank: int | None, early: tuple[Any, str, Any] | None
    ) -> str | None:
        """Compares the ranks; what stops the engine, or None. *early* is what was left before profiling and not compared."""
        from vllm_graphfix import agreement

        decision, telling = self._membership.decision, self._membership.telling
        parallel = config.parallel_config
        rank, world_size = _world()
        telling.rank = (rank, local_rank, world_size, int(getattr(parallel, "data_parallel_rank", 0) or 0))
        if world_size == 1:
            word = self.word()
            telling.agreement = word and agreement.Agreement(word.token, word.engine, 1, 1, None, all_off=False)
            return None
        if getattr(parallel, "enable_elastic_ep", False):
            logger.info(
                "graphfix: with --enable-elastic-ep ranks come and go, so they are not compared with each other"
            )
            return None
        captures = config.compilation_config.cudagraph_mode.name != "NONE" and not config.model_config.enforce_eager
        stops = captures and decision is not None and decision.master is not settings.Master.OFF
        if stage == "compile_or_warm_up_model" and not stops and telling.agreement is not None:
            return None
        # Between profiling and here hosts may go apart by minutes. Where a difference is a warning at most, nobody waits: what was said
        # before is there already.
        left = early if early is not None and not stops else self._left
        self._left = None
        if left is None:
            return None
        store, place, word = left
        found = telling.agreement = agreement.compare(
            store,
            place,
            rank,
            world_size,
            word,
            lambda text: logger.warning("graphfix: %s", text),
            silent_host=lambda silent: agreement.host_in(store, silent, world_size),
            # What is a warning at most is not worth minutes: the kill switch brings a server up, also beside a rank without the plugin.
            timeout=agreement.TIMEOUT if stops else agreement.TIMEOUT_FOR_A_WARNING,
        )
        if found.difference is None:
            return None
        message = f"the ranks of this engine do not agree. {found.difference}"
        if not captures or found.all_off:
            logger.warning(
                "graphfix: %s The engine starts all the same, because it uses no CUDA graphs or because every fix is off.",
                message,
            )
            return None
        return (
            f"{STOPS}: {message} Give all its nodes the same vllm-graphfix, the "
            f"same VLLM_GRAPHFIX variables and, with {settings.ROLLOUT}, the same {settings.ROLLOUT_KEY}; where something failed, repair "
            "it. To serve stock vLLM, set VLLM_GRAPHFIX=off on all nodes. Ranks that run different code could hang or answer wrongly, "
            "and a fix that has already taken effect on the other ranks cannot be undone there."
        )

    def word(self) -> Any:
        """What this rank says of itself; None before there is a decision."""
        from vllm_graphfix.agreement import Word, new_token, shown

        decision, shadow = self._membership.decision, self._membership.shadow
        if decision is None:
            return None
        states: dict[str, FixState] = {}
        fault = ""
        try:
            states = self._membership.process.states() | (shadow.states() if shadow is not None else {})
        except Exception as error:
            logger.exception("graphfix: could not report the states of the fixes to the other ranks")
            fault = shown(f"{type(error).__name__}: {error}")
        return Word(
            host=_or_else("an unknown host", host_name),
            pid=os.getpid(),
            engine=decision.engine,
            graphfix=decision.graphfix,
            vllm=decision.vllm,
            canary=decision.canary,
            master=decision.master.value,
            modes={name: mode.value for name, mode in decision.modes.items()}
            | {"shadow": f"{decision.shadow}, {decision.shadow_action.value}"},
            states={name: _compared(state).value for name, state in states.items()},
            token=_or_else(decision.engine, new_token),
            reasons={name: shown(state.reason) for name, state in states.items() if _compared(state) in _TELL_WHY},
            fault=fault,
        )


def _compared(told: FixState) -> State:
    """The state that the ranks are compared by.

    A fix that was taken back for want of a companion stays where the companion's code is not imported: on the first stages of a pipeline
    whose last one has the drafter. That concerns how each rank captures its own graphs, and no other rank.
    """
    taken_back = (
        told.state is State.INCOMPATIBLE and told.diagnosis is not None and told.diagnosis.verdict is Verdict.AFFECTED
    )
    return State.WAITING if taken_back else told.state


def _or_else(otherwise: str, make: Callable[[], str]) -> str:
    """What *make* makes, or *otherwise*: nothing that ranks have to agree about."""
    try:
        return make()
    except Exception:
        logger.exception("graphfix: reporting %r to the other ranks instead", otherwise)
        return otherwise


def _world() -> tuple[int, int]:
    """This rank, and how many there are."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)
