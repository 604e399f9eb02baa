"""What a vLLM needs and what this environment would do about it, judged from its source alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_graphfix import manifest
from vllm_graphfix._version import __version__
from vllm_graphfix.deployment import Answer, Concern, Deployment, needs
from vllm_graphfix.deployment.runner import Default, default_runner
from vllm_graphfix.fix import Diagnosis, Fix, Mode, State, Verdict, variable
from vllm_graphfix.fixes import FIXES, OBSERVED_BY_DEFAULT, about
from vllm_graphfix.patching.applied_fix import AppliedFix, Policy
from vllm_graphfix.settings import decision as rollout
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.settings.environment import Settings
from vllm_graphfix.source.files import Source
from vllm_graphfix.text import brief_repr

SCHEMA = 1


class Row(NamedTuple):
    """One fix."""

    fix: Fix
    diagnosis: Diagnosis
    mode: Mode
    would_be: State
    reason: str
    """Why it would be in that state."""
    notes: tuple[str, ...]
    answer: Answer | None = None
    """Whether the defect can show in the deployment that was asked about."""

    @property
    def left_undone(self) -> bool:
        """Needed, or perhaps needed, and not applied, which is not for want of a decision of the user's."""
        by_default = self.fix.default is Mode.OBSERVE and self.would_be is State.OBSERVING
        needed = self.diagnosis.needs_action and not self.is_ruled_out
        return needed and self.would_be is not State.ACTIVE and not by_default

    @property
    def is_unknown(self) -> bool:
        """Nothing of the defect was seen, in code that nobody knows: that is no all-clear."""
        return self.diagnosis.verdict is Verdict.UNRECOGNISED and not self.diagnosis.defect_seen

    @property
    def is_ruled_out(self) -> bool:
        """The defect cannot show in the deployment that was asked about."""
        return self.answer is not None and self.answer.concern is Concern.DOES_NOT


class Status(NamedTuple):
    """One vLLM under one environment."""

    source: Source
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """What the operator should act on, beyond the rows."""
    misconfigured: Mapping[str, str]
    """Variables whose value means nothing, and names that do, each with that value."""
    elsewhere: bool = False
    """Whether it is a vLLM that was named: the plugin may not be beside it."""

    @property
    def default_runner(self) -> Default:
        """The model runner that this vLLM takes where nobody chooses one."""
        return default_runner(self.source)

    @property
    def is_nothing_known(self) -> bool:
        """Whether none of the code that the fixes concern is there, which no vLLM from 0.14 on lacks all of."""
        return all(row.is_unknown for row in self.rows)

    @property
    def unknown(self) -> tuple[Row, ...]:
        """The defects that cannot be told, less those that do not concern the deployment that was asked about."""
        return tuple(row for row in self.rows if row.is_unknown and not row.is_ruled_out)

    @property
    def left_undone(self) -> bool:
        """Whether something needed would not be applied, or a setting means nothing: what it was to do is not known."""
        return bool(self.misconfigured) or any(row.left_undone for row in self.rows)

    @property
    def why_left_undone(self) -> str:
        """The reason of `left_undone`, or what cannot be told, in one line."""
        rows = [row for row in self.rows if row.left_undone]
        told = []
        if self.misconfigured:
            values = ", ".join(f"{name}={value}" for name, value in self.misconfigured.items())
            known = settings.names(row.fix.name for row in self.rows)
            what = "value" if self.misconfigured.keys() <= set(known) else "name or value"
            told.append(f"a {what} that means nothing ({values})")
        if self.is_nothing_known:
            told.append("none of the code that the fixes concern is there: is this vLLM, 0.14 or later?")
        if rows:
            why = ", ".join(dict.fromkeys(row.reason for row in rows))
            told.append(f"{len(rows)} needed fix{'es' if len(rows) > 1 else ''} not applied ({why})")
        elif self.unknown and not self.is_nothing_known:
            told.append(f"{len(self.unknown)} cannot be told: {', '.join(row.fix.name for row in self.unknown)}")
        return "; ".join(told)

    def as_json(self) -> dict[str, Any]:
        """The stable interface; `SCHEMA` changes with it."""
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
        }


def status(source: Source, environment: Mapping[str, str] = os.environ, deployment: Deployment | None = None) -> Status:
    """Judges *source*, and for a *deployment* of it which fixes concern it. Raises `SourceError` and `ManifestError`.

    Nothing is imported or executed.
    """
    if deployment is not None:
        environment = {**environment, **deployment.assigned}
    wanted = settings.read(environment, [fix.name for fix in FIXES], OBSERVED_BY_DEFAULT)
    found = {fix.name: manifest.diagnose(fix, source) for fix in FIXES}
    filtered = why_not_loaded(environment)
    decision = rollout.decide(wanted, source.version or "")
    if deployment is not None and not wanted.rollout_key and (separately := deployment.decides_separately()):
        decision = decision.needing_a_key(separately)
    notes = [*wanted.problems, *filter(None, [decision.refused])]
    if filtered is not None:
        notes.append(filtered)
    if not decision.canary and decision.refused is None:
        notes.append(f"an engine started here would not be in the rollout: {decision.withheld}")
    would = _applied_fixes(
        found,
        Policy(decision.master, decision.modes, decision.withheld, decision.misconfigured, decision.trees),
        filtered,
    )
    rows = tuple(_row(fix, found, would, wanted) for fix in FIXES)
    if deployment is not None:
        rows = tuple(row._replace(answer=_answer(row.fix, row.diagnosis, deployment)) for row in rows)
    unneeded = [variable(row.fix.name) for row in rows if _no_longer_needed(row, wanted)]
    if unneeded:
        notes.append(f"these settings are no longer needed with this vLLM: {', '.join(unneeded)}")
    return Status(source, rows, tuple(notes), decision.misconfigured)


def _may_be_needed(found: Diagnosis) -> bool:
    return found.verdict in (Verdict.AFFECTED, Verdict.UNRECOGNISED)


def _no_longer_needed(row: Row, wanted: Settings) -> bool:
    return row.fix.name in wanted.explicit and row.diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT)


def _answer(fix: Fix, diagnosis: Diagnosis, deployment: Deployment) -> Answer:
    # Of `fixed`, a shape has cases that are open, which the fix's needs tell apart.
    is_open = diagnosis.verdict is Verdict.FIXED and diagnosis.shape
    if diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT) and not is_open:
        return Answer(Concern.DOES_NOT, f"this vLLM does not have the defect: {diagnosis.reason}")
    found = needs.judge(fix.needs(), deployment, diagnosis.shape)
    if is_open and found.concern is Concern.CONCERNS:
        return Answer(Concern.UNKNOWN, f"a run of such an engine: {diagnosis.reason}")
    if diagnosis.verdict is Verdict.UNRECOGNISED and found.concern is Concern.CONCERNS:
        return Answer(Concern.UNKNOWN, f"a person who reads the code: {diagnosis.reason}")
    return found


def _row(fix: Fix, found: Mapping[str, Diagnosis], would: Mapping[str, AppliedFix], wanted: Settings) -> Row:
    """What the engine's own `AppliedFix` comes to with this diagnosis."""
    applied, notes = would[fix.name], list[str]()
    would_be = applied.expected_state
    if would_be is State.OBSERVING and fix.default is Mode.OBSERVE and fix.name not in wanted.explicit:
        notes.append(f"observed by default; {fix.variable}=auto applies it")
    for together in fix.requires:
        other = would[together.name]
        lacks = applied.lacks(together, other, lambda each: _may_be_needed(found[each.fix.name]))
        if lacks is None:
            continue
        if not other.is_restrained():
            would_be = State.INCOMPATIBLE
            notes.append(f"{together.name} is {found[together.name].verdict.value}; without it {together.because}")
        elif lacks:  # only in a process that imports the companion's code
            notes.append(f"{together.name} is not switched on: where {together.because}, this fix is reverted")
        else:
            notes.append(f"{together.name} is not switched on: {together.because}")
    return Row(fix, found[fix.name], applied.mode, would_be, applied.reason, tuple(notes))


def _applied_fixes(found: Mapping[str, Diagnosis], policy: Policy, filtered: str | None) -> dict[str, AppliedFix]:
    """Every fix as an engine started here would have it, once vLLM has imported all that the fixes concern."""
    would = {fix.name: AppliedFix(fix, policy) for fix in FIXES}
    for name, applied in would.items():
        if filtered is not None:
            applied.set_state(State.OFF, filtered)
        elif applied.engaged:
            applied.judge(found[name])
    return would


def why_not_loaded(environment: Mapping[str, str]) -> str | None:
    """vLLM loads the plugins that VLLM_PLUGINS names; set and empty, it loads none."""
    named = environment.get("VLLM_PLUGINS")
    if named is None or "graphfix" in (name.strip() for name in named.split(",")):
        return None
    return f"VLLM_PLUGINS={brief_repr(named)} keeps vLLM from loading this plugin; add graphfix to it"
