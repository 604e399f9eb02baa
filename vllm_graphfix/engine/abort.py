"""How a rank has requests ended whose answers would be wrong, and their blocks taken out of the prefix cache.

A rank knows what is wrong, and the scheduler who is concerned and what is cached. Verdicts wait for the scheduler in a
bounded queue of its process: a rank in that process puts them there itself, one that it has started sends them there
(`abort_channel.py`), and no other rank can. Nobody waits for anybody for long, and no file is touched. A verdict that
cannot be delivered is counted, and is a state.

vLLM's own way for ranks to name invalid blocks (`invalid_block_ids` of a KV connector) computes them anew by default,
leaves cached ones of ended requests where they are, and ends a 0.33.0 engine that has several cache groups.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from vllm_graphfix.engine import abort_channel
from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.log import logger
from vllm_graphfix.marks import process as marks
from vllm_graphfix.patching.applied_fix import FixState
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.settings.json_object import JsonError, JsonObject
from vllm_graphfix.shadow import process as shadow
from vllm_graphfix.text import printable

NAME = "abort"
"""Under which records, `fleet` and metrics tell of it, as of a fix."""
DETECTORS = (shadow.NAME, marks.NAME)
"""Those by whose verdicts requests end, which are counted as events of theirs."""
_CODES = {State.INCOMPATIBLE: Code.ENGINE, State.FAILED: Code.UNDELIVERED}
_KINDS = ("=", "#")
_LONGEST_WHY = 900
_LONGEST_NAME = 256
"""Characters of a request's name that is sent as it is. Twelve bytes each in JSON, with a reason, fit one message."""
_NOT_ADMITTED = (
    "the process that started it has closed the connection: its thread has ended, or this rank is none of its own to "
    "it (another user, another PID namespace)"
)
_START_UP = 60.0
"""Seconds after a rank has captured in which there may be no scheduler yet."""


class Verdict(NamedTuple):
    """Requests that must end, and blocks that nobody may read any more."""

    detector: str
    requests: tuple[str, ...]
    """By name after ``=``, or where that is long by its digest after ``#``: a client may have chosen it."""
    blocks: tuple[int, ...]
    why: str

    def encode(self) -> bytes:
        return json.dumps(self._asdict(), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> Verdict:
        """Raises JsonError."""
        try:
            fields = JsonObject(json.loads(message), "a verdict")
        except (ValueError, RecursionError) as error:
            raise JsonError(str(error)) from None
        requests, blocks = fields.get("requests"), fields.get("blocks")
        if not isinstance(requests, list) or not all(isinstance(each, str) and each[:1] in _KINDS for each in requests):
            fields.refuse("requests")
        if not isinstance(blocks, list) or not all(type(each) is int and each > 0 for each in blocks):
            fields.refuse("blocks")
        return cls(fields.one_of("detector", DETECTORS), tuple(requests), tuple(blocks), fields.text("why"))

    def parts(self) -> Iterator[Verdict]:
        """This verdict in parts of which each fits one message."""
        size = len(self.requests) + len(self.blocks)
        if size <= 1 or len(self.encode()) <= abort_channel.MOST_BYTES:
            yield self
            return
        requests, blocks = len(self.requests) // 2, -(-len(self.blocks) // 2)
        yield from self._replace(requests=self.requests[:requests], blocks=self.blocks[:blocks]).parts()
        yield from self._replace(requests=self.requests[requests:], blocks=self.blocks[blocks:]).parts()


class CannotTellError(OSError):
    """The scheduler cannot hear of a verdict; its text says why."""


class Aborts:
    """Carries verdicts within one process, which has the scheduler, or a rank, or both."""

    def __init__(self, on_ended: Callable[[], None] = lambda: None) -> None:
        """*on_ended* is called once a request was ended in this process, by the thread of the scheduler."""
        self._on_ended = on_ended
        self._engine = ""
        self._receiver: abort_channel.Receiver | None = None
        self._sender: abort_channel.Sender | None = None
        self._forget()

    def _forget(self) -> None:
        self._scheduled_here = False
        self._scheduler: Any = lambda: None
        """The one that was made last; verdicts are of its engine."""
        self._refused: str | None = None
        """The reason for which the scheduler of this process ends no request; None where it does."""
        self._unheard: str | None = None
        """The reason for which verdicts of other processes do not arrive here; None where they do."""
        self._pending: deque[Verdict] = deque()
        """Verdicts for the scheduler to take. Another thread appends; both ends of a deque are safe without a lock."""
        self._waiting: list[Verdict] = []
        """What the scheduler has taken out of the cache, and has not ended yet."""
        self.ended = dict.fromkeys(DETECTORS, 0)
        """Requests that this process has ended, by what found them wrong."""
        self._sending = threading.Lock()
        """Held to connect and to send, by a step's thread or the heartbeat's, a quarter of a second at most."""
        self._serving_since: float | None = None
        self._why_not: str | None = None
        self._reconnect_at = 0.0
        """The time, by the monotonic clock, before which a rank that was not admitted does not connect again; 0 if it
        was admitted since, or never refused."""
        self._given_up = False
        """True once the scheduler of this process could not carry out a verdict."""
        self._delivered = self._undelivered = 0
        """Verdicts that are where the scheduler sees them, without those of the present connection, and lost ones."""

    def forked(self) -> None:
        """Forgets the scheduler and all sockets, which a forked child has copies of."""
        if self._receiver is not None:
            self._receiver.forked()
        if self._sender is not None:
            self._sender.close()
        self._receiver = self._sender = None
        self._forget()

    def begin(self, engine: str) -> None:
        """For *engine*, by its name in the records. With an empty one nobody is ended any more."""
        if engine != self._engine:
            self._disconnect()
            self._reconnect_at = 0.0
        self._engine = engine

    def watch(self) -> None:
        """Puts what follows around vLLM's scheduler."""
        when_imported("vllm.v1.core.sched.scheduler", self._watch_scheduler)

    # -- for others ----------------------------------------------------------------------------------------------

    def states(self) -> dict[str, FixState]:
        """One, in the form of a fix's; none where nobody is to be ended. Of a rank: whether the scheduler hears it."""
        if not self._engine:
            return {}
        state, reason = self._state()
        return {NAME: FixState(NAME, Mode.AUTO, None, state, reason, _CODES.get(state, Code.NONE))}

    def _state(self) -> tuple[State, str]:
        # The reasons have no numbers and no names: each is a series of its own in the metrics.
        if self._refused is not None:
            return State.INCOMPATIBLE, f"requests cannot be ended: {self._refused}"
        if self._given_up:
            return State.FAILED, "verdicts could not be carried out, and their requests go on (event undelivered)"
        sender = self._sender
        if self._undelivered or (sender is not None and (sender.overdue or sender.is_unanswered())):
            why = "verdicts did not reach the scheduler, and their requests go on (event undelivered)"
            return State.FAILED, why if self._undelivered else "the scheduler's process does not read verdicts"
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
        """For the events of a record, by the name of what they are of."""
        if not self._engine:
            return {}
        ended = {detector: {"aborted": count} for detector, count in self.ended.items()}
        delivered, sender = self._delivered, self._sender
        if sender is not None:
            sender.catch_up()
            delivered += sender.read
        return ended | {NAME: {"delivered": delivered, "undelivered": self._undelivered}}

    def serve(self) -> None:
        """A rank in this process is about to serve; its scheduler may not have been made yet."""
        self._serving_since, self._why_not = time.monotonic(), None

    def look(self) -> None:
        """Finds out now and then whether the scheduler hears a rank in this process, before there is a verdict."""
        since = self._serving_since
        if since is None or not self._engine or self._scheduled_here:
            return
        if self.why_not() is not None and not self._reconnect_at and time.monotonic() - since < _START_UP:
            self._why_not = None

    # -- ranks ---------------------------------------------------------------------------------------------------

    def of(self, detector: str) -> DetectorAborts:
        """Return the way by which *detector* ends requests."""
        return DetectorAborts(self, detector)

    def why_not(self) -> str | None:
        """Why the scheduler cannot be told; None if it can. Not before the first step, when there is a scheduler."""
        try:
            with self._sending:
                sender = self._connect()
        except OSError as error:
            self._why_not = _why_not(error)
            return self._why_not
        if sender is None or sender.admitted:
            self._reconnect_at = 0.0
        if not self._reconnect_at:  # else one that was refused tries again, and is not admitted yet
            self._why_not = None
        return self._why_not

    def tell(self, detector: str, requests: Collection[str], blocks: Collection[int], why: str) -> None:
        """Raises CannotTellError where the scheduler cannot be told; what did not reach it is counted.

        Waits for no room, and a quarter of a second at most for the word that the scheduler's process has it.
        """
        verdict = Verdict(detector, tuple(map(_reference, requests)), tuple(blocks), printable(why)[:_LONGEST_WHY])
        failed: OSError | None = None
        for part in verdict.parts():
            try:
                self._deliver(part)
            except OSError as error:  # there may be room for the next one
                self._undelivered += 1
                failed = error
        if failed is not None:
            raise CannotTellError(_why_not(failed)) from None

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
        """The connection to the scheduler's process; None where that is this one. Raises OSError if there is none."""
        if self._refused is not None:
            raise CannotTellError(self._refused)
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
            raise CannotTellError(_NOT_ADMITTED)
        # Not getppid: a fork server may stand between.
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid is None:
            raise CannotTellError("it was not started by the scheduler's process (Ray, another launcher)")
        try:
            self._sender = abort_channel.Sender(self._engine, parent.pid)
        except ConnectionRefusedError:
            raise CannotTellError(
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
        evict = getattr(scheduler.kv_cache_manager, "evict_blocks", None)
        if not callable(evict) or not callable(getattr(scheduler, "finish_requests", None)):
            self._refuse("this scheduler is not known")
            return
        model = getattr(getattr(scheduler, "vllm_config", None), "model_config", None)
        if getattr(model, "runner_type", None) == "pooling":
            # The front-end takes an end without a result for a mistake of its own, and ends all requests.
            self._refuse("this model answers with vectors or scores")
            return
        parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
        launched = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        if launched and getattr(parallel, "world_size", 1) > 1:
            # Each rank has a scheduler of its own, and all must schedule alike: one that ends a request alone hangs.
            self._refuse("each rank has a scheduler of its own (external_launcher)")
            return
        self._scheduled_here, self._scheduler = True, weakref.ref(scheduler)
        self._pending.clear()
        self._waiting = []
        self._listen(parallel)

    def _listen(self, parallel: Any) -> None:
        """Begins to hear the ranks that this process has started.

        vLLM makes them before the scheduler, so no rank is forked from a process that has this thread.
        """
        self._unheard = None
        receiver = self._receiver
        if receiver is not None:
            if receiver.engine == self._engine and receiver.alive:
                return  # of an engine before, with the same decision
            receiver.close()
            # Which it may still add to.
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
        if self._receiver is not None:  # of an engine before
            self._receiver.close()
            self._receiver = None
        logger.warning("graphfix: requests cannot be ended here: %s", why)

    def _around_schedule(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pending:  # in nearly every step all that this costs
            self._insist(self._take_out, scheduler)
        return stock(scheduler, *args, **kwargs)

    def _around_update(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._pending and not self._waiting:
            return stock(scheduler, *args, **kwargs)
        ended: list[tuple[Any, str]] = []
        # Before the step's tokens are handed out: those of a request that ends are not.
        self._insist(self._end_requests, scheduler, ended)
        outputs = stock(scheduler, *args, **kwargs)
        try:
            _hand_out(outputs, ended)
        except Exception:
            logger.exception("graphfix: requests that have ended could not be reported; it is tried once more")
            # What this raises stops the engine: the clients of these requests would wait for their end for ever.
            _hand_out(outputs, ended)
        return outputs

    def _insist(self, act: Callable[..., None], *args: Any) -> None:
        """Carries out by *act* what waits, which is lost if that fails twice: it would fail on, in each step."""
        for _ in range(2):
            try:
                act(*args)
            except Exception:
                logger.exception("graphfix: requests are not ended: %s failed", act.__name__)
            else:
                return
        self._given_up = True
        self._undelivered += len(self._waiting)
        self._waiting = []
        while self._pending:
            self._pending.popleft()
            self._undelivered += 1
        guarded(self._on_ended)  # the record says so

    def _take_out(self, scheduler: Any) -> None:
        """Takes blocks out of the cache before a request may get them."""
        if scheduler is not self._scheduler():
            return
        # Not more than there are now: a rank may add as fast as they are taken.
        for _ in range(len(self._pending)):
            verdict = self._pending[0]
            _evict(scheduler, _names(scheduler, verdict), verdict.blocks)
            self._waiting.append(verdict)
            self._pending.popleft()  # last: if this fails, the verdict still waits, and what is done twice does no harm

    def _end_requests(self, scheduler: Any, ended: list[tuple[Any, str]]) -> None:
        self._take_out(scheduler)
        if not self._waiting or scheduler is not self._scheduler():
            return
        error, before = _finished_error(), len(ended)
        while self._waiting:
            verdict = self._waiting[0]
            for name in _names(scheduler, verdict):
                request = scheduler.requests.get(name)
                if request is not None and not request.is_finished():
                    # Once more: the step that is under way has given it blocks, whose contents follow from wrong ones.
                    _evict(scheduler, (name,), ())
                    # Before it ends: of a request that has ended and is not in here, its client never hears.
                    if all(each is not request for each, _ in ended):
                        ended.append((request, verdict.why))
                    scheduler.finish_requests(name, error)
                    self.ended[verdict.detector] += 1
                    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
                    logger.error("graphfix: request %s ends with an error: %s", ascii(shown)[1:-1], verdict.why)
            del self._waiting[0]  # last, as above
        if len(ended) > before:
            self._on_ended()


class DetectorAborts:
    """What one detector has requests ended by: `settings.shadow_rate.Abort`."""

    def __init__(self, aborts: Aborts, detector: str) -> None:
        self._aborts, self._detector = aborts, detector

    def why_not(self) -> str | None:
        return self._aborts.why_not()

    def tell(self, requests: Collection[str], blocks: Collection[int], why: str) -> None:
        """Raises OSError where the scheduler cannot be told."""
        self._aborts.tell(self._detector, requests, blocks, why)


def _why_not(error: OSError) -> str:
    why = str(error) if isinstance(error, CannotTellError) else error.strerror or type(error).__name__
    return f"the scheduler of this rank cannot be told: {why}"


def _reference(name: str) -> str:
    return f"={name}" if len(name) <= _LONGEST_NAME else f"#{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _names(scheduler: Any, verdict: Verdict) -> list[str]:
    """The requests that *verdict* refers to. Only where names are long all of the scheduler's are looked at."""
    found = [each[1:] for each in verdict.requests if each[0] == "="]
    if digests := {each[1:] for each in verdict.requests if each[0] == "#"}:
        found += [name for name in scheduler.requests if len(name) > _LONGEST_NAME and _digest(name) in digests]
    return found


def _evict(scheduler: Any, requests: Collection[str], blocks: Collection[int]) -> None:
    """Takes *blocks*, and all that *requests* have, out of the prefix cache."""
    manager = scheduler.kv_cache_manager
    known = len(manager.block_pool.blocks)
    found = set(blocks)
    for request in requests:
        if request in scheduler.requests:
            found.update(number for group in manager.get_block_ids(request) for number in group)
    manager.evict_blocks({number for number in found if 0 < number < known})


def _finished_error() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ERROR


def _hand_out(outputs: Any, ended: list[tuple[Any, str]]) -> None:
    """Moves the last output of each request in *ended* to the *outputs* of a step, by client."""
    if not ended:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    while ended:
        request, why = ended[0]
        if request.is_finished():  # not where that failed
            last = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=why,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
        del ended[0]
