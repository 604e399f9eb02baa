"""What is wrong with an engine, and what is worth knowing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.commands.fleet.wording import ago, lasting, ranks_named
from vllm_graphfix.fix import State
from vllm_graphfix.records import PRUNED_AFTER, Liveness
from vllm_graphfix.settings.environment import STATUS_DIR

if TYPE_CHECKING:
    from vllm_graphfix.commands.fleet.engine import Engine, Member

_STOPPED_LATELY = PRUNED_AFTER
BAD = frozenset({State.FAILED.value, State.CONFLICT.value, State.INCOMPATIBLE.value})


def judged(engine: Engine) -> tuple[list[str], list[str]]:
    """What somebody has to see to, and what is worth knowing, of one engine."""
    wrong: list[str] = []
    notes: list[str] = []
    for member in engine.members:
        if member.record.problem is not None:
            what = f"stopped by vllm-graphfix {ago(member.age)}, according to {engine.name_of(member)}: {member.record.problem}"
            (wrong if member.age <= _STOPPED_LATELY else notes).append(what)
    hang = [m for m in engine.members if m.hangs]
    if hang:
        wrong.append(
            f"not heard from for {min(m.age for m in hang):.0f} s: {engine.several(hang)}. "
            "What exists and is not heard from hangs, is stopped (SIGSTOP), or cannot write its record"
        )
    if not any(member.live for member in engine.members):
        return wrong, notes
    gone = [m for m in engine.members if m.liveness is Liveness.DEAD and m.record.problem is None]
    silent = [m for m in engine.members if m.liveness is Liveness.SILENT and not m.hangs]
    if gone:
        wrong.append(f"dead: {engine.several(gone)}")
    if silent:
        wrong.append(f"not heard from for {min(m.age for m in silent):.0f} s: {engine.several(silent)}")
    if starting := engine.starting:
        notes.append(f"starting for {lasting(max(m.unchanged for m in starting))}: {engine.several(starting)}")
    elif not any(member.record.rank is not None for member in engine.members):
        wrong.append(
            f"no rank has reported: they are starting, or run on machines whose records are not here (put {STATUS_DIR} on shared storage)"
        )
    for absent, agreed in engine.missing():
        if agreed:
            verb = "runs on a machine" if len(absent) == 1 else "run on machines"
            notes.append(
                f"{ranks_named(absent)} {verb} whose records are not here: put {STATUS_DIR} on shared storage to see them; they agreed with the others at start-up"
            )
        elif not starting:
            wrong.append(
                f"no record of {ranks_named(absent)}: starting, without the plugin, or on machines whose records are not here (put {STATUS_DIR} on shared storage)"
            )
    uncompared = [member for member in engine.ranked if member.record.agreement is None]
    if uncompared:
        notes.append(f"not compared with the others: {engine.several(uncompared)}")
    for member in engine.ranked:
        agreement = member.record.agreement
        if agreement is not None and agreement.difference is not None:
            wrong.append(f"the ranks do not agree. {agreement.difference}")
    for fix in engine.fixes:
        states = engine.states(fix)
        for state in sorted(BAD & states.keys()):
            reason = states[state][0].record.fixes[fix].reason
            wrong.append(f"{fix} is {state} on {engine.several(states[state])}: {reason}")
        # `waiting` is a rank that does not run what the fix concerns, as a drafter.
        if len(states.keys() - {State.WAITING.value}) > 1:
            wrong.append(f"{fix} differs: {_by_name(engine, states)}")
    if (found := engine.counts("shadow")).get("mismatches"):
        stopped = (
            f"; graphs no longer replayed: {found['quarantined-graphs']}" if found.get("quarantined-graphs") else ""
        )
        wrong.append(
            f"the shadow check found wrong CUDA graph replays, {found['mismatches']} in {found.get('checks', 0)} checks"
            f"{stopped}. `vllm-graphfix report` writes the bug report for vLLM"
        )
    live = [member for member in engine.members if member.live]
    wrong += [
        f"misconfigured: {variable}={given} means nothing: what it is for is off, or at its default, until it is corrected and the engine "
        "restarted"
        for variable, given in engine.misconfigured.items()
    ]
    for what, value in (
        ("vLLM", lambda record: record.vllm),
        ("vllm-graphfix", lambda record: record.graphfix),
        ("in the rollout", lambda record: "yes" if record.decision.canary else "no"),
    ):
        values: dict[str, list[Member]] = {}
        for member in live:
            values.setdefault(value(member.record), []).append(member)
        if len(values) > 1:
            wrong.append(f"{what} differs: {_by_name(engine, values)}")
    return wrong, notes


def _by_name(engine: Engine, values: Mapping[str, Sequence[Member]]) -> str:
    return "; ".join(f"{value} on {engine.several(members)}" for value, members in values.items())
