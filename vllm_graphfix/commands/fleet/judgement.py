"""The problems of an engine, and notes on it: a table of checks, each of which yields sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_graphfix.commands.fleet.engine import BAD, YOUNG, Engine
from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.fix import Code, State
from vllm_graphfix.marks import process as marks
from vllm_graphfix.records import HEARTBEAT, PRUNED_AFTER, Liveness, path_text
from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.text import ago, lasting, ranks_named

_STOPPED_LATELY = PRUNED_AFTER
LIMITED = {Code.CANNOT_ABORT.value: True, Code.GRAPH_EXCLUDED.value: False, Code.UNDELIVERED.value: True}
"""Codes of a detector that is active and does not do all that it is set to do; True for those that break a promise."""


class Finding(NamedTuple):
    """One sentence about an engine."""

    text: str
    is_wrong: bool = True
    """Somebody has to act on it; otherwise it is a note."""


def judged(engine: Engine) -> Engine:
    """Return *engine* with its problems and notes, in the order of the checks, each once."""
    checks = (*_CHECKS, *(_CHECKS_WHILE_IT_RUNS if engine.live else ()))
    findings = list(dict.fromkeys(finding for check in checks for finding in check(engine)))
    wrong, notes = ([each.text for each in findings if each.is_wrong is kind] for kind in (True, False))
    return replace(engine, wrong=tuple(wrong), notes=tuple(notes))


def _stopped(engine: Engine) -> Iterator[Finding]:
    stops: dict[tuple[bool, str], list[Member]] = {}
    for member in engine.members:
        if member.record.problem is not None:
            stops.setdefault((member.age <= _STOPPED_LATELY, member.record.problem), []).append(member)
    for (lately, problem), members in stops.items():
        since = ago(min(m.age for m in members))
        yield Finding(
            f"stopped by vllm-graphfix {since}, according to {engine.several(members)}: {problem}", is_wrong=lately
        )


def _hanging(engine: Engine) -> Iterator[Finding]:
    if hang := [m for m in engine.members if m.hangs]:
        yield Finding(
            f"not heard from for {min(m.age for m in hang):.0f} s: {engine.several(hang)}. "
            "What exists and is not heard from hangs, is stopped (SIGSTOP), or cannot write its record"
        )


def _misdated(engine: Engine) -> Iterator[Finding]:
    if misdated := [m for m in engine.members if m.misdated]:
        yield Finding(
            f"cannot be told to be alive: {engine.several(misdated)}. Records dated "
            f"{lasting(max(m.ahead for m in misdated))} ahead of their folder's clock, which was set back, are no sign "
            f"of life; a process that runs dates its own anew within {HEARTBEAT:.0f} s",
            # A process that exists here and has such a record hangs, or the clock was set back a moment ago.
            is_wrong=engine.live,
        )


def _lost(engine: Engine) -> Iterator[Finding]:
    if gone := [m for m in engine.members if m.liveness is Liveness.DEAD and m.record.problem is None]:
        yield Finding(f"dead: {engine.several(gone)}")
    if silent := [m for m in engine.members if m.liveness is Liveness.SILENT and not (m.hangs or m.misdated)]:
        yield Finding(f"not heard from for {min(m.age for m in silent):.0f} s: {engine.several(silent)}")


def _stuck(engine: Engine) -> Iterator[Finding]:
    if stuck := [m for m in engine.members if m.in_step is not None]:
        yield Finding(
            f"in one step for {lasting(min(m.in_step or 0.0 for m in stuck))}: {engine.several(stuck)}. Its heartbeat "
            "goes on, and the thread that runs the model waits: a collective or kernel that does not end, or code that "
            "is compiled (py-spy dump --pid says where)"
        )


def _outdated(engine: Engine) -> Iterator[Finding]:
    if outdated := [m for m in engine.members if m.live and m.found.outdated]:
        yield Finding(
            f"record not written for {lasting(max(m.unchanged for m in outdated))}: {engine.several(outdated)}. "
            "What has changed there since is not known; the log says why (no space, a quota)"
        )


def _starting(engine: Engine) -> Iterator[Finding]:
    if starting := engine.starting:
        since = lasting(max(m.unchanged for m in starting))
        yield Finding(f"starting for {since}: {engine.several(starting)}", is_wrong=False)


def _unreadable(engine: Engine) -> Iterator[Finding]:
    for one in engine.unreadable:
        yield Finding(
            f"the state of process {one.pid} on {one.host} is not known: its record {path_text(one.path)} cannot be "
            f"read ({one.why})"
        )


def _unrecorded(engine: Engine) -> Iterator[Finding]:
    starting, unread = bool(engine.starting), len(engine.unreadable)
    recorded = any(member.record.rank is not None for member in engine.members)
    if not starting and not unread and not recorded:
        yield Finding(
            "no rank has reported: they are starting, "
            f"or run on machines whose records are not here (put {STATUS_DIR} on shared storage)"
        )
    lacking = max(engine.unrecorded - unread, 0) if recorded and not starting else 0
    for absent, agreed in engine.missing():
        if len(absent) <= unread:
            unread -= len(absent)
            yield Finding(f"no record of {ranks_named(absent)} can be read")
        elif agreed and not lacking:
            verb = "runs on a machine" if len(absent) == 1 else "run on machines"
            yield Finding(
                f"{ranks_named(absent)} {verb} whose records are not here: put {STATUS_DIR} on shared storage to see "
                "them; they agreed with the others at start-up",
                is_wrong=False,
            )
        elif not starting:
            yield Finding(
                f"no record of {ranks_named(absent)}: starting, without the plugin, or on machines whose records are "
                f"not here (put {STATUS_DIR} on shared storage)"
            )
            lacking = max(lacking - len(absent), 0)
    if lacking:  # ranks that were compared with nobody whose record is here
        yield Finding(
            f"no record of {lacking} of the ranks that its front-end has started on its own host: without the plugin, "
            f"or with another {STATUS_DIR}"
        )


def _uncompared(engine: Engine) -> Iterator[Finding]:
    if engine.graphs is False:
        text = "it runs without CUDA graphs (--enforce-eager, or cudagraph_mode NONE): its zeros mean nothing"
        yield Finding(text, is_wrong=False)
    unchecked: dict[str, list[Member]] = {}
    # An error that came early may have hidden its rank from a worker.
    for member in (*engine.ranked, *(each for each in engine.members if each.live and each.record.rank is None)):
        if member.record.unchecked is not None:
            unchecked.setdefault(member.record.unchecked, []).append(member)
    yield from (Finding(f"not checked, {engine.several(members)}: {why}") for why, members in unchecked.items())
    uncompared = [member for member in engine.ranked if member.record.agreement is None]
    if uncompared and engine.graphs is not False:
        yield Finding(f"not compared with the others: {engine.several(uncompared)}", is_wrong=False)
    for member in engine.ranked:
        agreement = member.record.agreement
        if agreement is not None and agreement.difference is not None:
            yield Finding(f"the ranks do not agree. {agreement.difference}")


def _states(engine: Engine) -> Iterator[Finding]:
    for fix in engine.fixes:
        states = engine.states(fix)
        for state in sorted(BAD & states.keys()):
            reason = states[state][0].record.fixes[fix].reason
            yield Finding(f"{fix} is {state} on {engine.several(states[state])}: {reason}")
        # `waiting` is a rank that does not run what the fix concerns, as a drafter.
        if len(states.keys() - {State.WAITING.value}) > 1:
            yield Finding(f"{fix} differs: {_names_by_value(engine, states)}")
    if unknown := [fix for fix in engine.fixes if State.UNKNOWN.value in engine.states(fix)]:
        yield Finding(
            f"cannot be told, since this vLLM is newer than what is known: {', '.join(unknown)}. "
            "`vllm-graphfix status` says more",
            is_wrong=False,
        )


def _limited_detectors(engine: Engine) -> Iterator[Finding]:
    for name in engine.fixes:
        active = engine.states(name).get(State.ACTIVE.value, ())
        for code, is_wrong in LIMITED.items():
            if members := [member for member in active if member.record.fixes[name].code == code]:
                reason = members[0].record.fixes[name].reason
                yield Finding(f"{name} is limited on {engine.several(members)}: {reason}", is_wrong=is_wrong)


def _unseen(engine: Engine) -> Iterator[Finding]:
    front_ends = [m for m in engine.members if m.live and m.record.role in ("front-end", "api-server")]
    serves = any(m.record.serves_metrics for m in front_ends)
    if front_ends and not serves and min(m.unchanged for m in front_ends) >= YOUNG:
        yield Finding(
            "no process of it serves graphfix_* on /metrics, so Prometheus sees nothing of it: it is no server, or its "
            "front-end is on another host or not vLLM's Python one",
            is_wrong=False,
        )


def _detected(engine: Engine) -> Iterator[Finding]:
    if (events := engine.counts("shadow")).get("mismatches"):
        restored = events.get("quarantines-given-up", 0)
        out = events.get("quarantined-graphs", 0) - restored
        stopped = f"; graphs no longer replayed: {out}" if out else ""
        if restored:  # their steps cannot be run without them
            stopped += f"; graphs replayed again, wrong or not, after they had been taken out: {restored}"
        yield Finding(
            f"the shadow check found wrong CUDA graph replays, {events['mismatches']} in {events.get('checks', 0)} "
            f"checks{stopped}. `vllm-graphfix report` writes the bug report for vLLM"
        )
    if events.get("acceptance-collapses"):
        yield Finding(
            "far fewer drafts of a CUDA graph are accepted than without it: the log of its ranks names it. Of all "
            f"graphs, {events.get('drafts-accepted', 0)} of {events.get('drafts-verified', 0)} in checks, "
            f"{events.get('drafts-accepted-without-graph', 0)} without them. See docs/shadow.md#accepted-drafts"
        )
    if elsewhere := [
        moved for member in engine.reporting_members for moved in member.record.moved if moved.outcome != "repaired"
    ]:
        first = elsewhere[0]
        yield Finding(
            f"tensors lie elsewhere than CUDA graphs have them, {engine.counts('addresses').get('moved', 0)} times: "
            f"{first.name} ({first.kind}; after {first.after}; {first.outcome}). See docs/addresses.md"
        )
    if claims := [claim for member in engine.reporting_members for claim in member.record.claims]:
        of_builders = {claim.builder: claim for claim in reversed(claims)}
        what_to_do = "; ".join(
            f"{claim.builder} (first in {claim.graph}): {claim.advice}" for claim in reversed(of_builders.values())
        )
        yield Finding(
            f"full graphs hold decodes with drafts as prompts, and may answer wrongly. {what_to_do}. See docs/claims.md"
        )
    if others := [other for member in engine.reporting_members for other in member.record.metadata]:
        counts, other = engine.counts("metadata"), others[0]
        yield Finding(
            "full graphs replay on other metadata than they were captured with, in "
            f"{counts.get('differing', 0)} of {counts.get('compared', 0)} replays: {other.field} {other.difference} "
            f"({other.graph}). See docs/detectors.md#metadata-of-replays"
        )
    if arguments := [argument for member in engine.reporting_members for argument in member.record.traced]:
        counts, one = engine.counts("traced"), arguments[0]
        yield Finding(
            "compiled models are called with other arguments than torch.compile traced, in "
            f"{counts.get('differing', 0)} of {counts.get('compared', 0)} calls: {one.argument} of {one.model} is "
            f"{one.now}, and was {one.traced}. Serve with -cc.mode=0. See docs/detectors.md#traced-constants"
        )
    if overwritten := [block for member in engine.reporting_members for block in member.record.overwritten]:
        block = overwritten[0]
        yield Finding(
            f"finished cache blocks have changed, {engine.counts('kv-marks').get('changed', 0)} times: block "
            f"{block.block} of cache group {block.group} in {block.layers}; in between: {block.ran}. "
            "See docs/kv-marks.md"
        )


def _idle_detectors(engine: Engine) -> Iterator[Finding]:
    marking = engine.states(marks.NAME).get(State.ACTIVE.value, ())
    # Not of one rank that has no requests while others have: it makes as many steps as they do.
    if marking and all(marks.NONE_MARKED in member.record.fixes[marks.NAME].reason for member in marking):
        text = f"no cache block is watched: {marks.NONE_MARKED}. docs/kv-marks.md says what is not marked"
        yield Finding(text, is_wrong=False)
    if engine.counts("addresses").get("failures"):
        yield Finding("addresses are not compared any more: the log of its ranks says why", is_wrong=False)
    if engine.counts("claims").get("failures"):
        yield Finding("claims of builders were not checked: the log of its ranks says why", is_wrong=False)
    if engine.counts("metadata").get("failures"):
        yield Finding("metadata of replays are not compared: the log of its ranks says why", is_wrong=False)
    if engine.counts("traced").get("failures"):
        text = "arguments of compiled models are not compared: the log of its ranks says why"
        yield Finding(text, is_wrong=False)


def _settings(engine: Engine) -> Iterator[Finding]:
    for variable, value in engine.misconfigured.items():
        yield Finding(
            f"misconfigured: {variable}={value} means nothing: what it is for is off, or at its default, "
            "until it is corrected and the engine restarted"
        )
    for what, value_of in (
        ("vLLM", lambda record: record.vllm),
        ("vllm-graphfix", lambda record: record.graphfix),
        ("in the rollout", lambda record: "yes" if record.decision.canary else "no"),
    ):
        values: dict[str, list[Member]] = {}
        for member in (each for each in engine.members if each.live):
            values.setdefault(value_of(member.record), []).append(member)
        if len(values) > 1:
            yield Finding(f"{what} differs: {_names_by_value(engine, values)}")


_CHECKS: tuple[Callable[[Engine], Iterator[Finding]], ...] = (_stopped, _hanging, _misdated)
_CHECKS_WHILE_IT_RUNS: tuple[Callable[[Engine], Iterator[Finding]], ...] = (
    *(_lost, _stuck, _outdated, _starting, _unreadable, _unrecorded, _uncompared, _states),
    *(_limited_detectors, _unseen, _detected, _idle_detectors, _settings),
)
"""The checks of an engine with a living process, in the order in which their sentences are listed."""


def _names_by_value(engine: Engine, values: Mapping[str, Sequence[Member]]) -> str:
    return "; ".join(f"{value} on {engine.several(members)}" for value, members in values.items())
