"""The work that the plugin's threads repeat: records made, written and read, and told as metrics."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import vllm_graphfix
from endurance_growth import Case
from vllm_graphfix import records
from vllm_graphfix.fixes import FIXES

RANKS = 64
ENGINE, ANOTHER = "0123456789abcdef", "fedcba9876543210"


def _record(rank: int = 0, engine: str = ENGINE, count: int = 0) -> records.Record:
    """The record of a rank on another host, as large as a worker's."""
    here = records.identity()._replace(host=f"node-{rank // 8}", pid=1000 + rank, boot="another")
    return records.Record(
        graphfix="0.1.0",
        vllm="0.21.0",
        engine=engine,
        **here._asdict(),
        role="worker",
        model="some/model",
        rank=records.Rank(rank, rank % 8, RANKS, 0),
        decision=records.Decided(canary=True, bucket=1234, percentage=25.0, master="on", inherited=True),
        fixes={fix.name: records.FixReport("auto", "active", f"applied on rank {rank}") for fix in FIXES},
        events={fix.name: {event.name: count for event in fix.events} for fix in FIXES},
        agreement=records.AgreementReport("a-token", RANKS, RANKS, None),
        leader=engine,
        written=time.time(),
    )


def _folder() -> Path:
    """In what the caller cleans up."""
    return Path(tempfile.mkdtemp(dir="."))


def watcher(*, others: int = 0) -> Case:
    """The records of 64 ranks read and told; beside so many of another engine."""
    from prometheus_client import CollectorRegistry

    from vllm_graphfix.engine.metrics import Exposition, Watcher
    from vllm_graphfix.engine.metrics_snapshot import ServedEngine

    base = _folder()
    for rank in range(RANKS):
        records.write(base, _record(rank))
    for rank in range(others):
        records.write(base, _record(rank, ANOTHER))
    served = ServedEngine(ENGINE, canary=True, percentage=25.0, ranks=RANKS)
    watcher = Watcher(base, served, Exposition(CollectorRegistry()))
    return Case(watcher.look)


def reporter(*, base: Path | None = None, changing: bool = False, engines: bool = False) -> Case:
    """Records handed over and written: touched, written anew if *changing*, or those of one engine after the other."""
    warnings: list[str] = []
    reporter = records.Reporter(base or _folder(), warnings.append)
    numbers, record = itertools.count(), _record()

    def publish() -> None:
        published = record
        if changing:
            published = _record(count=next(numbers))
        if engines:
            published = _record(engine=f"{next(numbers):016x}")
        reporter.publish(published)
        reporter.flush(60)

    return Case(publish)


def telling() -> Case:
    """A rank's record of itself, made every ten seconds; with the fixes on what has been imported so far."""
    vllm_graphfix.register()
    process = vllm_graphfix._this_process()
    telling = process.status_record
    telling.rank = (0, 0, 1, 0)
    assert telling.record().fixes["mamba-padding"].state == "active"
    return Case(telling.record, activities={fix.name: process.manager.activity(fix.name) for fix in FIXES})
