"""Relays the records of ranks on other machines to the folder of rank 0, where its front-end reads them.

Without shared storage each machine has a folder of its own, and a front-end would miss the ranks of all others. The
ranks have one store in common, by which they are compared. Each rank that does not see the record of rank 0 in its own
folder puts its own record there with every heartbeat, and rank 0 writes it into its folder, as that rank would have
done on shared storage. So whatever reads records needs to know nothing of this.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix import records
from vllm_graphfix.log import logger
from vllm_graphfix.text import error_text

_TIMEOUT = timedelta(seconds=10)
"""Limit of one access to the store."""
_LEADER = "relay/leader"
"""The key of the file name of rank 0's record."""
_BEAT = re.compile(rf"([0-9]{{1,18}}) ([0-9]{{1,18}}) ({records.FILE_NAME})".encode())
"""Number of the heartbeat, version of the record, and name of its file."""
_LONGEST_NAME, _LONGEST_BEAT = 128, 256
"""Bytes of a file name and of a heartbeat that are looked at: more than either has."""


_FILE = re.compile(records.FILE_NAME)


class _Relayed(NamedTuple):
    """The file of another rank's record."""

    file_name: str


class RecordRelay:
    """The relay of one rank, in a thread of its own: neither a step nor the heartbeat waits for store or disk.

    The store holds one record of each rank, of at most `records.LARGEST` bytes, and its heartbeat.
    """

    def __init__(
        self, base: Path, newest: Callable[[], records.Record | None], store: Any, rank: int, world_size: int
    ) -> None:
        """*newest* returns the record that this rank has published last; *store* is a `torch.distributed.Store`."""
        self._base, self._newest, self._rank = base, newest, rank
        self._common_store = store
        self._store: Any = None
        self._others = range(1, world_size)
        self._ended = threading.Event()
        self._warned = False
        # Of a rank other than 0:
        self._sent: records.Record | None = None
        self._beat = self._version = 0
        # Of rank 0:
        self._announced = ""
        self._beats: dict[int, bytes] = {}
        self._files: dict[int, tuple[bytes, _Relayed]] = {}
        """By rank: the version of its record and the file that this process has written of it."""
        self._thread = threading.Thread(target=self._run, name="graphfix-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 1.0) -> None:
        """Remove the files of other ranks at a clean end, in at most *timeout* seconds."""
        # Joined also because a daemon thread that returns from torch's C++ to an interpreter that is gone aborts the
        # process.
        self._ended.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.relay()
            except Exception as error:
                self._store = None  # a connection that broke is made anew
                if not (self._warned or self._ended.is_set()):
                    self._warned, why = True, error_text(error)
                    logger.info("graphfix: records of ranks on other hosts are not relayed for the moment: %s", why)
            self._ended.wait(records.HEARTBEAT)
        for _, relayed in self._files.values():
            with suppress(OSError):
                records.remove(self._base, relayed)

    def relay(self) -> None:
        """Send the record of this rank, or on rank 0 write those of the others. Raises the store's error."""
        record = self._newest()
        if record is None:
            return
        if self._store is None:
            # A connection of its own: an access that waits would hold up vLLM's and torch's own ones.
            store = self._common_store.clone()
            store.set_timeout(_TIMEOUT)
            self._store = store
        if self._rank == 0:
            self._announce(record.file_name)
            self._receive()
        else:
            self._send(record)

    def _announce(self, file_name: str) -> None:
        """Let the other ranks send, once for each engine of this process: a program may have one after the other."""
        if file_name != self._announced:
            for other in self._others:  # before they send: `multi_get` would wait for a missing key
                self._store.set(f"relay/beat/{other}", self._beats.get(other, b""))
            self._store.set(_LEADER, file_name)
            self._announced = file_name

    def _send(self, record: records.Record) -> None:
        if not self._store.check([_LEADER]):
            return
        beat = f"relay/beat/{self._rank}"
        if not self._is_needed(record, self._store.get(_LEADER)[:_LONGEST_NAME].decode("ascii", "replace")):
            if self._sent is not None:
                self._sent = None
                self._store.set(beat, b"")
            return
        # Its clock is not the one that dates the file of rank 0's folder.
        record = record._replace(clock_offset=None, kept=True)
        if self._sent is None or self._sent._replace(written=record.written) != record:
            data = record.encode()
            if len(data) > records.LARGEST:
                return  # it looks silent, as a record that cannot be written does
            self._store.set(f"relay/record/{self._rank}", data)
            self._sent, self._version = record, self._version + 1
        self._beat += 1
        self._store.set(beat, f"{self._beat} {self._version} {record.file_name}")

    def _is_needed(self, record: records.Record, leader: str) -> bool:
        """Tell if rank 0, whose record has the file name *leader*, should write *record* to its folder."""
        if not _FILE.fullmatch(leader) or records.is_stored(self._base, _Relayed(leader)):
            return False  # shared storage, or the same machine
        if leader.startswith(record.engine):
            return True
        # A node with a front-end that serves metrics exposes its ranks there, and nobody else must.
        here = records.read(self._base, own=True, engines={record.engine}).found
        return not any(one.record.serves_metrics for one in here)

    def _receive(self) -> None:
        beats = self._store.multi_get([f"relay/beat/{other}" for other in self._others])
        for other, whole_beat in zip(self._others, beats, strict=True):
            beat = whole_beat[:_LONGEST_BEAT]  # of a longer one, no more is kept in memory, and it is none
            if beat != self._beats.get(other, b""):
                with suppress(OSError):  # the next ranks' records may be smaller, and this one is tried again
                    self._receive_from(other, beat)
                    self._beats[other] = beat

    def _receive_from(self, rank: int, beat: bytes) -> None:
        parts = _BEAT.fullmatch(beat)
        version, file = self._files.get(rank, (b"", None))
        relayed = parts and _Relayed(parts[3].decode("ascii"))
        if file is not None and (relayed is None or relayed.file_name != file.file_name):
            del self._files[rank]
            records.remove(self._base, file)
            version, file = b"", None
        if parts is None or relayed is None:
            return  # it needs no relay, or none any more
        if file is None and records.is_stored(self._base, relayed):
            return  # shared storage of which that rank has not seen this rank's record yet
        if version == parts[2]:
            with suppress(FileNotFoundError):  # somebody has removed it: write it again
                records.touch(self._base, relayed)
                return
        record = _decoded(self._store.get(f"relay/record/{rank}"))
        # Whoever reaches the store can write to it, and what is written here passes for this user's own.
        if record is None or record.file_name != relayed.file_name or not self._is_from(rank, record):
            return
        records.write_or_mark(self._base, record)
        self._files[rank] = parts[2], relayed

    def _is_from(self, rank: int, record: records.Record) -> bool:
        """Tell if *record* is of *rank*, and of an engine whose ranks were compared with this one."""
        own = self._newest()
        compared = () if own is None else (own.engine, *own.followers)
        return record.rank is not None and record.rank.rank == rank and record.engine in compared


def _decoded(data: bytes) -> records.Record | None:
    try:
        return records.Record.from_json(json.loads(data)) if len(data) <= records.LARGEST else None
    except (ValueError, RecursionError):
        return None
