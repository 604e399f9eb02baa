"""Ends requests whose answers would be wrong, and takes their blocks out of the prefix cache.

A rank detects wrong results; only the scheduler knows the requests and the cached blocks. Verdicts wait for the
scheduler in a bounded queue of its process. A rank in that process appends to the queue, a rank that the process has
started sends to it (`abort_channel.py`), and no other rank can reach it. No wait is long, and no file is used. A
verdict that cannot be delivered is counted, and makes the state `failed`.

vLLM's own way for ranks to name invalid blocks (`invalid_block_ids` of a KV connector) computes them anew by default,
leaves cached blocks of ended requests in the cache, and ends a 0.33.0 engine with several cache groups.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from vllm_graphfix.engine import abort_channel
from vllm_graphfix.engine.ended_requests import evict, finished_error, hand_out, names_of
from vllm_graphfix.engine.verdict import DETECTORS, LONGEST_NAME, CannotDeliverError, Verdict, failure_text, reference
from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.log import logger
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.text import printable

NAME = "abort"
"""Its name in records, `fleet` and metrics, which hold it like a fix."""
_CODES = {State.INCOMPATIBLE: Code.ENGINE, State.FAILED: Code.UNDELIVERED}
_LONGEST_WHY = 900
_NOT_ADMITTED = (
    "the process that started it has closed the connection: its thread has ended, or this rank is none of its own to "
    "it (another user, another PID namespace)"
)
_START_UP = 60.0
"""Seconds after a capture within which there may be no scheduler yet."""


class Aborts:
    """Delivers and carries out verdicts in one process, which has the scheduler, or a rank, or both."""

    def __init__(self, on_ended: Callable[[], None] = lambda: None) -> None:
        """*on_ended* is called in the scheduler's thread after a request was ended in this process."""
        self._on_ended = on_ended
        self._engine = ""
        self._receiver: abort_channel.Receiver | None = None
        self._sender: abort_channel.Sender | None = None
        self._forget()

    def _forget(self) -> None:
        self._scheduled_here = False
        self._scheduler: Any = lambda: None
        """A weak reference to the scheduler that was made last; verdicts are for its engine."""
        self._refused: str | None = None
        """The reason for which the scheduler of this process ends no requests; None if it does."""
        self._unheard: str | None = None
        """The reason for which verdicts of other processes do not arrive here; None if they do."""
        self._pending: deque[Verdict] = deque()
        """Verdicts for the scheduler. Another thread appends; both ends of a deque are safe without a lock."""
        self._waiting: list[Verdict] = []
        """Verdicts whose blocks were taken out of the cache, and whose requests have not been ended yet."""
        self.ended = dict.fromkeys(DETECTORS, 0)
        """The number of requests that this process has ended, by detector."""
        self._sending = threading.Lock()
        """Held to connect and to send, by a step's thread or the heartbeat's, for a quarter of a second at most."""
        self._serving_since: float | None = None
        self._why_not: str | None = None
        self._reconnect_at = 0.0
        """Monotonic time before which a rank that was not admitted does not connect again; 0 if it was admitted since,
        or never refused."""
        self._has_failed = False
        """True once the scheduler of this process could not carry out a verdict."""
        self._delivered = self._undelivered = 0
        """Numbers of delivered verdicts, without those over the present connection, and of lost ones."""
        self._lost_before = 0
        """The number of verdicts that were lost under earlier engines of this process."""

    def forked(self) -> None:
        """Discard scheduler and sockets in a forked child, which has copies of them."""
        if self._receiver is not None:
            self._receiver.forked()
        if self._sender is not None:
            self._sender.close()
        self._receiver = self._sender = None
        self._forget()

    def begin(self, engine: str) -> None:
        """Deliver verdicts for *engine*, by its name in records; with an empty name, end no more requests."""
        if engine != self._engine:
            self._disconnect()
            self._reconnect_at = 0.0
            self._forget_failures()
        self._engine = engine

    def _forget_failures(self) -> None:
        """Let a later engine not begin as `failed`; counts of a process only rise."""
        self._has_failed, self._lost_before = False, self._undelivered

    def watch(self) -> None:
        """Wrap the methods of vLLM's scheduler once it is imported."""
        when_imported("vllm.v1.core.sched.scheduler", self._watch_scheduler)

    # -- for others ----------------------------------------------------------------------------------------------

    def states(self) -> dict[str, FixState]:
        """Return the state in the form of a fix's, by name; empty if requests are not to be ended.

        On a rank it shows if the scheduler receives its verdicts.
        """
        if not self._engine:
            return {}
        state, reason = self._state()
        return {NAME: FixState(NAME, Mode.AUTO, None, state, reason, _CODES.get(state, Code.NONE))}

    def _state(self) -> tuple[State, str]:
        # No numbers or names in reasons: each reason is a series of its own in the metrics.
        if self._refused is not None:
            return State.INCOMPATIBLE, f"requests cannot be ended: {self._refused}"
        if self._has_failed:
            return State.FAILED, "verdicts could not be carried out, and their requests go on (event undelivered)"
        sender = self._sender
        lost = self._undelivered > self._lost_before
        if lost or (sender is not None and (sender.overdue or sender.is_unanswered())):
            why = "verdicts did not reach the scheduler, and their requests go on (event undelivered)"
            return State.FAILED, why if lost else "the scheduler's process does not read verdicts"
        if self._scheduled_here:
            if self._unheard is None and self._receiver is not None and not self._receiver.alive:
                self._unheard = "the thread that hears of them has ended"
            if self._unheard is not None:
                return State.FAILED, f"verdicts of ranks in other processes are not heard: {self._unheard}"
            return State.ACTIVE, "the scheduler of this process ends requests by verdicts of ranks"
        if sender is not None and sender.admitted:
            return State.ACTIVE, "the scheduler hears this rank's verdicts"
        since = self._serving_since
        if since is None or (self._why_not is None and (sender or time.monotonic() - since < _START_UP)):
            return State.WAITING, "no rank serves in this process yet, or its scheduler is still to come, or to answer"
        return State.INCOMPATIBLE, self._why_not or "the scheduler of this rank cannot be told"

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events for a record, by detector, and those of `abort` itself."""
        if not self._engine:
            return {}
        ended = {detector: {"aborted": count} for detector, count in self.ended.items()}
        delivered, sender = self._delivered, self._sender
        if sender is not None:
            sender.catch_up()
            delivered += sender.read
        return ended | {NAME: {"delivered": delivered, "undelivered": self._undelivered}}

    def on_captured(self) -> None:
        """Note that a rank in this process is about to serve; its scheduler may not exist yet."""
        self._serving_since, self._why_not = time.monotonic(), None

    def poll(self) -> None:
        """Check the connection of a rank in this process to its scheduler, before there is a verdict."""
        since = self._serving_since
        if since is None or not self._engine or self._scheduled_here:
            return
        if self.why_not() is not None and not self._reconnect_at and time.monotonic() - since < _START_UP:
            self._why_not = None  # nobody has refused this rank: the scheduler may still come

    # -- ranks ---------------------------------------------------------------------------------------------------

    def of(self, detector: str) -> DetectorAborts:
        """Return the `settings.shadow_rate.Abort` of *detector*."""
        return DetectorAborts(self, detector)

    def why_not(self) -> str | None:
        """Return the reason for which the scheduler cannot be told; None if it can.

        Not to be called before the first step: only then there is a scheduler.
        """
        try:
            with self._sending:
                sender = self._connect()
        except OSError as error:
            self._why_not = failure_text(error)
            return self._why_not
        if sender is None or sender.admitted:
            self._reconnect_at = 0.0
        if not self._reconnect_at:  # else it was refused, has connected again and is not admitted yet
            self._why_not = None
        return self._why_not

    def deliver(self, detector: str, requests: Collection[str], blocks: Collection[int], why: str) -> None:
        """Deliver a verdict to the scheduler. Raises CannotDeliverError if it cannot be told; lost parts are counted.

        Does not wait for room, and a quarter of a second at most for the answer of the scheduler's process.
        """
        verdict = Verdict(detector, tuple(map(reference, requests)), tuple(blocks), printable(why)[:_LONGEST_WHY])
        failed: OSError | None = None
        for part in verdict.parts():
            try:
                self._deliver(part)
            except OSError as error:  # there may be room for the next part
                self._undelivered += 1
                failed = error
        if failed is not None:
            raise CannotDeliverError(failure_text(failed)) from None

    def _deliver(self, verdict: Verdict) -> None:
        if self._scheduled_here:
            if len(self._pending) >= abort_channel.MOST_PENDING:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self._pending.append(verdict)
            self._delivered += 1
            return
        with self._sending:
            sender = self._connect()
            if sender is not None:
                sender.send(verdict.encode())

    def _connect(self) -> abort_channel.Sender | None:
        """Return the connection to the scheduler's process; None if that is this one. Raises OSError."""
        if self._refused is not None:
            raise CannotDeliverError(self._refused)
        if self._scheduled_here:
            return None
        if self._sender is not None:
            self._sender.catch_up()
            if not self._sender.closed:
                return self._sender
            if not self._sender.admitted:
                self._reconnect_at = time.monotonic() + abort_channel.UNANSWERED
            self._disconnect()
        if time.monotonic() < self._reconnect_at:
            raise CannotDeliverError(_NOT_ADMITTED)
        # Not getppid, which may be a fork server.
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid is None:
            raise CannotDeliverError("it was not started by the scheduler's process (Ray, another launcher)")
        try:
            self._sender = abort_channel.Sender(self._engine, parent.pid)
        except ConnectionRefusedError:
            raise CannotDeliverError(
                "the process that started it does not listen: it cannot end requests, has no scheduler, or is in "
                "another network namespace"
            ) from None
        return self._sender

    def _disconnect(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._delivered += sender.read
            self._undelivered += sender.sent - sender.read
            sender.close()

    # -- the scheduler -------------------------------------------------------------------------------------------

    def _watch_scheduler(self, module: Any) -> None:
        kind = module.Scheduler
        for name, around in (
            ("__init__", self._around_init),
            ("schedule", self._around_schedule),
            ("update_from_output", self._around_update),
        ):
            if name in vars(kind):
                wrap(kind, name, around)

    def _around_init(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        stock(scheduler, *args, **kwargs)
        if self._engine:
            guarded(self._begin, scheduler)

    def _begin(self, scheduler: Any) -> None:
        self._refused = None
        self._forget_failures()
        evicts = callable(getattr(scheduler.kv_cache_manager, "evict_blocks", None))
        if not evicts or not callable(getattr(scheduler, "finish_requests", None)):
            self._refuse("this scheduler is not known")
            return
        model = getattr(getattr(scheduler, "vllm_config", None), "model_config", None)
        if getattr(model, "runner_type", None) == "pooling":
            # The front-end treats an end without a result as an error of its own, and ends all requests.
            self._refuse("this model answers with vectors or scores")
            return
        parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
        launched = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        if launched and getattr(parallel, "world_size", 1) > 1:
            # All schedulers must act alike: a rank that ends a request alone would hang.
            self._refuse("each rank has a scheduler of its own (external_launcher)")
            return
        self._scheduled_here, self._scheduler = True, weakref.ref(scheduler)
        self._pending.clear()
        self._waiting = []
        self._listen(parallel)

    def _listen(self, parallel: Any) -> None:
        """Listen for the ranks that this process has started.

        vLLM starts them before it makes the scheduler, so no rank is forked from a process with this thread.
        """
        self._unheard = None
        receiver = self._receiver
        if receiver is not None:
            if receiver.engine == self._engine and receiver.alive:
                return  # it is from an earlier engine with the same decision
            receiver.close()
            # A new queue: the thread may still append to the old one.
            self._receiver, self._pending = None, deque()
        if getattr(parallel, "distributed_executor_backend", None) == "uni":
            return  # the only rank is here
        pending = self._pending
        try:
            self._receiver = abort_channel.Receiver(
                self._engine, lambda message: pending.append(Verdict.decode(message)), lambda: len(pending)
            )
        except (OSError, RuntimeError) as error:
            self._unheard = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            logger.warning("graphfix: ranks in other processes cannot have requests ended: %s", self._unheard)

    def _refuse(self, why: str) -> None:
        self._refused, self._scheduled_here = why, False
        if self._receiver is not None:  # from an earlier engine
            self._receiver.close()
            self._receiver = None
        logger.warning("graphfix: requests cannot be ended here: %s", why)

    def _around_schedule(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pending:  # the only cost in nearly every step
            self._insist(self._take_out, scheduler)
        return stock(scheduler, *args, **kwargs)

    def _around_update(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._pending and not self._waiting:
            return stock(scheduler, *args, **kwargs)
        ended: list[tuple[Any, str]] = []
        # Before the outputs: the step's tokens of a request that ends are not to be sent.
        self._insist(self._end_requests, scheduler, ended)
        outputs = stock(scheduler, *args, **kwargs)
        try:
            hand_out(outputs, ended)
        except Exception:
            logger.exception("graphfix: requests that have ended could not be reported; it is tried once more")
            # If it raises again, the engine stops: otherwise clients would wait for the end of these requests for ever.
            hand_out(outputs, ended)
        return outputs

    def _insist(self, act: Callable[..., None], *args: Any) -> None:
        """Call *act* to carry out waiting verdicts; drop them after two failures, which each step would repeat."""
        for _ in range(2):
            try:
                act(*args)
            except Exception:
                logger.exception("graphfix: requests are not ended: %s failed", act.__name__)
            else:
                return
        self._has_failed = True
        self._undelivered += len(self._waiting)
        self._waiting = []
        while self._pending:
            self._pending.popleft()
            self._undelivered += 1
        guarded(self._on_ended)  # for the state in the record

    def _take_out(self, scheduler: Any) -> None:
        """Take blocks of pending verdicts out of the prefix cache, before a request may get them."""
        if scheduler is not self._scheduler():
            return
        # A fixed number: a rank may add as fast as they are taken.
        for _ in range(len(self._pending)):
            verdict = self._pending[0]
            evict(scheduler, names_of(scheduler, verdict), verdict.blocks)
            self._waiting.append(verdict)
            self._pending.popleft()  # last: after an error the verdict still waits, and a repetition does no harm

    def _end_requests(self, scheduler: Any, ended: list[tuple[Any, str]]) -> None:
        self._take_out(scheduler)
        if not self._waiting or scheduler is not self._scheduler():
            return
        error, before = finished_error(), len(ended)
        while self._waiting:
            verdict = self._waiting[0]
            for name in names_of(scheduler, verdict):
                request = scheduler.requests.get(name)
                if request is not None and not request.is_finished():
                    # Again: the running step has given it blocks, whose contents are computed from wrong ones.
                    evict(scheduler, (name,), ())
                    # Before `finish_requests`: without an entry here, the client is never told of the end.
                    if all(each is not request for each, _ in ended):
                        ended.append((request, verdict.why))
                    scheduler.finish_requests(name, error)
                    self.ended[verdict.detector] += 1
                    shortened = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
                    logger.error("graphfix: request %s ends with an error: %s", ascii(shortened)[1:-1], verdict.why)
            del self._waiting[0]  # last, as above
        if len(ended) > before:
            self._on_ended()


class DetectorAborts:
    """Ends requests for one detector: an implementation of `settings.shadow_rate.Abort`."""

    def __init__(self, aborts: Aborts, detector: str) -> None:
        self._aborts, self._detector = aborts, detector

    def why_not(self) -> str | None:
        return self._aborts.why_not()

    def deliver(self, requests: Collection[str], blocks: Collection[int], why: str) -> None:
        """Deliver a verdict. Raises OSError if the scheduler cannot be told."""
        self._aborts.deliver(self._detector, requests, blocks, why)
