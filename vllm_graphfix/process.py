"""What this process does about each fix: diagnosed and applied when vLLM imports the targets."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from vllm_graphfix import patching, settings
from vllm_graphfix.fix import Diagnosis, Fix, Mode, Patch, State, Verdict

# Below "vllm", the one logger that vLLM gives a handler; anywhere else an INFO line is lost. Its format leaves
# the logger's name out, so every message says whose it is.
logger = logging.getLogger("vllm.graphfix")

_GATE = "vllm.v1.worker.gpu_worker"


class GraphfixError(RuntimeError):
    """A fix that the user insists on is needed and is not applied; the engine must not start."""


class FixState(NamedTuple):
    """What this process did about one fix."""

    name: str
    mode: Mode
    diagnosis: Diagnosis | None
    """None if there was none to be had: the fix is off, or the source could not be read."""
    state: State
    reason: str


class _Progress:
    """One fix in this process."""

    def __init__(self, fix: Fix, mode: Mode) -> None:
        self.fix = fix
        self.mode = mode
        self.diagnosis: Diagnosis | None = None
        self.patches: tuple[Patch, ...] = ()
        self.sites: list[patching.Site] = []
        self.state = State.WAITING
        self.reason = "to be diagnosed when vLLM imports what it concerns"

    def settle(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason

    @property
    def engaged(self) -> bool:
        return self.state in (State.ACTIVE, State.WAITING)


class Process:
    """All fixes in one process. `start` may be called any number of times and never raises."""

    def __init__(self, fixes: Iterable[Fix], environment: settings.Settings) -> None:
        self._settings = environment
        self._progress = {fix.name: _Progress(fix, environment.modes[fix.name]) for fix in fixes}
        self._started = False
        self._diagnosed = False
        self._summed_up = False
        # Imports run in threads, and a hook may cause an import that runs a hook.
        self._lock = threading.RLock()
        for progress in self._progress.values():
            if environment.master is settings.Master.OFF:
                progress.settle(State.OFF, "VLLM_GRAPHFIX=off")
            elif environment.withheld is not None:
                progress.settle(State.NOT_IN_CANARY, environment.withheld)
            elif progress.mode in (Mode.OFF, Mode.OBSERVE):
                progress.settle(State.OFF, f"{progress.fix.variable}={progress.mode.value}")

    def start(self) -> None:
        """Hooks the imports of what may have to be patched; what is imported already is patched now."""
        with self._lock:
            if self._started:
                return
            self._started = True
        # From here on without the lock: to hook a module that another thread is importing is to wait for that thread.
        for problem in self._settings.problems:
            logger.warning("graphfix: %s", problem)
        _when_imported("vllm.envs", self._register_names)
        engaged = [progress for progress in self._progress.values() if progress.engaged]
        modules = [module for progress in engaged for module in progress.fix.modules]
        # A companion's module matters even where the companion itself is switched off.
        modules += [together.module for progress in engaged for together in progress.fix.together]
        for module in dict.fromkeys(modules):
            _when_imported(module, functools.partial(self._apply_to, module))
        if self._settings.master is not settings.Master.OFF and any(map(self._settings.loud, self._progress)):
            _when_imported(_GATE, self._install_gate)
        if not engaged:
            self._sum_up()
        elif not {"-h", "--help"} & set(sys.argv):
            atexit.register(self._sum_up)  # for a process, such as an API server's, that imports no code of a fix

    def states(self) -> dict[str, FixState]:
        """Every fix, by name, in the order of application; targets are read back."""
        with self._lock:
            self._diagnose()
            for progress in self._progress.values():
                lost = [site for site in progress.sites if not site.holds()] if progress.state is State.ACTIVE else []
                if lost:
                    progress.settle(State.CONFLICT, f"{lost[0].attribute} was replaced after the fix was applied")
            return {name: self._told(progress) for name, progress in self._progress.items()}

    def _told(self, progress: _Progress) -> FixState:
        reason = progress.reason
        if progress.state is State.WAITING and not self._started:
            reason = f"register() has not run in this process (VLLM_PLUGINS?); {reason}"
        return FixState(progress.fix.name, progress.mode, progress.diagnosis, progress.state, reason)

    def revert(self, name: str) -> None:
        """Takes the fix *name* back, in this process, from here on. Graphs captured before keep what they recorded."""
        with self._lock:
            self._take_back(
                self._progress[name], State.OFF, "taken back; graphs captured before keep what they recorded"
            )

    # -- diagnosis -----------------------------------------------------------------------------------------------

    def _diagnose(self) -> None:
        """Once, when the first target is imported: most processes of a server import none and need no diagnosis."""
        if self._diagnosed:
            return
        self._diagnosed = True
        from vllm_graphfix import manifest
        from vllm_graphfix.source import open_source

        source = None
        for progress in self._progress.values():
            if progress.engaged:
                try:
                    source = source or open_source()
                    self._judge(progress, manifest.diagnose(progress.fix, source))
                except Exception as error:
                    self._fail(progress, error)

    def _judge(self, progress: _Progress, found: Diagnosis) -> None:
        progress.diagnosis = found
        if found.verdict is Verdict.AFFECTED:
            progress.patches = tuple(progress.fix.patches(found.shape))
            progress.settle(State.WAITING, f"{found.reason} ({found.where}); to be applied when vLLM imports it")
        elif found.verdict is Verdict.UNRECOGNISED:
            progress.settle(State.INCOMPATIBLE, f"{found.reason} ({found.where})")
            self._warn(progress, "cannot be applied to this vLLM; see `vllm-graphfix explain`")
        else:
            progress.settle(State.NOT_NEEDED, found.reason)

    # -- application: everything below runs inside vLLM's imports and must not raise -------------------------------

    def _apply_to(self, module: str, _: ModuleType) -> None:
        with self._lock:
            self._diagnose()
            for progress in self._progress.values():
                patches = [patch for patch in progress.patches if patch.module == module]
                if progress.engaged and patches:
                    self._apply(progress, patches)
            for progress in self._progress.values():
                self._keep_together(progress, module)
            self._sum_up()

    def _apply(self, progress: _Progress, patches: list[Patch]) -> None:
        try:
            progress.sites += patching.apply(progress.fix.name, patches)
            if not all(site.holds() for site in progress.sites):
                raise RuntimeError("a target does not read back as it was set")
            missing = sorted({patch.module for patch in progress.patches if patch.module not in sys.modules})
            rest = f"; {', '.join(missing)} when it is imported" if missing else ""
            progress.settle(State.ACTIVE, f"applied to {', '.join(site.attribute for site in progress.sites)}{rest}")
            logger.debug("graphfix: %s: active, %s", progress.fix.name, progress.reason)
        except patching.ConflictError as error:
            self._take_back(progress, State.CONFLICT, str(error))
            self._warn(progress, "is not applied: remove the other patch, or switch this fix off")
        except Exception as error:
            self._fail(progress, error)

    def _keep_together(self, progress: _Progress, module: str) -> None:
        """Takes a fix back that would trade its defect for another one without a companion that is not there."""
        for together in progress.fix.together:
            other = self._progress.get(together.name)
            if together.module != module or not progress.engaged or other is None or other.engaged:
                continue
            switched_off = other.state is State.OFF
            if other.state is State.NOT_NEEDED or (switched_off and not self._affected_by(other)):
                continue
            if switched_off and together.may_be_off:
                logger.warning(
                    "graphfix: %s without %s (%s): %s", progress.fix.name, together.name, other.reason, together.because
                )
                continue
            self._take_back(
                progress, State.INCOMPATIBLE, f"{together.name} is {other.state.value}; without it {together.because}"
            )
            self._warn(progress, f"is taken back: switch {together.name} on, or this fix off")

    def _affected_by(self, other: _Progress) -> bool:
        """Whether a fix that is switched off would be needed here."""
        from vllm_graphfix import manifest
        from vllm_graphfix.source import open_source

        try:
            other.diagnosis = other.diagnosis or manifest.diagnose(other.fix, open_source())
        except Exception:
            return True
        return other.diagnosis.verdict in (Verdict.AFFECTED, Verdict.UNRECOGNISED)

    def _take_back(self, progress: _Progress, state: State, reason: str) -> None:
        try:
            patching.take_back(progress.fix.name, progress.sites)
        except Exception as error:
            progress.settle(State.FAILED, f"{reason}; and {error}")
            return
        progress.sites = []
        progress.settle(state, reason)

    def _fail(self, progress: _Progress, error: Exception) -> None:
        logger.debug("graphfix: %s failed", progress.fix.name, exc_info=error)
        self._take_back(progress, State.FAILED, f"{type(error).__name__}: {error}")
        self._warn(progress, "is not applied; vLLM runs as it was")

    # -- names, gate, log ----------------------------------------------------------------------------------------

    def _register_names(self, envs: Any) -> None:
        """vLLM warns of names that it does not know, and some Ray executors copy only those that it does."""
        for name in settings.names(self._progress):
            # The value enters the key of the compile cache. It is constant: no fix touches code that is compiled.
            envs.environment_variables.setdefault(name, lambda: None)

    def _install_gate(self, worker_module: Any) -> None:
        """Around the worker's start-up, which captures graphs: late enough to know everything.

        On top of whatever is there: the gate changes nothing, and a conflict must not open it.
        """
        stock = worker_module.Worker.compile_or_warm_up_model

        @functools.wraps(stock)
        def compile_or_warm_up_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
            self.check(worker)
            return stock(worker, *args, **kwargs)

        worker_module.Worker.compile_or_warm_up_model = compile_or_warm_up_model

    def check(self, worker: Any) -> None:
        """Raises GraphfixError if a fix that the user insists on is needed by *worker* and is not applied."""
        if getattr(getattr(worker, "model_config", None), "enforce_eager", False):
            return  # no graphs, none of these defects
        v2 = getattr(worker, "use_v2_model_runner", None)
        missing = [
            f"{state.name} is {state.state.value}: {state.reason}"
            for state in self.states().values()
            if self._settings.loud(state.name) and self._left_undone(self._progress[state.name], v2)
        ]
        if missing:
            raise GraphfixError(
                f"vllm-graphfix stops this engine before it captures its CUDA graphs: {'; '.join(missing)}. Set the "
                "variable of the fix to off, or VLLM_GRAPHFIX=on, to serve without it; `vllm-graphfix status` says more."
            )

    def _left_undone(self, progress: _Progress, v2: bool | None) -> bool:
        """Whether this engine has imported what the fix is for, and the fix is not on all of it."""
        if progress.fix.runner is not None and v2 is not None and (progress.fix.runner == "V2") != v2:
            return False
        if progress.state in (State.INCOMPATIBLE, State.CONFLICT, State.FAILED):
            return any(module in sys.modules for module in progress.fix.modules)
        if progress.state is State.NOT_IN_CANARY:
            return self._affected_by(progress)
        imported = sum(patch.module in sys.modules for patch in progress.patches)
        return progress.engaged and len(progress.sites) < imported

    def _warn(self, progress: _Progress, what: str) -> None:
        logger.warning("graphfix: %s %s (%s: %s)", progress.fix.name, what, progress.state.value, progress.reason)

    def _sum_up(self) -> None:
        """One line a process, once it is known what will be done; what goes otherwise later is a warning of its own."""
        if self._summed_up:
            return
        self._summed_up = True
        told: dict[str, list[str]] = {}
        for progress in self._progress.values():
            word = progress.state.value
            if progress.engaged:
                word = "applied where vLLM imports them" if self._diagnosed else "nothing imported that these concern"
            told.setdefault(word, []).append(progress.fix.name)
            logger.debug("graphfix: %s: %s, %s", progress.fix.name, progress.state.value, progress.reason)
        logger.info("graphfix: %s", "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items()))


def _when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Calls *hook* with the module once it is imported, or now if it is; whatever goes wrong stays here."""

    def guarded(imported: ModuleType) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("graphfix: failed on %s; vLLM runs as it was", module)

    loaded = sys.modules.get(module)
    if getattr(getattr(loaded, "__spec__", None), "_initializing", False):
        # Another thread is importing it, and wrapt would call the hook on what is there so far. This waits for that thread.
        importlib.import_module(module)
    wrapt.register_post_import_hook(guarded, module)
