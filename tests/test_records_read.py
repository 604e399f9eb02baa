"""Records are read and refused, whatever is in their folder."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from records import elsewhere, leave, needs_root, record
from vllm_graphfix.records import FILES, own_folder, read, reading, write

GOOD = record(elsewhere(1))
BAD = record(elsewhere(2)).file_name


def put(content: bytes) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.write_bytes(content)

    return plant


def changed(**changes: Any) -> bytes:
    return json.dumps({**record(elsewhere(2)).as_json(), **changes}).encode()


def a_link_to_a_record(path: Path) -> None:
    path.symlink_to(GOOD.file_name)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which has no end


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def a_file_of_another_user(path: Path) -> None:
    path.write_bytes(changed())
    os.chown(path, 12345, 12345)


HOSTILE = [
    (a_link_to_a_record, "it is a link or not a folder"),
    (a_fifo, "it is not a regular file"),
    (a_folder, "it is not a regular file"),
    pytest.param(a_device, "it is not a regular file", marks=needs_root),
    (a_huge_file, "it has 10737418240 bytes; a record has at most 65536"),
    pytest.param(a_file_of_another_user, "it belongs to uid 12345, and its folder to", marks=needs_root),
    pytest.param(put(b""), "it is not JSON (JSONDecodeError)", id="empty"),
    pytest.param(put(b"[" * 60_000), "it is not JSON (RecursionError)", id="deep"),
    pytest.param(put(b'{"a":' * 12_000), "it is not JSON (RecursionError)", id="deep object"),
    pytest.param(put(b"\xff\xfe\x00"), "it is not JSON", id="no text"),
    pytest.param(put(b'"\xc3\x28"'), "it is not JSON (UnicodeDecodeError)", id="broken UTF-8"),
    pytest.param(put(b"9" * 10_000), "it is not JSON (ValueError)", id="long number"),
    pytest.param(put(b"null"), "the record is None, not an object", id="null"),
    pytest.param(put(changed(written=nan)), "written is nan", id="NaN"),
    pytest.param(put(changed(schema=7)), "it has schema 7", id="newer"),
    pytest.param(put(changed(pid=3)), "its content belongs to another record", id="another's content"),
]


@pytest.mark.parametrize(("plant", "why"), HOSTILE)
def test_what_is_no_record_is_one_line_and_hides_no_record(
    tmp_path: Path, plant: Callable[[Path], None], why: str
) -> None:
    write(tmp_path, GOOD)
    plant(own_folder(tmp_path) / BAD)
    result = read(tmp_path)
    assert [one.record for one in result.found] == [GOOD]
    (line,) = result.problems
    assert line.startswith(f"{own_folder(tmp_path)}: {BAD}: {why}")


def test_many_that_are_no_records_are_one_line_too(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    for name in ("README", "a\x1b[2Jb.json", "x.json"):
        (own_folder(tmp_path) / name).touch()
    result = read(tmp_path)
    assert [one.record for one in result.found] == [GOOD]
    assert result.problems == (
        (
            f"{own_folder(tmp_path)}: 3 files are not records or cannot be read; the first: README: its name is "
            "not a record's"
        ),
    )


@given(st.binary(max_size=200))
@settings(database=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_read_without_an_error(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, GOOD)
    (own_folder(tmp_path) / BAD).write_bytes(content)
    assert [one.record for one in read(tmp_path).found] == [GOOD]


def test_files_beyond_the_limit_are_reported_and_cost_no_more(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    for pid in range(FILES + 10):
        (own_folder(tmp_path) / record(elsewhere(pid), engine="f" * 16).file_name).touch()
    result = read(tmp_path)
    assert len(result.found) == 1
    assert f"{own_folder(tmp_path)}: 11 files were skipped, since at most {FILES} are read" in result.problems


def test_the_records_of_64_ranks_are_read_fast_enough_for_a_scrape(tmp_path: Path) -> None:
    leave(tmp_path, *(record(elsewhere(rank), rank, 64) for rank in range(64)))
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        assert len(read(tmp_path).found) == 64
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.02  # 0.003 where nothing else runs


@needs_root
def test_a_user_with_many_records_hides_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FILES", 8)
    for uid, count in ((1001, 20), (1002, 3), (1003, 6)):
        folder = tmp_path / f"vllm-graphfix-{uid}"
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, uid)
        for pid in range(1, count + 1):
            one = record(elsewhere(pid))
            (folder / one.file_name).write_bytes(one.encode())
            os.chown(folder / one.file_name, uid, uid)
    result = read(tmp_path)
    counts = {uid: sum(one.owner == uid for one in result.found) for uid in (1001, 1002, 1003)}
    assert (counts, result.skipped) == ({1001: 3, 1002: 2, 1003: 3}, 21)
    assert result.problems == tuple(
        f"{tmp_path}/vllm-graphfix-{uid}: {left_out} files were skipped, since at most {share} of it are read, "
        "and 8 of all folders"
        for uid, left_out, share in ((1001, 17, 3), (1002, 1, 2), (1003, 3, 3))
    )


@needs_root
def test_a_folder_with_few_records_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FILES", 8)
    write(tmp_path, GOOD)
    theirs = tmp_path / "vllm-graphfix-1001"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 1001, 1001)
    for pid in range(1, 8):
        (theirs / record(elsewhere(pid)).file_name).write_bytes(record(elsewhere(pid)).encode())
        os.chown(theirs / record(elsewhere(pid)).file_name, 1001, 1001)
    result = read(tmp_path)
    assert (len(result.found), result.skipped, result.problems) == (8, 0, ())


def test_names_beyond_the_limit_of_a_folder_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ENTRIES", 3)
    for pid in range(1, 4):
        write(tmp_path, record(elsewhere(pid)))
    assert (len(read(tmp_path).found), read(tmp_path).skipped, read(tmp_path).problems) == (3, 0, ())
    write(tmp_path, record(elsewhere(4)))
    result = read(tmp_path)
    assert (len(result.found), result.skipped) == (3, 1)
    assert result.problems == (f"{own_folder(tmp_path)}: only its first 3 entries were examined",)


def test_folders_beyond_the_limit_may_hold_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ENTRIES", 1)
    write(tmp_path, GOOD)
    assert read(tmp_path).skipped == 0
    (tmp_path / "another").mkdir()
    assert (len(read(tmp_path).found), read(tmp_path).skipped) == (1, 1)
