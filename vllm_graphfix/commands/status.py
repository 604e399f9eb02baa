"""The fixes that a vLLM needs, and those that this environment would apply, judged from its source alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_graphfix import manifest
from vllm_graphfix._version import __version__
from vllm_graphfix.commands.look_alikes import LookAlike, look_alikes_of
from vllm_graphfix.commands.next_step import answer_to
from vllm_graphfix.deployment import Answer, Concern, Deployment, hardware
from vllm_graphfix.deployment.runner import Default, default_runner
from vllm_graphfix.fix import Diagnosis, Fix, Mode, State, Verdict, variable
from vllm_graphfix.fixes import FIXES, OBSERVED_BY_DEFAULT, about
from vllm_graphfix.patching.applied_fix import AppliedFix, Lack, Policy
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.environment import Settings
from vllm_graphfix.source.files import Source
from vllm_graphfix.text import brief_repr, printable

SCHEMA = 1


class Row(NamedTuple):
    """One fix, for one vLLM in one environment."""

    fix: Fix
    diagnosis: Diagnosis
    mode: Mode
    would_be: State
    reason: str
    """The reason for `would_be`."""
    notes: tuple[str, ...]
    answer: Answer | None = None
    """The answer to whether the defect concerns the deployment of `--for`; None without one."""

    @property
    def ran_on(self) -> list[str]:
        """Names of the GPUs on which engines ran with the fix: parts of the names that drivers have for them."""
        return list(filter(None, about(self.fix).ran_on.split(", ")))

    @property
    def is_unapplied(self) -> bool:
        """True if the fix is or may be needed, would not be applied, and is not merely observed by default."""
        by_default = self.fix.default is Mode.OBSERVE and self.would_be is State.OBSERVING
        needed = self.diagnosis.needs_action and not self.is_ruled_out
        return needed and self.would_be is not State.ACTIVE and not by_default

    @property
    def is_unknown(self) -> bool:
        """True if the code is unrecognised and no part of the defect was seen in it, which is no all-clear."""
        return self.diagnosis.verdict is Verdict.UNRECOGNISED and not self.diagnosis.defect_seen

    @property
    def is_ruled_out(self) -> bool:
        """True if the defect cannot occur in the deployment of `--for`."""
        return self.answer is not None and self.answer.concern is Concern.DOES_NOT


class Status(NamedTuple):
    """One vLLM in one environment."""

    source: Source
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Messages that call for action, besides the rows."""
    misconfigured: Mapping[str, str]
    """Variables with an invalid value, and unknown variables, each with its value."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that serve: that of `--gpu`, or this machine's; none where they are not known."""
    elsewhere: bool = False
    """True for the vLLM of `--vllm`: the plugin may not be installed beside it."""
    deployment: Deployment | None = None
    """The deployment of `--for` or of a running server."""

    @property
    def ran_on(self) -> str:
        """Return on how many of the GPUs that serve the needed fixes have run; empty if either is not known."""
        needed = [row.ran_on for row in self.rows if row.diagnosis.needs_action and not row.is_ruled_out]
        names = sorted({name for names in needed for name in names})
        if not names or not self.gpus:
            return ""
        here = sum(all(_is_one_of(gpu, names) for gpu in self.gpus) for names in needed)
        own = ", ".join(printable(gpu[:60]) for gpu in self.gpus)
        which = "that may concern you" if any(row.answer for row in self.rows) else "that this vLLM needs"
        count = "all" if here == len(needed) else here or "none"
        elsewhere = "" if here == len(needed) else f"; the project's GPUs are {', '.join(names)}"
        if len(needed) == 1:
            where = "in an engine" if here else "in no engine"
            return f"The fix {which} has run {where} on this GPU, {own}{elsewhere}."
        return f"Of the {len(needed)} fixes {which}, {count} have run in an engine on this GPU, {own}{elsewhere}."

    @property
    def hit(self) -> tuple[Row, ...]:
        """Defects that the deployment has."""
        return tuple(row for row in self.rows if row.answer and row.answer.concern is Concern.CONCERNS)

    @property
    def undecided(self) -> tuple[Row, ...]:
        """Defects that the deployment may have."""
        return tuple(row for row in self.rows if row.answer and row.answer.concern is Concern.UNKNOWN)

    @property
    def look_alikes(self) -> Sequence[tuple[LookAlike, Answer]]:
        """Defects that the deployment has or may have and that no fix corrects."""
        return () if self.deployment is None else look_alikes_of(self.source, self.deployment)

    @property
    def default_runner(self) -> Default:
        """The model runner that this vLLM uses by default."""
        return default_runner(self.source)

    @property
    def is_nothing_known(self) -> bool:
        """True if all code that the fixes concern is missing, which is so in no vLLM from 0.14 on."""
        return all(row.is_unknown for row in self.rows)

    @property
    def unknown(self) -> tuple[Row, ...]:
        """Defects that the source does not decide, without those that cannot occur in the deployment of `--for`."""
        return tuple(row for row in self.rows if row.is_unknown and not row.is_ruled_out)

    @property
    def is_incomplete(self) -> bool:
        """True if a needed fix would not be applied, or a setting is invalid, so that its intent is unknown."""
        return bool(self.misconfigured) or any(row.is_unapplied for row in self.rows)

    @property
    def why_incomplete(self) -> str:
        """The reasons for `is_incomplete`, and the unknown defects, in one line."""
        rows = [row for row in self.rows if row.is_unapplied]
        reasons = []
        if self.misconfigured:
            values = ", ".join(f"{name}={value}" for name, value in self.misconfigured.items())
            known = settings.names(row.fix.name for row in self.rows)
            what = "value" if self.misconfigured.keys() <= set(known) else "name or value"
            reasons.append(f"an invalid {what} ({values})")
        if self.is_nothing_known:
            reasons.append("none of the code that the fixes concern is there: is this vLLM, 0.14 or later?")
        if rows:
            why = ", ".join(dict.fromkeys(row.reason for row in rows))
            reasons.append(f"{len(rows)} needed fix{'es' if len(rows) > 1 else ''} not applied ({why})")
        elif self.unknown and not self.is_nothing_known:
            reasons.append(f"{len(self.unknown)} cannot be told: {', '.join(row.fix.name for row in self.unknown)}")
        return "; ".join(reasons)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `status`, a stable interface; `SCHEMA` changes with it."""
        return {
            "schema": SCHEMA,
            "graphfix": __version__,
            "vllm": self.source.version,
            "source": self.source.label,
            "default_runner": self.default_runner or None,
            "misconfigured": dict(self.misconfigured),
            "notes": list(self.notes),
            "fixes": [
                {
                    "name": row.fix.name,
                    "pr": about(row.fix).pr,
                    "references": list(about(row.fix).references),
                    "diagnosis": row.diagnosis.verdict.value,
                    "reason": row.diagnosis.reason,
                    "where": row.diagnosis.where,
                    "known_release": row.diagnosis.known,
                    "defect_seen": row.diagnosis.defect_seen if row.diagnosis.verdict is Verdict.UNRECOGNISED else None,
                    "tree": row.diagnosis.tree or None,
                    "rests_on": row.fix.default_rationale,
                    "ran_on": row.ran_on,
                    "mode": row.mode.value,
                    "would_be": row.would_be.value,
                    "notes": list(row.notes),
                    **(
                        {"concern": {"answer": row.answer.concern.value, "reason": row.answer.reason}}
                        if row.answer
                        else {}
                    ),
                }
                for row in self.rows
            ],
            **(
                {}
                if self.deployment is None
                else {"not_corrected": [each.as_json(to) for each, to in self.look_alikes]}
            ),
        }


def status(source: Source, environment: Mapping[str, str] = os.environ, deployment: Deployment | None = None) -> Status:
    """Judge *source* in *environment*, and the fixes that concern *deployment*; raise SourceError or ManifestError.

    Nothing of vLLM is imported or executed.
    """
    if deployment is not None:
        environment = {**environment, **deployment.assigned}
    wanted = settings.read(environment, [fix.name for fix in FIXES], OBSERVED_BY_DEFAULT)
    diagnoses = {fix.name: manifest.diagnose(fix, source) for fix in FIXES}
    filtered = why_not_loaded(environment)
    decision = rollout.decide(wanted, source.version or "")
    if deployment is not None and not wanted.rollout_key and (separately := deployment.decides_separately()):
        decision = decision.needing_a_key(separately)
    notes = [*wanted.problems, *filter(None, [decision.refused])]
    if filtered is not None:
        notes.append(filtered)
    if not decision.canary and decision.refused is None:
        notes.append(f"an engine started here would not be in the rollout: {decision.withheld}")
    applied_fixes = _applied_fixes(
        diagnoses,
        Policy(decision.master, decision.modes, decision.withheld, decision.misconfigured, decision.trees),
        filtered,
    )
    rows = tuple(_row(fix, diagnoses, applied_fixes, wanted) for fix in FIXES)
    if deployment is not None:
        rows = tuple(row._replace(answer=answer_to(row.fix, row.diagnosis, deployment)) for row in rows)
    unneeded = [variable(row.fix.name) for row in rows if _no_longer_needed(row, wanted)]
    if unneeded:
        notes.append(f"these settings are no longer needed with this vLLM: {', '.join(unneeded)}")
    gpus = tuple(dict.fromkeys(hardware.gpus()))
    if deployment is not None and (name := deployment.gpu[0]) is not None:
        gpus = () if hardware.CAPABILITY.fullmatch(name) else (name,)  # several GPUs have one capability
    return Status(source, rows, tuple(notes), decision.misconfigured, gpus, deployment=deployment)


def _is_one_of(gpu: str, names: Sequence[str]) -> bool:
    return any(re.search(rf"\b{name}\b", gpu, re.IGNORECASE) for name in names)


def _may_be_needed(diagnosis: Diagnosis) -> bool:
    return diagnosis.verdict in (Verdict.AFFECTED, Verdict.UNRECOGNISED)


def _no_longer_needed(row: Row, wanted: Settings) -> bool:
    return row.fix.name in wanted.explicit and row.diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT)


def _row(
    fix: Fix, diagnoses: Mapping[str, Diagnosis], applied_fixes: Mapping[str, AppliedFix], wanted: Settings
) -> Row:
    """Report the state that the engine's own `AppliedFix` reaches with this diagnosis."""
    applied, notes = applied_fixes[fix.name], list[str]()
    would_be = applied.expected_state
    if would_be is State.OBSERVING and fix.default is Mode.OBSERVE and fix.name not in wanted.explicit:
        notes.append(f"observed by default; {fix.variable}=auto applies it")
    for companion in fix.requires:
        other = applied_fixes[companion.name]
        lack = applied.lack_of(companion, other, lambda each: _may_be_needed(diagnoses[each.fix.name]))
        if lack is Lack.NONE:
            continue
        if not other.is_off_or_observed():
            would_be = State.INCOMPATIBLE
            verdict = diagnoses[companion.name].verdict.value
            notes.append(f"{companion.name} is {verdict}; without it {companion.because}")
        elif lack is Lack.REVERT:  # reverted only in a process that imports the companion's code
            notes.append(f"{companion.name} is not switched on: where {companion.because}, this fix is reverted")
        else:
            notes.append(f"{companion.name} is not switched on: {companion.because}")
    return Row(fix, diagnoses[fix.name], applied.mode, would_be, applied.reason, tuple(notes))


def _applied_fixes(diagnoses: Mapping[str, Diagnosis], policy: Policy, filtered: str | None) -> dict[str, AppliedFix]:
    """Return every fix in its state in an engine started here that has imported all code that the fixes concern."""
    applied_fixes = {fix.name: AppliedFix(fix, policy) for fix in FIXES}
    for name, applied in applied_fixes.items():
        if filtered is not None:
            applied.set_state(State.OFF, filtered)
        elif applied.engaged:
            applied.judge(diagnoses[name])
    return applied_fixes


def why_not_loaded(environment: Mapping[str, str]) -> str | None:
    """Return the reason why vLLM would not load this plugin, which VLLM_PLUGINS does not name; None if it would."""
    named = environment.get("VLLM_PLUGINS")
    if named is None or "graphfix" in (name.strip() for name in named.split(",")):
        return None
    return f"VLLM_PLUGINS={brief_repr(named)} keeps vLLM from loading this plugin; add graphfix to it"
