"""One fix in this process: what is wanted of it, and how far it has come."""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.fix import Activity, Code, Diagnosis, Mode, Patch, State, Together, Verdict
from vllm_graphfix.patching import sites
from vllm_graphfix.settings.environment import PREFIX, Master, asks_for_less, names

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable


class FixState(NamedTuple):
    """What this process did about one fix."""

    name: str
    mode: Mode
    diagnosis: Diagnosis | None
    """None if there was none to be had: the fix is off, or the source could not be read."""
    state: State
    reason: str
    code: Code = Code.NONE
    """The kind of *reason*."""


class Policy(NamedTuple):
    """What is to be done about all fixes: the environment's word, or what the first process of an engine made of it."""

    master: Master
    modes: Mapping[str, Mode]
    withheld: str | None = None
    """Why nothing is patched although the switch is on."""
    misconfigured: Mapping[str, str] = {}
    """Variables whose value means nothing, and names that do, each with that value."""
    trees: Mapping[str, str] = {}
    """Fixes that are on for unrecognised code, each with the `Diagnosis.tree` of that code."""

    def required(self, name: str) -> bool:
        """Whether the engine must not start without the fix where it is needed."""
        if self.withheld is not None or self.master is Master.OFF:
            return False
        mode = self.modes[name]
        return mode is Mode.ON or (self.master is Master.STRICT and mode is Mode.AUTO)

    @property
    def mistyped(self) -> tuple[str, ...]:
        """The names that are no variable, each with its value, where an engine must not start with one of them."""
        if self.withheld is not None or self.master is not Master.STRICT:
            return ()
        known = names(self.modes)
        return tuple(f"{name}={value}" for name, value in self.misconfigured.items() if name not in known)

    def why_off(self, variable: str) -> str:
        """The setting by which *variable* switches something off."""
        if variable in self.misconfigured:
            return f"{variable}={self.misconfigured[variable]} means nothing, which counts as off"
        mistyped = (name for name, value in self.misconfigured.items() if asks_for_less(name, value))
        if variable == PREFIX and (name := next(mistyped, None)):
            return f"{name}={self.misconfigured[name]} is not a variable of vllm-graphfix, and counts as {PREFIX}=off"
        return f"{variable}=off"

    def code_of(self, variable: str) -> Code:
        """The kind of reason that `why_off` is."""
        return Code.MISCONFIGURED if variable in self.misconfigured else Code.SETTING


class AppliedFix:
    """One fix in this process."""

    def __init__(self, fix: "Patchable", wanted: Policy) -> None:
        self.fix = fix
        self.mode = wanted.modes[fix.name]
        self._tree = wanted.trees.get(fix.name)
        self.diagnosis: Diagnosis | None = None
        self._patches: tuple[Patch, ...] | None = None
        self.sites: list[sites.Site] = []
        self.state = State.WAITING
        self.reason = "waits for vLLM to import the code that it concerns"
        self.code = Code.NONE
        self.activity = Activity(fix.events, corrects=not self.observes)
        if wanted.master is Master.OFF:
            self.set_state(State.OFF, wanted.why_off(PREFIX), wanted.code_of(PREFIX))
        elif self.mode is Mode.OFF:
            self.set_state(State.OFF, wanted.why_off(fix.variable), wanted.code_of(fix.variable))
        elif wanted.withheld is not None:
            self.set_state(State.NOT_IN_CANARY, wanted.withheld)

    def set_state(self, state: State, reason: str, code: Code = Code.NONE) -> None:
        self.state, self.reason, self.code = state, reason, code

    @property
    def observes(self) -> bool:
        return self.mode is Mode.OBSERVE

    @property
    def engaged(self) -> bool:
        """Whether its patches are on vLLM, or will be when vLLM imports the targets.

        They are those that put right, or those that only look.
        """
        return self.state in (State.ACTIVE, State.OBSERVING, State.WAITING)

    @property
    def puts_right(self) -> bool:
        return self.engaged and not self.observes

    @property
    def will_be(self) -> State:
        """The state once vLLM has imported all that it concerns, if nothing goes wrong; it has to be judged before."""
        if self.state is State.WAITING and self.diagnosis is not None:
            return State.OBSERVING if self.observes else State.ACTIVE
        return self.state

    def is_chosen(self) -> bool:
        """Whether the user has it off or only observed."""
        return self.state is State.OFF or self.observes

    def lacks(
        self, together: Together, other: "AppliedFix", is_affected: Callable[["AppliedFix"], bool]
    ) -> bool | None:
        """Whether it must not stay without *other*, its companion: None if nothing is lacking, False if it may.

        *is_affected* says of a fix that the user has not switched on whether this vLLM would need it.
        """
        if not self.puts_right or other.puts_right or other.state is State.NOT_NEEDED:
            return None
        if other.is_chosen() and not is_affected(other):
            return None
        return not (other.is_chosen() and together.may_be_off)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """What is to be put on this vLLM. The module of the fix is asked, once: where vLLM has imported a target."""
        if self._patches is None:
            found = self.diagnosis
            affected = found is not None and found.verdict is Verdict.AFFECTED
            offered = self.fix.patches(found.shape) if found is not None and affected else ()
            self._patches = tuple(patch for patch in offered if patch.observes or not self.observes)
        return self._patches

    def judge(self, found: Diagnosis) -> None:
        """Goes by the diagnosis of its vLLM."""
        if found.tree and found.tree == self._tree:
            reason = f"{found.reason}; {self.fix.variable}=on:{found.tree} names this very code"
            found = found._replace(verdict=Verdict.AFFECTED, reason=reason)
        self.diagnosis = found
        if found.verdict is Verdict.AFFECTED:
            done = "observed" if self.observes else "applied"
            self.set_state(State.WAITING, f"{found.reason} ({found.where}); to be {done} when vLLM imports that code")
        elif found.verdict is Verdict.UNRECOGNISED:
            named = f"; {self.fix.variable} names another tree, {self._tree}" if self._tree and found.tree else ""
            state = State.INCOMPATIBLE if found.defect_seen else State.UNKNOWN
            self.set_state(state, f"{found.reason} ({found.where}){named}", Code.NEW_CODE)
        else:
            self.set_state(State.NOT_NEEDED, found.reason)

    def take_back(self, state: State, reason: str, code: Code = Code.NONE) -> None:
        """Settles on *state*, or on why that cannot be done."""
        try:
            sites.take_back(self.fix.name, self.sites)
            sites.drop_copies(self._patches or ())
        except Exception as error:
            foreign = isinstance(error, sites.ConflictError)
            state, code = (State.CONFLICT, Code.FOREIGN_PATCH) if foreign else (State.FAILED, Code.ERROR)
            self.set_state(state, f"{reason}; and {error}", code)
            return
        self.sites = []
        self.set_state(state, reason, code)

    @property
    def failed_in_use(self) -> bool:
        """Whether it failed while vLLM ran, and stands where it was put."""
        applied = bool(self.sites) and not any(site.lost() for site in self.sites)
        return self.state is State.FAILED and self.activity.error is not None and applied

    def left_undone(self, *, v2: bool | None) -> bool:
        """Whether this engine has imported what the fix is for, and the fix is not on all of it.

        *v2*: whether the engine is on model runner V2; None if that is not known.
        """
        if self.fix.runner is not None and v2 is not None and (self.fix.runner == "V2") != v2:
            return False
        if not any(module in sys.modules for module in self.fix.modules):
            return False
        if self.state in (State.INCOMPATIBLE, State.CONFLICT, State.FAILED):
            return True
        imported = sum(patch.module in sys.modules for patch in self.patches) if self.engaged else 0
        return len(self.sites) < imported
