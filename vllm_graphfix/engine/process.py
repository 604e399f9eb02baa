"""This process as a part of an engine: its role, and the decision that it follows.

Wraps the functions of vLLM in which an engine is configured, plugins are loaded and metrics are collected. These
wrappers never change a result of vLLM, and no exception escapes from them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from vllm_graphfix.engine.capture_gate import CaptureGate
from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.engine.components import Component
from vllm_graphfix.engine.context import EngineContext
from vllm_graphfix.engine.role import (
    Role,
    deciding_separately,
    detect_role,
    is_api_server_of,
    prints_help,
    ranks_on_host,
    served_model,
)
from vllm_graphfix.engine.status_record import StatusRecord
from vllm_graphfix.fix import Fix, Mode, State
from vllm_graphfix.log import logger
from vllm_graphfix.patching.applied_fix import Policy
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.patching.manager import FixManager
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.decision import Decision
from vllm_graphfix.text import error_text

_configuring: ContextVar[bool] = ContextVar("graphfix_configuring", default=False)
"""An engine is being configured: one wrapped function may call another."""


class EngineProcess(EngineContext):
    """One process. `start` may be called any number of times."""

    def __init__(
        self,
        fixes: Iterable[Fix],
        environment: MutableMapping[str, str] = os.environ,
        report: Callable[[], str] | None = None,
    ) -> None:
        fixes = tuple(fixes)
        self._names = tuple(fix.name for fix in fixes)
        self._observed = frozenset(fix.name for fix in fixes if fix.default is Mode.OBSERVE)
        self._compile_factors = {
            fix.variable: partial(self._compile_factor, fix.name) for fix in fixes if fix.changes_compiled_code
        }
        self._environment_read = settings.own_variables(environment)
        wanted = self._settings_read = settings.read(environment, self._names, self._observed)
        manager = FixManager(fixes, Policy(wanted.master, wanted.modes, None, wanted.misconfigured, wanted.trees))
        super().__init__(fixes, environment, manager)
        self._lock = threading.Lock()
        self._report = report
        """Returns the text to append to vLLM's own report."""
        self._started = False
        self._configured = False
        self._ranks: int | None = None
        """The number of ranks of the engine that this process configured last; None if that changes while it runs."""
        self._decisions: dict[str | None, Decision] = {}
        """The decisions of the engines that this process configured, by `VllmConfig.instance_id`."""
        self.status_record = StatusRecord(self)
        self.gate = CaptureGate(self, self.status_record)
        record = self.status_record
        self.make_components(record.publish, record.start_heartbeat, record.publish_end)

    @property
    def started(self) -> bool:
        return self._started

    # -- the decision --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Decide, or follow an inherited decision, and engage the fixes. Raises only what must stop `register`.

        A second caller returns at once, perhaps before the first has decided.
        """
        with self._lock:
            if self._started:
                return
            self._started = True
        # Not under the lock: what follows imports, and a thread that holds that import's lock may call this.
        self.role, config = detect_role()
        self.model = served_model(config)
        self._join(config)
        when_imported("vllm.envs", self._register_names)
        if self.role is Role.INSPECTION:
            return
        when_imported("vllm.plugins", self._watch_plugins)
        when_imported("vllm.engine.arg_utils", self._watch_engines)
        CaptureHooks(self.gate).watch()
        when_imported("vllm.entrypoints.serve.instrumentator.metrics", self._watch_metrics)
        if self._report is not None and self.role is Role.FRONT_END:
            when_imported("vllm.collect_env", self._watch_report)
        # vLLM forks engine cores and workers, and calls `register` in none of them.
        os.register_at_fork(after_in_child=self._reset_in_child)
        if not prints_help():
            # Also in a process that imports no code of a fix, such as an API server.
            atexit.register(self.manager.end)
        if self.role in (Role.ENGINE_CORE, Role.WORKER):
            guarded(self.status_record.publish_start)

    def _join(self, config: Any) -> None:
        """Follow the inherited decision, or decide."""
        inherited = rollout.inherited_decision(
            self.environment.get(settings.DECISION), _vllm_version(), frozenset(self._names)
        )
        if inherited is not None and self._is_ours(inherited, config):
            self.decision, self.inherited = inherited, True
            self._engage(inherited)
            return
        if self.role in (Role.ENGINE_CORE, Role.WORKER) and self.environment.get(settings.DECISION):
            logger.warning(
                "graphfix: %s was not made for this engine; this process decides for itself, from its own environment",
                settings.DECISION,
            )
        self._decide()

    def _is_ours(self, decision: Decision, config: Any) -> bool:
        """Tell if this process is a part of the engine that *decision* was made for."""
        if self.role is Role.FRONT_END:
            # Any child process inherits the environment, including another engine.
            if not is_api_server_of(decision):
                return False
            self.role = Role.API_SERVER
        # A Ray node keeps the environment of the engine that started it, and newer executors do not overwrite it.
        instance = getattr(config, "instance_id", None)
        if not instance:
            return True
        # Data-parallel engine cores on Ray have their rank appended to it (0.21.0 and later).
        return decision.instance is not None and f"{instance}_dp".startswith(f"{decision.instance}_dp")

    def _settings(self) -> settings.Settings:
        """Return the settings in the environment; they are parsed again only if a variable has changed."""
        environment = settings.own_variables(self.environment)
        if environment != self._environment_read:
            self._environment_read = environment
            self._settings_read = settings.read(self.environment, self._names, self._observed)
        return self._settings_read

    def _decide(self) -> None:
        wanted = self._settings()
        decision = rollout.decide(wanted, _vllm_version())
        problems = [*wanted.problems, *filter(None, [decision.refused])]
        if self.decision is not None and decision.same_choice(self.decision):
            if not self._configured and self.decision.pid == os.getpid():
                return  # no engine has begun since, nor has this process been forked from the one that decided
            problems = []  # logged before
        elif self.gate.captures_here:
            logger.warning(
                "graphfix: this process has already captured graphs; a second engine in it keeps the first engine's "
                "decision. To make a new decision, start it in a process of its own, "
                "or with VLLM_ENABLE_V1_MULTIPROCESSING=1."
            )
            return
        for problem in problems:
            logger.warning("graphfix: %s", problem)
        self.decision, self.inherited = decision, False
        self.environment[settings.DECISION] = decision.encode()
        self._engage(decision)

    def _engage(self, decision: Decision) -> None:
        policy = _policy_of(decision)
        self.manager.start(policy)
        if self.role is not Role.INSPECTION:
            for each in self.components:
                self._start(each, decision, policy)

    def _start(self, component: Component, decision: Decision, policy: Policy) -> None:
        """Start *component*; if that fails, its state reports that it detects nothing."""
        self.not_begun.pop(component.name, None)
        try:
            component.start(decision, policy)
        except Exception as error:
            logger.exception("graphfix: %s cannot begin; vLLM itself is not affected", component.name)
            if component.has_state:
                self.not_begun[component.name] = error_text(error)

    def _watch_engines(self, arg_utils: Any) -> None:
        """Wrap the function that configures an engine: each engine of this process gets a decision of its own."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if _configuring.get() or self.role not in (Role.FRONT_END, Role.API_SERVER):
                return stock(*args, **kwargs)
            token = _configuring.set(True)
            try:
                guarded(self._decide_for_engine)
                config = stock(*args, **kwargs)
                guarded(self._leave_rollout_without_key, config, args, kwargs)
                guarded(self._note_configuration, config)
            finally:
                _configuring.reset(token)
            return config

        # `vllm serve` uses the second, which inherits the method, unless another plugin has put a method of its own
        # there.
        for name in ("EngineArgs", "AsyncEngineArgs"):
            engine_args = getattr(arg_utils, name, None)
            if engine_args is not None and "create_engine_config" in vars(engine_args):
                wrap(engine_args, "create_engine_config", around)

    def _decide_for_engine(self) -> None:
        if self.role is Role.FRONT_END:
            self._decide()

    def _leave_rollout_without_key(self, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the engine out of the rollout if each of its nodes would decide by its own host name.

        Only the configuration shows that. Nothing is captured before it exists, so applied fixes can be reverted.
        """
        decision = self.decision
        if self.role is not Role.FRONT_END or decision is None or decision.rollout is None or self.gate.captures_here:
            return
        if self.environment.get(settings.ROLLOUT_KEY, "").strip():
            return
        # The third argument, self included; `vllm serve --headless` passes it by name.
        headless = bool(kwargs.get("headless", args[2] if len(args) > 2 else False))
        separately = deciding_separately(config.parallel_config, headless)
        if separately is None:
            return
        refused = decision.needing_a_key(separately)
        if refused != decision:
            logger.warning("graphfix: %s", refused.refused)
            self.decision = refused
            self._engage(refused)

    def _note_configuration(self, config: Any) -> None:
        parallel = config.parallel_config
        # To vLLM, data-parallel ranks of a dense model are separate engines; those of another node belong to another
        # front-end.
        replicas = (
            parallel.data_parallel_size
            if getattr(config.model_config, "is_moe", True)
            else parallel.data_parallel_size_local
        )
        # With elastic expert parallelism ranks come and go.
        self._ranks = None if getattr(parallel, "enable_elastic_ep", False) else int(parallel.world_size * replicas)
        self.status_record.ranks_here = ranks_on_host(parallel)
        self._configured, self.model = True, served_model(config)
        if self.decision is not None and self.role is Role.FRONT_END:
            self.decision = self.decision._replace(instance=str(config.instance_id))
            self.environment[settings.DECISION] = self.decision.encode()
            self._decisions[self.decision.instance] = self.decision
            if self.decision.rollout is not None:
                inside = "in" if self.decision.canary else "not in"
                part = rollout.as_percentage(self.decision.rollout)
                bucket = f"{self.decision.bucket} of {rollout.BUCKETS}"
                logger.info(
                    "graphfix: this engine is %s the rollout of %s (bucket %s, key %r)",
                    *(inside, part, bucket, self.decision.key),
                )
        self.status_record.publish()

    def _watch_plugins(self, plugins: Any) -> None:
        """Wrap the function that loads plugins: in a forked process vLLM calls it, and not `register` again."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            guarded(self._settle_role)
            return result

        wrap(plugins, "load_general_plugins", around)

    def _reset_in_child(self) -> None:
        # Runs in the forked child: the parent's locks may be held by threads that are not here.
        self._lock = threading.Lock()
        self.forked()
        self.status_record.reset_in_child()

    def _settle_role(self) -> None:
        role, config = detect_role()
        if role not in (Role.ENGINE_CORE, Role.WORKER):
            return
        if self.status_record.forked:
            self.role, self.inherited, self.status_record.forked = role, True, False
            made = self._decisions.get(str(getattr(config, "instance_id", None)))
            if made is not None and made != self.decision:
                # The parent has configured another engine since `made`.
                self.decision = made
            if self.decision is not None:
                # No effect, unless the decision has changed or the fork interrupted a thread in the manager.
                self._engage(self.decision)
        elif self.role is not Role.FRONT_END:
            return  # `start` has published; an engine core that runs the model itself loads plugins twice
        # A front-end that hosts the engine core publishes, too.
        self.status_record.publish_start()

    # -- names, metrics ------------------------------------------------------------------------------------------

    def _register_names(self, envs: Any) -> None:
        """Register our variables with vLLM, which warns of unknown names; some Ray executors copy only known ones."""
        for name in settings.names(self._names):
            # The value enters the keys of the compile cache: it is constant but for fixes that change compiled code.
            envs.environment_variables.setdefault(name, self._compile_factors.get(name, lambda: None))

    def _compile_factor(self, name: str) -> str | None:
        """Return the value of the variable of the fix *name* in vLLM's compile keys: None for stock's code.

        vLLM asks when it has called the model, which the fix has patched by then, and before it looks for compiled
        code. The patches are read back: what is compiled without them must not be run with them later. In a conflict,
        and after an error, some of them may still work: such code is neither stock's nor the fix's.
        """
        try:
            state = self.manager.states(diagnose=False)[name].state
        except Exception as error:  # vLLM calls this unguarded while an engine core starts
            return type(error).__name__
        return state.value if state in (State.ACTIVE, State.CONFLICT, State.FAILED) else None

    def _watch_metrics(self, instrumentator: Any) -> None:
        """Wrap the function by which a process of vLLM starts to serve /metrics."""

        def around(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            registry = stock(*args, **kwargs)
            guarded(self._expose_metrics)
            return registry

        wrap(instrumentator, "get_prometheus_registry", around)

    def _watch_report(self, collect_env: Any) -> None:
        """Wrap the function that makes vLLM's own report of an environment."""
        from vllm_graphfix.engine import environment_report

        if self._report is not None:
            environment_report.extend(collect_env, self._report)

    def _expose_metrics(self) -> None:
        from vllm_graphfix.engine import metrics

        if self.decision is not None and self._configured:
            record = self.status_record
            metrics.expose(record.base(), self.decision, self._ranks, record.ranks_here)
            record.serves_metrics = True
            record.start_heartbeat()


def _policy_of(decision: Decision) -> Policy:
    return Policy(decision.master, decision.modes, decision.withheld, decision.misconfigured, decision.trees)


def _vllm_version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))
