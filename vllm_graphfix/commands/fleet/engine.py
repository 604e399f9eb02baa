"""An engine: the processes that left a record and serve one model together."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.fix import State
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.records import FixReport, Liveness, Unreadable
from vllm_graphfix.text import ranks_named

BAD = frozenset(each.value for each in (State.FAILED, State.CONFLICT, State.INCOMPATIBLE, State.BYPASSED))
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
class Engine:
    """The processes that serve one model together, on however many hosts."""

    name: str
    members: tuple[Member, ...]
    unreadable: tuple[Unreadable, ...] = ()
    """Records of processes that may run, of which no more than the name can be read."""
    wrong: tuple[str, ...] = ()
    """Problems that somebody has to solve, as `judgement.judged` finds them."""
    notes: tuple[str, ...] = ()

    @cached_property
    def live(self) -> bool:
        return any(member.live for member in self.members)

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
    def reporting_members(self) -> tuple[Member, ...]:
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
        members = [member for member in self.members if member.live] or self.members
        return {name: value for member in members for name, value in member.record.misconfigured.items()}

    @property
    def graphs(self) -> bool | None:
        """True if its ranks capture CUDA graphs; None if none of them has reported it."""
        values = [member.record.graphs for member in self.reporting_members if member.record.graphs is not None]
        return any(values) if values else None

    def states(self, fix: str) -> dict[str, list[Member]]:
        """Return the processes in each state of *fix*."""
        states: dict[str, list[Member]] = {}
        for member in self.reporting_members:
            if fix in member.record.fixes:
                states.setdefault(member.record.fixes[fix].state, []).append(member)
        return states

    @property
    def states_of_fixes(self) -> frozenset[str]:
        """The states that any fix is in, without detectors."""
        return frozenset(state for fix in self.fixes if fix in BY_NAME for state in self.states(fix))

    def foremost(self, fix: str) -> FixReport:
        """The report of the first process in the state that matters most."""
        states = self.states(fix)
        bad = sorted(states, key=lambda state: (state not in BAD, state == State.WAITING.value))
        return states[bad[0]][0].record.fixes[fix]

    def counts(self, fix: str) -> dict[str, int]:
        """Add up each event of *fix* over the ranks; aborted requests are counted by the scheduler's process."""
        counts: dict[str, int] = {}
        for member in self.reporting_members:
            for event, count in member.record.events.get(fix, {}).items():
                counts[event] = counts.get(event, 0) + count
        schedulers = [member for member in self.members if self.ranked and member.record.rank is None]
        if aborted := sum(member.record.events.get(fix, {}).get("aborted", 0) for member in schedulers):
            counts["aborted"] = counts.get("aborted", 0) + aborted
        return counts

    @property
    def fixes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for member in self.reporting_members for name in member.record.fixes))

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
            members.append(member)
            worlds[key] = members, max(size, rank.world_size)
        return worlds
