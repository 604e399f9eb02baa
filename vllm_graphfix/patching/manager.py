"""All fixes of one process: each is diagnosed and applied when vLLM imports its targets."""

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
from vllm_graphfix.patching.applied_fix import AppliedFix, FixState, Lack, Policy, Proof
from vllm_graphfix.patching.hooks import when_imported
from vllm_graphfix.text import error_text

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["FixManager", "FixState", "Policy"]

_UNEVENTFUL = frozenset({State.NOT_NEEDED.value, State.OFF.value, State.NOT_IN_CANARY.value})
_REVERTED = "reverted; graphs captured before then keep what they recorded"


def _exclusive(method: Callable[Concatenate[FixManager, P], T]) -> Callable[Concatenate[FixManager, P], T]:
    """Run *method* under the manager's lock, and log only after the thread has left the outermost such method.

    Logging under the lock may deadlock: a log handler may wait for a thread that imports, and the hook on that import
    waits for this lock. The lock is taken by a plain `with`: a context manager written in Python may be interrupted
    between taking and releasing it.
    """

    @functools.wraps(method)
    def locked(self: FixManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        outermost = False
        try:
            with self._lock:
                # Read under the lock, so that the depth is this thread's. Restored, not decremented: a fork in between
                # sets it to 0.
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

    return locked


class FixManager:
    """All fixes in one process."""

    def __init__(self, fixes: Iterable[Patchable], policy: Policy) -> None:
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
        """The gate has called `unapplied`: from then on a fix that fails in use keeps its layers."""
        self.interrupted = False
        """This process was forked while a thread was inside the manager; the next `start` begins anew."""
        self._set_policy(policy)

    def _set_policy(self, policy: Policy) -> None:
        self._policy = policy
        self._applied = {fix.name: AppliedFix(fix, policy) for fix in self._fixes}
        for name in self._reverted:
            self._applied[name].set_state(State.OFF, _REVERTED)
        self._diagnosed = False

    @_exclusive
    def _adopt(self, policy: Policy) -> list[AppliedFix] | None:
        """Take over *policy*, and return the fixes to hook; None if nothing has changed."""
        if self._started and policy == self._policy and not self.interrupted:
            return None
        self.interrupted = False
        for applied in self._applied.values():
            if applied.sites:
                applied.revert(State.OFF, "reverted for another engine")
        self._started = True
        self._set_policy(policy)
        return [applied for applied in self._applied.values() if applied.engaged]

    def start(self, policy: Policy) -> None:
        """Hook the imports of all targets; patch those that are imported already.

        For a later engine of the same process, fixes that it does not want are reverted. Raises what an import hook's
        registration raises, after all fixes have been reverted.
        """
        engaged = self._adopt(policy)
        if engaged is None:
            return
        # Without the lock: hooking a module that another thread is importing waits for that thread.
        modules = [module for applied in engaged for module in applied.fix.modules]
        # A companion's module matters even where the companion itself is switched off.
        modules += [companion.module for applied in engaged for companion in applied.fix.requires]
        try:
            for module in dict.fromkeys(modules):
                if module not in self._hooked:
                    when_imported(module, functools.partial(self._apply_to, module))
                    self._hooked.add(module)
                elif (imported := sys.modules.get(module)) is not None:
                    self._apply_to(module, imported)
        except Exception as error:
            # A fix with targets in several modules must not stay on the first of them alone.
            self.give_up(error)
            raise
        if not engaged:
            self.sum_up()

    @_exclusive
    def give_up(self, error: Exception) -> None:
        """Revert all fixes after an error that concerns them all."""
        for applied in self._applied.values():
            if applied.engaged:
                self._fail(applied, error)

    @_exclusive
    def states(self, *, diagnose: bool = True) -> dict[str, FixState]:
        """Return the state of every fix by name, in the order of application; targets are read back.

        Without *diagnose* no source is read: for a process that imports no target.
        """
        if diagnose:
            self._diagnose()
        ineffective = []
        for applied in self._applied.values():
            if applied.state not in (State.ACTIVE, State.OBSERVING):
                continue
            if lost := [reason for site in applied.sites if (reason := site.lost())]:
                # The layers stay: code that still holds our function must not lose a fix that works for it.
                applied.set_state(State.CONFLICT, lost[0], Code.FOREIGN_PATCH)
                ineffective.append(applied)
            elif (error := applied.activity.error) is not None:
                what = f"{error}; since then vLLM's own code runs wherever that happens"
                applied.set_state(State.FAILED, what, Code.ERROR)
                if not self._may_capture:  # a serving engine keeps the layers that work
                    ineffective.append(applied)
        for applied in ineffective:
            if applied.state is State.CONFLICT:
                self._warn(applied, "is no longer applied: remove the other patch, or switch this fix off")
            self._revert_dependents(applied)
        return {name: self._state(applied) for name, applied in self._applied.items()}

    def _state(self, applied: AppliedFix) -> FixState:
        reason = applied.reason
        if applied.state is State.WAITING and not self._started:
            reason = f"register() has not run in this process (VLLM_PLUGINS?); {reason}"
        return FixState(applied.fix.name, applied.mode, applied.diagnosis, applied.state, reason, applied.code)

    @_exclusive
    def revert(self, name: str) -> None:
        """Revert the fix *name* in this process for good, with the fixes that require it.

        Neither `register` nor an import nor another engine applies it again. Graphs captured before keep what they
        recorded.
        """
        applied = self._applied[name]
        applied.revert(State.OFF, _REVERTED)
        if applied.state is State.OFF:
            self._reverted.add(name)
        if self._diagnosed:  # else `_apply_to` does so after the diagnosis
            self._revert_dependents(applied)

    # -- diagnosis -----------------------------------------------------------------------------------------------

    def _diagnose(self) -> None:
        """Diagnose all fixes, once, at the first import of a target: most processes of a server import none."""
        if self._diagnosed:
            return
        # First: after an error below, not each import of vLLM's is to read the source again.
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
            if applied.apply(module, self._diagnosed_files):
                self._log_state(applied)
        except sites.ConflictError as error:
            applied.revert(State.CONFLICT, str(error), Code.FOREIGN_PATCH)
            self._warn(applied, "is not applied: remove the other patch, or switch this fix off")
        except Exception as error:
            self._fail(applied, error)

    def _require_companions(self, applied: AppliedFix, module: str) -> None:
        """Revert a fix that lacks a companion, without which it would trade its defect for another one."""
        for companion in applied.fix.requires:
            other = self._applied.get(companion.name)
            if companion.module != module or other is None:
                continue
            lack = applied.lack_of(companion, other, self._may_be_needed)
            if lack is Lack.NONE:
                continue
            if lack is Lack.ACCEPTED:
                self._log.warning(
                    "graphfix: %s without %s (%s): %s",
                    applied.fix.name,
                    companion.name,
                    other.reason,
                    companion.because,
                )
                continue
            why = f"{companion.name} is {other.state.value}; without it {companion.because}"
            applied.revert(State.INCOMPATIBLE, why, Code.COMPANION)
            self._warn(applied, f"is reverted: switch {companion.name} on, or this fix off")

    def _revert_dependents(self, lost: AppliedFix) -> None:
        """Revert the fixes that require *lost*, as if it had never been applied."""
        for applied in self._applied.values():
            for companion in applied.fix.requires:
                if companion.name == lost.fix.name and companion.module in sys.modules:
                    self._require_companions(applied, companion.module)

    def _may_be_needed(self, other: AppliedFix) -> bool:
        """Tell if this vLLM may need *other*; True without a diagnosis.

        Diagnoses *other* and keeps that, since it is off or observed, and may not have been judged.
        """
        from vllm_graphfix import manifest
        from vllm_graphfix.source.files import open_source

        try:
            other.diagnosis = other.diagnosis or manifest.diagnose(other.fix, open_source())
        except Exception:
            return True
        return other.diagnosis.verdict in (Verdict.AFFECTED, Verdict.UNRECOGNISED)

    def _fail(self, applied: AppliedFix, error: Exception) -> None:
        self._log.debug("graphfix: %s failed", applied.fix.name, exc_info=error)
        applied.revert(State.FAILED, error_text(error), Code.ERROR)
        self._warn(applied, "is not applied; vLLM runs its own code there")

    # -- gate, log -------------------------------------------------------------------------------------------------

    def requires_any(self) -> bool:
        """Tell if the user requires a fix."""
        return any(map(self._policy.required, self._applied))

    def forked(self) -> None:
        """Reset the lock, the log and the counts in a forked child, where the thread that held the lock is missing."""
        self.interrupted = self.interrupted or self._depth > 0
        self._lock, self._depth, self._log = threading.RLock(), 0, HeldLog()
        for applied in self._applied.values():
            applied.activity.reset()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of times that each event occurred, by fix and event."""
        # Without the lock: steps add to these numbers without it, too.
        return {name: applied.activity.counts for name, applied in self._applied.items()}

    @_exclusive
    def proofs(self) -> dict[str, list[tuple[sites.Site, Proof]]]:
        """Return, of each fix that is applied, the sites at which a call proves that it is on the path."""
        applied = (State.ACTIVE, State.OBSERVING)
        return {name: each.proofs() for name, each in self._applied.items() if each.state in applied}

    def activity(self, name: str) -> Activity:
        """Return the activity of the fix *name*."""
        return self._applied[name].activity

    def unapplied(self, *, v2: bool | None, recapture: bool = False) -> tuple[str, ...]:
        """Return the required fixes that this process needs and that are not applied, with state and reason.

        With `strict`, unknown names come first. *v2* tells if the engine runs model runner V2; None if that is not
        known. With *recapture* the engine has served and captures anew: a fix that failed in a step and is still in
        place is left out, since this capture shows if it works.

        Also ends the phase in which a fix that fails in use is reverted.
        """
        states = self.states().values()
        self._may_capture = True  # after `states`, which still reverts by the old phase
        mistyped = (f"{each} is not a variable of vllm-graphfix: correct or unset it" for each in self._policy.mistyped)
        undone = (
            f"{state.name} is {state.state.value}: {state.reason}"
            for state in states
            if self._policy.required(state.name)
            and self._applied[state.name].is_unapplied(v2=v2)
            and not (recapture and self._applied[state.name].failed_in_use)
        )
        return (*mistyped, *undone)

    @_exclusive
    def begin_capture(self, graph_being_captured: Callable[[], Hashable]) -> None:
        """Record the failures of fixes by graph from now on: such a graph holds what stock's code does."""
        Activity.capturing = graph_being_captured
        for applied in self._applied.values():
            applied.activity.graphs = {}

    def discard_failures(self) -> None:
        """Stop recording, and discard the failures: they were settled, or concern no graph that is served."""
        # Without the lock: whole objects are assigned, and a thread that imports may hold it.
        Activity.capturing = None
        for applied in self._applied.values():
            applied.activity.graphs = {}

    @_exclusive
    def stop_recording_failures(self) -> dict[str, dict[Any, str]]:
        """Stop recording; return the graphs in which each correcting fix failed, with the first error of each.

        None stands for an unknown graph.
        """
        Activity.capturing = None
        failures: dict[str, dict[Any, str]] = {}
        for name, applied in self._applied.items():
            graphs = {g: why for g, why in applied.activity.graphs.items() if getattr(g, "serves", True)}
            if graphs and applied.observes:  # the graphs are stock's anyway, but its counts may be too low from here on
                applied.activity.error = applied.activity.error or next(iter(graphs.values()))
            elif graphs:
                failures[name] = graphs
        return failures

    @_exclusive
    def settle_capture(self, name: str, what: str, *, failed: bool) -> None:
        """Settle on *what* was done about the graphs in which the fix *name* failed, on this rank or on another."""
        applied = self._applied[name]
        if applied.state is not State.ACTIVE:
            return
        if failed:
            applied.activity.error = what
        state, reason = (State.FAILED, what) if failed else (State.ACTIVE, f"{applied.reason}; {what}")
        applied.set_state(state, reason, Code.IN_CAPTURE)

    def required(self, name: str) -> bool:
        """Tell if the user requires the fix *name*."""
        return self._policy.required(name)

    def _log_state(self, applied: AppliedFix) -> None:
        self._log.debug("graphfix: %s: %s, %s", applied.fix.name, applied.state.value, applied.reason)

    def _warn(self, applied: AppliedFix, what: str) -> None:
        self._log.warning("graphfix: %s %s (%s: %s)", applied.fix.name, what, applied.state.value, applied.reason)

    def end(self) -> None:
        """Log the summary at the exit of a process, which may have imported no target."""
        self._sum_up()  # not `sum_up`, which releases lines where a closed stream makes logging print a traceback
        self._log.release_at_exit()

    @_exclusive
    def sum_up(self) -> None:
        """Log one line for this process, once. Later changes are warnings of their own."""
        self._sum_up()

    def _sum_up(self) -> None:
        if self._summed_up:
            return
        self._summed_up = True
        names_by_state: dict[str, list[str]] = {}
        for applied in self._applied.values():
            word = applied.state.value
            if applied.engaged:
                word = f"{'observed' if applied.observes else 'applied'} where vLLM imports them"
            names_by_state.setdefault(word, []).append(applied.fix.name)
            self._log_state(applied)
        if any(applied.engaged for applied in self._applied.values()) and not self._diagnosed:
            done = "this process has imported nothing that a fix concerns"
        else:  # the names of eventful states, the number of the others
            done = "; ".join(
                f"{word}: {len(names) if word in _UNEVENTFUL else ', '.join(names)}"
                for word, names in names_by_state.items()
            )
        self._log.info(
            "graphfix: %s (vllm-graphfix %s, VLLM_GRAPHFIX=%s)", done, __version__, self._policy.master.value
        )
