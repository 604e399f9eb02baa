"""`vllm-graphfix fleet` over records that cannot be read: it never says that all is in order."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fleets import OTHER_ENGINE, only, text
from records import AN_HOUR, elsewhere, leave, needs_root, record
from vllm_graphfix.commands.doctor.collect import hosts_of
from vllm_graphfix.commands.fleet import as_json, look
from vllm_graphfix.records import Record, own_folder

pytestmark = pytest.mark.usefixtures("alone")
THIRD_ENGINE = "e" * 16


def unreadable(base: Path, *records: Record, age: float = 0.0) -> None:
    """Leaves *records* of a newer release."""
    leave(base, *records)
    for one in records:
        place, then = own_folder(base) / one.file_name, time.time() - age
        place.write_text('{"schema": 2}')
        os.utime(place, (then, then))


def test_an_engine_of_which_no_record_can_be_read_is_exit_1(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    unreadable(tmp_path, *(record(elsewhere(rank), rank, 4, engine=OTHER_ENGINE) for rank in range(4)))
    (message,) = look(tmp_path).wrong
    assert message.startswith(f"engine {OTHER_ENGINE}: 4 processes may run, on node-b, whose records cannot be read; ")
    assert "use a newer version" in message
    assert (look(tmp_path).exit_code, only(tmp_path).status) == (1, "in order")
    assert as_json(look(tmp_path))["wrong"] == [message]
    assert "1 engine NOT READABLE" in text(tmp_path)
    assert f"✗ engine {OTHER_ENGINE}: 4 processes" in text(tmp_path)
    assert "node-b" in hosts_of(look(tmp_path))


def test_an_engine_of_which_no_living_process_can_be_read_is_exit_1(tmp_path: Path) -> None:
    front = record(elsewhere(1), engine=OTHER_ENGINE)
    leave(tmp_path, record(rank=0))
    leave(tmp_path, front, age=AN_HOUR)
    unreadable(tmp_path, record(elsewhere(2), 0, engine=OTHER_ENGINE))
    assert [what.split(",")[0] for what in look(tmp_path).wrong] == [f"engine {OTHER_ENGINE}: 1 process may run"]
    assert look(tmp_path).exit_code == 1


def test_where_nothing_can_be_read_it_does_not_say_that_there_is_nothing(tmp_path: Path) -> None:
    unreadable(tmp_path, record(rank=0))  # of this process, which runs
    assert look(tmp_path).exit_code == 1
    assert "No records" not in text(tmp_path)


def test_records_of_an_engine_killed_elsewhere_an_hour_ago_are_no_fault(tmp_path: Path) -> None:
    leave(tmp_path, record(rank=0))
    unreadable(tmp_path, record(elsewhere(1), 0, engine=OTHER_ENGINE), age=AN_HOUR + 1)
    assert (look(tmp_path).wrong, look(tmp_path).exit_code) == ((), 0)


def test_an_unreadable_record_of_a_node_that_follows_is_its_leaders(tmp_path: Path) -> None:
    leave(tmp_path, record(elsewhere(1), 0, 2, followers=(OTHER_ENGINE,)), record(rank=0, engine=THIRD_ENGINE))
    follower = record(elsewhere(2, "node-c"), 1, 2, engine=OTHER_ENGINE)
    unreadable(tmp_path, follower)
    leader, other = sorted(look(tmp_path).engines, key=lambda engine: engine.name)
    assert other.wrong == ()
    assert leader.wrong[0].startswith(f"the state of process {follower.pid} on node-c is not known")
    assert (leader.wrong[1], leader.notes) == ("no record of rank 1 can be read", ())
    assert (look(tmp_path).wrong, look(tmp_path).exit_code) == ((), 1)


@needs_root
@pytest.mark.parametrize("mode", [0o770, 0o2770])
def test_a_folder_that_is_refused_is_exit_1_and_one_line(tmp_path: Path, mode: int) -> None:
    leave(tmp_path, record(rank=0))
    theirs = tmp_path / "vllm-graphfix-1234"
    theirs.mkdir()
    os.chown(theirs, 1234, -1)
    theirs.chmod(mode)
    assert (look(tmp_path).skipped, look(tmp_path).exit_code) == (1, 1)
    assert "1 file or folder NOT READ" in text(tmp_path)
    assert text(tmp_path).count("others may write to it") == 1
    theirs.chmod(0o700)
    assert (look(tmp_path).skipped, look(tmp_path).exit_code) == (0, 0)


def test_a_folder_that_its_owner_has_closed_to_this_user_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, record(rank=0))
    theirs, stock = tmp_path / "vllm-graphfix-1234", os.open
    theirs.mkdir()

    def opening(path: object, *rest: object, **more: object) -> int:
        """A double of the system for a user that is not root."""
        if path == theirs:
            raise PermissionError(13, "Permission denied")
        return stock(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opening)
    assert look(tmp_path).exit_code == 0
    assert "cannot be read by this user" in text(tmp_path)
