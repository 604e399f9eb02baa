"""Heartbeats where the clock that dates files is not this machine's.

A double: `os.utime` dates as the clock of a file server would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleets import Start, keeping, only
from records import AN_HOUR, elsewhere, eventually, leave, of, record
from records import only as only_record
from vllm_graphfix.commands.fleet import look
from vllm_graphfix.records import (
    CLOCKS_DIFFER,
    HeartbeatWatch,
    Liveness,
    Record,
    Reporter,
    StoredRecord,
    clock,
    own_folder,
    prune,
    read,
    write,
)
from vllm_graphfix.records.clock import OffsetMeter

FileServer = Callable[[float], None]


@pytest.fixture
def file_server(monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """Has "now" dated by a clock that is so many seconds ahead: a stand-in of a file server's."""
    real = os.utime

    def set_clock(ahead: float) -> None:
        def utime(path: Any, times: Any = None, **rest: Any) -> None:
            if times is None:
                times = (time.time() + ahead,) * 2
            real(path, times, **rest)

        monkeypatch.setattr(os, "utime", utime)

    return set_clock


def test_a_record_says_by_how_much_its_folder_s_clock_is_ahead_and_no_longer(
    tmp_path: Path, file_server: FileServer
) -> None:
    reporter = Reporter(tmp_path, print)
    try:
        file_server(-70.0)
        reporter.keep(lambda: record(rank=0), 0.02)
        assert eventually(lambda: read(tmp_path).found and only_record(tmp_path).record.clock_offset is not None)
        assert only_record(tmp_path).record.clock_offset == pytest.approx(-70.0, abs=CLOCKS_DIFFER)
        file_server(AN_HOUR)
        assert eventually(lambda: (only_record(tmp_path).record.clock_offset or 0.0) > AN_HOUR - CLOCKS_DIFFER)
        file_server(0.0)
        assert eventually(lambda: only_record(tmp_path).record.clock_offset is None)
    finally:
        reporter.close()


def test_what_a_slow_call_or_a_trembling_clock_seems_to_say_is_no_offset() -> None:
    meter = OffsetMeter()
    assert not meter.note(1000.0, 1000.0, 1000.1)
    assert not meter.note(1030.0, 1000.0, 1060.0)  # a server that took a minute
    assert meter.note(1070.04, 1000.0, 1000.0)
    assert meter.offset == 70.0
    assert not meter.note(1073.0, 1000.0, 1000.0)
    assert meter.offset == 70.0
    assert meter.note(1001.0, 1000.0, 1000.0)
    assert meter.offset is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ahead", [-70.0, 70.0, -2 * AN_HOUR])
@pytest.mark.parametrize("some_here", [True, False])
def test_healthy_ranks_alone_are_alive_whatever_the_file_servers_clock(
    tmp_path: Path, start: Start, ahead: float, some_here: bool
) -> None:
    here = of(start().pid) if some_here else elsewhere(9)
    offset: dict[str, Any] = {"clock_offset": ahead, "kept": True}
    leave(tmp_path, record(here, **offset), record(elsewhere(1), 0, 2, **offset), age=3.0 - ahead)
    second = record(elsewhere(2), 1, 2, **offset)
    leave(tmp_path, second, age=3.0 - ahead)
    engine = only(tmp_path)
    assert (engine.status, engine.wrong, look(tmp_path).exit_code) == ("in order", (), 0)
    (note,) = look(tmp_path).notes
    assert ("behind" if ahead < 0 else "ahead of") in note
    assert max(member.age for member in engine.members) < 30.0
    leave(tmp_path, second, age=65.0 + max(0.0, 0.0 if some_here else ahead) - ahead)
    (wrong,) = only(tmp_path).wrong
    assert wrong.startswith("not heard from for")
    assert look(tmp_path).exit_code == 1


@pytest.mark.usefixtures("alone")
def test_the_folders_clock_is_that_of_a_local_process_that_does_not_hang(tmp_path: Path, start: Start) -> None:
    """The file server's clock was set back by an hour, after which one of them was not heard of."""
    first, second = (of(start().pid) for _ in range(2))
    leave(tmp_path, record(first, 0, 3, kept=True, clock_offset=-AN_HOUR), age=AN_HOUR)
    leave(tmp_path, record(second, 1, 3, kept=True), age=90.0)
    leave(tmp_path, record(elsewhere(3), 2, 3, kept=True), age=AN_HOUR)
    liveness = [member.liveness for member in only(tmp_path).members]
    assert liveness == [Liveness.ALIVE, Liveness.SILENT, Liveness.ALIVE]


@pytest.mark.usefixtures("alone")
def test_a_clock_that_was_set_back_makes_no_dead_rank_alive(tmp_path: Path, start: Start) -> None:
    leave(tmp_path, record(), record(elsewhere(1), 0, 2))
    leave(tmp_path, record(elsewhere(2), 1, 2), age=-AN_HOUR)
    engine = only(tmp_path)
    assert [member.liveness for member in engine.members][-1] is Liveness.SILENT
    assert len(engine.wrong) == 1
    assert engine.wrong[0].startswith("cannot be told to be alive: rank 1. Records dated 60 min ahead")
    assert look(tmp_path).exit_code == 1
    gone = keeping(start, tmp_path, record(rank=1, world_size=2))
    gone.kill()
    gone.wait()
    path = next(own_folder(tmp_path).glob(f"*-{gone.pid}.json"))
    os.utime(path, (time.time() + AN_HOUR,) * 2)
    assert "dead: rank 1" in only(tmp_path).wrong


class Clock:
    """Two clocks that a test moves: of the epoch, and the monotonic one."""

    def __init__(self) -> None:
        self.now, self.steady = 1e9, 50.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.steady

    def wait(self, seconds: float) -> None:
        self.now, self.steady = self.now + seconds, self.steady + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clock, "time", made)
    return made


@pytest.mark.parametrize("ahead", [-70.0, 0.0, 3 * AN_HOUR])
def test_a_heartbeat_that_changes_is_heard_of_whatever_its_clock(clocks: Clock, ahead: float) -> None:
    watch, one = HeartbeatWatch(), record(elsewhere(1), 0)

    def age(heartbeat: float) -> float:
        (dated,) = watch.by_this_clock([StoredRecord(one, heartbeat, Path("folder", one.file_name))], clocks.now)
        return clocks.now - dated.heartbeat

    beat = clocks.now + ahead
    assert age(beat) == abs(ahead)  # nobody knows better yet
    clocks.wait(10.0)
    beat += 10.0
    assert age(beat) == 0.0
    clocks.wait(5.0)
    assert age(beat) == 5.0
    clocks.wait(60.0)
    assert age(beat) == 65.0  # it has stopped
    beat += 10.0
    clocks.now -= AN_HOUR  # our own clock is set back
    assert age(beat) == 0.0
    clocks.wait(10.0)
    assert age(beat - AN_HOUR) == abs(clocks.now - beat + AN_HOUR)  # the other one is: by the date
    clocks.wait(10.0)
    assert age(beat - AN_HOUR + 10.0) == 0.0


def test_what_is_being_written_is_not_forgotten_by_a_clock_that_is_behind(tmp_path: Path) -> None:
    write(tmp_path, record())
    theirs: Record = record(elsewhere(1))
    written = own_folder(tmp_path) / f".{theirs.file_name}.01234567"
    written.touch()
    os.utime(written, (time.time() - 2 * AN_HOUR,) * 2)
    prune(tmp_path, -2 * AN_HOUR)
    assert written.exists()
    prune(tmp_path)
    assert not written.exists()
