"""A process keeps its record on disk, and nobody waits for the disk."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from records import eventually, names, only, record, run_python
from vllm_graphfix.engine.status_record import StatusRecord
from vllm_graphfix.records import Record, Reporter, identity, own_folder, read


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def reporter(tmp_path: Path, warned: Warnings) -> Iterator[Reporter]:
    made = Reporter(tmp_path, warned)
    yield made
    made.close()
    assert eventually(lambda: threads() == [])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphfix")]


def test_a_published_record_is_written_by_a_thread_that_then_ends(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    assert only(tmp_path).record == record()
    assert threads() == []


def test_two_threads_that_publish_first_at_once_make_one_reporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Reporter] = []

    def slow(base: Path, warn: Any) -> Reporter:
        time.sleep(0.1)
        made.append(Reporter(base, warn))
        return made[-1]

    monkeypatch.setattr("vllm_graphfix.records.Reporter", slow)
    context: Any = SimpleNamespace(environment={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)})
    status_record = StatusRecord(context)
    others = [threading.Thread(target=status_record.flush) for _ in range(2)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert len(made) == 1
    with status_record._making_reporter:  # the module's: whoever comes next in this process needs it
        status_record.reset_in_child()  # the thread that held it is not there
        status_record.flush()


def test_of_many_records_the_last_one_is_written(tmp_path: Path, reporter: Reporter) -> None:
    for number in range(100):
        reporter.publish(record(problem=str(number)))
    reporter.flush(10.0)
    assert only(tmp_path).record.problem == "99"


def test_records_of_two_engines_in_one_process_are_both_written(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record(engine="1" * 16))
    reporter.publish(record(engine="2" * 16))
    reporter.flush(10.0)
    assert {one.record.engine for one in read(tmp_path).found} == {"1" * 16, "2" * 16}
    reporter.close(60.0)
    assert names(tmp_path) == []


def test_a_heartbeat_rewrites_a_changed_record_and_touches_an_unchanged_one(tmp_path: Path, reporter: Reporter) -> None:
    says = {"now": record(rank=0)}

    def refresh() -> Record:
        return says["now"]._replace(written=time.time())

    reporter.keep(refresh, 0.02)
    assert eventually(lambda: read(tmp_path).found)
    first = only(tmp_path)
    assert eventually(lambda: only(tmp_path).heartbeat > first.heartbeat)
    assert only(tmp_path).record == first.record  # `written` included: it was touched
    says["now"] = record(rank=0, events={"capture-state": {"state-consumed": 13}})
    assert eventually(lambda: only(tmp_path).record.events == says["now"].events)


def test_a_refresh_without_an_answer_is_a_heartbeat(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record(rank=0))
    reporter.flush(10.0)
    first = only(tmp_path)
    reporter.keep(lambda: None, 0.02)
    assert eventually(lambda: only(tmp_path).heartbeat > first.heartbeat)


def test_a_record_says_whether_it_has_a_heartbeat(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    assert not only(tmp_path).record.kept
    reporter.keep(lambda: None, 0.02)
    assert eventually(lambda: only(tmp_path).record.kept)
    reporter.publish(record(problem="why"))
    assert eventually(lambda: only(tmp_path).record == record(problem="why", kept=True))


def test_a_full_disk_is_no_silence(tmp_path: Path) -> None:
    """A double of the disk: this process may not write a byte more. What it wrote before is touched."""
    code = """
        import resource, sys, time
        from pathlib import Path
        from records import eventually, only, record
        from vllm_graphfix.records import Reporter
        base, counts, warned = Path(sys.argv[1]), iter(range(10**9)), []
        reporter = Reporter(base, warned.append)
        reporter.publish(record(rank=0))
        reporter.flush(10.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        first = only(base)
        reporter.keep(lambda: record(rank=0, events={"capture-state": {"state-consumed": next(counts)}}), 0.02)
        assert eventually(lambda: only(base).heartbeat > first.heartbeat), "silent"
        assert only(base).record == first.record
        assert only(base).outdated, "its heartbeat vouches for what it says"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert eventually(lambda: not only(base).outdated and only(base).record != first.record), "there is room"
        assert len(warned) == 1 and "File too large" in warned[0], warned
        """
    run_python(code, str(tmp_path))


def test_where_no_mark_can_be_set_an_old_record_gets_no_heartbeat(
    tmp_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take a chmod and do nothing: to be silent is honest, to vouch for old content is not."""
    reporter.publish(record(rank=0))
    reporter.flush(10.0)
    before = only(tmp_path)
    refused: list[str] = []

    def refuse(base: Path, one: Record) -> None:
        refused.append(one.file_name)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("vllm_graphfix.records.writing.write", refuse)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    reporter.publish(record(rank=0, problem="why"))
    assert eventually(lambda: refused and threads() == [])
    assert only(tmp_path) == before


def test_a_record_that_somebody_cleared_away_comes_back(tmp_path: Path, reporter: Reporter, warned: Warnings) -> None:
    reporter.keep(lambda: record(rank=0), 0.02)
    assert eventually(lambda: read(tmp_path).found)
    shutil.rmtree(own_folder(tmp_path))
    assert eventually(lambda: read(tmp_path).found)
    assert warned == []


def test_an_error_in_refresh_is_one_warning(tmp_path: Path, reporter: Reporter, warned: Warnings) -> None:
    calls = []

    def refresh() -> Record:
        calls.append(1)
        raise KeyError("x")

    reporter.keep(refresh, 0.01)
    assert eventually(lambda: len(calls) > 3)
    assert len(warned) == 1
    assert "KeyError: 'x'" in warned[0]


def test_a_clean_end_removes_the_record_and_nothing_comes_after(tmp_path: Path, reporter: Reporter) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: read(tmp_path).found)
    reporter.close(60.0)
    reporter.publish(record())
    reporter.keep(record)
    assert names(tmp_path) == []
    assert eventually(lambda: threads() == [])


def test_a_writer_that_an_error_has_ended_is_replaced(
    tmp_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(reporter, "_write", fail)
        reporter.publish(record(problem="first"))
        writer = reporter._writer
        assert writer is not None
        writer.join()
    reporter.publish(record(problem="second"))
    reporter.flush(60.0)
    assert only(tmp_path).record.problem == "second"


def test_a_record_with_a_problem_is_written_and_stays(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    reporter.publish(record(problem="the ranks do not agree"))
    reporter.close(10.0)
    assert only(tmp_path).record.problem == "the ranks do not agree"


def test_a_failing_folder_is_one_warning_and_the_record_comes_once_it_works_again(
    tmp_path: Path, reporter: Reporter, warned: Warnings
) -> None:
    own_folder(tmp_path).touch()
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: warned)
    time.sleep(0.1)
    own_folder(tmp_path).unlink()
    assert eventually(lambda: read(tmp_path).found)
    assert len(warned) == 1
    assert "it is a link or not a folder" in warned[0]
    assert "VLLM_GRAPHFIX_STATUS_DIR can name another folder" in warned[0]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A double of a disk that does not answer until the event is set: `os.open` of the folder, in any thread."""
    answers = threading.Event()
    really_open = os.open

    def hanging_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == own_folder(tmp_path):
            answers.wait(30.0)
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", hanging_open)
    yield answers
    answers.set()


def test_nobody_waits_for_a_folder_that_hangs(tmp_path: Path, reporter: Reporter, hanging: threading.Event) -> None:
    started = time.monotonic()
    for number in range(1000):
        reporter.publish(record(problem=str(number)))
    assert time.monotonic() - started < 1.0
    assert threads() == ["graphfix-record"]
    hanging.set()
    assert eventually(lambda: threads() == [])
    assert only(tmp_path).record.problem == "999"


def test_the_end_waits_up_to_its_limit_for_a_folder_that_hangs(reporter: Reporter, hanging: threading.Event) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: reporter._busy_since is not None)
    started = time.monotonic()
    reporter.close(0.2)
    assert 0.15 < time.monotonic() - started < 30.0  # for ever would be the failure


def test_a_folder_that_hangs_is_one_warning(
    reporter: Reporter, warned: Warnings, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_graphfix.records.reporter._SLOW", 0.05)
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: warned)
    time.sleep(0.1)
    assert len(warned) == 1
    assert "has not answered for" in warned[0]


def test_a_forked_child_starts_with_nothing_and_leaves_its_parents_record_alone(
    tmp_path: Path, reporter: Reporter
) -> None:
    reporter.keep(lambda: record(rank=0), 0.01)
    assert eventually(lambda: read(tmp_path).found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, which is what is tried here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            assert threads() == []
            reporter.publish(record(identity(), rank=1))
            reporter.flush(10.0)
            assert len(read(tmp_path).found) == 2
            reporter.close(10.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.record.pid for one in read(tmp_path).found] == [os.getpid()]


def test_a_forked_child_that_says_nothing_leaves_its_parents_record_alone(tmp_path: Path, reporter: Reporter) -> None:
    reporter.publish(record())
    reporter.flush(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        reporter.close(10.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert only(tmp_path).record == record()


def start_no_thread(self: threading.Thread) -> None:
    """A double of an interpreter that is shutting down, in Python 3.12.0 to 3.12.2."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_the_record_is_removed_also_where_no_thread_can_be_started_any_more(
    tmp_path: Path, reporter: Reporter, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter.keep(record)
    assert eventually(lambda: threads() == ["graphfix-heartbeat"] and read(tmp_path).found)
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    reporter.close(10.0)
    assert names(tmp_path) == []
    assert warned == []


@pytest.mark.parametrize("has_heartbeat", [False, True])
def test_the_end_waits_no_longer_where_no_thread_can_be_started_any_more(
    has_heartbeat: bool,
    tmp_path: Path,
    reporter: Reporter,
    warned: Warnings,
    hanging: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hanging.set()
    if has_heartbeat:
        reporter.keep(record)
    else:
        reporter.publish(record())
    assert eventually(lambda: "graphfix-record" not in threads() and read(tmp_path).found)
    hanging.clear()
    monkeypatch.setattr(threading.Thread, "start", start_no_thread)
    started = time.monotonic()
    reporter.close(0.2)
    assert time.monotonic() - started < 10.0
    assert names(tmp_path) == [record().file_name]
    assert warned == []
    hanging.set()
    assert eventually(lambda: threads() == [])
    assert names(tmp_path) == ([] if has_heartbeat else [record().file_name])


def test_no_thread_to_be_had_is_one_warning_and_no_silence(
    tmp_path: Path, reporter: Reporter, warned: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        """A double of a process at its limit of threads."""
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    reporter.publish(record())
    reporter.keep(record)
    reporter.publish(record())
    assert len(warned) == 1
    assert "can't start new thread" in warned[0]
    monkeypatch.undo()
    reporter.publish(record())  # starts it after all
    assert eventually(lambda: read(tmp_path).found and only(tmp_path).record.kept)


def test_a_process_whose_folder_hangs_ends_in_a_moment(tmp_path: Path) -> None:
    code = """
        import atexit, os, sys, time
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import Reporter
        reporter = Reporter(Path(sys.argv[1]), print)
        reporter.publish(record())
        reporter.flush(10.0)
        really_open = os.open
        os.open = lambda *given, **named: time.sleep(600.0) or really_open(*given, **named)
        atexit.register(reporter.close)
        """
    started = time.monotonic()
    assert run_python(code, str(tmp_path)) == ""
    assert time.monotonic() - started < 300.0
    assert len(names(tmp_path)) == 1


def test_a_process_that_keeps_a_record_ends_at_once_and_cleanly(tmp_path: Path) -> None:
    code = """
        import atexit, sys, time
        from pathlib import Path
        from records import record
        from vllm_graphfix.records import Reporter, read
        reporter = Reporter(Path(sys.argv[1]), print)
        atexit.register(reporter.close, 60.0)
        reporter.keep(lambda: record(rank=0), 600.0)
        while not read(Path(sys.argv[1])).found:
            time.sleep(0.01)
        """
    started = time.monotonic()
    assert run_python(code, str(tmp_path)) == ""
    assert time.monotonic() - started < 300.0  # not with the next heartbeat
    assert names(tmp_path) == []
