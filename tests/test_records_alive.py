"""Whose process runs, and what those that ended have left: alive, dead or silent, kept or removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from record_folders import a_file, a_link, writable_by_all
from records import A_DAY, AN_HOUR, ENGINE, elsewhere, eventually, leave, names, of, record
from vllm_graphfix.records import (
    Identity,
    Liveness,
    Rank,
    Record,
    StoredRecord,
    Unreadable,
    all_liveness,
    exists,
    identity,
    liveness_of,
    may_run,
    own_folder,
    prune,
    pruning,
    read,
    write,
)
from vllm_graphfix.records.process_identity import owner_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def judged(one: Record, heartbeat: float = 0.0, among: tuple[StoredRecord, ...] = ()) -> Liveness:
    stored = StoredRecord(one, time.time() - heartbeat, Path("folder", one.file_name))
    return liveness_of(stored, time.time(), identity(), among)


def test_a_process_that_writes_once_is_alive_as_long_as_it_runs_here(sleeper: subprocess.Popen[bytes]) -> None:
    assert judged(record(of(sleeper.pid)), A_DAY) is Liveness.ALIVE


@pytest.mark.parametrize(
    "changes",
    [
        {"kept": True},
        {"kept": True, "role": "worker", "rank": Rank(0, 0, 1, 0)},
        {"role": "worker", "rank": Rank(0, 0, 1, 0)},  # its thread could not be started
        {"role": "engine-core"},
    ],
)
def test_a_process_without_a_heartbeat_for_a_minute_is_silent_here_and_elsewhere(
    sleeper: subprocess.Popen[bytes], changes: dict[str, Any]
) -> None:
    for process in of(sleeper.pid), elsewhere(1):
        one = record(process, **changes)
        assert judged(one, 59.0) is Liveness.ALIVE
        assert judged(one, 61.0) is Liveness.SILENT


def test_a_killed_process_is_dead_at_once_also_before_anybody_waits_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    one = record(of(sleeper.pid), kept=True)
    sleeper.send_signal(signal.SIGKILL)
    assert eventually(lambda: judged(one) is Liveness.DEAD)  # a zombie
    sleeper.wait()
    assert judged(one) is Liveness.DEAD
    assert judged(one, 61.0) is Liveness.DEAD


def test_another_process_with_its_id_is_not_taken_for_it(sleeper: subprocess.Popen[bytes]) -> None:
    before = of(sleeper.pid)
    assert judged(record(before._replace(start_ticks=before.start_ticks - 1))) is Liveness.DEAD


def test_a_process_elsewhere_is_alive_as_long_as_it_is_heard_of() -> None:
    assert judged(record(elsewhere(1), rank=0), 59.0) is Liveness.ALIVE
    assert judged(record(elsewhere(1), rank=0), 61.0) is Liveness.SILENT


@pytest.mark.parametrize("other", ["boot", "pid_namespace"])
def test_a_process_id_of_another_boot_or_container_says_nothing_here(other: str) -> None:
    changed_one: dict[str, Any] = {other: "another"}
    assert judged(record(rank=0)._replace(**changed_one), A_DAY) is Liveness.SILENT


def test_a_process_that_could_not_tell_where_it_is_goes_by_its_heartbeat() -> None:
    assert judged(record(rank=0, boot="", pid_namespace=""), 1.0) is Liveness.ALIVE


def test_a_remote_process_without_a_heartbeat_is_as_alive_as_its_engine_on_its_host() -> None:
    def rank(host: str = "node-b", engine: str = ENGINE) -> tuple[StoredRecord, ...]:
        one = record(elsewhere(2, host), rank=0, engine=engine)
        return (StoredRecord(one, time.time(), Path("folder", one.file_name)),)

    front_end = record(elsewhere(1))
    assert judged(front_end, AN_HOUR, rank()) is Liveness.ALIVE
    assert judged(front_end, AN_HOUR, rank(host="node-c")) is Liveness.SILENT
    assert judged(front_end, AN_HOUR, rank(engine="f" * 16)) is Liveness.SILENT
    assert judged(record(elsewhere(1), rank=1), AN_HOUR, rank()) is Liveness.SILENT
    assert judged(record(elsewhere(1), kept=True), AN_HOUR, rank()) is Liveness.SILENT


def test_the_identity_is_that_of_this_process_and_cheap() -> None:
    here = identity()
    assert here == of(os.getpid())
    assert here.boot
    assert here.pid_namespace.startswith("pid:[")
    started = time.perf_counter()
    for _ in range(100):
        identity()
    assert time.perf_counter() - started < 0.1


def test_the_owner_of_a_process_is_known_whatever_its_name(tmp_path: Path) -> None:
    program = os.fsencode(tmp_path) + b"/\xff\xfe"
    shutil.copy(b"/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process:
        owner = owner_of(process.pid)
        process.kill()
    assert owner == os.geteuid()


def remaining(base: Path) -> set[str]:
    prune(base)
    return {one.record.engine for one in read(base).found}


@pytest.fixture
def dead() -> Identity:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        gone = of(process.pid)
        process.kill()
    return gone


def test_records_of_dead_processes_are_removed_after_an_hour(tmp_path: Path, dead: Identity) -> None:
    leave(tmp_path, record(dead, engine="1" * 16), age=AN_HOUR + 1)
    leave(tmp_path, record(dead, engine="2" * 16, problem="why"), age=AN_HOUR - 10)
    leave(tmp_path, record(engine="3" * 16), age=30 * A_DAY)
    assert remaining(tmp_path) == {"2" * 16, "3" * 16}


def test_records_from_before_this_host_booted_are_removed_after_an_hour(tmp_path: Path) -> None:
    here = identity()
    leave(tmp_path, record(here._replace(boot="before"), engine="1" * 16), age=AN_HOUR + 1)
    leave(tmp_path, record(here._replace(boot="before"), engine="2" * 16), age=AN_HOUR - 10)
    leave(tmp_path, record(elsewhere(1), engine="3" * 16), age=AN_HOUR + 1)
    assert remaining(tmp_path) == {"2" * 16, "3" * 16}


def test_remote_records_are_removed_once_their_engine_was_silent_for_a_week(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), engine="1" * 16), age=8 * A_DAY)
    leave(tmp_path, record(elsewhere(2), engine="2" * 16), age=6 * A_DAY)
    leave(tmp_path, record(elsewhere(3), engine="3" * 16), age=8 * A_DAY)
    leave(tmp_path, record(elsewhere(4, "node-c"), rank=0, engine="3" * 16))
    assert remaining(tmp_path) == {"2" * 16, "3" * 16}


def test_half_written_files_are_removed_after_an_hour(tmp_path: Path) -> None:
    write(tmp_path, record())
    for number, age in enumerate((0.0, AN_HOUR + 1)):
        path = own_folder(tmp_path) / f".{record().file_name}.0000000{number}"
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    prune(tmp_path)
    assert names(tmp_path) == [f".{record().file_name}.00000000", record().file_name]


def test_a_record_that_is_written_while_others_are_judged_is_not_removed(
    tmp_path: Path, dead: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, record(dead), age=2 * AN_HOUR)

    def judged(*args: Any) -> list[Liveness]:
        leave(tmp_path, record(dead))
        return all_liveness(*args)

    monkeypatch.setattr(pruning, "all_liveness", judged)
    prune(tmp_path)
    assert names(tmp_path) == [record(dead).file_name]


def test_nothing_is_removed_that_is_not_a_record_of_ours(tmp_path: Path, dead: Identity) -> None:
    leave(tmp_path, record(dead), age=A_DAY)
    outside = tmp_path / "outside"
    outside.mkdir()
    own_folder(tmp_path).rename(outside / "records")
    own_folder(tmp_path).symlink_to(outside / "records")
    prune(tmp_path)
    assert len(list((outside / "records").iterdir())) == 1


@pytest.mark.parametrize("plant", [a_link, a_file, writable_by_all])
def test_clearing_up_never_fails(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    prune(tmp_path / "gone")
    prune(tmp_path)
    plant(own_folder(tmp_path))
    prune(tmp_path)


@pytest.mark.parametrize("pid", [0, -1])
def test_no_process_has_an_id_below_1(pid: int) -> None:
    assert not exists(pid)
    here = identity()
    assert not may_run(Unreadable(ENGINE, here.host, pid, Path(), "no JSON", time.time()), here)
    front_end = StoredRecord(record(here._replace(pid=pid, start_ticks=0)), time.time(), Path())
    assert liveness_of(front_end, time.time(), here) is Liveness.DEAD
