"""Processes with a scheduler or a rank, for tests of how ranks have requests ended. All is real but the scheduler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from vllm_graphfix.engine import abort, abort_channel
from vllm_graphfix.engine.abort import Aborts
from vllm_graphfix.engine.verdict import Verdict

PATIENCE = 120.0
"""Seconds until what a test waits for counts as never."""


class SchedulerStandIn:
    """Stands in for vLLM's scheduler, which tests with a real engine have: two requests that share block 3."""

    def __init__(self) -> None:
        self.evicted: set[int] = set()
        self.ended: list[str] = []
        self.requests = {name: SimpleNamespace(is_finished=lambda: False) for name in ("a", "b")}
        self.kv_cache_manager = SimpleNamespace(
            evict_blocks=self.evicted.update,
            get_block_ids=lambda name: ([3, 4 if name == "a" else 5],),
            block_pool=SimpleNamespace(blocks=range(8)),
        )

    def finish_requests(self, name: str, status: object) -> None:
        self.ended.append(name)
        del self.requests[name]


class AnyRequest(dict[str, Any]):
    """Has every request until it is deleted, once."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        return default if name in self.gone else SimpleNamespace(is_finished=lambda: False)

    def __contains__(self, name: object) -> bool:
        return name not in self.gone

    def __delitem__(self, name: str) -> None:
        self.gone.add(name)


def until(holds: Callable[[], Any], each: Callable[[], object] = lambda: None) -> None:
    """Waits until it *holds*, and calls *each* meanwhile. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{holds} does not hold within {PATIENCE:.0f} s")
        each()
        time.sleep(0.001)


def steps(aborts: Aborts, scheduler: SchedulerStandIn) -> None:
    """A step, as far as requests end in it."""
    aborts._around_schedule(lambda _: None, scheduler)
    aborts._around_update(lambda _: {}, scheduler)


def ended_by(aborts: Aborts) -> Aborts:
    """*aborts*, in whose process requests end without vLLM's enumeration of reasons, and without outputs."""
    vars(abort).update(finished_error=lambda: "error", hand_out=lambda outputs, ended: None)
    return aborts


def rank(engine: str, ends: Connection) -> None:
    """A rank that does as it hears: ``(first, number)`` is so many verdicts, None the end."""
    aborts = Aborts()
    aborts.begin(engine)
    ends.send("there is a rank")
    while (order := ends.recv()) is not None:
        first, number = order
        longest, failed, begun = 0.0, None, time.monotonic()
        for each in range(first, first + number):
            at = time.monotonic()
            try:
                aborts.deliver("shadow", [f"request-{each}"], [3], "wrong")
            except OSError as error:
                failed = str(error)
            longest = max(longest, time.monotonic() - at)
        counts, state = aborts.counts()["abort"], aborts.states()["abort"]
        took = time.monotonic() - begun
        ends.send((counts, state.state.value, state.reason, failed, longest, took))


def scheduler_that_stops(engine: str, starts: Any, ends: Connection, to_rank: Connection) -> None:
    """A scheduler's process that has started a rank, and is stopped by a signal once there is one."""
    child = starts.Process(target=rank, args=(engine, to_rank))
    child.start()
    aborts = ended_by(Aborts())
    aborts.begin(engine)
    scheduler = SchedulerStandIn()
    aborts._begin(scheduler)
    ends.send(child.pid)
    os.kill(os.getpid(), signal.SIGSTOP)
    ends.send("goes on")
    until(lambda: ends.poll(0), lambda: steps(aborts, scheduler))
    ends.send(aborts._undelivered)
    child.join()


def flood(engine: str, pid: int, ends: Connection) -> None:
    """A rank that sends without a pause and reads no answer, until it is killed."""
    sender = abort_channel.Sender(engine, pid)
    message = Verdict("shadow", ("=nobody",), tuple(range(1, 1000)), "wrong").encode()
    ends.send("floods")
    while True:
        try:
            sender._socket.send(message)
        except BlockingIOError:
            continue


def die(engine: str, pid: int, number: int, ends: Connection) -> None:
    """A rank that reads no answer, and is gone in the middle of what it has to say."""
    sender = abort_channel.Sender(engine, pid)
    for each in range(number):
        sender._socket.send(Verdict("shadow", (f"=request-{each}",), (), "wrong").encode())
    ends.send("has sent")
    ends.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def another_user(engine: str, pid: int, uid: int, ends: Connection) -> None:
    os.setresuid(uid, uid, uid)
    ends.send(outcome(engine, pid))


def outcome(engine: str, pid: int) -> str:
    """Return the fate of a process that has a request ended by process *pid*, past all checks of its own."""
    connection = abort_channel._socket()
    connection.setblocking(True)
    connection.settimeout(PATIENCE)
    connection.connect(abort_channel._address(engine, pid))
    try:
        connection.send(Verdict("shadow", ("=a",), (), "wrong").encode())
        return "heard" if connection.recv(64) else "refused"
    except (BrokenPipeError, ConnectionResetError):
        return "refused"
    finally:
        connection.close()


@contextmanager
def process(starts: Any, target: Callable[..., None], *args: Any) -> Iterator[Any]:
    made = starts.Process(target=target, args=args)
    made.start()
    try:
        yield made
    finally:
        made.kill()
        made.join()
