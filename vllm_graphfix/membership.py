"""This process as a part of an engine: whose decision it goes by, and whether all ranks agree before they capture graphs.

vLLM's own functions are wrapped here where an engine begins, where its graphs are about to be captured and where its metrics are put
together. These wrappers change nothing that vLLM does, whatever the switches say; all that goes wrong in them stays in them.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any

from vllm_graphfix import rollout, settings
from vllm_graphfix.fix import Fix, Mode, State, Verdict
from vllm_graphfix.log import logger
from vllm_graphfix.process import FixState, Process, Wanted, when_imported
from vllm_graphfix.role import Role, host_name, is_api_server_of, only_asks, place, served_model
from vllm_graphfix.rollout import Decision
from vllm_graphfix.shadow.rate import OFF, parse
from vllm_graphfix.telling import Telling

STOPS = "vllm-graphfix stops this engine before it captures its CUDA graphs"
"""How every message begins that stops an engine."""
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_TELL_WHY = (State.FAILED, State.CONFLICT, State.INCOMPATIBLE)
"""States that nobody chose."""


_configuring: ContextVar[bool] = ContextVar("graphfix_configuring", default=False)
"""An engine is being configured: of its functions that are wrapped, one may call another."""


class GraphfixError(RuntimeError):
    """The engine must not capture its graphs: a fix that the user insists on is not applied, or the ranks do not agree."""


class Membership:
    """One process. `start` may be called any number of times."""

    def __init__(self, fixes: Iterable[Fix], environment: MutableMapping[str, str] = os.environ) -> None:
        self.fixes = tuple(fixes)
        self.environment = environment
        self._names = tuple(fix.name for fix in self.fixes)
        self._observed = frozenset(fix.name for fix in self.fixes if fix.default is Mode.OBSERVE)
        wanted = settings.read(environment, self._names, self._observed)
        self.process = Process(self.fixes, Wanted(wanted.master, wanted.modes))
        self._lock = threading.Lock()
        self._started = False
        self.role = Role.FRONT_END
        self.decision: Decision | None = None
        self.inherited = False
        self.model: str | None = None
        """Of the engine that this process is a part of, or configured last."""
        self._configured = False
        self._ranks: int | None = None
        """Of the engine that this process configured last; None if that changes while it runs."""
        self._shadow: Process | None = None
        """What the shadow check has put around vLLM's functions; None where nothing was ever to be checked."""
        self._decisions: dict[str | None, Decision] = {}
        """Of the engines that this process configured, by `VllmConfig.instance_id`."""
        self._left: tuple[Any, str, Any] | None = None
        """Store, stage and word that this rank has left there and not compared yet."""
        self._captures_here = False
        self._telling = Telling(self)

    # -- the decision --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Decides, or goes by what was decided, and engages the fixes. Raises only what must stop `register`."""
        with self._lock:
            if self._started:
                return
            self._started = True
        self.role, config = place()
        self.model = served_model(config)
        self._join(config)
        when_imported("vllm.envs", self._register_names)
        if self.role is Role.INSPECTION:
            return
        when_imported("vllm.plugins", self._watch_plugins)
        when_imported("vllm.engine.arg_utils", self._watch_engines)
        when_imported("vllm.v1.engine.core", self._watch_start)
        when_imported("vllm.v1.worker.gpu_worker", functools.partial(self._watch_profiling, "Worker"))
        when_imported("vllm.v1.worker.cpu_worker", functools.partial(self._watch_profiling, "CPUWorker"))
        when_imported("vllm.v1.worker.gpu_worker", functools.partial(self._gate, "Worker", "compile_or_warm_up_model"))
        when_imported(
            "vllm.v1.worker.cpu_worker", functools.partial(self._gate, "CPUWorker", "compile_or_warm_up_model")
        )
        for runner in _RUNNERS:
            # V1 captures and discards graphs to learn their size (0.18.0 and later), before the worker captures those that it keeps.
            when_imported(runner, functools.partial(self._gate, "GPUModelRunner", "profile_cudagraph_memory"))
        when_imported("vllm.entrypoints.serve.instrumentator.metrics", self._watch_metrics)
        os.register_at_fork(after_in_child=self._forked)
        if not only_asks():
            # For a process, such as an API server's, that imports no code of a fix.
            atexit.register(self.process.end)
        if self.role in (Role.ENGINE_CORE, Role.WORKER):
            _guarded(self._telling.tell)

    def _join(self, config: Any) -> None:
        """Goes by the decision that was handed on, or decides."""
        found = rollout.handed_on(self.environment.get(settings.DECISION), _vllm_version(), frozenset(self._names))
        if found is not None and self._is_ours(found, config):
            self.decision, self.inherited = found, True
            self._engage(found)
            return
        if self.role in (Role.ENGINE_CORE, Role.WORKER) and self.environment.get(settings.DECISION):
            logger.warning(
                "graphfix: %s is not this engine's; this process decides for itself, from its own environment",
                settings.DECISION,
            )
        self._decide()

    def _is_ours(self, decision: Decision, config: Any) -> bool:
        """Whether this process is a part of the engine that *decision* was made for."""
        if self.role is Role.FRONT_END:
            # An environment is inherited by whatever is started, another engine included.
            if not is_api_server_of(decision):
                return False
            self.role = Role.API_SERVER
        # A Ray node keeps the environment of the engine that started it, and newer executors do not overwrite it.
        instance = getattr(config, "instance_id", None)
        if not instance:
            return True
        # Data-parallel engine cores on Ray have their rank appended to it (0.21.0 and later).
        return decision.instance is not None and f"{instance}_dp".startswith(f"{decision.instance}_dp")

    def _decide(self) -> None:
        wanted = settings.read(self.environment, self._names, self._observed)
        decision = rollout.decide(wanted, _vllm_version())
        problems = [*wanted.problems, *filter(None, [decision.refused])]
        if self.decision is not None and decision.same_choice(self.decision):
            if not self._configured and self.decision.pid == os.getpid():
                return  # no engine has begun since, nor has this process been forked from the one that decided
            problems = []  # said already
        elif self._captures_here:
            logger.warning(
                "graphfix: this process has captured graphs; a second engine in it goes by the decision of the first. "
                "Start it in a process of its own, or with VLLM_ENABLE_V1_MULTIPROCESSING=1."
            )
            return
        for problem in problems:
            logger.warning("graphfix: %s", problem)
        self.decision, self.inherited = decision, False
        self.environment[settings.DECISION] = decision.encode()
        self._engage(decision)

    def _engage(self, decision: Decision) -> None:
        self.process.start(_wanted(decision))
        _guarded(self._engage_shadow, decision)

    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """Of every fix, and of the shadow check where it is on."""
        found = self.process.states(diagnose=diagnose)
        if self._shadow is None:
            return found
        from vllm_graphfix.shadow import process

        return found | {process.NAME: process.state(self._shadow.states(diagnose=diagnose))}

    def _engage_shadow(self, decision: Decision) -> None:
        rate = parse(decision.shadow if decision.canary and decision.master is not settings.Master.OFF else OFF)
        if self._shadow is None and not rate:
            return
        from vllm_graphfix.shadow import process
        from vllm_graphfix.shadow.runners import RUNNERS

        process.start(rate, decision.shadow_action)
        wanted = _wanted(decision)._replace(modes={each.name: Mode.AUTO if rate else Mode.OFF for each in RUNNERS})
        self._shadow = self._shadow or Process(RUNNERS, wanted)
        self._shadow.start(wanted)

    def _watch_engines(self, arg_utils: Any) -> None:
        """Around the function with which an engine begins: each engine of this process gets a decision of its own."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if _configuring.get() or self.role not in (Role.FRONT_END, Role.API_SERVER):
                return stock(*args, **kwargs)
            token = _configuring.set(True)
            try:
                _guarded(self._begin_engine)
                config = stock(*args, **kwargs)
                _guarded(self._configure, config)
            finally:
                _configuring.reset(token)
            return config

        # `vllm serve` has the second. It inherits the method, unless another plugin has given it one that calls what was inherited then.
        for name in ("EngineArgs", "AsyncEngineArgs"):
            engine_args = getattr(arg_utils, name, None)
            if engine_args is not None and "create_engine_config" in vars(engine_args):
                _wrap(engine_args, "create_engine_config", around)

    def _begin_engine(self) -> None:
        if self.role is Role.FRONT_END:
            self._decide()

    def _configure(self, config: Any) -> None:
        parallel = config.parallel_config
        # Data-parallel ranks of a dense model are engines of their own to vLLM; those of another node are another front-end's.
        together = (
            parallel.data_parallel_size
            if getattr(config.model_config, "is_moe", True)
            else parallel.data_parallel_size_local
        )
        # With elastic expert parallelism ranks come and go.
        self._ranks = None if getattr(parallel, "enable_elastic_ep", False) else int(parallel.world_size * together)
        self._configured, self.model = True, served_model(config)
        if self.decision is not None and self.role is Role.FRONT_END:
            self.decision = self.decision._replace(instance=str(config.instance_id))
            self.environment[settings.DECISION] = self.decision.encode()
            self._decisions[self.decision.instance] = self.decision
            if self.decision.rollout is not None:
                inside = "in" if self.decision.canary else "not in"
                logger.info(
                    "graphfix: this engine is %s the rollout of %s (bucket %d of %d, key %r)",
                    *(
                        inside,
                        rollout.shown(self.decision.rollout),
                        self.decision.bucket,
                        rollout.BUCKETS,
                        self.decision.key,
                    ),
                )
        self._telling.tell()

    def _watch_plugins(self, plugins: Any) -> None:
        """Around what vLLM calls in each of its processes; in one that was forked, it does not call `register` again."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            if self._telling.forked:
                _guarded(self._settle_in_fork)
            return result

        _wrap(plugins, "load_general_plugins", around)

    def _forked(self) -> None:
        self._lock = threading.Lock()
        self.process.forked()
        if self._shadow is not None:
            self._shadow.forked()
        for fix in self.fixes:
            for event in fix.events:
                event.count = 0
            fix.fallback.reason = None
        self._telling = Telling(self, forked=True)

    def _settle_in_fork(self) -> None:
        role, config = place()
        if role not in (Role.ENGINE_CORE, Role.WORKER):
            return
        self.role, self.inherited, self._telling.forked = role, True, False
        made = self._decisions.get(str(getattr(config, "instance_id", None)))
        if made is not None and made != self.decision:
            # The process that was forked has configured another engine since.
            self.decision = made
            self._engage(made)
        self._telling.tell()

    # -- the gate ------------------------------------------------------------------------------------------------

    def _gate(self, owner: str, method: str, module: Any) -> None:
        """Around a method that is about to capture graphs: late enough to know everything.

        On top of whatever is there: the gate changes nothing, and a conflict must not open it.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_capture(subject, method)
            result = stock(subject, *args, **kwargs)
            if method == "compile_or_warm_up_model":
                _guarded(self._telling.keep)
            return result

        found = getattr(module, owner, None)
        if found is not None and method in vars(found):  # before 0.18.0 no runner measures its graphs
            _wrap(found, method, around)

    def _before_capture(self, subject: Any, stage: str) -> None:
        """Raises GraphfixError if the ranks do not agree, or if a fix that the user insists on is needed and not applied."""
        problem = None
        try:
            self._captures_here = True
            early = self._left
            if stage == "compile_or_warm_up_model":
                self._leave("warm-up")  # before anything else may fail: others wait for it
            config = getattr(subject, "vllm_config", None)
            # A worker knows its local rank, a runner its device.
            local_rank = getattr(subject, "local_rank", getattr(getattr(subject, "device", None), "index", None))
            problem = self._compare(config, stage, local_rank, early)
        except Exception:
            logger.exception("graphfix: could not compare the ranks of this engine")
        if problem is None:
            problem = self._undone_or_unknown(subject)
        self._telling.problem = problem
        _guarded(self._telling.tell)
        if problem is not None:
            _guarded(self._telling.finish)
            raise GraphfixError(problem)

    def _undone_or_unknown(self, subject: Any) -> str | None:
        try:
            return self._undone(subject)
        except Exception as error:
            logger.exception("graphfix: could not tell the states of the fixes")
            if not self.process.insisted():
                return None
            return f"{STOPS}: the states of the fixes cannot be told ({type(error).__name__}: {error}). VLLM_GRAPHFIX=off serves without them."

    def _undone(self, subject: Any) -> str | None:
        model = getattr(getattr(subject, "vllm_config", None), "model_config", None) or getattr(
            subject, "model_config", None
        )
        if getattr(model, "enforce_eager", False):  # no graphs, none of these defects
            return None
        v2 = getattr(subject, "use_v2_model_runner", None)
        if v2 is None and type(subject).__module__ in _RUNNERS:
            v2 = type(subject).__module__ == _RUNNERS[1]
        undone = self.process.left_undone(v2=v2)
        if not undone:
            return None
        return (
            f"{STOPS}: {'; '.join(undone)}. Set the variable of the fix to off, "
            "or VLLM_GRAPHFIX=on, to serve without it; `vllm-graphfix status` says more."
        )

    def _watch_start(self, core: Any) -> None:
        """Around the part of an engine core's start in which ranks may stop it.

        A silent rank is by then in a collective with ranks that have stopped. The core would wait for it at its own end, without limit;
        vLLM's own way to end an executor ends its processes.
        """

        def around(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return stock(engine, *args, **kwargs)
            except Exception as error:
                if STOPS in str(error):
                    _guarded(engine.model_executor.shutdown)
                raise

        if "_initialize_kv_caches" in vars(core.EngineCore):
            _wrap(core.EngineCore, "_initialize_kv_caches", around)

    def _watch_profiling(self, owner: str, module: Any) -> None:
        """Around what every rank does before the first of them may capture a graph.

        Some ranks capture while they measure memory, and others do not (a start-up plan, 0.30.0 and later; a later pipeline stage that is
        still compiling): a rank that waits for the others must find their words there already.
        """

        def around(stock: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
            _guarded(self._leave, "profiling")
            return stock(subject, *args, **kwargs)

        if "determine_available_memory" in vars(getattr(module, owner)):
            _wrap(getattr(module, owner), "determine_available_memory", around)

    def _leave(self, stage: str) -> None:
        """Leaves this rank's word for the others."""
        from torch.distributed import distributed_c10d

        from vllm_graphfix import agreement

        rank, world_size = _world()
        word = self._word() if world_size > 1 else None
        if word is not None:
            store = distributed_c10d.PrefixStore("vllm_graphfix", distributed_c10d._get_default_store())
            self._left = store, agreement.leave(store, stage, rank, word), word

    def _compare(
        self, config: Any, stage: str, local_rank: int | None, early: tuple[Any, str, Any] | None
    ) -> str | None:
        """Compares the ranks; what stops the engine, or None. *early* is what was left before profiling and not compared."""
        from vllm_graphfix import agreement

        parallel = config.parallel_config
        rank, world_size = _world()
        telling = self._telling
        telling.rank = (rank, local_rank, world_size, int(getattr(parallel, "data_parallel_rank", 0) or 0))
        if world_size == 1:
            word = self._word()
            telling.agreement = word and agreement.Agreement(word.token, word.engine, 1, 1, None, all_off=False)
            return None
        if getattr(parallel, "enable_elastic_ep", False):
            logger.info("graphfix: ranks are not compared with --enable-elastic-ep: they come and go")
            return None
        captures = config.compilation_config.cudagraph_mode.name != "NONE" and not config.model_config.enforce_eager
        stops = captures and self.decision is not None and self.decision.master is not settings.Master.OFF
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
                "graphfix: %s Without graphs, or with everything off, that does not stop the engine.", message
            )
            return None
        return (
            f"{STOPS}: {message} Give all its nodes the same vllm-graphfix, the "
            f"same VLLM_GRAPHFIX variables and, with {settings.ROLLOUT}, the same {settings.ROLLOUT_KEY}; where something failed, mend "
            "that. VLLM_GRAPHFIX=off on all of them serves as stock vLLM does. Ranks that run different code could hang or answer wrongly, "
            "and a fix that has acted by now cannot be taken back on the others."
        )

    def _word(self) -> Any:
        from vllm_graphfix.agreement import Word, new_token, shown

        decision = self.decision
        if decision is None:
            return None
        states: dict[str, FixState] = {}
        fault = ""
        try:
            states = self.process.states() | (self._shadow.states() if self._shadow is not None else {})
        except Exception as error:
            logger.exception("graphfix: could not tell the other ranks the states of the fixes")
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

    # -- names, metrics ------------------------------------------------------------------------------------------

    def _register_names(self, envs: Any) -> None:
        """vLLM warns of names that it does not know, and some Ray executors copy only those that it does."""
        for name in settings.names(self._names):
            # The value enters the key of the compile cache. It is constant: no fix touches code that is compiled.
            envs.environment_variables.setdefault(name, lambda: None)

    def _watch_metrics(self, instrumentator: Any) -> None:
        """Around the function with which a process of vLLM begins to serve /metrics."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            registry = stock(*args, **kwargs)
            _guarded(self._expose)
            return registry

        _wrap(instrumentator, "get_prometheus_registry", around)

    def _expose(self) -> None:
        from vllm_graphfix import metrics

        if self.decision is not None and self._configured:
            metrics.expose(self._telling.base(), self.decision, self._ranks)
            self._telling.serves_metrics = True
            self._telling.keep()


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
        logger.exception("graphfix: the other ranks are told %r", otherwise)
        return otherwise


def _world() -> tuple[int, int]:
    """This rank, and how many there are."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)


def _wanted(decision: Decision) -> Wanted:
    return Wanted(decision.master, decision.modes, decision.withheld)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts *around* on a function of vLLM, if it is there: called with the stock function, then with its arguments."""
    stock = getattr(owner, name, None)
    if stock is None:
        return

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    setattr(owner, name, wrapper)


def _guarded(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        logger.exception("graphfix: %s failed; vLLM runs as it was", function.__name__)


def _vllm_version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))
