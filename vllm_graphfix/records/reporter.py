"""Writes this process's records to disk from threads of its own, so that no caller waits for the disk."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_graphfix.records.clock import OffsetMeter
from vllm_graphfix.records.folder import own_folder, path_text
from vllm_graphfix.records.pruning import prune
from vllm_graphfix.records.record import Record
from vllm_graphfix.records.writing import remove, touch, write_or_mark
from vllm_graphfix.settings.environment import STATUS_DIR

HEARTBEAT = 10.0
"""Seconds between two heartbeats."""
_SLOW = 10.0
"""Seconds after which a write that has not ended is reported."""
_ENGINES = 64
"""Records of one process, which may make one engine after the other."""


class Reporter:
    """Writes and removes this process's records. No call waits for the disk, except `flush` and `close` for a moment.

    A daemon thread accesses the disk, and ends when there is nothing more to write, so that a process that is about to
    fork has no thread. The first failure is a warning; later ones are silent, and the next record is tried again. A
    forked child starts empty.
    """

    def __init__(self, base: Path, warn: Callable[[str], None]) -> None:
        self._base = base
        self._warn = warn
        self._reset()
        afresh = weakref.WeakMethod(self._reset)  # a hook at fork cannot be taken back
        os.register_at_fork(after_in_child=lambda: (method := afresh()) and method())

    def _reset(self) -> None:
        self._lock = threading.Lock()  # never held during an access to the disk
        self._pending: dict[str, Record] = {}
        self._on_disk: dict[str, Record] = {}
        """Records that were written, and that no touch has found missing since."""
        self._meter = OffsetMeter()
        self._tried: dict[str, Record] = {}
        """Records that may be on disk, the oldest first: those to remove at the end."""
        self._newest: Record | None = None
        self._writer: threading.Thread | None = None
        self._busy_since: float | None = None
        self._keeper: threading.Thread | None = None
        self._keeps = False
        self._refresh: Callable[[], Record | None] = lambda: None
        self._every = HEARTBEAT
        self._ended = threading.Event()
        self._pruned = False
        self._warned = False

    def publish(self, record: Record) -> None:
        """Write *record* soon; of several for one engine, only the last."""
        self._start_keeper()  # if it could not be started before
        with self._lock:
            if self._ended.is_set():
                return
            self._newest = record._replace(kept=self._keeper is not None, clock_offset=self._meter.offset)
            self._pending[record.file_name] = self._newest
            busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > _SLOW:
            self._warn_once(
                f"{path_text(own_folder(self._base))} has not answered for {time.monotonic() - busy_since:.0f} seconds"
            )
        self._start_writer()

    @property
    def newest(self) -> Record | None:
        """The record that was published last."""
        return self._newest

    def keep(self, refresh: Callable[[], Record | None], every: float = HEARTBEAT) -> None:
        """Call *refresh* now and every so many seconds, in a daemon thread.

        If it returns None or an unchanged record, the file is only touched: a heartbeat.
        """
        with self._lock:
            self._keeps, self._refresh, self._every = True, refresh, every
        self._start_keeper()

    def _start_keeper(self) -> None:
        with self._lock:
            if not self._keeps or _is_at_work(self._keeper) or self._ended.is_set():
                return
            self._keeper = threading.Thread(
                target=self._run_heartbeat, args=(self._ended,), name="graphfix-heartbeat", daemon=True
            )
        try:
            self._keeper.start()
        except RuntimeError as error:  # no more threads
            self._keeper = None
            self._warn_once(str(error))

    def flush(self, timeout: float = 1.0) -> None:
        """Wait at most *timeout* seconds until published records are on disk; for a process that is about to end."""
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            with suppress(RuntimeError):  # it could not be started: nothing to wait for
                writer.join(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Remove the records at a clean end, in at most *timeout* seconds; a record with a problem stays.

        Python 3.12.0 to 3.12.2 starts no thread in an interpreter that shuts down: there the thread of `keep` removes
        them, and without that thread they stay until `prune`.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._pending = {name: record for name, record in self._pending.items() if record.problem is not None}
            self._writer = self._writer or self._keeper
            self._ended.set()
        self._start_writer()
        self.flush(timeout)

    def _run_heartbeat(self, ended: threading.Event) -> None:
        while True:
            try:
                record = self._refresh() or self._newest
                if record is not None:
                    self.publish(record)
            except Exception as error:
                self._warn_once(f"{type(error).__name__}: {error}")
            if ended.wait(self._every):
                break
        with self._lock:
            if self._writer is not threading.current_thread():
                return
        self._write()

    def _start_writer(self) -> None:
        with self._lock:
            if _is_at_work(self._writer) or not (self._pending or (self._ended.is_set() and self._tried)):
                return
            self._writer = threading.Thread(target=self._write, name="graphfix-record", daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:
            self._writer = None
            if not self._ended.is_set():  # at the end nothing is written from this thread: the disk may hang
                self._warn_once(str(error))

    def _write(self) -> None:
        while True:
            with self._lock:
                self._busy_since = time.monotonic()
                if self._pending:
                    act, (name, record) = self._write_record, self._pending.popitem()
                elif self._ended.is_set() and self._tried:
                    act, (name, record) = self._remove_record, self._tried.popitem()
                else:
                    # Under the lock: `publish` must not rely on a thread that is about to end.
                    self._writer = self._busy_since = None
                    return
            try:
                act(name, record)
            except Exception as error:
                self._warn_once(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")

    def _write_record(self, name: str, record: Record) -> None:
        # Before the attempt: one that fails half-way may leave a file, which has to be removed at the end.
        self._tried[name] = record
        before = self._on_disk.pop(name, None)
        if before is not None and before._replace(written=record.written) == record:
            with suppress(FileNotFoundError):  # somebody has removed it: write it again
                self._meter.note(*touch(self._base, record))  # a new offset goes into the record at the next heartbeat
                self._on_disk[name] = before
                return
        if self._meter.note(*write_or_mark(self._base, record)):
            record = record._replace(clock_offset=self._meter.offset)
            write_or_mark(self._base, record)
        self._on_disk[name] = record
        while len(self._tried) > _ENGINES:
            oldest = next(iter(self._tried))
            self._on_disk.pop(oldest, None)
            self._remove_record(oldest, self._tried.pop(oldest))
        if not self._pruned:
            self._pruned = True
            prune(self._base, self._meter.offset or 0.0)

    def _remove_record(self, name: str, record: Record) -> None:
        if record.problem is None:
            remove(self._base, record)

    def _warn_once(self, what: str) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        with suppress(Exception):
            self._warn(
                f"the status record of this process cannot be kept: {what}. Serving is not affected, but "
                f"`vllm-graphfix fleet` and the metrics miss this process. {STATUS_DIR} can name another folder"
            )


def _is_at_work(thread: threading.Thread | None) -> bool:
    """Tell if *thread* runs or is about to; one that ended with an error, such as no memory, is to be replaced."""
    return thread is not None and (thread.ident is None or thread.is_alive())
