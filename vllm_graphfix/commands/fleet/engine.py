"""The processes that left a record, and the engines that they make up."""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from vllm_graphfix.fix import Code, State
from vllm_graphfix.marks import process as marks
from vllm_graphfix.records import (
    HEARTBEAT,
    PRUNED_AFTER,
    FixReport,
    Liveness,
    Record,
    StoredRecord,
    Unreadable,
    path_text,
)
from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.text import ago, lasting, ranks_named

_STOPPED_LATELY = PRUNED_AFTER
BAD = frozenset({State.FAILED.value, State.CONFLICT.value, State.INCOMPATIBLE.value})
YOUNG = 120.0
"""Seconds in which a process of vLLM may not have come to its plugins: it imports torch first."""
_MOST_MISSING = 1024
"""Ranks of one world that are told to be missing: a file may claim a world of any size, and another user's too."""


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"


@dataclass(frozen=True)
class Member:
    """A process that left a record."""

    found: StoredRecord
    liveness: Liveness
    age: float
    """Seconds since its record was last written or touched."""
    visible: bool = False
    """It would be seen from here if it did not exist."""

    @property
    def record(self) -> Record:
        return self.found.record

    @property
    def live(self) -> bool:
        return self.liveness is Liveness.ALIVE

    ahead: float = 0.0
    """Seconds by which its record is dated after now, by the clock of its folder."""

    @property
    def misdated(self) -> bool:
        """Its record is dated so far ahead that it is no sign of life: the clock was set back since."""
        return self.liveness is Liveness.SILENT and self.ahead > 0.0

    @property
    def hangs(self) -> bool:
        """Its process exists and is not heard of."""
        return self.liveness is Liveness.SILENT and self.visible and not self.misdated

    @property
    def unchanged(self) -> float:
        """Seconds since its record last changed."""
        return self.age + max(self.found.heartbeat - self.record.written, 0.0)

    @property
    def in_step(self) -> float | None:
        """Seconds that its present step lasts, where that is so long that it may never end."""
        since = self.record.in_step_since
        return None if since is None or not self.live else max(self.age + self.found.heartbeat - since, 0.0)

    @property
    def world(self) -> str:
        """Names the ranks that this one was compared with."""
        record = self.record
        if record.agreement is not None:
            return record.agreement.group
        return f"{record.rank.world_size}" if record.rank is not None else ""


@dataclass(frozen=True)
class Engine:
    """The processes that serve one model together, on however many hosts."""

    name: str
    members: tuple[Member, ...]
    unreadable: tuple[Unreadable, ...] = ()
    """Records of processes that may run, of which no more than the name can be read."""
    live: bool = field(init=False)
    wrong: tuple[str, ...] = field(init=False)
    """Problems that somebody has to solve."""
    notes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        wrong, notes = judge_engine(self)
        object.__setattr__(self, "live", any(member.live for member in self.members))
        object.__setattr__(self, "wrong", tuple(dict.fromkeys(wrong)))
        object.__setattr__(self, "notes", tuple(dict.fromkeys(notes)))

    @property
    def owner(self) -> int | None:
        """The user whose records these are."""
        return self.members[0].found.owner

    @property
    def status(self) -> str:
        if any(member.record.problem is not None for member in self.members):
            return "stopped"
        if not self.live:
            hangs = any(member.hangs for member in self.members)
            dead = any(member.liveness is Liveness.DEAD for member in self.members)
            return "ended" if dead and not hangs else "silent"
        if self.wrong:
            return "not in order"
        return "starting" if self.starting else "in order"

    @property
    def starting(self) -> tuple[Member, ...]:
        """The processes that are not up yet; an engine core is when all of its workers are."""
        live = [member for member in self.members if member.live]
        cores = [member for member in live if member.record.role == "engine-core"]
        if any(member.record.kept or member.record.role in ("engine-core", "worker") for member in self.members):
            return tuple(member for member in cores or live if member.record.starting)
        # Only who has configured the engine has reported: the others do when they have imported vLLM.
        return tuple(member for member in live if member.age < YOUNG)

    @property
    def ranked(self) -> tuple[Member, ...]:
        """The ranks; live ones only, if any is."""
        ranked = [member for member in self.members if member.record.rank is not None]
        return tuple([member for member in ranked if member.live] or ranked)

    @property
    def tellers(self) -> tuple[Member, ...]:
        """The processes whose fixes count: the ranks, or before there are any, all."""
        return self.ranked or tuple([member for member in self.members if member.live] or self.members)

    @cached_property
    def _several_worlds(self) -> bool:
        return len({member.world for member in self.members if member.record.rank is not None}) > 1

    def name_of(self, member: Member) -> str:
        rank = member.record.rank
        if rank is None:
            return f"{member.record.role} {member.record.pid} on {member.record.host}"
        return f"rank {rank.rank}" + (f" of DP {rank.data_parallel_rank}" if self._several_worlds else "")

    def several(self, members: Iterable[Member]) -> str:
        """The *members* by name, ranks as ``ranks 0-3``."""
        names: list[str] = []
        ranks: dict[str, list[int]] = {}
        for member in members:
            if member.record.rank is None:
                names.append(self.name_of(member))
            else:
                ranks.setdefault(self.name_of(member).partition(" of ")[2], []).append(member.record.rank.rank)
        return ", ".join(
            [ranks_named(numbers) + (f" of {world}" if world else "") for world, numbers in ranks.items()] + names
        )

    def values_of(self, key: str) -> tuple[Any, ...]:
        """The values of *key* in the records, live ones first; without None."""
        members = sorted(self.members, key=lambda member: not member.live)
        return tuple(dict.fromkeys(v for member in members if (v := getattr(member.record, key)) is not None))

    @property
    def misconfigured(self) -> dict[str, str]:
        """Variables whose value means nothing, each with that value; of living processes, if there are any."""
        tellers = [member for member in self.members if member.live] or self.members
        return {name: value for member in tellers for name, value in member.record.misconfigured.items()}

    @property
    def graphs(self) -> bool | None:
        """True if its ranks capture CUDA graphs; None if none of them has reported it."""
        values = [member.record.graphs for member in self.tellers if member.record.graphs is not None]
        return any(values) if values else None

    def states(self, fix: str) -> dict[str, list[Member]]:
        """Return the processes in each state of *fix*."""
        states: dict[str, list[Member]] = {}
        for member in self.tellers:
            if fix in member.record.fixes:
                states.setdefault(member.record.fixes[fix].state, []).append(member)
        return states

    def foremost(self, fix: str) -> FixReport:
        """The report of the first process in the state that matters most."""
        states = self.states(fix)
        bad = sorted(states, key=lambda state: (state not in BAD, state == State.WAITING.value))
        return states[bad[0]][0].record.fixes[fix]

    def counts(self, fix: str) -> dict[str, int]:
        """Add up each event of *fix* over the ranks; aborted requests are counted by the scheduler's process."""
        counts: dict[str, int] = {}
        for member in self.tellers:
            for event, count in member.record.events.get(fix, {}).items():
                counts[event] = counts.get(event, 0) + count
        schedulers = [member for member in self.members if self.ranked and member.record.rank is None]
        if aborted := sum(member.record.events.get(fix, {}).get("aborted", 0) for member in schedulers):
            counts["aborted"] = counts.get("aborted", 0) + aborted
        return counts

    @property
    def fixes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for member in self.tellers for name in member.record.fixes))

    @property
    def expected(self) -> int:
        """Ranks of the worlds that are known here."""
        return sum(size for _, size in self._worlds().values())

    @property
    def agreeing(self) -> int | None:
        """The number of expected ranks that agree; None as long as none was compared."""
        compared = {m.world: m.record.agreement for m in self.ranked if m.record.agreement is not None}
        return sum(agreement.agreeing for agreement in compared.values()) if compared else None

    def missing(self) -> list[tuple[list[int], bool]]:
        """Ranks without a record, of each world, and whether the ranks that have one agreed with them."""
        missing = []
        for members, size in self._worlds().values():
            there = {member.record.rank.rank for member in members if member.record.rank is not None}
            compared = [member.record.agreement for member in members if member.record.agreement is not None]
            absent = list(islice((rank for rank in range(size) if rank not in there), _MOST_MISSING))
            if absent:
                missing.append((absent, any(agreement.agreeing == agreement.world_size for agreement in compared)))
        return missing

    @property
    def unrecorded(self) -> int:
        """The number of ranks without a record that its front-ends have started on their own hosts."""
        lacking: dict[str, int] = {}
        for member in self.members:
            record = member.record
            known = record.role == "front-end" and record.ranks_here is not None
            if known and member.live and member.unchanged >= YOUNG:  # one that is younger may have cores to come
                lacking[record.host] = lacking.get(record.host, 0) + (record.ranks_here or 0)
        for member in self.members:
            if member.record.rank is not None and member.record.host in lacking:
                lacking[member.record.host] -= 1
        return sum(max(number, 0) for number in lacking.values())

    def _worlds(self) -> dict[tuple[str, int], tuple[list[Member], int]]:
        """The ranks that were compared with each other, dead ones included, and how many there should be."""
        ranked = [(member, member.record.rank) for member in self.members if member.record.rank is not None]
        # Before the comparison, worlds of one size are told apart by their ranks of data parallelism, if they have to
        # be.
        uncompared = [rank.rank for member, rank in ranked if member.record.agreement is None]
        split = len(set(uncompared)) < len(uncompared)
        worlds: dict[tuple[str, int], tuple[list[Member], int]] = {}
        for member, rank in ranked:
            apart = split and member.record.agreement is None
            key = (member.world, rank.data_parallel_rank if apart else 0)
            members, size = worlds.get(key, ([], 0))
            worlds[key] = ([*members, member], max(size, rank.world_size))
        return worlds


def judge_engine(engine: Engine) -> tuple[list[str], list[str]]:
    """Return the problems of one engine that somebody has to solve, and notes on it."""
    wrong: list[str] = []
    notes: list[str] = []
    stops: dict[tuple[bool, str], list[Member]] = {}
    for member in engine.members:
        if member.record.problem is not None:
            stops.setdefault((member.age <= _STOPPED_LATELY, member.record.problem), []).append(member)
    for (lately, problem), members in stops.items():
        (wrong if lately else notes).append(
            f"stopped by vllm-graphfix {ago(min(m.age for m in members))}, according to {engine.several(members)}: "
            f"{problem}"
        )
    hang = [m for m in engine.members if m.hangs]
    if hang:
        wrong.append(
            f"not heard from for {min(m.age for m in hang):.0f} s: {engine.several(hang)}. "
            "What exists and is not heard from hangs, is stopped (SIGSTOP), or cannot write its record"
        )
    runs = any(member.live for member in engine.members)
    if misdated := [m for m in engine.members if m.misdated]:
        (wrong if runs else notes).append(
            f"cannot be told to be alive: {engine.several(misdated)}. Records dated "
            f"{lasting(max(m.ahead for m in misdated))} ahead of their folder's clock, which was set back, are no sign "
            f"of life; a process that runs dates its own anew within {HEARTBEAT:.0f} s"
        )
    if not runs:
        return wrong, notes
    gone = [m for m in engine.members if m.liveness is Liveness.DEAD and m.record.problem is None]
    silent = [m for m in engine.members if m.liveness is Liveness.SILENT and not (m.hangs or m.misdated)]
    if gone:
        wrong.append(f"dead: {engine.several(gone)}")
    if silent:
        wrong.append(f"not heard from for {min(m.age for m in silent):.0f} s: {engine.several(silent)}")
    if stuck := [m for m in engine.members if m.in_step is not None]:
        wrong.append(
            f"in one step for {lasting(min(m.in_step or 0.0 for m in stuck))}: {engine.several(stuck)}. Its heartbeat "
            "goes on, and the thread that runs the model waits: a collective or kernel that does not end, or code that "
            "is compiled (py-spy dump --pid says where)"
        )
    if outdated := [m for m in engine.members if m.live and m.found.outdated]:
        wrong.append(
            f"record not written for {lasting(max(m.unchanged for m in outdated))}: {engine.several(outdated)}. "
            "What has changed there since is not known; the log says why (no space, a quota)"
        )
    if starting := engine.starting:
        notes.append(f"starting for {lasting(max(m.unchanged for m in starting))}: {engine.several(starting)}")
    wrong += [
        f"the state of process {one.pid} on {one.host} is not known: its record {path_text(one.path)} cannot be read "
        f"({one.why})"
        for one in engine.unreadable
    ]
    unread = len(engine.unreadable)
    recorded = any(member.record.rank is not None for member in engine.members)
    if not starting and not unread and not recorded:
        wrong.append(
            "no rank has reported: they are starting, "
            f"or run on machines whose records are not here (put {STATUS_DIR} on shared storage)"
        )
    lacking = max(engine.unrecorded - unread, 0) if recorded and not starting else 0
    for absent, agreed in engine.missing():
        if len(absent) <= unread:
            unread -= len(absent)
            wrong.append(f"no record of {ranks_named(absent)} can be read")
        elif agreed and not lacking:
            verb = "runs on a machine" if len(absent) == 1 else "run on machines"
            notes.append(
                f"{ranks_named(absent)} {verb} whose records are not here: put {STATUS_DIR} on shared storage to see "
                "them; they agreed with the others at start-up"
            )
        elif not starting:
            wrong.append(
                f"no record of {ranks_named(absent)}: starting, without the plugin, or on machines whose records are "
                f"not here (put {STATUS_DIR} on shared storage)"
            )
            lacking = max(lacking - len(absent), 0)
    if lacking:  # ranks that were compared with nobody whose record is here
        wrong.append(
            f"no record of {lacking} of the ranks that its front-end has started on its own host: without the plugin, "
            f"or with another {STATUS_DIR}"
        )
    if engine.graphs is False:
        notes.append("it runs without CUDA graphs (--enforce-eager, or cudagraph_mode NONE): its zeros mean nothing")
    unchecked: dict[str, list[Member]] = {}
    # An error that came early has kept a worker from knowing its rank.
    for member in (*engine.ranked, *(each for each in engine.members if each.live and each.record.rank is None)):
        if member.record.unchecked is not None:
            unchecked.setdefault(member.record.unchecked, []).append(member)
    wrong += [f"not checked, {engine.several(members)}: {why}" for why, members in unchecked.items()]
    uncompared = [member for member in engine.ranked if member.record.agreement is None]
    if uncompared and engine.graphs is not False:
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
            wrong.append(f"{fix} differs: {_names_by_value(engine, states)}")
    if unknown := [fix for fix in engine.fixes if State.UNKNOWN.value in engine.states(fix)]:
        notes.append(
            f"cannot be told, since this vLLM is newer than what is known: {', '.join(unknown)}. "
            "`vllm-graphfix status` says more"
        )
    _judge_detectors(engine, wrong, notes)
    if (events := engine.counts("shadow")).get("mismatches"):
        restored = events.get("quarantines-given-up", 0)
        stopped = (
            f"; graphs no longer replayed: {out}" if (out := events.get("quarantined-graphs", 0) - restored) else ""
        )
        if restored:  # their steps cannot be run without them
            stopped += f"; graphs replayed again, wrong or not, after they had been taken out: {restored}"
        wrong.append(
            f"the shadow check found wrong CUDA graph replays, {events['mismatches']} in {events.get('checks', 0)} "
            f"checks{stopped}. `vllm-graphfix report` writes the bug report for vLLM"
        )
    elsewhere = [moved for member in engine.tellers for moved in member.record.moved if moved.outcome != "repaired"]
    if elsewhere:
        first = elsewhere[0]
        wrong.append(
            f"tensors lie elsewhere than CUDA graphs have them, {engine.counts('addresses').get('moved', 0)} times: "
            f"{first.name} ({first.kind}; after {first.after}; {first.outcome}). See docs/addresses.md"
        )
    overwritten = [block for member in engine.tellers for block in member.record.overwritten]
    if overwritten:
        block = overwritten[0]
        wrong.append(
            f"finished cache blocks have changed, {engine.counts('kv-marks').get('changed', 0)} times: block "
            f"{block.block} of cache group {block.group} in {block.layers}; in between: {block.ran}. "
            "See docs/kv-marks.md"
        )
    marking = engine.states(marks.NAME).get(State.ACTIVE.value, ())
    # Not of one rank that has no requests while others have: it makes as many steps as they do.
    if marking and all(marks.NONE_MARKED in member.record.fixes[marks.NAME].reason for member in marking):
        notes.append(f"no cache block is watched: {marks.NONE_MARKED}. docs/kv-marks.md says what is not marked")
    if engine.counts("addresses").get("failures"):
        notes.append("addresses are not compared any more: the log of its ranks says why")
    live = [member for member in engine.members if member.live]
    wrong += [
        f"misconfigured: {variable}={value} means nothing: what it is for is off, or at its default, "
        "until it is corrected and the engine restarted"
        for variable, value in engine.misconfigured.items()
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
            wrong.append(f"{what} differs: {_names_by_value(engine, values)}")
    return wrong, notes


_LIMITED = {Code.CANNOT_ABORT.value: True, Code.GRAPH_EXCLUDED.value: False, Code.UNDELIVERED.value: True}
"""Codes of a detector that is active and does not do all that it is set to do; True for those that break a promise."""


def _judge_detectors(engine: Engine, wrong: list[str], notes: list[str]) -> None:
    for name in engine.fixes:
        for code, is_wrong in _LIMITED.items():
            members = [
                member
                for member in engine.states(name).get(State.ACTIVE.value, ())
                if member.record.fixes[name].code == code
            ]
            if members:
                text = f"{name} is limited on {engine.several(members)}: {members[0].record.fixes[name].reason}"
                (wrong if is_wrong else notes).append(text)
    front_ends = [m for m in engine.members if m.live and m.record.role in ("front-end", "api-server")]
    if (
        front_ends
        and min(m.unchanged for m in front_ends) >= YOUNG
        and not any(m.record.serves_metrics for m in front_ends)
    ):
        notes.append(
            "no process of it serves graphfix_* on /metrics, so Prometheus sees nothing of it: it is no server, or its "
            "front-end is not vLLM's Python one"
        )


def _names_by_value(engine: Engine, values: Mapping[str, Sequence[Member]]) -> str:
    return "; ".join(f"{value} on {engine.several(members)}" for value, members in values.items())
