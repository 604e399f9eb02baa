"""Records of ranks on other machines reach the folder of rank 0 through the store of the ranks."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gate_doubles import process_double, worker_of
from records import ENGINE, elsewhere, eventually, leave, names, only, record
from vllm_graphfix import records
from vllm_graphfix.engine import capture_gate, gate_reports, rank_agreement
from vllm_graphfix.engine.gate_reports import PROFILING, WARM_UP
from vllm_graphfix.engine.metrics import Exposition, Watcher
from vllm_graphfix.engine.metrics_snapshot import ServedEngine
from vllm_graphfix.engine.record_relay import RecordRelay
from vllm_graphfix.engine.status_record import StatusRecord
from vllm_graphfix.records import Record, own_folder, read, writing

FOLLOWER = "fedcba9876543210"


class Rank(NamedTuple):
    """A rank with its record, the folder of its machine, and its relay."""

    folder: Path
    published: list[Record]
    relay: RecordRelay

    def publish(self, one: Record) -> None:
        self.published[:] = [one]
        leave(self.folder, one)


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore(
        "vllm_graphfix", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    )


def rank(store: PrefixStore, folder: Path, number: int, **changes: object) -> Rank:
    folder.mkdir(exist_ok=True)
    published: list[Record] = []
    one = Rank(folder, published, RecordRelay(folder, lambda: published[0] if published else None, store, number, 3))
    one.publish(record(elsewhere(100 + number, f"node-{number}"), rank=number, world_size=3, **changes))
    return one


@pytest.fixture
def ranks(store: PrefixStore, tmp_path: Path) -> list[Rank]:
    """Three ranks on three machines, whose folders have only their own record."""
    return [rank(store, tmp_path / f"node-{number}", number) for number in range(3)]


def beat(ranks: list[Rank]) -> None:
    """One heartbeat: rank 0 announces itself, the others send, and rank 0 receives."""
    for one in (*ranks, ranks[0]):
        one.relay.relay()


def test_records_of_other_machines_are_in_the_folder_of_rank_0(ranks: list[Rank]) -> None:
    beat(ranks)
    there = [each.record for each in read(ranks[0].folder).found]
    assert there == [ranks[0].published[0], *(one.published[0]._replace(kept=True) for one in ranks[1:])]
    assert [len(names(one.folder)) for one in ranks[1:]] == [1, 1]


def test_a_front_end_counts_ranks_of_other_machines(ranks: list[Rank]) -> None:
    from prometheus_client import CollectorRegistry

    beat(ranks)
    registry = CollectorRegistry()
    Watcher(ranks[0].folder, ServedEngine(ENGINE, True, 25.0, 3, ranks_here=1), Exposition(registry)).look()
    labels = {"fix": "capture-state", "mode": "auto", "state": "active", "code": "none"}
    assert registry.get_sample_value("graphfix_fix_ranks", labels) == 3
    assert registry.get_sample_value("graphfix_ranks_unrecorded") == 0
    assert registry.get_sample_value("graphfix_events_total", {"fix": "capture-state", "event": "state-consumed"}) == 36


def test_a_rank_that_changes_is_written_anew_and_one_that_does_not_is_touched(ranks: list[Rank]) -> None:
    beat(ranks)
    old = time.time() - 1000
    files = [own_folder(ranks[0].folder) / one.published[0].file_name for one in ranks]
    for file in files:
        os.utime(file, (old, old))
    ranks[2].publish(ranks[2].published[0]._replace(problem="it stops"))
    before = files[1].stat().st_ino
    beat(ranks)
    assert files[1].stat().st_ino == before
    assert all(file.stat().st_mtime > old + 900 for file in files[1:])
    assert "it stops" in files[2].read_text()


def test_a_rank_that_is_not_heard_of_is_not_touched(ranks: list[Rank]) -> None:
    beat(ranks)
    file = own_folder(ranks[0].folder) / ranks[2].published[0].file_name
    old = time.time() - 1000
    os.utime(file, (old, old))
    beat(ranks[:2])
    assert file.stat().st_mtime == pytest.approx(old)


def test_nothing_is_sent_where_the_folder_is_shared(store: PrefixStore, tmp_path: Path) -> None:
    ranks = [rank(store, tmp_path, number) for number in range(3)]
    beat(ranks)
    assert not store.check(["relay/record/1"])
    inodes = {path: path.stat().st_ino for path in own_folder(tmp_path).iterdir()}
    beat(ranks)
    assert {path: path.stat().st_ino for path in own_folder(tmp_path).iterdir()} == inodes


def test_a_file_of_shared_storage_is_never_replaced(store: PrefixStore, tmp_path: Path) -> None:
    """A file server may show rank 0's record late, so that a rank sends all the same."""
    ranks = [rank(store, tmp_path, number) for number in range(3)]
    (own_folder(tmp_path) / ranks[0].published[0].file_name).unlink()
    beat(ranks)
    assert store.check(["relay/record/1"])
    assert [each.record for each in read(tmp_path).found] == [one.published[0] for one in ranks[1:]]


def test_a_node_with_metrics_of_its_own_is_not_relayed(store: PrefixStore, tmp_path: Path) -> None:
    leader = rank(store, tmp_path / "a", 0, followers=(FOLLOWER,))
    ranks = [leader, rank(store, tmp_path / "b", 1, engine=FOLLOWER, leader=ENGINE)]
    ranks.append(rank(store, tmp_path / "b", 2, engine=FOLLOWER, leader=ENGINE))
    beat(ranks)
    assert len(names(ranks[0].folder)) == 3
    leave(tmp_path / "b", record(elsewhere(7), engine=FOLLOWER, serves_metrics=True))
    beat(ranks)
    assert only(ranks[0].folder).record == ranks[0].published[0]


def test_a_later_engine_of_the_same_processes_takes_the_place_of_the_earlier(ranks: list[Rank]) -> None:
    beat(ranks)
    for one in ranks:
        one.publish(one.published[0]._replace(engine=FOLLOWER))
    beat(ranks)
    relayed = [name for name in names(ranks[0].folder) if "node-0" not in name]
    assert relayed == [one.published[0].file_name for one in ranks[1:]]


def test_a_removed_file_is_written_again(ranks: list[Rank]) -> None:
    beat(ranks)
    (own_folder(ranks[0].folder) / ranks[1].published[0].file_name).unlink()
    beat(ranks)
    assert ranks[1].published[0].file_name in names(ranks[0].folder)


def test_a_folder_that_refuses_one_record_gets_the_next(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    beat(ranks)
    write, changed = writing.write, ranks[1].published[0].file_name
    full = True

    def written(base: Path, one: Record) -> object:
        if full and one.file_name == changed:
            raise OSError(28, "No space left on device")
        return write(base, one)

    monkeypatch.setattr(writing, "write", written)
    for one in ranks[1:]:
        one.publish(one.published[0]._replace(problem="it stops"))
    beat(ranks)
    there = {each.record.rank.rank: each for each in read(ranks[0].folder).found if each.record.rank is not None}
    assert [(there[number].outdated, there[number].record.problem) for number in (1, 2)] == [
        (True, None),
        (False, "it stops"),
    ]
    full = False
    beat(ranks)
    there = {each.record.rank.rank: each for each in read(ranks[0].folder).found if each.record.rank is not None}
    assert not there[1].outdated
    assert there[1].record.problem == "it stops"


@pytest.mark.parametrize("name", ["../../x-y-1.json", "0123456789abcdef-node-1-1.json/..", "x"])
def test_a_name_that_is_no_records_is_not_written(ranks: list[Rank], store: PrefixStore, name: str) -> None:
    beat(ranks)
    store.set("relay/beat/1", f"9 9 {name}")
    ranks[0].relay.relay()
    assert not [each for each in names(ranks[0].folder) if "node-1" in each]


STRANGERS: dict[str, str | Record] = {
    "no JSON": "#!/bin/sh\n" * 9,
    "no record": "{}",
    "nested": "[" * 60_000,
    "too large": " " * (records.LARGEST + 1),
    "of another file": record(elsewhere(999, "node-1"), rank=1, world_size=3),
    "of another rank": record(elsewhere(101, "node-1"), rank=2, world_size=3),
    "of no rank": record(elsewhere(101, "node-1")),
    "of an engine that was not compared": record(elsewhere(101, "node-1"), rank=1, world_size=3, engine=FOLLOWER),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_what_is_no_record_of_that_rank_is_not_written(ranks: list[Rank], store: PrefixStore, what: str) -> None:
    """The store has no password."""
    ranks[0].relay.relay()
    content = STRANGERS[what]
    engine = content.engine if isinstance(content, Record) else ENGINE
    store.set("relay/beat/1", f"1 1 {engine}-node-1-101.json")
    store.set("relay/record/1", content if isinstance(content, str) else content.encode().decode())
    ranks[0].relay.relay()
    assert names(ranks[0].folder) == [ranks[0].published[0].file_name]


def test_a_record_is_written_without_what_it_should_not_hold(ranks: list[Rank], store: PrefixStore) -> None:
    beat(ranks)
    content = ranks[1].published[0]
    store.set("relay/beat/1", f"9 9 {content.file_name}")
    store.set("relay/record/1", json.dumps(content.as_json() | {"payload": "x"}))
    ranks[0].relay.relay()
    assert "payload" not in (own_folder(ranks[0].folder) / content.file_name).read_text()


def test_a_rank_relays_from_its_capture_on(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    for module in (capture_gate, gate_reports):
        monkeypatch.setattr(module, "world", lambda: (1, 2))
        monkeypatch.setattr(module, "common_store", lambda: store)
    monkeypatch.setattr(rank_agreement, "TIMEOUT_FOR_A_WARNING", 0.1)
    me = process_double({"VLLM_GRAPHFIX": "off"})
    vars(me.gate.status_record)["start_relay"] = lambda *arguments: started.append(arguments)
    me.gate.before_capture(worker_of(1), PROFILING)
    assert started == []
    me.gate.before_capture(worker_of(1), WARM_UP)
    assert started == [(store, 1, 2)]


def test_a_relay_that_no_thread_can_be_started_for_is_tried_again(
    store: PrefixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = SimpleNamespace(environment={"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)})
    status_record = StatusRecord(context)
    at_the_end: list[object] = []
    monkeypatch.setattr("multiprocessing.util.Finalize", lambda _, call, **__: at_the_end.append(call.__self__))

    def no_threads(relay: RecordRelay) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(RecordRelay, "start", no_threads)
        with pytest.raises(RuntimeError):
            status_record.start_relay(store, 1, 2)
    assert not [each for each in at_the_end if isinstance(each, RecordRelay)]  # to join it would raise
    status_record.start_relay(store, 1, 2)
    (relay,) = (each for each in at_the_end if isinstance(each, RecordRelay))
    relay.close()


def test_an_error_of_the_store_is_one_line_of_the_log(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no store\nframe #0: " + "c10d::TCPStore " * 99)

    relay = ranks[1].relay
    vars(relay)["relay"] = fail
    with caplog.at_level("INFO", "vllm.graphfix"):
        relay.start()
        assert eventually(lambda: caplog.records)
        relay.close()
    (line,) = (each.getMessage() for each in caplog.records)
    assert "RuntimeError: no store frame #0: c10d" in line
    assert "\n" not in line
    assert len(line) < 400


def test_what_was_relayed_goes_at_a_clean_end(ranks: list[Rank]) -> None:
    beat(ranks)
    ranks[0].relay.start()
    ranks[0].relay.close()
    assert names(ranks[0].folder) == [ranks[0].published[0].file_name]
