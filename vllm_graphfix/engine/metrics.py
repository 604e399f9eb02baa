"""Series of this engine's ranks on vLLM's own /metrics.

With prometheus_client, which comes with vLLM, and as vLLM itself uses it: with several API servers it runs in
multiprocess mode, in which collectors of one's own do not exist, and a Gauge says what holds for the whole engine in
mode `mostrecent`.

vLLM renders /metrics in the event loop that serves requests. So a scrape must not touch a disk: a thread reads the
records now and then.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter as Tally
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

    from vllm_graphfix.records import AgreementReport, HeartbeatWatch, Record
    from vllm_graphfix.settings.decision import Decision

EVERY = 5.0
"""Seconds between two readings of the records."""

FIX_LABELS = ("fix", "mode", "state", "code")
EVENT_LABELS = ("fix", "event")
BUILD_LABELS = ("version", "vllm")
STATE_LABELS = ("fix", "mode", "state", "reason", "vllm", "graphfix")
MISCONFIGURED_LABELS = ("variable", "value")
NAMES = (
    "graphfix_build_info",
    "graphfix_fix_ranks",
    "graphfix_events_total",
    "graphfix_detector_seconds_total",
    "graphfix_ranks_expected",
    "graphfix_ranks_agreeing",
    "graphfix_ranks_silent",
    "graphfix_ranks_unrecorded",
    "graphfix_ranks_unchecked",
    "graphfix_ranks_outdated",
    "graphfix_steps_stuck",
    "graphfix_records_unreadable",
    "graphfix_canary",
    "graphfix_rollout_ratio",
    "graphfix_misconfigured_variable",
    "graphfix_records_read_timestamp_seconds",
)
"""Every metric that is exposed; `docs/metrics.md` describes them in this order."""
DEPRECATED = ("graphfix_fix_state", "graphfix_rollout_percent", "graphfix_misconfigured")
"""Metrics that are exposed beside these until the next release."""
_TROUBLES = {
    "ranks_silent": "Ranks and engine cores not heard from for a minute, or ended while the engine serves.",
    "ranks_unrecorded": "Ranks of this engine that should have a record here and have none: what they do is not known.",
    "ranks_unchecked": "Ranks that have captured although the check of the ranks failed; their records say why.",
    "ranks_outdated": "Ranks that live and cannot write their record: what has changed there since is not known.",
    "steps_stuck": "Ranks and engine cores that have a heartbeat and have been in one step for over two minutes.",
    "records_unreadable": "Records of this engine that are there and cannot be read: their processes are not known.",
}
"""Gauges that are 0 where all is well, each with what it says of itself."""


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
    """By the values of `FIX_LABELS`: the number of ranks. Fixes that are not needed are left out: they are most."""
    states: dict[tuple[str, ...], int]
    """By the values of `STATE_LABELS`: the number of ranks."""
    events: dict[Process, dict[tuple[str, ...], int]]
    """By the process of a rank, and the values of `EVENT_LABELS`; of ranks that have ended, too."""
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
            # Outside the rollout the reason quotes the key, which is not for everybody and differs between engines.
            reason = fix.code if fix.state == "not-in-canary" else fix.reason
            states[name, fix.mode, fix.state, reason, record.vllm, record.graphfix] += 1
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
    """Return counts by the values of `EVENT_LABELS`; an event that nobody counts is no series."""
    return {
        (name, event): count
        for name, counts in record.events.items()
        for event, count in counts.items()
        if count or name not in record.fixes or record.fixes[name].state in ("active", "observing")
    }


def _aborted(record: Record) -> dict[tuple[str, ...], int]:
    """Return the requests that the process of *record* has ended, by the values of `EVENT_LABELS`."""
    return {(name, "aborted"): counts["aborted"] for name, counts in record.events.items() if counts.get("aborted")}


class _Labelled:
    """A gauge with labels, of which a series ends when nothing is in it any more."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._present: set[tuple[str, ...]] = set()
        self._can_remove = not {"PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"} & os.environ.keys()

    def set(self, values: Mapping[tuple[str, ...], int]) -> None:
        """Set each series of *values*; all others end, or are 0 in multiprocess mode, which can take none away."""
        for labels in self._present - values.keys():
            if self._can_remove:
                self._gauge.remove(*labels)
            else:
                self._gauge.labels(*labels).set(0)
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        self._present = {*values} if self._can_remove else self._present | values.keys()


class Exposition:
    """The series of one process, in *registry*; not to be made twice for the same one."""

    def __init__(self, registry: CollectorRegistry, *, counts: bool = True) -> None:
        """*counts*: expose events. Counters of several API servers are added up, so one of them does."""
        from prometheus_client import Counter

        self._registry = registry
        self._build = self._gauge("build_info", "1, with the versions of the plugin and of vLLM.", BUILD_LABELS)
        self._ranks = _Labelled(
            self._gauge("fix_ranks", "Ranks of this engine in which a fix or a detector is in that state.", FIX_LABELS)
        )
        self._state = _Labelled(
            self._gauge(
                "fix_state", "Deprecated, see graphfix_fix_ranks: ranks in which a fix is in that state.", STATE_LABELS
            )
        )
        self._engine: ServedEngine | None = None
        self._expected: Gauge | None = None
        self._agreeing: Gauge | None = None
        self._troubles: dict[str, Gauge] = {}
        self._canary = self._gauge(
            "canary", "1 if this engine gets the fixes, 0 if not: outside the rollout, switched off, or only observing."
        )
        self._ratio = self._gauge(
            "rollout_ratio",
            "Share of the engines that get the fixes, as set for this engine, from 0 to 1; "
            "0 where its settings give them to nobody.",
        )
        self._percent = self._gauge("rollout_percent", "Deprecated, see graphfix_rollout_ratio: the same in percent.")
        self._variables = _Labelled(
            self._gauge(
                "misconfigured_variable", "1 for each variable of this engine whose value means nothing.", ("variable",)
            )
        )
        self._misconfigured = _Labelled(
            self._gauge(
                "misconfigured",
                "Deprecated, see graphfix_misconfigured_variable: the same, with the value.",
                MISCONFIGURED_LABELS,
            )
        )
        self._read_at = self._gauge("records_read_timestamp_seconds", "When the records of the ranks were last read.")
        self._events = Counter(
            "graphfix_events_total",
            "What a fix counted: defects that an observing fix saw, or that an active fix corrected.",
            EVENT_LABELS,
            registry=registry,
        )
        self._seconds = Counter(
            "graphfix_detector_seconds_total",
            "Time that a detector has taken, over the ranks of this engine.",
            ("fix",),
            registry=registry,
        )
        self._counts = counts
        self._exposed: dict[Process, dict[tuple[str, ...], int]] = {}

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(f"graphfix_{name}", documentation, labels, registry=self._registry, multiprocess_mode="mostrecent")

    def _end_numbers(self) -> None:
        """End the series that a later engine may not have; in multiprocess mode they stay, without a number."""
        gauges = [gauge for gauge in (self._expected, self._agreeing, *self._troubles.values()) if gauge is not None]
        self._expected = self._agreeing = None
        self._troubles = {}
        for gauge in gauges:
            gauge.set(float("nan"))
            self._registry.unregister(gauge)

    def tell_engine(self, engine: ServedEngine) -> None:
        if engine is not self._engine:  # a later one may be equal to it
            self._engine = engine
            self._end_numbers()
        self._canary.set(engine.canary)
        self._build.labels(engine.graphfix, engine.vllm).set(1)
        self._ratio.set(engine.percentage / 100)
        self._percent.set(engine.percentage)
        self._variables.set({(variable,): 1 for variable in engine.misconfigured})
        self._misconfigured.set(dict.fromkeys(engine.misconfigured.items(), 1))
        # Not where all of them are known to be on other hosts, and none of their records is here: that is no fault.
        if engine.ranks is not None and (engine.ranks_here != 0 or self._agreeing is not None):
            self._expected = self._expected or self._gauge("ranks_expected", "Ranks of this engine.")
            self._expected.set(engine.ranks)

    def tell_unreadable(self, records: int) -> None:
        """Expose the number of *records* of this engine that cannot be read; there may be no other one."""
        self._set_trouble("records_unreadable", records)

    def _set_trouble(self, name: str, number: int) -> None:
        gauge = self._troubles[name] = self._troubles.get(name) or self._gauge(name, _TROUBLES[name])
        gauge.set(number)

    def tell(self, snapshot: Snapshot) -> None:
        self._read_at.set(snapshot.read_at)
        if snapshot.agreeing is not None:
            # Not before it is known: 0 would say that the ranks disagree.
            self._agreeing = self._agreeing or self._gauge(
                "ranks_agreeing", "Ranks that agree about the fixes, compared before the first capture."
            )
            self._agreeing.set(snapshot.agreeing)
        numbers = {
            "ranks_silent": snapshot.silent,
            **({} if snapshot.unrecorded is None else {"ranks_unrecorded": snapshot.unrecorded}),
            "ranks_unchecked": snapshot.unchecked,
            "ranks_outdated": snapshot.outdated,
            "steps_stuck": snapshot.stuck,
        }
        for name, number in numbers.items():
            self._set_trouble(name, number)
        self._ranks.set(snapshot.fixes)
        self._state.set(snapshot.states)
        for process, events in snapshot.events.items() if self._counts else ():
            # By process: of a rank that is gone, or whose record is missing for a moment, what it has counted stays.
            exposed = self._exposed.setdefault(process, {})
            for labels, count in events.items():
                before = exposed.get(labels, 0)
                self._events.labels(*labels).inc(max(0, count - before))
                if labels[1] == "milliseconds":
                    self._seconds.labels(labels[0]).inc(max(0, count - before) / 1000)
                exposed[labels] = max(count, before)


class Watcher:
    """Reads the records of one engine in a thread of its own, for as long as the process lives."""

    def __init__(self, base: Path, engine: ServedEngine, exposition: Exposition) -> None:
        self._base = base
        self._exposition = exposition
        self._heartbeats: HeartbeatWatch | None = None
        self._followers: frozenset[str] = frozenset()
        """The engines of nodes that follow this one, also where the record that names them cannot be read any more."""
        self.engine = engine

    def serve(self, engine: ServedEngine) -> None:
        """Read the records of another engine from now on."""
        self.engine, self._followers = engine, frozenset()

    def start(self) -> None:
        threading.Thread(target=self._run, name="graphfix-metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # the timestamp says so; a line in the log every few seconds would say no more
                self.look()
            time.sleep(EVERY)

    def look(self) -> None:
        """Read the records now. Where no rank's can be read, the last values stay, with their time."""
        from vllm_graphfix import records

        self._exposition.tell_engine(self.engine)
        now, here = time.time(), records.identity()
        # Our own user's: what others write is not ours to tell.
        stored, _, _, unreadable = records.read(self._base, own=True, engines={self.engine.id})
        # By name: on shared storage there are those of a whole fleet, and this process serves requests.
        self._followers = self._followers.union(*(each.record.followers for each in stored)) - {self.engine.id}
        if self._followers:
            of_followers = records.read(self._base, own=True, engines=self._followers)
            stored, unreadable = stored + of_followers.found, unreadable + of_followers.unreadable
        # Not by the dates of files: a file server's clock may be minutes off.
        self._heartbeats = self._heartbeats or records.HeartbeatWatch()
        stored = tuple(self._heartbeats.by_this_clock(stored, now))
        others = {each.record.engine for each in stored if each.record.serves_metrics} - {self.engine.id}
        of_ours_alone = [each for each in unreadable if each.engine not in others and records.may_run(each, here)]
        if stored or unreadable:  # else the folder may be gone, which is another number
            self._exposition.tell_unreadable(len(of_ours_alone))
        ours = {record.file_name for record in records_of_engine((each.record for each in stored), self.engine.id)}
        of_ours = [each for each in stored if each.path.name in ours]
        states = [records.liveness_of(each, now, here) for each in of_ours]
        there = [each for each, state in zip(of_ours, states, strict=True) if state is not records.Liveness.DEAD]
        ended = [each.record for each, state in zip(of_ours, states, strict=True) if state is records.Liveness.DEAD]
        if there:
            # Not a rank that could not be checked before it knew which it is: that is one of ours already.
            no_ranks = [each for each in stored if each.record.rank is None and each.record.unchecked is None]
            engines = {record.engine for record in (*(each.record for each in there), *ended)}
            schedulers = [each.record for each in no_ranks if each.record.engine in engines]
            # Engine cores, too: they wait for the result of a step whose rank has gone on to wait elsewhere.
            steps = [each for each in no_ranks if each.record.engine == self.engine.id] + there
            core_states = [records.liveness_of(each, now, here) for each in steps if each.record.role == "engine-core"]
            lost = Tally(state for state in (*states, *core_states) if state is not records.Liveness.ALIVE)
            silent = lost[records.Liveness.SILENT]
            if self.engine.ranks is not None:  # with elastic expert parallelism ranks end while the engine serves
                silent += lost[records.Liveness.DEAD]
            # A process that is in such a step and silent as well is both.
            stuck = sum(
                each.record.in_step_since is not None
                and records.liveness_of(each, now, here) is not records.Liveness.DEAD
                for each in steps
            )
            outdated = sum(each.outdated for each in there)
            ranks = [each.record for each in there]
            unrecorded = self.engine.unrecorded(ranks, here.host, alone=not others)
            if unrecorded is not None:  # those whose record cannot be read are another number
                unrecorded = max(unrecorded - len(of_ours_alone), 0)
            snapshot = snapshot_of(ranks, now, silent, ended, schedulers, self.engine.ranks or 0)
            self._exposition.tell(snapshot._replace(outdated=outdated, stuck=stuck, unrecorded=unrecorded))


_watcher: Watcher | None = None


def expose(base: Path, decision: Decision, ranks: int | None, ranks_here: int | None = None) -> None:
    """Put this engine's series beside vLLM's. A later call, for another engine of the process, replaces it."""
    global _watcher  # noqa: PLW0603 # one process serves one engine
    engine = ServedEngine(
        decision.engine,
        decision.applies,
        decision.percentage,
        ranks,
        decision.misconfigured,
        decision.graphfix,
        decision.vllm,
        ranks_here,
    )
    if _watcher is None:
        from prometheus_client import REGISTRY

        name = multiprocessing.current_process().name
        counts = not name.startswith("ApiServer") or name == "ApiServer_0"
        _watcher = Watcher(base, engine, Exposition(REGISTRY, counts=counts))
        _watcher.start()
    else:
        _watcher.serve(engine)
