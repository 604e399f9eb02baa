"""A local socket by which the ranks that a process has started reach the scheduler in it.

The kernel keeps its name, no file system does: nothing can remove it or make it hang, and it goes with its process. A
rank sends without waiting for room, and what the kernel holds of its messages is bounded. The scheduler's process has a
thread that reads them, so the scheduler itself calls nothing. Both ends ask the kernel who the other one is.
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
"""Bytes of a message."""
MOST_PENDING = 256
"""Messages of all ranks that the scheduler has not taken yet; more stay in the sockets, until these are full, too."""
_MOST_RANKS = 1024
_PATIENCE = 0.25
"""Seconds that a rank waits for the word that a message was read.

It then knows that the scheduler sees it before the output of the step that is running. A reader that lets a rank wait
so long once is not waited for again before it has caught up.
"""
UNANSWERED = 5.0
"""Seconds after which a reader that has not admitted a rank is known not to read.

So long a rank that was not admitted waits, too, before it connects again.
"""
_BEHIND = 0.02
"""Seconds until the reader looks again whether the scheduler has taken something."""
_CREDENTIALS = struct.Struct("iII")


def _address(engine: str, pid: int) -> bytes:
    # A leading zero byte: the name is no path. It holds the engine's 64 random bits.
    return f"\0vllm-graphfix/{engine}/{pid}".encode()


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """The process and the effective user at the other end, as the kernel noted them; 0 for one of another namespace."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class Receiver:
    """Reads what ranks send, in a daemon thread, until `close` or until it fails."""

    def __init__(self, engine: str, accept: Callable[[bytes], None], pending: Callable[[], int]) -> None:
        """Listens for ranks of *engine*. Raises OSError.

        *accept* is called in the thread with each message, and raises ValueError for one that is none of a rank's.
        *pending*: how many of these have not been taken yet.
        """
        self.engine = engine
        self._accept, self._pending = accept, pending
        self._ranks: dict[int, tuple[socket.socket, int]] = {}
        """By descriptor: each rank's connection, and the number of messages that were read from it."""
        self._listener = _socket()
        try:
            self._listener.bind(_address(engine, os.getpid()))
            self._listener.listen(_MOST_RANKS)
        except OSError:
            self._listener.close()
            raise
        self._warned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphfix-abort", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, which then closes its sockets: a number that is closed here may be another file's there."""
        self._over.set()
        with suppress(OSError):  # it has ended itself
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes it

    def forked(self) -> None:
        """Closes this process's copies of the sockets, in a forked child, which has no such thread."""
        for each in (self._listener, *(rank for rank, _ in self._ranks.values())):
            each.close()

    def _run(self) -> None:
        try:
            ready = select.poll()
            ready.register(self._listener, select.POLLIN)
            while not self._over.is_set():
                if self._pending() >= MOST_PENDING:
                    time.sleep(_BEHIND)
                    continue
                for number, _ in ready.poll():
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
                each.close()  # by which a rank knows

    def _admitted(self) -> socket.socket | None:
        """The next connection, if it is of this user's and of a process below this one; others are closed."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever it was has gone; or no descriptor is free, which would be asked for without a pause
            time.sleep(_BEHIND)
            return None
        connection.setblocking(False)
        pid, uid = _credentials(connection)
        if uid == os.geteuid() and _is_ours(pid) and len(self._ranks) < _MOST_RANKS:
            with suppress(OSError):  # it has just ended
                connection.send(b"0")  # by which it knows that it is admitted: a connection that waits looks the same
            return connection
        connection.close()
        if not self._warned:
            self._warned = True
            logger.warning("graphfix: process %s of uid %s is no rank of this engine's and is not heard", pid, uid)
        time.sleep(_BEHIND)  # whoever it is may connect again and again, and this thread shares the scheduler's lock
        return None

    def _read(self, number: int) -> bool:
        """Reads one message; False at the end of that connection."""
        connection, count = self._ranks[number]
        try:
            message = connection.recv(MOST_BYTES + 1)
            if not message:
                return False
            self._accept(message)
            self._ranks[number] = connection, count + 1
        except (BlockingIOError, ConnectionResetError):
            # The second comes once of a rank that ended with answers unread, before what it has sent.
            return True
        except OSError:
            return False
        except ValueError as error:
            logger.warning("graphfix: what a rank says to the scheduler is not understood: %s", error)
            return False
        with suppress(OSError):  # a rank that reads no answers, or has just ended; the next answer says as much
            connection.send(b"%d" % (count + 1))
        return True


def _is_ours(pid: int) -> bool:
    """Whether *pid* is this process or one below it; 0, of a process that cannot be seen from here, is not."""
    if pid == os.getpid():
        return True
    try:
        return pid > 0 and any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


class Sender:
    """A rank's connection to the process of its scheduler."""

    def __init__(self, engine: str, pid: int) -> None:
        """Connects to process *pid*. Raises OSError where it does not listen, or is somebody else."""
        self._socket = _socket()
        self.sent = 0
        self.read = 0
        """Messages of which the reader has said that they were read."""
        self.admitted = False
        """The reader has answered: it reads what this rank sends."""
        self.overdue = False
        """The reader has let this rank wait too long, and has not caught up since."""
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
        """Raises OSError if there is no room for it, or nobody to read it."""
        self._socket.send(message)
        self.sent += 1
        until = time.monotonic() + _PATIENCE
        while not self.catch_up() and not self.overdue and not self.closed:
            left = until - time.monotonic()
            if left <= 0:
                self.overdue = True
                break
            reads = select.poll()
            reads.register(self._socket, select.POLLIN)
            reads.poll(1000 * left)

    def catch_up(self) -> bool:
        """Whether all that was sent was read, as far as the reader has said. Does not wait."""
        try:
            while said := self._socket.recv(64):
                self.admitted, self.read = True, max(self.read, int(said))
            self.closed = True
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.closed = True
        if self.read == self.sent:
            self.overdue = False
        return self.read == self.sent

    def is_unanswered(self) -> bool:
        """Tell if the reader has not admitted this rank, though it had the time to."""
        self.catch_up()
        return not (self.admitted or self.closed) and time.monotonic() > self._answer_until

    def close(self) -> None:
        self.closed = True
        self._socket.close()
