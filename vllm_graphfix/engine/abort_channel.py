"""A local socket over which ranks send verdicts to the scheduler in the process that started them.

Its name is in the kernel, not in a file system: nothing can remove it or make it hang, and it ends with its process. A
rank sends without waiting for room, and the kernel bounds the messages that it buffers. A thread in the scheduler's
process reads them, so the scheduler itself makes no system call. Each end checks the other's credentials.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from vllm_graphfix.log import logger

MOST_BYTES = 16 * 1024
"""Limit of bytes of a message."""
MOST_PENDING = 256
"""Limit of messages that wait for the scheduler; more stay in the sockets, until these are full, too."""
_MOST_RANKS = 1024
_PATIENCE = 0.25
"""Seconds that a rank waits for the answer that a message was read.

After it, the scheduler sees the message before it handles the output of the running step. After one timeout a rank does
not wait again until the reader has caught up.
"""
UNANSWERED = 5.0
"""Seconds after which a reader that has not admitted a rank counts as not reading.

A rank that was not admitted also waits so long before it connects again.
"""
_BEHIND = 0.02
"""Seconds that the reader sleeps while the scheduler's queue is full, and after a connection that it does not admit."""
_CREDENTIALS = struct.Struct("iII")


def _address(engine: str, pid: int) -> bytes:
    # A leading zero byte: an abstract name, not a path. The engine has 64 random bits.
    return f"\0vllm-graphfix/{engine}/{pid}".encode()


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return PID and effective user of the other end, from the kernel; PID 0 for one of another namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class Receiver:
    """Reads messages of ranks in a daemon thread, until `close` or an error."""

    def __init__(self, engine: str, accept: Callable[[bytes], None], pending: Callable[[], int]) -> None:
        """Listen for ranks of *engine*. Raises OSError, or RuntimeError if no thread can be started.

        *accept* is called in the thread with each message, and raises ValueError for an invalid one. *pending* returns
        the number of messages that the scheduler has not taken yet.
        """
        self.engine = engine
        self._accept, self._pending = accept, pending
        self._ranks: dict[int, tuple[socket.socket, int]] = {}
        """By descriptor: connection of a rank, and the number of messages read from it."""
        self._listener = _socket()
        try:
            self._listener.bind(_address(engine, os.getpid()))
            self._listener.listen(_MOST_RANKS)
        except OSError:
            self._listener.close()
            raise
        self._warned = self._warned_of_message = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphfix-abort", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, which closes the sockets: closed here, a descriptor could be another file's in the thread."""
        self._over.set()
        with suppress(OSError):  # it has ended itself
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes it

    def forked(self) -> None:
        """Close the copies of the sockets in a forked child, which has no such thread."""
        # Not `shutdown`, which would end the parent's connections.
        for each in (self._listener, *(rank for rank, _ in self._ranks.values())):
            each.close()

    def _run(self) -> None:
        try:
            ready = select.poll()
            ready.register(self._listener, select.POLLIN)
            while not self._over.is_set():
                for number, _ in ready.poll():
                    # Before each message: a poll may find a thousand sockets. Waiting here, not before the poll, keeps
                    # the turn of the ranks behind one that floods.
                    while self._pending() >= MOST_PENDING and not self._over.is_set():
                        time.sleep(_BEHIND)
                    if number != self._listener.fileno():
                        if not self._read(number):
                            ready.unregister(number)
                            self._ranks.pop(number)[0].close()
                    elif not self._over.is_set() and (connection := self._admitted()) is not None:
                        self._ranks[connection.fileno()] = connection, 0
                        ready.register(connection, select.POLLIN)
        except Exception:
            logger.exception("graphfix: no more requests are ended in this engine: the thread that hears of them ended")
        finally:
            for each in (self._listener, *(rank for rank, _ in self._ranks.values())):
                each.close()  # ranks notice that

    def _admitted(self) -> socket.socket | None:
        """Accept the next connection if it is from this user and a descendant of this process; close any other."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the other end is gone; or no descriptor is free, and without a pause this would spin
            time.sleep(_BEHIND)
            return None
        connection.setblocking(False)
        pid, uid = _credentials(connection)
        if uid == os.geteuid() and _is_ours(pid) and len(self._ranks) < _MOST_RANKS:
            with suppress(OSError):  # it has just ended
                connection.send(b"0")  # it is admitted: to the rank, a connection in the backlog looks the same
            return connection
        connection.close()
        if not self._warned:
            self._warned = True
            why = (
                f"comes after {_MOST_RANKS} ranks" if len(self._ranks) >= _MOST_RANKS else "is no rank of this engine's"
            )
            logger.warning("graphfix: process %s of uid %s %s and is not heard", pid, uid, why)
        # It may connect again and again, and this thread shares the interpreter lock with the scheduler.
        time.sleep(_BEHIND)
        return None

    def _read(self, number: int) -> bool:
        """Read one message; return False at the end of the connection."""
        connection, count = self._ranks[number]
        try:
            message = connection.recv(MOST_BYTES + 1)
            if not message:
                return False
            if len(message) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            self._accept(message)
            self._ranks[number] = connection, count + 1
        except (BlockingIOError, ConnectionResetError):
            # ConnectionResetError comes once, before its messages, from a rank that ended with answers unread.
            return True
        except OSError:
            return False
        except ValueError as error:
            if not self._warned_of_message:  # the rank counts the others: its connection is closed each time
                self._warned_of_message = True
                logger.warning("graphfix: what a rank says to the scheduler is not understood: %s", error)
            return False
        with suppress(OSError):  # the rank reads no answers, or has just ended; the next answer has the total, too
            connection.send(b"%d" % (count + 1))
        return True


def _is_ours(pid: int) -> bool:
    """Tell if *pid* is this process or a descendant; 0, for a process of another namespace, is not."""
    if pid == os.getpid():
        return True
    try:
        return pid > 0 and any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


class Sender:
    """A rank's connection to the process of its scheduler."""

    def __init__(self, engine: str, pid: int) -> None:
        """Connect to process *pid*. Raises OSError if it does not listen, or another process does in its place."""
        self._socket = _socket()
        self.sent = 0
        self.read = 0
        """The number of messages that the reader has confirmed."""
        self.admitted = False
        """The reader has answered: it reads what this rank sends."""
        self.overdue = False
        """The reader has not answered in time, and has not caught up since."""
        self.closed = False
        self._answer_until = time.monotonic() + UNANSWERED
        try:
            self._socket.connect(_address(engine, pid))
            if _credentials(self._socket) != (pid, os.geteuid()):
                raise PermissionError(errno.EPERM, "another process listens in its place")
        except OSError:
            self._socket.close()
            raise

    def send(self, message: bytes) -> None:
        """Send *message* and wait up to `_PATIENCE` for the answer. Raises OSError without room or reader."""
        self._socket.send(message)
        self.sent += 1
        until = time.monotonic() + _PATIENCE
        while not self.catch_up() and not self.overdue and not self.closed:
            remaining = until - time.monotonic()
            if remaining <= 0:
                self.overdue = True
                break
            reads = select.poll()
            reads.register(self._socket, select.POLLIN)
            reads.poll(1000 * remaining)

    def catch_up(self) -> bool:
        """Read the answers, without waiting; tell if all messages are confirmed."""
        try:
            while answer := self._socket.recv(64):
                self.admitted, self.read = True, max(self.read, int(answer))
            self.closed = True
        except BlockingIOError:
            pass
        # Whatever is wrong at the other end, the next verdict connects anew.
        except (OSError, ValueError):
            self.closed = True
        if self.read == self.sent:
            self.overdue = False
        return self.read == self.sent

    def is_unanswered(self) -> bool:
        """Tell if the reader has not admitted this rank within `UNANSWERED`."""
        self.catch_up()
        return not (self.admitted or self.closed) and time.monotonic() > self._answer_until

    def close(self) -> None:
        self.closed = True
        self._socket.close()
