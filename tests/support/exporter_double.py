"""A double of a small fleet: serves what engines serve on /metrics, without an engine behind it.

    python tests/support/exporter_double.py --seconds 180

The plugin's half comes from its own code, told made-up snapshots; vLLM's half has its names, with made-up load.
Prints the addresses, one a line, and serves for so many seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from fleet_simulator import serve_metrics
from vllm_graphfix.engine import metrics, metrics_snapshot
from vllm_graphfix.fixes import BY_NAME, FIXES

AFFECTED = ("capture-state", "draft-prefill-state", "mamba-padding")
"""The fixes whose defects 0.21.0 has."""
EVENTS = [(fix.name, event.name) for fix in FIXES if fix.name in AFFECTED for event in fix.events]
ONCE = ("capture-state", "draft-prefill-state")
"""Counted while graphs are captured, never again."""
SHADOW = {"checks": 1, "mismatches": 0, "quarantined-graphs": 0, "milliseconds": 20}
"""Events of the shadow check: what a fifth of a second adds."""
RANKS = 2


class Role(NamedTuple):
    """The role of one engine of the fleet."""

    plugin: bool = True
    canary: bool = False
    observed: tuple[str, ...] = ()


FLEET = (Role(canary=True), Role(canary=True, observed=("mamba-padding",)), Role(), Role(), Role(), Role(plugin=False))


class WatcherDouble:
    """In place of `metrics.Watcher`: made-up snapshots instead of records that were read."""

    def __init__(self, role: Role) -> None:
        self.engine = metrics_snapshot.ServedEngine(f"{id(role):016x}", role.canary, 25.0, RANKS, {}, "0.1.0", "0.21.0")
        self._role = role
        self.events: dict[tuple[str, ...], int] = (
            {(fix, event): 12 if fix in ONCE else 0 for fix, event in EVENTS} if role.canary else {}
        )
        self.checks: dict[tuple[str, ...], int] = {("shadow", event): 0 for event in SHADOW} if role.canary else {}

    @property
    def snapshot(self) -> metrics_snapshot.Snapshot:
        states: dict[tuple[str, ...], int] = {
            (fix, "auto", "not-needed", "upstream has it", "0.21.0", "0.1.0"): RANKS
            for fix in BY_NAME
            if fix not in AFFECTED
        }
        for fix in AFFECTED:
            mode, state, reason = "auto", "active", "applied and read back"
            if not self._role.canary:
                state, reason = "not-in-canary", "bucket 7300 is not below 25 %"
            elif fix in self._role.observed:
                mode, state, reason = "observe", "observing", "counts, and changes nothing"
            states[fix, mode, state, reason, "0.21.0", "0.1.0"] = RANKS
        if self.checks:
            states["shadow", "auto", "active", "applied", "0.21.0", "0.1.0"] = RANKS
        fixes: dict[tuple[str, ...], int] = {
            (fix, mode, state, "none"): ranks
            for (fix, mode, state, *_), ranks in states.items()
            if state != "not-needed"
        }
        events = {metrics_snapshot.Process("ranks", 0, 0): self.events | self.checks}
        return metrics_snapshot.Snapshot(time.time(), fixes, states, events, RANKS)


class EngineDouble:
    """The registry of one engine, and the load on it."""

    def __init__(self, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._canary = role.canary
        self._watcher = WatcherDouble(role)
        self._exposition = metrics.Exposition(self.registry) if role.plugin else None
        ProcessCollector(registry=self.registry)
        labels, model = ("model_name", "engine"), ("my-model", "0")
        buckets = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5)

        def made(kind: Any, name: str, **more: Any) -> Any:
            return kind(f"vllm:{name}", "Double.", labels, registry=self.registry, **more).labels(*model)

        self._first = made(Histogram, "time_to_first_token_seconds", buckets=buckets)
        self._next = made(Histogram, "inter_token_latency_seconds", buckets=buckets)
        self._tokens = made(Counter, "generation_tokens")
        self._preempted = made(Counter, "num_preemptions")
        self._corrupted = made(Counter, "corrupted_requests")
        self._drafted = made(Counter, "spec_decode_num_draft_tokens")
        self._accepted = made(Counter, "spec_decode_num_accepted_tokens")
        self._running = made(Gauge, "num_requests_running")
        self._waiting = made(Gauge, "num_requests_waiting")
        finished = Counter("vllm:request_success", "Double.", (*labels, "finished_reason"), registry=self.registry)
        self._finished = {
            reason: finished.labels(*model, reason) for reason in ("stop", "length", "abort", "error", "repetition")
        }

    def work(self, chance: random.Random) -> None:
        """A fifth of a second of it."""
        running = chance.randint(20, 30)
        self._running.set(running)
        self._waiting.set(chance.randint(0, 3))
        for _ in range(4):
            self._first.observe(chance.uniform(0.15, 0.3))
            share_of_length = 0.1 if self._canary else 0.4
            reason = chance.choices(("stop", "length", "abort"), (1 - share_of_length, share_of_length, 0.01))[0]
            self._finished[reason].inc()
        for _ in range(running):
            self._next.observe(chance.gauss(0.021 if self._canary else 0.0205, 0.002))
        self._tokens.inc(running * 10)
        self._drafted.inc(running * 2)
        self._accepted.inc(running * (1.3 if self._canary else 0.05))
        self._preempted.inc(chance.random() < 0.05)
        self._corrupted.inc(0 if self._canary else chance.random() < 0.01)
        for fix, event in self._watcher.events:
            if fix not in ONCE:
                self._watcher.events[fix, event] += chance.randint(0, 2)
        for fix, event in self._watcher.checks:
            self._watcher.checks[fix, event] += SHADOW[event]
        if self._exposition is not None:
            self._exposition.publish_engine(self._watcher.engine)
            self._exposition.publish(self._watcher.snapshot)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    seconds = parser.parse_args().seconds
    chance = random.Random(4)  # noqa: S311 # made-up load, the same every time
    engines = [EngineDouble(role) for role in FLEET]
    with ExitStack() as serving:
        for engine in engines:
            address = serving.enter_context(serve_metrics(lambda _, engine=engine: generate_latest(engine.registry)))  # type: ignore[misc]
            print(f"http://{address}/metrics", flush=True)  # noqa: T201 # for whoever points a Prometheus at it
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for engine in engines:
                engine.work(chance)
            time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
