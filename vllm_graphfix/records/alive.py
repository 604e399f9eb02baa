"""Whether the process of a record runs: alive, dead or silent."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from pathlib import Path

from vllm_graphfix.records.processes import Identity, exists, seen_by_system
from vllm_graphfix.records.reading import Found

SILENT_AFTER = 60.0


class Liveness(str, Enum):
    ALIVE = "alive"
    DEAD = "dead"
    SILENT = "silent"
    """It runs where this process cannot look, and has not been heard of."""


def liveness(found: Found, now: float, here: Identity, among: Collection[Found] = ()) -> Liveness:
    """Whether the process of *found* runs, at *now* in seconds of the epoch.

    *among* are the records it was found with: elsewhere, a process without a rank has no heartbeat of its own, and is as alive as its engine on
    its host.
    """
    record = found.record
    if record.boot and record.boot == here.boot and record.pid_namespace and record.pid_namespace == here.pid_namespace:
        seen = seen_by_system(record.pid)
        if seen is not None:
            same = seen.start_ticks == record.start_ticks and seen.state not in ("Z", "X", "x")
            return Liveness.ALIVE if same else Liveness.DEAD
        if not exists(record.pid):
            return Liveness.DEAD
    heartbeat = found.heartbeat
    if record.rank is None:
        heartbeat = max(
            [heartbeat]
            + [
                other.heartbeat
                for other in among
                if (other.record.engine, other.record.host) == (record.engine, record.host)
                and other.path.parent == found.path.parent
            ]
        )
    return Liveness.ALIVE if now - heartbeat < SILENT_AFTER else Liveness.SILENT


def all_liveness(found: Collection[Found], now: float, here: Identity) -> list[Liveness]:
    """`liveness` of each of *found*, among all of them: there may be thousands."""
    last: dict[tuple[str, str, Path], Found] = {}
    places = [(one.record.engine, one.record.host, one.path.parent) for one in found]
    for place, one in zip(places, found, strict=True):
        if place not in last or last[place].heartbeat < one.heartbeat:
            last[place] = one
    return [liveness(one, now, here, (last[place],)) for place, one in zip(places, found, strict=True)]
