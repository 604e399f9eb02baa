"""What this process does about each fix: diagnosed and applied when vLLM imports the targets."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm_graphfix._version import __version__
from vllm_graphfix.fix import Activity, Code, State, Verdict
from vllm_graphfix.fixes import import_whole
from vllm_graphfix.log import HeldLog
from vllm_graphfix.patching import sites
from vllm_graphfix.patching.applied_fix import AppliedFix, FixState, Policy
from vllm_graphfix.patching.hooks import when_imported

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["FixManager", "FixState", "Policy"]

_UNEVENTFUL = frozenset({State.NOT_NEEDED.value, State.OFF.value, State.NOT_IN_CANARY.value})
_REVERTED = "reverted; graphs captured before then keep what they recorded"


def _exclusive(method: Callable[Concatenate[FixManager, P], T]) -> Callable[Concatenate[FixManager, P], T]:
    """Wraps a method that one thread at a time is in; what it logs is released when that thread is out of all of them.

    A handler of the log may wait for a thread that waits for an import, and the hook on that import for this lock. The
    lock is taken by a statement alone: a context manager in Python may fail between having it and giving it back.
    """

    @functools.wraps(method)
    def alone(self: FixManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        outermost = False
        try:
            with self._lock:
                # Read under the lock, where it is this thread's: another one that is inside by the time this one is out
                # releases its own lines alone. Set back, and not counted down: a fork in between begins at 0.
                depth = self._depth
                outermost = not depth
                self._depth = depth + 1
                try:
                    return method(self, *args, **kwargs)
                finally:
                    self._depth = depth
        finally:
            if outermost:
                self._log.release()

    return alone


class FixManager:
    """All fixes in one process."""

    def __init__(self, fixes: Iterable[Patchable], wanted: Policy) -> None:
        self._fixes = tuple(fixes)
        self._started = False
        self._summed_up = False
        self._hooked: set[str] = set()
        self._reverted: set[str] = set()
        # Imports run in threads, and a hook may cause an import that runs a hook.
        self._lock = threading.RLock()
        self._depth = 0
        self._log = HeldLog()
        self._diagnosed_files = sites.DiagnosedFiles()
        self._may_capture = False
        self.interrupted = False
        """This process was forked while a thread was in the middle of something here; to `start` again is to begin
        anew."""
        self._set_policy(wanted)

    def _set_policy(self, wanted: Policy) -> None:
        self._wanted = wanted
        self._applied = {fix.name: AppliedFix(fix, wanted) for fix in self._fixes}
        for name in self._reverted:
            self._applied[name].set_state(State.OFF, _REVERTED)
        self._diagnosed = False

    @_exclusive
    def _begin(self, wanted: Policy) -> list[AppliedFix] | None:
        """The fixes that are to be hooked; None if nothing has changed."""
        if self._started and wanted == self._wanted and not self.interrupted:
            return None
        self.interrupted = False
        for applied in self._applied.values():
            if applied.sites:
                applied.take_back(State.OFF, "reverted for another engine")
        self._started = True
        self._set_policy(wanted)
        return [applied for applied in self._applied.values() if applied.engaged]

    def start(self, wanted: Policy) -> None:
        """Hooks the imports of what may have to be patched; what is imported already is patched now.

        Called again, for a later engine that this process starts, it takes back what that engine does not want. Never
        raises.
        """
        engaged = self._begin(wanted)
        if engaged is None:
            return
        # From here on without the lock: to hook a module that another thread is importing is to wait for that thread.
        modules = [module for applied in engaged for module in applied.fix.modules]
        # A companion's module matters even where the companion itself is switched off.
        modules += [together.module for applied in engaged for together in applied.fix.together]
        try:
            for module in dict.fromkeys(modules):
                if module not in self._hooked:
                    when_imported(module, functools.partial(self._apply_to, module))
                    self._hooked.add(module)
                elif (imported := sys.modules.get(module)) is not None:
                    self._apply_to(module, imported)
        except Exception as error:
            # A fix whose targets are in several modules must not be on the first of them only.
            self.give_up(error)
            raise
        if not engaged:
            self.sum_up()

    @_exclusive
    def give_up(self, error: Exception) -> None:
        """Takes all fixes back: something went wrong that concerns them all."""
        for applied in self._applied.values():
            if applied.engaged:
                self._fail(applied, error)

    @_exclusive
    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """Every fix, by name, in the order of application; targets are read back.

        Without *diagnose* nothing is read that was not read before: for a process that imports no code of a fix.
        """
        if diagnose:
            self._diagnose()
        gone = []
        for applied in self._applied.values():
            stands = applied.state in (State.ACTIVE, State.OBSERVING)
            lost = [reason for site in applied.sites if (reason := site.lost())] if stands else []
            if lost:
                # Whoever still has what was replaced keeps the layer: an engine that serves must not lose a fix that
                # works for it.
                applied.set_state(State.CONFLICT, lost[0], Code.FOREIGN_PATCH)
                gone.append(applied)
            elif stands and (error := applied.activity.error) is not None:
                what = f"{error}; since then vLLM's own code runs wherever that happens"
                applied.set_state(State.FAILED, what, Code.ERROR)
                if not self._may_capture:  # an engine that serves keeps the layers that work for it
                    gone.append(applied)
        for applied in gone:
            if applied.state is State.CONFLICT:
                self._warn(applied, "is no longer applied: remove the other patch, or switch this fix off")
            self._take_back_dependents(applied)
        return {name: self._state(applied) for name, applied in self._applied.items()}

    def _state(self, applied: AppliedFix) -> FixState:
        reason = applied.reason
        if applied.state is State.WAITING and not self._started:
            reason = f"register() has not run in this process (VLLM_PLUGINS?); {reason}"
        return FixState(applied.fix.name, applied.mode, applied.diagnosis, applied.state, reason, applied.code)

    @_exclusive
    def revert(self, name: str) -> None:
        """Takes the fix *name* back, in this process, from here on.

        Neither `register` nor an import nor another engine brings it again. Graphs captured before keep what they
        recorded. A fix that cannot be without it is taken back too.
        """
        applied = self._applied[name]
        applied.take_back(State.OFF, _REVERTED)
        if applied.state is State.OFF:
            self._reverted.add(name)
        if self._diagnosed:  # else the diagnosis is followed by this
            self._take_back_dependents(applied)

    # -- diagnosis -----------------------------------------------------------------------------------------------

    def _diagnose(self) -> None:
        """Once, when the first target is imported: most processes of a server import none and need no diagnosis."""
        if self._diagnosed:
            return
        self._diagnosed = True
        source = None
        for applied in self._applied.values():
            if applied.engaged:
                try:
                    for module in ("manifest", "source.files"):
                        import_whole(f"vllm_graphfix.{module}")
                    from vllm_graphfix import manifest
                    from vllm_graphfix.source.files import open_source

                    source = source or open_source()
                    applied.judge(manifest.diagnose(applied.fix, source))
                    if applied.state is State.INCOMPATIBLE:
                        self._warn(
                            applied,
                            "cannot be applied to this vLLM; "
                            f"`vllm-graphfix explain {applied.fix.name}` has a workaround",
                        )
                    targets = applied.fix.modules if applied.state is State.WAITING else ()  # to be patched
                    self._diagnosed_files.add(applied.fix, source, targets)
                except Exception as error:
                    self._fail(applied, error)

    # -- application: everything below runs inside vLLM's imports and must not raise -------------------------------

    @_exclusive
    def _apply_to(self, module: str, _: ModuleType) -> None:
        try:
            self._diagnose()
            for applied in self._applied.values():
                if applied.engaged and module in applied.fix.modules:
                    self._apply(applied, module)
            for applied in self._applied.values():
                self._require_companions(applied, module)
        except Exception as error:
            self.give_up(error)
        self.sum_up()

    def _apply(self, applied: AppliedFix, module: str) -> None:
        try:
            patches = [patch for patch in applied.patches if patch.module == module]
            if not patches:
                return
            self._diagnosed_files.refuse_others(applied.fix)
            applied.sites += sites.apply(applied.fix.name, patches, applied.activity, self._diagnosed_files.text)
            for site in applied.sites:
                if reason := site.lost():
                    raise sites.ConflictError(reason)
            missing = sorted({patch.module for patch in applied.patches if patch.module not in sys.modules})
            rest = f"; {', '.join(missing)} when it is imported" if missing else ""
            state, done = (State.OBSERVING, "counts at") if applied.observes else (State.ACTIVE, "applied to")
            applied.set_state(state, f"{done} {', '.join(site.name for site in applied.sites)}{rest}")
            self._log.debug("graphfix: %s: %s, %s", applied.fix.name, state.value, applied.reason)
        except sites.ConflictError as error:
            applied.take_back(State.CONFLICT, str(error), Code.FOREIGN_PATCH)
            self._warn(applied, "is not applied: remove the other patch, or switch this fix off")
        except Exception as error:
            self._fail(applied, error)

    def _require_companions(self, applied: AppliedFix, module: str) -> None:
        """Takes a fix back that would trade its defect for another one without a companion that is not there."""
        for together in applied.fix.together:
            other = self._applied.get(together.name)
            if together.module != module or other is None:
                continue
            lacks = applied.lacks(together, other, self._is_affected)
            if lacks is None:
                continue
            if not lacks:
                self._log.warning(
                    "graphfix: %s without %s (%s): %s", applied.fix.name, together.name, other.reason, together.because
                )
                continue
            why = f"{together.name} is {other.state.value}; without it {together.because}"
            applied.take_back(State.INCOMPATIBLE, why, Code.COMPANION)
            self._warn(applied, f"is reverted: switch {together.name} on, or this fix off")

    def _take_back_dependents(self, lost: AppliedFix) -> None:
        """Takes back what needs *lost*, as if it had never been applied."""
        for applied in self._applied.values():
            for together in applied.fix.together:
                if together.name == lost.fix.name and together.module in sys.modules:
                    self._require_companions(applied, together.module)

    def _is_affected(self, other: AppliedFix) -> bool:
        """Whether a fix that is switched off, or observed, would be needed here."""
        from vllm_graphfix import manifest
        from vllm_graphfix.source.files import open_source

        try:
            other.diagnosis = other.diagnosis or manifest.diagnose(other.fix, open_source())
        except Exception:
            return True
        return other.diagnosis.verdict in (Verdict.AFFECTED, Verdict.UNRECOGNISED)

    def _fail(self, applied: AppliedFix, error: Exception) -> None:
        self._log.debug("graphfix: %s failed", applied.fix.name, exc_info=error)
        applied.take_back(State.FAILED, f"{type(error).__name__}: {error}", Code.ERROR)
        self._warn(applied, "is not applied; vLLM runs its own code there")

    # -- gate, log -------------------------------------------------------------------------------------------------

    def requires_any(self) -> bool:
        """Whether there is a fix that the user insists on."""
        return any(map(self._wanted.required, self._applied))

    def forked(self) -> None:
        """In a forked child: a thread that held the lock is not there, and will not finish what it did."""
        self.interrupted = self.interrupted or self._depth > 0
        self._lock, self._depth, self._log = threading.RLock(), 0, HeldLog()
        for applied in self._applied.values():
            applied.activity.reset()

    def counts(self) -> dict[str, dict[str, int]]:
        """How often each fix has met each of its events, by their names."""
        return {name: applied.activity.counts for name, applied in self._applied.items()}

    def activity(self, name: str) -> Activity:
        """What the fix *name* does in this process."""
        return self._applied[name].activity

    def left_undone(self, *, v2: bool | None, again: bool = False) -> tuple[str, ...]:
        """The fixes that the user insists on, that this process needs and that are not applied.

        Each with state and reason; with `strict`, names that are no variable come first. *v2*: whether the engine is
        on model runner V2; None if that is not known. *again*: whether it has served, and captures once more; a fix
        that failed in a step then, and stands where it was put, may do well in this capture, which will tell.
        """
        states = self.states().values()
        self._may_capture = True
        mistyped = (f"{each} is not a variable of vllm-graphfix: correct or unset it" for each in self._wanted.mistyped)
        undone = (
            f"{state.name} is {state.state.value}: {state.reason}"
            for state in states
            if self._wanted.required(state.name)
            and self._applied[state.name].left_undone(v2=v2)
            and not (again and self._applied[state.name].failed_in_use)
        )
        return (*mistyped, *undone)

    @_exclusive
    def begin_capture(self, graph_being_captured: Callable[[], Hashable]) -> None:
        """From now on a fix that fails does so in a graph, which holds what stock's code does there."""
        Activity.capturing = graph_being_captured
        for applied in self._applied.values():
            applied.activity.graphs = {}

    def forget_capture(self) -> None:
        """The capture is over, and what failed in it has been dealt with, or was in no graph that is kept."""
        Activity.capturing = None
        for applied in self._applied.values():
            applied.activity.graphs = {}

    @_exclusive
    def failures_in_capture(self) -> dict[str, dict[Any, str]]:
        """The graphs that fixes have failed in since `begin_capture`, each with its first error, by fix.

        Fixes that only observe are left out: they change nothing. None stands for a graph that is not known.
        """
        Activity.capturing = None
        found: dict[str, dict[Any, str]] = {}
        for name, applied in self._applied.items():
            graphs = {g: why for g, why in applied.activity.graphs.items() if getattr(g, "kept", True)}
            if (
                graphs and applied.observes
            ):  # it has changed nothing in them; what it counts from here on may be too little
                applied.activity.error = applied.activity.error or next(iter(graphs.values()))
            elif graphs:
                found[name] = graphs
        return found

    @_exclusive
    def settle_capture(self, name: str, what: str, *, failed: bool) -> None:
        """Says *what* came of the graphs in which the fix *name*, which is applied here, failed.

        It may have failed on this rank or on another.
        """
        applied = self._applied[name]
        if applied.state is not State.ACTIVE:
            return
        if failed:
            applied.activity.error = what
        state, reason = (State.FAILED, what) if failed else (State.ACTIVE, f"{applied.reason}; {what}")
        applied.set_state(state, reason, Code.IN_CAPTURE)

    def required(self, name: str) -> bool:
        """Whether the user insists on the fix *name*."""
        return self._wanted.required(name)

    def _warn(self, applied: AppliedFix, what: str) -> None:
        self._log.warning("graphfix: %s %s (%s: %s)", applied.fix.name, what, applied.state.value, applied.reason)

    def end(self) -> None:
        """At the exit of a process, which may have imported no code of a fix."""
        self._sum_up()
        self._log.release_at_exit()

    @_exclusive
    def sum_up(self) -> None:
        """One line a process, once it is known what will be done; what goes otherwise later is a warning of its own."""
        self._sum_up()

    def _sum_up(self) -> None:
        if self._summed_up:
            return
        self._summed_up = True
        told: dict[str, list[str]] = {}
        for applied in self._applied.values():
            word = applied.state.value
            if applied.engaged:
                word = f"{'observed' if applied.observes else 'applied'} where vLLM imports them"
            told.setdefault(word, []).append(applied.fix.name)
            self._log.debug("graphfix: %s: %s, %s", applied.fix.name, applied.state.value, applied.reason)
        if any(applied.engaged for applied in self._applied.values()) and not self._diagnosed:
            done = "this process has imported nothing that a fix concerns"
        else:  # names of what is done, or stands in the way; of the rest how many
            done = "; ".join(
                f"{word}: {len(names) if word in _UNEVENTFUL else ', '.join(names)}" for word, names in told.items()
            )
        self._log.info(
            "graphfix: %s (vllm-graphfix %s, VLLM_GRAPHFIX=%s)", done, __version__, self._wanted.master.value
        )
