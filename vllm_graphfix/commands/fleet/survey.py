"""All engines whose records are seen from here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_graphfix.commands.fleet.engine import Engine
from vllm_graphfix.commands.fleet.judgement import judged
from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.commands.fleet.unrecorded import Unrecorded, without_record
from vllm_graphfix.records import (
    PRUNED_AFTER,
    Identity,
    Liveness,
    Unreadable,
    all_liveness,
    base_folder,
    by_this_clock,
    identity,
    may_run,
    path_text,
    read,
    visible,
)
from vllm_graphfix.settings.environment import STATUS_DIR
from vllm_graphfix.text import lasting

IN_ORDER, NOT_IN_ORDER, NOTHING, STARTING = 0, 1, 3, 4


class FleetError(Exception):
    """There is nothing to look at, and what to do about it."""


@dataclass(frozen=True)
class Fleet:
    """All that is seen from here."""

    folder: Path
    here: Identity
    engines: tuple[Engine, ...]
    unrecorded: tuple[Unrecorded, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    """Records that cannot be read."""
    skipped: int = 0
    """Records that were not read because there are too many, and folders that are refused: engines may be missing."""
    wrong: tuple[str, ...] = ()
    """Engines that may run and of which no record of a living process can be read, a sentence for each."""
    unreadable: tuple[Unreadable, ...] = ()
    """Records of processes that may run, of which no more than the name can be read."""
    prometheus: str | None = None
    """The address of the Prometheus whose series were asked for, instead of records."""

    @property
    def exit_code(self) -> int:
        missed = [one for one in self.unrecorded if not one.elsewhere]
        wrong = self.wrong or any(engine.wrong for engine in self.engines)
        if self.skipped or wrong or not all(one.starting for one in missed):
            return NOT_IN_ORDER
        if missed or any(engine.status == "starting" for engine in self.engines):
            return STARTING
        return IN_ORDER if any(engine.live for engine in self.engines) else NOTHING


def look(folder: Path | None = None) -> Fleet:
    """The engines whose records are below *folder*, or where the environment says.

    Raises FleetError if there is no such folder.
    """
    base = folder if folder is not None else base_folder(os.environ)
    if re.fullmatch(r"vllm-graphfix-\d+", base.name) and _is_folder(base):
        base = base.parent
    if not _is_folder(base):
        source = "--dir" if folder is not None else STATUS_DIR
        place = path_text(base)
        raise FleetError(
            f"{source}={place!r} is not a folder that this user can read; "
            f"give the one that {STATUS_DIR} names for the engines"
        )
    if not os.access(base, os.R_OK | os.X_OK):
        raise FleetError(f"{path_text(base)!r} cannot be read by this user")
    reading, here = read(base), identity()
    now = time.time()
    dated = by_this_clock(reading.found, now, here)
    members = [
        Member(
            file,
            state,
            max(now - file.heartbeat, 0.0),
            visible(file.record, here),
            max(file.heartbeat - now, 0.0),
        )
        for file, state in zip(dated, all_liveness(dated, now, here), strict=True)
    ]
    unrecorded, notes = without_record(base, here, members, now)
    notes += tuple(_about_clocks(members))
    unreadable = tuple(one for one in reading.unreadable if may_run(one, here))
    engines, lost = _engines(_without_abandoned_engines(members), unreadable)
    wrong = tuple(_about_lost_engines(lost, now))
    return Fleet(base, here, engines, unrecorded, notes, reading.problems, reading.skipped, wrong, unreadable)


def _about_lost_engines(lost: Mapping[tuple[Path, str], Sequence[Unreadable]], now: float) -> Iterator[str]:
    """Yield a sentence for each engine whose processes *lost* their records, and may have run within the hour."""
    for (_, name), files in lost.items():
        # Nobody removes such a record of a process that was killed on another machine.
        if recent := [one for one in files if one.heartbeat > now - PRUNED_AFTER]:
            number, first = len(recent), recent[0]
            yield (
                f"engine {name}: {number} process{'' if number == 1 else 'es'} may run, on "
                f"{', '.join(sorted({one.host for one in recent}))}, whose records cannot be read; the first: "
                f"{path_text(first.path)} ({first.why})"
            )


def _about_clocks(members: Iterable[Member]) -> Iterator[str]:
    """Yield, for each folder, by how much the clock that dates its records differs from those of their processes."""
    differ: dict[Path, Member] = {}
    for member in members:
        if member.record.clock_offset is not None and member.liveness is not Liveness.DEAD:
            differ.setdefault(member.found.path.parent, member)
    for folder, member in sorted(differ.items(), key=lambda item: item[0]):
        offset = member.record.clock_offset or 0.0
        yield (
            f"{path_text(folder)}: the clock that dates its files is {lasting(abs(offset))} "
            f"{'ahead of' if offset > 0 else 'behind'} that of {member.record.host}; heartbeats are corrected by that"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a folder of somebody else
        return False


def _without_abandoned_engines(members: Sequence[Member]) -> list[Member]:
    """Less the front-ends that have gone on to another engine, as a program does that makes one after the other.

    Their process lives and so does its record; an engine with a rank that lives is kept, since a program may have two
    at once.
    """

    def place(member: Member) -> tuple[Path, str]:  # another user may name any engine and process
        return member.found.path.parent, member.record.engine

    def process(member: Member) -> tuple[Path, str, int, int]:
        record = member.record
        return member.found.path.parent, record.host, record.pid, record.start_ticks

    latest: dict[tuple[Path, str, int, int], float] = {}
    for member in members:
        latest[process(member)] = max(latest.get(process(member), 0.0), member.record.written)
    serving = {place(member) for member in members if member.live and member.record.rank is not None}
    return [
        member
        for member in members
        if member.record.role != "front-end"
        or place(member) in serving
        or member.record.problem is not None
        or member.record.written >= latest[process(member)]
    ]


def _engines(
    members: Iterable[Member], unreadable: Iterable[Unreadable]
) -> tuple[tuple[Engine, ...], dict[tuple[Path, str], list[Unreadable]]]:
    """Return the engines, and by folder and name the *unreadable* records of those without a living process."""
    members = list(members)
    # Whose folder it is, too: other users may write what they like. Rank 0 names its followers, whose own records may
    # be what cannot be read.
    leaders = {
        (m.found.path.parent, follower): m.record.leader or m.record.engine
        for m in members
        for follower in m.record.followers
    }
    leaders |= {(m.found.path.parent, m.record.engine): m.record.leader for m in members if m.record.leader is not None}
    joined: dict[tuple[Path, str], list[Member]] = {}
    for member in members:
        place = member.found.path.parent
        name = leaders.get((place, member.record.engine)) or member.record.engine
        joined.setdefault((place, name), []).append(member)
    broken: dict[tuple[Path, str], list[Unreadable]] = {}
    for one in unreadable:
        place = one.path.parent
        broken.setdefault((place, leaders.get((place, one.engine)) or one.engine), []).append(one)
    engines = [
        judged(Engine(place[1], tuple(sorted(members_there, key=_order)), tuple(broken.get(place, ()))))
        for place, members_there in joined.items()
    ]
    live = {(engine.members[0].found.path.parent, engine.name) for engine in engines if engine.live}
    lost = {place: files for place, files in broken.items() if place not in live}
    return tuple(sorted(engines, key=lambda engine: (not engine.live, engine.name))), lost


_ROLES = {"front-end": 0, "api-server": 1, "engine-core": 2, "worker": 3}


def _order(member: Member) -> tuple[int, int, int, str, int]:
    record = member.record
    rank = (record.rank.data_parallel_rank, record.rank.rank) if record.rank is not None else (-1, -1)
    return (_ROLES[record.role], *rank, record.host, record.pid)
