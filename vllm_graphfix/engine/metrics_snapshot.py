"""The numbers of one engine for /metrics, by the records of its ranks and of those of other nodes that follow it."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.records import Liveness, liveness_of

if TYPE_CHECKING:
    from vllm_graphfix.records import AgreementReport, Identity, Record, StoredRecord


class ServedEngine(NamedTuple):
    """The engine that a process serves."""

    id: str
    canary: bool
    """It gets the fixes."""
    percentage: float
    """The percentage of the engines that are set up as this one that get the fixes."""
    ranks: int | None
    """The number of ranks in its configuration, data parallelism included; None if that changes while it runs."""
    misconfigured: Mapping[str, str] = {}
    """Variables whose value means nothing, each with that value."""
    graphfix: str = ""
    vllm: str = ""
    """Versions: of this plugin, and of vLLM."""
    ranks_here: int | None = None
    """The number of ranks in its configuration that are on this host; None where that is not known."""

    def unrecorded(self, ranks: Collection[Record], host: str, *, alone: bool) -> int | None:
        """Return how many ranks should have a record beside those of *ranks* that *host* reads; None if not known.

        Those of other hosts should where one of them has, since the folder is a shared one then; not unless this
        front-end is *alone*, as the only one of its engine that serves metrics: it knows nothing of the others' ranks.
        """
        if self.ranks is None or any(each.starting for each in ranks):
            return None
        here = sum(each.host == host for each in ranks)
        if (alone and here < len(ranks)) or len(ranks) >= self.ranks:
            return max(self.ranks - len(ranks), 0)
        return None if self.ranks_here is None else max(self.ranks_here - here, 0)


class Process(NamedTuple):
    """A process, unique despite reuse of its PID."""

    host: str
    pid: int
    start_ticks: int


class Snapshot(NamedTuple):
    """Content of the records of one engine's ranks when they were last read."""

    read_at: float
    """Epoch seconds."""
    fixes: dict[tuple[str, ...], int]
    """By the values of `metrics.FIX_LABELS`: the number of ranks. Fixes that are not needed, which are most, are left
    out."""
    states: dict[tuple[str, ...], int]
    """By the values of `metrics.STATE_LABELS`: the number of ranks."""
    events: dict[Process, dict[tuple[str, ...], int]]
    """By the process of a rank, and the values of `metrics.EVENT_LABELS`; of ranks that have ended, too."""
    agreeing: int | None
    """Ranks that agree; None if none has been compared yet."""
    silent: int = 0
    """Ranks and engine cores that are not heard from any more, and those that have ended while others serve. The other
    numbers still have the last report of a silent rank."""
    unchecked: int = 0
    """Ranks that have captured although the gate could not check them."""
    outdated: int = 0
    """Ranks that live and could not renew their record."""
    unrecorded: int | None = None
    """Ranks that should have a record here and have none; None if that is not known."""
    stuck: int = 0
    """Processes, engine cores among them, that exist and are in a step that may never end."""


def survey(
    stored: Sequence[StoredRecord], engine: ServedEngine, now: float, here: Identity, *, alone: bool, unreadable: int
) -> Snapshot | None:
    """Sum up the *stored* records of *engine* and its followers; None if no rank of it is left.

    *alone*: no other process serves metrics of its ranks. *unreadable* records are there besides.
    """
    ours = {record.file_name for record in records_of_engine((each.record for each in stored), engine.id)}
    of_ours = [each for each in stored if each.path.name in ours]
    states = [liveness_of(each, now, here) for each in of_ours]
    there = [each for each, state in zip(of_ours, states, strict=True) if state is not Liveness.DEAD]
    ended = [each.record for each, state in zip(of_ours, states, strict=True) if state is Liveness.DEAD]
    if not there:
        return None
    # Not a rank that could not be checked before it knew which it is: that is one of ours already.
    no_ranks = [each for each in stored if each.record.rank is None and each.record.unchecked is None]
    engines = {record.engine for record in (*(each.record for each in there), *ended)}
    schedulers = [each.record for each in no_ranks if each.record.engine in engines]
    # Engine cores, too: they wait for the result of a step whose rank has gone on to wait elsewhere.
    steps = [each for each in no_ranks if each.record.engine == engine.id] + there
    core_states = [liveness_of(each, now, here) for each in steps if each.record.role == "engine-core"]
    lost = Tally(state for state in (*states, *core_states) if state is not Liveness.ALIVE)
    silent = lost[Liveness.SILENT]
    if engine.ranks is not None:  # with elastic expert parallelism ranks end while the engine serves
        silent += lost[Liveness.DEAD]
    # A process that is in such a step and silent as well is both.
    stuck = sum(
        each.record.in_step_since is not None and liveness_of(each, now, here) is not Liveness.DEAD for each in steps
    )
    ranks = [each.record for each in there]
    unrecorded = engine.unrecorded(ranks, here.host, alone=alone)
    if unrecorded is not None:  # those whose record cannot be read are another number
        unrecorded = max(unrecorded - unreadable, 0)
    snapshot = snapshot_of(ranks, now, silent, ended, schedulers, engine.ranks or 0)
    return snapshot._replace(outdated=sum(each.outdated for each in there), stuck=stuck, unrecorded=unrecorded)


def records_of_engine(records: Iterable[Record], engine: str) -> list[Record]:
    """Return the records of *engine*'s ranks, and of those on nodes without /metrics that follow its rank 0."""
    all_records = list(records)
    exposed_elsewhere = {record.engine for record in all_records if record.serves_metrics and record.engine != engine}
    return [
        record
        for record in all_records
        # An error that came early may have hidden from a rank which it is.
        if (record.rank is not None or record.unchecked is not None)
        and (record.engine == engine or (record.leader == engine and record.engine not in exposed_elsewhere))
    ]


def snapshot_of(
    records: Iterable[Record],
    read_at: float,
    silent: int = 0,
    ended: Iterable[Record] = (),
    schedulers: Iterable[Record] = (),
    expected: int = 0,
) -> Snapshot:
    """Sum up the records of one engine's ranks, of which *silent* of *expected* are silent.

    Of those that have *ended* only what they have counted; of its *schedulers*, that are no ranks, only how many
    requests they have ended, and that they can end none where that is so: a rank may not know.
    """
    fixes: Tally[tuple[str, ...]] = Tally()
    states: Tally[tuple[str, ...]] = Tally()
    groups: dict[str, AgreementReport] = {}
    all_records = list(records)
    for record in all_records:
        for name, fix in record.fixes.items():
            # Not the reason in words: it may quote the rollout key, an error, a host, and /metrics is for everybody.
            states[name, fix.mode, fix.state, fix.code, record.vllm, record.graphfix] += 1
            if fix.state != "not-needed":
                fixes[name, fix.mode, fix.state, fix.code] += 1
        if record.agreement is not None:
            groups[record.agreement.group] = record.agreement
    events = {Process(each.host, each.pid, each.start_ticks): _counted(each) for each in (*all_records, *ended)}
    for each in schedulers:
        events[Process(each.host, each.pid, each.start_ticks)] = _aborted(each)
        ends = each.fixes.get("abort")
        if ends is not None and ends.state in ("failed", "incompatible"):
            fixes["abort", ends.mode, ends.state, ends.code] += 1
    agreeing = sum(group.agreeing for group in groups.values()) if groups else None
    if agreeing is not None and agreeing == sum(group.world_size for group in groups.values()) < expected:
        agreeing = None  # of some ranks nothing is known here, and no other one differs
    unchecked = sum(record.unchecked is not None for record in all_records)
    return Snapshot(read_at, dict(fixes), dict(states), events, agreeing, silent, unchecked)


def _counted(record: Record) -> dict[tuple[str, ...], int]:
    """Return counts by the values of `metrics.EVENT_LABELS`; an event that nobody counts is no series."""
    return {
        (name, event): count
        for name, counts in record.events.items()
        for event, count in counts.items()
        if count or name not in record.fixes or record.fixes[name].state in ("active", "observing")
    }


def _aborted(record: Record) -> dict[tuple[str, ...], int]:
    """Return the requests that the process of *record* has ended, by the values of `metrics.EVENT_LABELS`."""
    return {(name, "aborted"): counts["aborted"] for name, counts in record.events.items() if counts.get("aborted")}
