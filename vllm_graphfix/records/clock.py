"""The clock that dates the files of a folder, beside those of the machines.

On shared storage it is the file server's. Two clocks may differ by more than the minute after which a process counts as
silent, so a heartbeat is never compared with a clock that may be another one without a look at how far they are apart.
A writer knows, since it has just set a date; a reader writes nothing, and learns it from records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_graphfix.records.liveness import exists_here
from vllm_graphfix.records.process_identity import Identity
from vllm_graphfix.records.reading import Found

CLOCKS_DIFFER = 5.0
"""Seconds from which on two clocks differ: less is the time that a call takes."""


class OffsetMeter:
    """How far the clock that dates the files of this process is ahead of this machine's."""

    def __init__(self) -> None:
        self.offset: float | None = None
        """In seconds; None where they differ by less than `CLOCKS_DIFFER`, or nothing was measured yet."""

    def note(self, dated: float, before: float, after: float) -> bool:
        """Tell if the offset is another one: a file was *dated* in a call between *before* and *after*, all epoch."""
        measured = dated - (before + after) / 2
        # A slow call measures nothing, and an offset that wobbled would be another record at each heartbeat.
        if after - before > CLOCKS_DIFFER / 2 or abs(measured - (self.offset or 0.0)) <= CLOCKS_DIFFER:
            return False
        self.offset = round(measured, 1) if abs(measured) > CLOCKS_DIFFER else None
        return True


def by_this_clock(found: Sequence[Found], now: float, here: Identity) -> list[Found]:
    """Return *found* with each heartbeat as this machine's clock, which says *now*, would have dated it.

    A process of this machine says by how much its folder's clock is ahead. Where there is none, either the file
    server's clock is taken to be this one's, or that of the process: whichever makes it heard of later. That finds a
    dead process later by what the clocks differ, and calls none dead that is well.
    """
    local: set[Path] = set()
    known: dict[Path, tuple[float, float]] = {}
    """By folder: how long ago the last process of this machine was heard of, and the offset that it says."""
    for one in found:
        if one.record.kept and exists_here(one, here):
            local.add(one.path)
            offset = one.record.clock_offset or 0.0
            # One that hangs may have been dated by a clock that was set since.
            latest = (abs(now - one.heartbeat + offset), offset)
            known[one.path.parent] = min(known.get(one.path.parent, latest), latest)
    dated = []
    for one in found:
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
    """The heartbeats of records that are read again and again: one that changes is heard of, whatever its clock."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[float, float]] = {}
        """By file: the heartbeat that was read last, and when it was heard of, by the monotonic clock."""

    def by_this_clock(self, found: Iterable[Found], now: float) -> list[Found]:
        """Return *found* with each heartbeat as this machine's clock, which says *now*, would have dated it."""
        monotonic, seen, dated = time.monotonic(), self._seen, []
        self._seen = {}
        for one in found:
            before, heard = seen.get(one.path, (None, monotonic))
            if before is None or one.heartbeat < before:
                # The first time, or a clock was set back: nothing but the date is known yet.
                heard = monotonic - abs(now - one.heartbeat)
            elif one.heartbeat > before:
                heard = monotonic
            self._seen[one.path] = one.heartbeat, heard
            dated.append(one._replace(heartbeat=now - (monotonic - heard)))
        return dated
