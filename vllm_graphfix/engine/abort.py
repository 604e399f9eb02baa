"""How a rank has requests ended whose answers would be wrong, and their blocks taken out of the prefix cache.

A rank knows what is wrong, and the scheduler who is concerned and what is cached. Where both are in one process, they
share a queue. Else the process of the scheduler has a file in this user's folder of records, to which the ranks that it
started append a line each time. Nobody waits for anybody: the scheduler looks at the size of the file in each step.

vLLM's own way for ranks to name invalid blocks (`invalid_block_ids` of a KV connector) computes them anew by default,
leaves cached ones of ended requests where they are, and ends a 0.33.0 engine that has several cache groups.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import guarded, when_imported, wrap
from vllm_graphfix.records.folder import opened
from vllm_graphfix.settings.json_object import JsonError, JsonObject
from vllm_graphfix.text import printable

_LONGEST = 4000
"""Bytes of a line: as many as one write appends undivided."""
_LONGEST_WHY = 900
_MOST = 1 << 20
"""Bytes of all lines; what is beyond is not read."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Verdict(NamedTuple):
    """Requests that must end, and blocks that nobody may read any more."""

    requests: tuple[str, ...]
    blocks: tuple[int, ...]
    why: str

    def encode(self) -> bytes:
        return json.dumps(self._asdict(), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Verdict:
        """Raises JsonError."""
        try:
            said = JsonObject(json.loads(line), "a verdict")
        except ValueError as error:
            raise JsonError(str(error)) from None
        requests, blocks = said.get("requests"), said.get("blocks")
        if not isinstance(requests, list) or not all(isinstance(each, str) for each in requests):
            said.refuse("requests")
        if not isinstance(blocks, list) or not all(type(each) is int and each > 0 for each in blocks):
            said.refuse("blocks")
        return cls(tuple(requests), tuple(blocks), said.text("why"))


class Aborts:
    """Carries verdicts within one process, which has the scheduler, or a rank, or both."""

    def __init__(self, base: Path) -> None:
        """*base*: of the records."""
        self._base = base
        self._engine = ""
        self.forked()

    def forked(self) -> None:
        """Forgets the scheduler, which a forked child has not."""
        self._here: list[Verdict] = []
        self._scheduled_here = False
        self._scheduler: Any = lambda: None
        """The one that was made last; verdicts are of its engine."""
        self._incoming: int | None = None
        self._read = 0
        self._waiting: list[Verdict] = []
        """What the scheduler has taken out of the cache, and has not ended yet."""

    def begin(self, engine: str) -> None:
        """For *engine*, by its name in the records. With an empty one nobody is ended any more."""
        self._engine = engine

    def watch(self) -> None:
        """Puts what follows around vLLM's scheduler."""
        when_imported("vllm.v1.core.sched.scheduler", self._watch_scheduler)

    # -- ranks ---------------------------------------------------------------------------------------------------

    def why_not(self) -> str | None:
        """Why the scheduler cannot be told; None if it can. Not before the first step, when there is a scheduler."""
        if self._scheduled_here:
            return None
        try:
            with opened(self._base, "find the scheduler's file") as folder:
                os.stat(self._name(os.getppid()), dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            return f"the scheduler of this rank cannot be told: {error.strerror or error}"
        return None

    def tell(self, requests: Collection[str], blocks: Collection[int], why: str) -> None:
        """Raises OSError where the scheduler cannot be told."""
        verdict = Verdict(tuple(requests), tuple(blocks), printable(why)[:_LONGEST_WHY])
        if self._scheduled_here:
            self._here.append(verdict)
            return
        with opened(self._base, "tell the scheduler") as folder:
            file = os.open(self._name(os.getppid()), os.O_WRONLY | os.O_APPEND | _FLAGS, dir_fd=folder)
            try:
                for line in _lines(verdict):
                    os.write(file, line)
            finally:
                os.close(file)

    def _name(self, pid: int) -> str:
        return f"{self._engine}-{pid}.aborts"

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
        evict = getattr(scheduler.kv_cache_manager, "evict_blocks", None)
        if not callable(evict) or not callable(getattr(scheduler, "finish_requests", None)):
            logger.warning("graphfix: requests cannot be ended here: this scheduler is not known")
            return
        model = getattr(getattr(scheduler, "vllm_config", None), "model_config", None)
        if getattr(model, "runner_type", None) == "pooling":
            # The front-end takes an end without a result for a mistake of its own, and ends all requests.
            logger.warning("graphfix: requests cannot be ended here: this model answers with vectors or scores")
            return
        self._scheduled_here, self._scheduler = True, weakref.ref(scheduler)
        self._here, self._waiting = [], []
        with opened(self._base, "make the scheduler's file", make=True) as folder:
            name = self._name(os.getpid())
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600, dir_fd=folder)
            Finalize(None, _remove, (self._base, name, os.getpid()), exitpriority=0)
        if self._incoming is not None:
            os.close(self._incoming)
        self._incoming, self._read = file, 0

    def _around_schedule(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        guarded(self._take_out, scheduler)
        return stock(scheduler, *args, **kwargs)

    def _around_update(self, stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        ended: list[tuple[Any, str]] = []
        # Before the step's tokens are handed out: those of a request that ends are not.
        guarded(self._end_requests, scheduler, ended)
        outputs = stock(scheduler, *args, **kwargs)
        guarded(_hand_out, outputs, ended)
        return outputs

    def _take_out(self, scheduler: Any) -> None:
        """Takes blocks out of the cache before a request may get them."""
        fresh = self._news() if scheduler is self._scheduler() else []
        for verdict in fresh:
            _evict(scheduler, verdict.requests, verdict.blocks)
        self._waiting += fresh

    def _end_requests(self, scheduler: Any, ended: list[tuple[Any, str]]) -> None:
        self._take_out(scheduler)
        if not self._waiting or scheduler is not self._scheduler():
            return
        waiting, self._waiting = self._waiting, []
        error = _finished_error()
        for verdict in waiting:
            for name in verdict.requests:
                request = scheduler.requests.get(name)
                if request is not None and not request.is_finished():
                    # Once more: the step that is under way has given it blocks, whose contents follow from wrong ones.
                    _evict(scheduler, (name,), ())
                    scheduler.finish_requests(name, error)
                    ended.append((request, verdict.why))
                    logger.error("graphfix: request %s ends with an error: %s", ascii(name)[1:-1], verdict.why)

    def _news(self) -> list[Verdict]:
        """What ranks have said since."""
        fresh, self._here = self._here, []
        if self._incoming is None:
            return fresh
        size = os.fstat(self._incoming).st_size
        if size <= self._read or self._read >= _MOST:
            return fresh
        data = os.pread(self._incoming, min(size, _MOST) - self._read, self._read)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        if self._read >= _MOST:
            logger.warning("graphfix: no more requests are ended in this engine: it was told too much")
        for line in whole.splitlines():
            try:
                fresh.append(Verdict.decode(line))
            except JsonError as error:
                logger.warning("graphfix: what a rank says to the scheduler is not understood: %s", error)
        return fresh


def _lines(verdict: Verdict) -> Iterator[bytes]:
    """*verdict*, in parts where it is long; one name alone is told however long it is, a client may have chosen it."""
    line = verdict.encode()
    if len(line) <= _LONGEST or len(verdict.requests) + len(verdict.blocks) <= 1:
        yield line
        return
    requests, blocks = len(verdict.requests) // 2, -(-len(verdict.blocks) // 2)
    yield from _lines(verdict._replace(requests=verdict.requests[:requests], blocks=verdict.blocks[:blocks]))
    yield from _lines(verdict._replace(requests=verdict.requests[requests:], blocks=verdict.blocks[blocks:]))


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


def _hand_out(outputs: Any, ended: Sequence[tuple[Any, str]]) -> None:
    """Adds the last output of each request in *ended* to the *outputs* of a step, by client."""
    if not ended:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request, why in ended:
        last = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=why,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)


def _remove(base: Path, name: str, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        with opened(base, "remove the scheduler's file") as folder:
            os.unlink(name, dir_fd=folder)
    except OSError:  # it is gone, with its folder perhaps
        return
