"""Time limits for everything that a check waits for.

A thread in a collective, or in a copy from a GPU whose queue hangs in one, cannot be interrupted. To abandon it would
be no way out either: what it has queued would pair with whatever this rank queues next. So the process ends, with a
message that says why. A wait that no collective depends on is abandoned instead (`within`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.shadow.failures import Attempt

LIMIT = 15.0
"""Seconds from one agreement of the ranks to the next, once all have come to a step. A rank may be slow, by 10 s say;
vLLM's executor takes up to 9 s to end the other processes of an engine, and within half a minute the engine has to be
gone."""
DRAIN = 5.0
"""Seconds in which the collectives that ranks have queued must pair after a run has failed on one of them."""
EXIT_CODE = 70
_SLICE = 0.5
_LAST_WORDS = 3.0
"""Seconds for the log and the record, which may hang as well."""

T = TypeVar("T")

last_words: Callable[[str], None] = lambda reason: None  # noqa: E731 - replaced when a check starts
"""Takes the reason why this process ends, right before it does."""


class _Limit:
    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds, self.remaining = what, seconds, seconds


class _Watchdog:
    """One thread, which starts with the first limit and sleeps while there is none."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # the thread is not in the child, and may have held the lock

    def reset(self) -> None:
        self._changed = threading.Condition()
        self._limit: _Limit | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """End the process, saying that it *what*, if the block takes too long.

        The limit is *seconds*, or that of the enclosing block, whose time restarts afterwards, or `LIMIT`.
        """
        outer = self._limit
        if seconds is None:
            seconds = outer.seconds if outer is not None else LIMIT
        self._set(_Limit(what, seconds))
        try:
            yield
        finally:
            self._set(outer and _Limit(outer.what, outer.seconds))

    def _set(self, limit: _Limit | None) -> None:
        with self._changed:
            if limit is not None and self._thread is None:
                thread = threading.Thread(target=self._run, name="graphfix-shadow-watchdog", daemon=True)
                thread.start()
                self._thread = thread  # after the start, which may fail: the next limit tries again
            self._limit = limit
            if limit is not None:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                limit = self._limit
                if limit is None:
                    self._changed.wait()
                    continue
                before = time.monotonic()
                self._changed.wait(min(_SLICE, limit.remaining))
                # While the whole machine, or this process, is stopped, nobody is late: a slice counts for at most twice
                # its length.
                limit.remaining -= min(time.monotonic() - before, 2 * _SLICE)
                if self._limit is limit and limit.remaining <= 0:
                    break
        end(f"{limit.what}, and {limit.seconds:.0f} s were not enough")


limit = _Watchdog().limit


def end(reason: str) -> NoReturn:
    """End this process at once, with the reason in its log and its record.

    Not by an exception: vLLM's worker only logs one on a rank whose answer nobody waits for, and continues with the
    next step, whose collectives would pair with those that other ranks still have queued. When a worker's process is
    gone, vLLM's executor ends the engine.
    """
    words = threading.Thread(target=_last_words, args=(reason,), daemon=True)
    with suppress(RuntimeError):  # no more threads
        words.start()
        words.join(_LAST_WORDS)
    os._exit(EXIT_CODE)


def _last_words(reason: str) -> None:
    logger.error("graphfix: the shadow check ends this process, and with it the engine: %s", reason)
    last_words(reason)


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of *function*, or raise its error.

    Raises TimeoutError after *seconds*: then the call is abandoned, in a thread of its own.
    """
    attempt, results = Attempt(), list[T]()

    def call() -> None:
        with attempt:
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if attempt.error is not None:
        raise attempt.error
    if not results:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    return results[0]
