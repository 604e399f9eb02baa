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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix import records
from vllm_graphfix.engine.metrics_snapshot import Process, ServedEngine, Snapshot, survey

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

    from vllm_graphfix.records import HeartbeatWatch, StoredRecord, Unreadable
    from vllm_graphfix.settings.decision import Decision

EVERY = 5.0
"""Seconds between two readings of the records."""

MOST_SERIES = 1024
"""Series of one metric: several times as many as the fixes and detectors of an engine make. Names of fixes and events
come from records, which whoever has this user's rights can write."""

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
"""Metrics that are exposed beside these until 0.3.0."""
_TROUBLES = {
    "ranks_silent": "Ranks and engine cores not heard from for a minute, or ended while the engine serves.",
    "ranks_unrecorded": "Ranks of this engine that should have a record here and have none: what they do is not known.",
    "ranks_unchecked": "Ranks that have captured although the check of the ranks failed; their records say why.",
    "ranks_outdated": "Ranks that live and cannot write their record: what has changed there since is not known.",
    "steps_stuck": "Ranks and engine cores that have a heartbeat and have been in one step for over two minutes.",
    "records_unreadable": "Records of this engine that are there and cannot be read: their processes are not known.",
}
"""Gauges that are 0 where all is well, each with what it says of itself."""


def _has_room(present: set[tuple[str, ...]], labels: tuple[str, ...]) -> bool:
    """Add *labels* to those of a metric that are *present*; return False if it has `MOST_SERIES` others."""
    if len(present) < MOST_SERIES:
        present.add(labels)
    return labels in present


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
                self._present.remove(labels)
            else:
                self._gauge.labels(*labels).set(0)
        for labels, value in values.items():
            if _has_room(self._present, labels):
                self._gauge.labels(*labels).set(value)


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
        self._counted: set[tuple[str, ...]] = set()

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

    def publish_engine(self, engine: ServedEngine) -> None:
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

    def publish_unreadable(self, records: int) -> None:
        """Expose the number of *records* of this engine that cannot be read; there may be no other one."""
        self._set_trouble("records_unreadable", records)

    def _set_trouble(self, name: str, number: int) -> None:
        gauge = self._troubles[name] = self._troubles.get(name) or self._gauge(name, _TROUBLES[name])
        gauge.set(number)

    def publish(self, snapshot: Snapshot) -> None:
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
                if not _has_room(self._counted, labels):
                    continue
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
        # Without a lock: a reading under way may mix two engines once, and the next one is right seconds later.
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
        self._exposition.publish_engine(self.engine)
        now, here = time.time(), records.identity()
        stored, unreadable = self._read(now)
        others = {each.record.engine for each in stored if each.record.serves_metrics} - {self.engine.id}
        of_ours_alone = [each for each in unreadable if each.engine not in others and records.may_run(each, here)]
        if stored or unreadable:  # else the folder may be gone, which is another number
            self._exposition.publish_unreadable(len(of_ours_alone))
        snapshot = survey(stored, self.engine, now, here, alone=not others, unreadable=len(of_ours_alone))
        if snapshot is not None:
            self._exposition.publish(snapshot)

    def _read(self, now: float) -> tuple[tuple[StoredRecord, ...], tuple[Unreadable, ...]]:
        """Return the records of this engine and of its followers, dated by this host's clock, and unreadable ones."""
        # Our own user's: what others write is not ours to publish.
        stored, _, _, unreadable = records.read(self._base, own=True, engines={self.engine.id})
        # By name: on shared storage there are those of a whole fleet, and this process serves requests.
        named = {name for each in stored for name in each.record.followers} - {self.engine.id}
        self._followers = frozenset([*named, *self._followers - named][: records.MOST_FOLLOWERS])
        if self._followers:
            of_followers = records.read(self._base, own=True, engines=self._followers)
            stored, unreadable = stored + of_followers.found, unreadable + of_followers.unreadable
        # Not by the dates of files: a file server's clock may be minutes off.
        self._heartbeats = self._heartbeats or records.HeartbeatWatch()
        return tuple(self._heartbeats.by_this_clock(stored, now)), unreadable


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
