"""The time of status records and metrics.

Measured are writing one record, reading those of 64 ranks, alone and beside 2,000 records of other engines, a scrape of
/metrics, and by how much the event loop of a front-end is late while a thread reads beside these 2,000.

python benchmarks/status_records.py [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from measuring import Times, console, machine, table, verdict
from vllm_graphfix import records
from vllm_graphfix.engine.metrics import Exposition, Watcher
from vllm_graphfix.engine.metrics_snapshot import ServedEngine
from vllm_graphfix.fixes import FIXES

RANKS = 64
ENGINE = "0123456789abcdef"
OTHERS = 2000
TARGET = 0.005
"""Seconds for a scrape."""
OFTEN = 0.1
"""Seconds between two readings beside an event loop: 50 times as often as in an engine."""
NAPS = 300
ROUNDS = 15
LISTED = 0.002
"""Seconds for a folder with `OTHERS` records of other engines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="default: 200")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for rank in range(RANKS):
            records.write(base, of_rank(rank))
        shared = base / "shared"
        shared.mkdir()
        records.write(shared, of_rank(0))
        for number in range(OTHERS):
            records.write(shared, of_rank(number)._replace(engine=f"{number:016x}"))
        alone = Watcher(
            shared, ServedEngine(ENGINE, canary=True, percentage=25.0, ranks=1), Exposition(CollectorRegistry())
        )
        registry, empty = CollectorRegistry(), CollectorRegistry()
        watcher = Watcher(base, ServedEngine(ENGINE, canary=True, percentage=25.0, ranks=RANKS), Exposition(registry))
        watcher.look()
        measured: dict[str, tuple[Callable[[], object], float | None]] = {
            "a record written": (lambda: records.write(base, of_rank(0)), None),
            f"records of {RANKS} ranks read and told, in a thread every 5 s": (watcher.look, None),
            f"one rank beside {OTHERS} records of other engines, likewise": (alone.look, None),
            f"the records of one engine listed among {OTHERS}": (
                lambda: records.read(shared, own=True, engines={"f" * 16}),
                LISTED,
            ),
            "an empty registry rendered": (lambda: generate_latest(empty), None),
            f"a scrape: ours rendered, {RANKS} ranks": (lambda: generate_latest(registry), TARGET),
        }
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(rounds):
            for name, (call, _) in measured.items():
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
        late: dict[str, list[float]] = {"nothing else": [], f"a reader beside {OTHERS} records of other engines": []}
        for _ in range(ROUNDS):
            for name, look in zip(late, (lambda: None, alone.look), strict=True):
                late[name].append(lateness(look))
    made = table(f"milliseconds; {rounds} rounds, interleaved", "what", "min", "median", "target")
    for name, (_, target) in measured.items():
        taken = Times.of(times[name])
        judged = verdict(taken.minimum, target, "s") if target else ""
        made.add_row(name, *(f"{value * 1000:.2f}" for value in taken), judged)
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)
    least = min(late["nothing else"])
    made = table(f"event loop, 99th percentile of its lateness; {ROUNDS} rounds, interleaved", "beside", "min", "ratio")
    for name, values in late.items():
        made.add_row(name, f"{min(values) * 1000:.2f}", f"{min(values) / least:.2f}")
    out.print(made)


def lateness(look: Callable[[], object]) -> float:
    """Return how late an event loop is in 99 of 100 naps, in seconds, while a thread calls *look* every `OFTEN`."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(OFTEN):
            look()

    async def nap() -> list[float]:
        late = []
        for _ in range(NAPS):
            started = time.perf_counter()
            await asyncio.sleep(0.002)
            late.append(time.perf_counter() - started - 0.002)
        return late

    thread = threading.Thread(target=read)
    thread.start()
    try:
        return sorted(asyncio.run(nap()))[NAPS * 99 // 100]
    finally:
        ended.set()
        thread.join()


def of_rank(rank: int) -> records.Record:
    """Return a record as large as a worker's, with all events, and a reason of its own for each fix on each rank."""
    return records.Record(
        graphfix="0.1.0",
        vllm="0.21.0",
        engine=ENGINE,
        **records.identity()._replace(host=f"node-{rank // 8}", pid=1000 + rank, boot="another")._asdict(),
        role="worker",
        model="some/model",
        rank=records.Rank(rank, rank % 8, RANKS, 0),
        decision=records.Decided(canary=True, bucket=1234, percentage=25.0, master="on", inherited=True),
        fixes={fix.name: records.FixReport("auto", "active", f"applied to {fix.name} on rank {rank}") for fix in FIXES},
        events={fix.name: {event.name: 12 for event in fix.events} for fix in FIXES},
        agreement=records.AgreementReport("a-token", RANKS, RANKS, None),
        leader=ENGINE,
        written=time.time(),
    )


if __name__ == "__main__":
    main()
