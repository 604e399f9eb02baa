"""Whether the process of a record runs: alive, dead or silent."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from vllm_graphfix.records.process_identity import Identity, exists, owner_of, seen_by_system
from vllm_graphfix.records.reading import Found, Unreadable
from vllm_graphfix.records.record import Record

SILENT_AFTER = 60.0


class Liveness(str, Enum):
    """What can be said of the process of a record."""

    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"
    """It has not been heard of for `SILENT_AFTER`: it hangs, is stopped, or ran where this process cannot look."""


def visible(record: Record, here: Identity) -> bool:
    """Whether the process of *record* has to be found by this one if it exists: on this machine, in this container."""
    return "" != record.boot == here.boot and "" != record.pid_namespace == here.pid_namespace


def may_run(file: Unreadable, here: Identity) -> bool:
    """Tell if the process of a *file* that cannot be read may run: whether one of another machine does is not known."""
    return file.host != here.host or exists(file.pid)


def exists_here(found: Found, here: Identity) -> bool:
    """Tell if the process of *found* exists on this machine, where this one sees it, whatever its record is dated."""
    record = found.record
    if not visible(record, here):
        return False
    seen = seen_by_system(record.pid)
    if seen is not None and (seen.start_ticks != record.start_ticks or seen.state in ("Z", "X", "x")):
        return False
    if seen is None and not exists(record.pid):
        return False
    # Anyone may write a record that names somebody else's process.
    return found.owner is None or owner_of(record.pid) in (None, found.owner)


def _has_to_be_heard_of(record: Record) -> bool:
    # Whatever it says of itself: the thread that keeps its record may not have started.
    return record.kept or record.rank is not None or record.role in ("engine-core", "worker")


def liveness_of(found: Found, now: float, here: Identity, among: Collection[Found] = ()) -> Liveness:
    """Whether the process of *found* runs, at *now* in seconds of the epoch, by the clock of its heartbeat.

    An engine core, a worker and whoever keeps its record has to be heard of, also where it can be seen to exist. Others
    are alive as long as they exist. *among* are the records it was found with: elsewhere, a process without a heartbeat
    of its own is as alive as its engine on its host.
    """
    record = found.record
    if visible(record, here):
        if not exists_here(found, here):
            return Liveness.DEAD
        if not _has_to_be_heard_of(record):
            return Liveness.ALIVE
    heartbeat = found.heartbeat
    if not _has_to_be_heard_of(record):
        heartbeat = max(
            [heartbeat]
            + [
                other.heartbeat
                for other in among
                if (other.record.engine, other.record.host) == (record.engine, record.host)
                and other.path.parent == found.path.parent
            ]
        )
    # A date that is to come is no sign of life: the clock was set back since, and one that lives is dated anew soon.
    return Liveness.ALIVE if abs(now - heartbeat) < SILENT_AFTER else Liveness.SILENT


def all_liveness(found: Collection[Found], now: float, here: Identity) -> list[Liveness]:
    """`liveness_of` each of *found*, among all of them: there may be thousands."""
    last: dict[tuple[str, str, Path], Found] = {}
    places = [(one.record.engine, one.record.host, one.path.parent) for one in found]
    for place, one in zip(places, found, strict=True):
        if place not in last or last[place].heartbeat < one.heartbeat:
            last[place] = one
    return [liveness_of(one, now, here, (last[place],)) for place, one in zip(places, found, strict=True)]
