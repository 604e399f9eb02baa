"""Status records as processes of an engine leave them, for the tests that read them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_graphfix.records import (
    AgreementReport,
    Decided,
    FixReport,
    Identity,
    Rank,
    Record,
    StoredRecord,
    identity,
    own_folder,
    read,
    write,
)

ENGINE = "0123456789abcdef"
AN_HOUR = 3600.0
A_DAY = 24 * AN_HOUR
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")


def of(pid: int) -> Identity:
    """The identity of the process *pid* of this machine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return identity()._replace(pid=pid, start_ticks=int(fields[19]))


def record(process: Identity | None = None, rank: int | None = None, world_size: int = 1, **changes: Any) -> Record:
    """The record of a front-end; with *rank*, of a worker that agreed with all others."""
    return Record(
        graphfix="0.1.0",
        vllm="0.21.0",
        engine=ENGINE,
        **(process or identity())._asdict(),
        role="front-end" if rank is None else "worker",
        model="some/model",
        rank=None if rank is None else Rank(rank, rank, world_size, 0),
        decision=Decided(canary=True, bucket=1234, percentage=25.0, master="on", inherited=rank is not None),
        fixes={"capture-state": FixReport("auto", "active", "applied to GPUModelRunner.capture_model")},
        events={"capture-state": {"state-consumed": 12}},
        agreement=None if rank is None else AgreementReport("a-token", world_size, world_size, None),
        serves_metrics=rank is None,
        written=1763740000.0,
    )._replace(**changes)


def elsewhere(pid: int, host: str = "node-b") -> Identity:
    """A process on another machine."""
    return Identity(host, pid, 4242, "another-boot", "pid:[1]")


def leave(base: Path, *records: Record, age: float = 0.0) -> None:
    """Writes *records*, last touched *age* seconds ago."""
    for one in records:
        write(base, one)
        then = time.time() - age
        os.utime(own_folder(base) / one.file_name, (then, then))


def names(base: Path) -> list[str]:
    return sorted(path.name for path in own_folder(base).iterdir())


def only(base: Path) -> StoredRecord:
    result = read(base)
    assert result.problems == ()
    (one,) = result.found
    return one


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def run_python(code: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    return done.stdout
