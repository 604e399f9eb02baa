"""The state machine of one fix in this process, from the policy to the patches that are applied or reverted."""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.fix import Activity, Code, Companion, Diagnosis, Mode, Patch, State, Verdict
from vllm_graphfix.patching import sites
from vllm_graphfix.settings.environment import FIXES, PREFIX, Master, asks_for_less, names

if TYPE_CHECKING:
    from vllm_graphfix.fix import Patchable


class FixState(NamedTuple):
    """The state of one fix in this process, for reports."""

    name: str
    mode: Mode
    diagnosis: Diagnosis | None
    """None where the fix is off or the source cannot be read."""
    state: State
    reason: str
    code: Code = Code.NONE
    """The kind of *reason*."""


class Proof(Enum):
    """The time at which vLLM has to call a target, for the fix to be on the path of full graphs."""

    STEP = "each step"
    CAPTURE = "the capture"


class Lack(Enum):
    """The lack of a companion, as far as a fix is concerned."""

    NONE = "none"
    ACCEPTED = "accepted"
    """The user switched the companion off, or only observes it, and the fix may stay without it."""
    REVERT = "revert"
    """The fix must be reverted."""


_IN_EACH_STEP = frozenset({"_determine_batch_execution_and_padding", "update_requests", "prepare_inputs"})
"""Methods of model runners that each step with requests calls, in every release that has them."""
_IN_CAPTURES = frozenset({"capture", "capture_graph", "capture_model"})


def is_of_builder(target: str) -> bool:
    """Tell if *target*, ``Class.method``, belongs to a builder of attention metadata, which builds in each step."""
    owner, _, method = target.rpartition(".")
    return owner.endswith("MetadataBuilder") and not method.startswith("__")


def proof_of(patches: Sequence[Patch], patch: Patch) -> Proof | None:
    """Return when a call of the target of *patch*, one of all *patches* of its fix, proves that the fix is at work.

    None where no call can: targets that graphs record, that make objects, or that vLLM calls for some steps only. None,
    too, for a fix with a patch of `observes=False`: that one corrects, and a call of the others proves nothing of it.
    """
    owner, _, method = patch.name.rpartition(".")
    if owner and method in _IN_CAPTURES:
        return Proof.CAPTURE
    in_each_step = is_of_builder(patch.name) or (owner.endswith("ModelRunner") and method in _IN_EACH_STEP)
    return Proof.STEP if in_each_step and all(each.observes for each in patches) else None


class Policy(NamedTuple):
    """The modes of all fixes, from the environment or from the decision of an engine's first process."""

    master: Master
    modes: Mapping[str, Mode]
    withheld: str | None = None
    """The reason for which nothing is patched although the switch is on."""
    misconfigured: Mapping[str, str] = {}
    """Variables with an invalid value, and unknown names, each with its value."""
    trees: Mapping[str, str] = {}
    """The `Diagnosis.tree` of unrecognised code, by the name of the fix that the user switched on for it."""

    def required(self, name: str) -> bool:
        """Tell if the engine must not start without the fix *name* where it is needed."""
        if self.withheld is not None or self.master is Master.OFF:
            return False
        mode = self.modes[name]
        return mode is Mode.ON or (self.master is Master.STRICT and mode is Mode.AUTO)

    @property
    def mistyped(self) -> tuple[str, ...]:
        """The unknown names, each with its value, with which an engine must not start."""
        if self.withheld is not None or self.master is not Master.STRICT:
            return ()
        known = names(self.modes)
        return tuple(f"{name}={value}" for name, value in self.misconfigured.items() if name not in known)

    def why_off(self, variable: str) -> str:
        """Return the setting by which *variable* switches something off."""
        if variable in self.misconfigured:
            return f"{variable}={self.misconfigured[variable]} means nothing, which counts as off"
        if variable == PREFIX and FIXES in self.misconfigured:
            return f"{FIXES}={self.misconfigured[FIXES]} means nothing, which counts as {PREFIX}=off"
        mistyped = (name for name, value in self.misconfigured.items() if asks_for_less(name, value))
        if variable == PREFIX and (name := next(mistyped, None)):
            return f"{name}={self.misconfigured[name]} is not a variable of vllm-graphfix, and counts as {PREFIX}=off"
        return f"{variable}=off"

    def code_of(self, variable: str) -> Code:
        """Return the kind of reason that `why_off` is."""
        return Code.MISCONFIGURED if variable in self.misconfigured else Code.SETTING


class AppliedFix:
    """One fix in this process: it is judged once, then applied module by module, and reverted."""

    def __init__(self, fix: "Patchable", policy: Policy) -> None:
        self.fix = fix
        self.mode = policy.modes[fix.name]
        self._tree = policy.trees.get(fix.name)
        self.diagnosis: Diagnosis | None = None
        self._patches: tuple[Patch, ...] | None = None
        self.sites: list[sites.Site] = []
        self.state = State.WAITING
        self.reason = "waits for vLLM to import the code that it concerns"
        self.code = Code.NONE
        self.activity = Activity(fix.events, corrects=not self.observes)
        if policy.master is Master.OFF:
            self.set_state(State.OFF, policy.why_off(PREFIX), policy.code_of(PREFIX))
        elif self.mode is Mode.OFF:
            self.set_state(State.OFF, policy.why_off(fix.variable), policy.code_of(fix.variable))
        elif policy.withheld is not None:
            self.set_state(State.NOT_IN_CANARY, policy.withheld)

    def set_state(self, state: State, reason: str, code: Code = Code.NONE) -> None:
        self.state, self.reason, self.code = state, reason, code

    @property
    def observes(self) -> bool:
        return self.mode is Mode.OBSERVE

    @property
    def engaged(self) -> bool:
        """Tell if patches, of either mode, are on vLLM or will be when it imports their targets."""
        return self.state in (State.ACTIVE, State.OBSERVING, State.WAITING)

    @property
    def is_correcting(self) -> bool:
        return self.engaged and not self.observes

    @property
    def expected_state(self) -> State:
        """The state after all imports if nothing fails. Needs a diagnosis: see `judge`."""
        if self.state is State.WAITING and self.diagnosis is not None:
            return State.OBSERVING if self.observes else State.ACTIVE
        return self.state

    def is_off_or_observed(self) -> bool:
        """Tell if the fix is switched off, or only observes."""
        return self.state is State.OFF or self.observes

    def lack_of(self, companion: Companion, other: "AppliedFix", may_be_needed: Callable[["AppliedFix"], bool]) -> Lack:
        """Return the lack of *other*, which is the *companion* of this fix.

        *may_be_needed* tells, of a fix that is off or observes, if this vLLM may need it.
        """
        if not self.is_correcting or other.is_correcting or other.state is State.NOT_NEEDED:
            return Lack.NONE
        if not other.is_off_or_observed():
            return Lack.REVERT
        if not may_be_needed(other):
            return Lack.NONE
        return Lack.ACCEPTED if companion.may_be_off else Lack.REVERT

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches for this vLLM. The first access imports the fix: not before a target."""
        if self._patches is None:
            diagnosis = self.diagnosis
            affected = diagnosis is not None and diagnosis.verdict is Verdict.AFFECTED
            offered = self.fix.patches(diagnosis.shape) if diagnosis is not None and affected else ()
            self._patches = tuple(patch for patch in offered if patch.observes or not self.observes)
        return self._patches

    def judge(self, diagnosis: Diagnosis) -> None:
        """Take over the *diagnosis* of this vLLM, and settle on the state that follows."""
        if diagnosis.tree and diagnosis.tree == self._tree:
            reason = f"{diagnosis.reason}; {self.fix.variable}=on:{diagnosis.tree} names this very code"
            diagnosis = diagnosis._replace(verdict=Verdict.AFFECTED, reason=reason)
        self.diagnosis = diagnosis
        if diagnosis.verdict is Verdict.AFFECTED:
            done = "observed" if self.observes else "applied"
            self.set_state(
                State.WAITING, f"{diagnosis.reason} ({diagnosis.where}); to be {done} when vLLM imports that code"
            )
        elif diagnosis.verdict is Verdict.UNRECOGNISED:
            named = f"; {self.fix.variable} names another tree, {self._tree}" if self._tree and diagnosis.tree else ""
            state = State.INCOMPATIBLE if diagnosis.defect_seen else State.UNKNOWN
            self.set_state(state, f"{diagnosis.reason} ({diagnosis.where}){named}", Code.NEW_CODE)
        else:
            self.set_state(State.NOT_NEEDED, diagnosis.reason)

    def apply(self, module: str, files: sites.DiagnosedFiles) -> bool:
        """Put the patches of *module*, which is imported, on vLLM; False if there are none.

        Raises `ConflictError` where other code than *files* runs there, and whatever a wrapper raises.
        """
        patches = [patch for patch in self.patches if patch.module == module]
        if not patches:
            return False
        files.refuse_others(self.fix)
        self.sites += sites.apply(self.fix.name, patches, self.activity, files.text)
        # Read back from the module: callers may get something else than what was set on its class.
        for site in self.sites:
            if reason := site.lost():
                raise sites.ConflictError(reason)
        missing = sorted({patch.module for patch in self.patches if patch.module not in sys.modules})
        rest = f"; {', '.join(missing)} when it is imported" if missing else ""
        state, done = (State.OBSERVING, "counts at") if self.observes else (State.ACTIVE, "applied to")
        self.set_state(state, f"{done} {', '.join(site.name for site in self.sites)}{rest}")
        return True

    def revert(self, state: State, reason: str, code: Code = Code.NONE) -> None:
        """Take the patches off vLLM, and settle on *state*, or on why that cannot be done."""
        try:
            sites.revert(self.fix.name, self.sites)
            sites.drop_copies(self._patches or ())
        except Exception as error:
            # vLLM may be in an import or a step: the failure becomes the state.
            foreign = isinstance(error, sites.ConflictError)
            state, code = (State.CONFLICT, Code.FOREIGN_PATCH) if foreign else (State.FAILED, Code.ERROR)
            self.set_state(state, f"{reason}; and {error}", code)
            return
        self.sites = []
        self.set_state(state, reason, code)

    def proofs(self) -> list[tuple[sites.Site, Proof]]:
        """Return the sites at which a call proves that the fix is on the path, each with the time of such calls."""
        proofs = {(patch.module, patch.name): proof_of(self.patches, patch) for patch in self.patches}
        named = ((site, proofs.get((site.module, ".".join([*site.classes, site.attribute])))) for site in self.sites)
        return [(site, proof) for site, proof in named if proof is not None]

    @property
    def failed_in_use(self) -> bool:
        """Tell if it failed while vLLM ran, and is still in place."""
        applied = bool(self.sites) and not any(site.lost() for site in self.sites)
        return self.state is State.FAILED and self.activity.error is not None and applied

    def is_unapplied(self, *, v2: bool | None) -> bool:
        """Tell if the engine imported a module that the fix is for, and the fix is not on all of its targets.

        *v2* tells if the engine runs model runner V2; None if that is not known.
        """
        if self.fix.runner is not None and v2 is not None and (self.fix.runner == "V2") != v2:
            return False
        if not any(module in sys.modules for module in self.fix.modules):
            return False
        if self.state in (State.INCOMPATIBLE, State.CONFLICT, State.FAILED):
            return True
        imported = sum(patch.module in sys.modules for patch in self.patches) if self.engaged else 0
        return len(self.sites) < imported
