"""The offset between the clock that dates the files of a folder and the clock of a machine.

On shared storage the file server dates files. Two clocks may differ by more than the minute after which a process
counts as silent, so heartbeats are corrected by the offset before they are compared with the time. A writer measures
the offset, since it has just set a date; a reader writes nothing, and reads the offset from records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_graphfix.records.liveness import exists_here
from vllm_graphfix.records.process_identity import Identity
from vllm_graphfix.records.reading import StoredRecord

CLOCKS_DIFFER = 5.0
"""Seconds from which on two clocks differ: less is the time that a call takes."""


class OffsetMeter:
    """Measures how far the clock that dates this process's files is ahead of this machine's, in seconds."""

    def __init__(self) -> None:
        self.offset: float | None = None
        """None if the clocks differ by less than `CLOCKS_DIFFER`, or before the first measurement."""

    def note(self, dated: float, before: float, after: float) -> bool:
        """Measure by a call between *before* and *after* (epoch) that *dated* a file; tell if the offset changed."""
        measured = dated - (before + after) / 2
        # A slow call measures nothing, and an offset that wobbled would be another record at each heartbeat.
        if after - before > CLOCKS_DIFFER / 2 or abs(measured - (self.offset or 0.0)) <= CLOCKS_DIFFER:
            return False
        self.offset = round(measured, 1) if abs(measured) > CLOCKS_DIFFER else None
        return True


def by_this_clock(records: Sequence[StoredRecord], now: float, here: Identity) -> list[StoredRecord]:
    """Return *records* with each heartbeat as this machine's clock, which is at *now*, would have dated it.

    The record of a process on this machine holds the offset of its folder's clock. Without such a record, the file
    server's clock is assumed to agree either with this machine's or with the other process's, whichever makes the
    heartbeat later. A dead process is then noticed later by the offset, and no live process is called dead.
    """
    local: set[Path] = set()
    known: dict[Path, tuple[float, float]] = {}
    """By folder: the age of the newest heartbeat from this machine, and the offset in that record."""
    for one in records:
        if one.record.kept and exists_here(one, here):
            local.add(one.path)
            offset = one.record.clock_offset or 0.0
            # The newest counts: the clock may have been set since a process that hangs was dated.
            latest = (abs(now - one.heartbeat + offset), offset)
            known[one.path.parent] = min(known.get(one.path.parent, latest), latest)
    dated = []
    for one in records:
        own = one.record.clock_offset or 0.0
        if one.path in local:
            offsets = [own]
        elif one.path.parent in known:
            offsets = [known[one.path.parent][1]]
        else:
            offsets = [0.0, own]
        heartbeats = [one.heartbeat - offset for offset in offsets]
        dated.append(one._replace(heartbeat=min(heartbeats, key=lambda heartbeat: abs(now - heartbeat))))
    return dated


class HeartbeatWatch:
    """Follows heartbeats over repeated reads: a heartbeat that changes is a sign of life, whatever its clock."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[float, float]] = {}
        """By file: the last heartbeat, and the monotonic time at which it was first read."""

    def by_this_clock(self, records: Iterable[StoredRecord], now: float) -> list[StoredRecord]:
        """Return *records* with each heartbeat as this machine's clock, which is at *now*, would have dated it."""
        monotonic, seen, dated = time.monotonic(), self._seen, []
        self._seen = {}
        for one in records:
            before, heard = seen.get(one.path, (None, monotonic))
            if before is None or one.heartbeat < before:
                # First read, or a clock was set back: only the date is known yet.
                heard = monotonic - abs(now - one.heartbeat)
            elif one.heartbeat > before:
                heard = monotonic
            self._seen[one.path] = one.heartbeat, heard
            dated.append(one._replace(heartbeat=now - (monotonic - heard)))
        return dated
