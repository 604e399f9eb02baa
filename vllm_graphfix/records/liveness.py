"""Liveness of the process of a record: alive, dead or silent."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from vllm_graphfix.records.process_identity import Identity, exists, owner_of, seen_by_system
from vllm_graphfix.records.reading import StoredRecord, Unreadable
from vllm_graphfix.records.record import Record

SILENT_AFTER = 60.0
"""Seconds without a heartbeat."""


class Liveness(str, Enum):
    """State of the process of a record, as far as this process can tell."""

    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"
    """No heartbeat for `SILENT_AFTER`: it hangs, is stopped, or ran where this process cannot look."""


def visible(record: Record, here: Identity) -> bool:
    """Tell if this process would see that of *record*, if it exists: on this machine, in this PID namespace."""
    return record.boot == here.boot != "" and record.pid_namespace == here.pid_namespace != ""


def may_run(file: Unreadable, here: Identity) -> bool:
    """Tell if the process of an unreadable *file* may run; one on another machine always may."""
    return file.host != here.host or exists(file.pid)


def exists_here(stored: StoredRecord, here: Identity) -> bool:
    """Tell if the process of *stored* exists, visible to this process, whatever the date of its record."""
    return visible(stored.record, here) and _exists(stored)


def _exists(stored: StoredRecord) -> bool:
    record = stored.record
    seen = seen_by_system(record.pid)
    if seen is not None and (seen.start_ticks != record.start_ticks or seen.state in ("Z", "X", "x")):
        return False
    if seen is None and not exists(record.pid):
        return False
    # Anyone may write a record that names somebody else's process.
    return stored.owner is None or owner_of(record.pid) in (None, stored.owner)


def _has_to_be_heard_of(record: Record) -> bool:
    # Also without `kept`: the thread that renews the record may not have started.
    return record.kept or record.rank is not None or record.role in ("engine-core", "worker")


def liveness_of(stored: StoredRecord, now: float, here: Identity, among: Collection[StoredRecord] = ()) -> Liveness:
    """Return the liveness of the process of *stored* at *now*, in epoch seconds by the clock of its heartbeat.

    An engine core, a worker and any process that renews its record needs a recent heartbeat, even if it is seen to
    exist. Others are alive as long as they exist; if this process cannot see one, it is as alive as the other processes
    of its engine on its host, which are in *among*.
    """
    record = stored.record
    if visible(record, here):
        if not _exists(stored):
            return Liveness.DEAD
        if not _has_to_be_heard_of(record):
            return Liveness.ALIVE
    heartbeat = stored.heartbeat
    if not _has_to_be_heard_of(record):
        heartbeat = max(
            [heartbeat]
            + [
                other.heartbeat
                for other in among
                if (other.record.engine, other.record.host) == (record.engine, record.host)
                and other.path.parent == stored.path.parent
            ]
        )
    # A date in the future is no sign of life: the clock was set back since, and a live process is dated anew soon.
    return Liveness.ALIVE if abs(now - heartbeat) < SILENT_AFTER else Liveness.SILENT


def all_liveness(records: Collection[StoredRecord], now: float, here: Identity) -> list[Liveness]:
    """Return `liveness_of` each of *records* among all of them, in linear time: there may be thousands."""
    last: dict[tuple[str, str, Path], StoredRecord] = {}
    places = [(one.record.engine, one.record.host, one.path.parent) for one in records]
    for place, one in zip(places, records, strict=True):
        if place not in last or last[place].heartbeat < one.heartbeat:
            last[place] = one
    return [liveness_of(one, now, here, (last[place],)) for place, one in zip(places, records, strict=True)]
