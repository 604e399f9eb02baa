"""Nothing that a check waits for is waited for without a bound.

A thread that is in a collective, or in a copy from a GPU whose queue hangs in one, cannot be interrupted, and to leave
it behind is no way out either: what it has queued would pair with whatever this rank queues next. So the process ends,
with a message that says why. A wait for something that no collective depends on is given up instead (`within`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NoReturn, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.shadow.failures import Attempt

LIMIT = 15.0
"""Seconds from one agreement of the ranks to the next, once all have come to a step. A rank may be slow, by 10 s say;
vLLM's executor takes up to 9 s to end the other processes of an engine, and in half a minute the engine is to be
gone."""
DRAIN = 5.0
"""Seconds in which the collectives that ranks have queued must have found each other when a run has failed on one of
them."""
EXIT_CODE = 70
_SLICE = 0.5
_LAST_WORDS = 3.0
"""Seconds for the log and the record, which may hang as well."""

T = TypeVar("T")

last_words: Callable[[str], None] = lambda reason: None  # noqa: E731 - it is replaced where a check begins
"""Told why this process ends, right before it does."""


class _Limit:
    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds, self.left = what, seconds, seconds


class _Watchdog:
    """One thread, which sleeps as long as nothing is watched; it begins with the first thing that is."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)  # the thread is not in the child, and may have held the lock

    def begin(self) -> None:
        self._changed = threading.Condition()
        self._watched: _Limit | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, what: str, seconds: float | None) -> Iterator[None]:
        """Ends the process if the block takes longer than *seconds*.

        Where it is within another block, that one's time begins anew afterwards.
        """
        outer = self._watched
        if seconds is None:
            seconds = outer.seconds if outer is not None else LIMIT
        self._watch(_Limit(what, seconds))
        try:
            yield
        finally:
            self._watch(outer and _Limit(outer.what, outer.seconds))

    def _watch(self, watched: _Limit | None) -> None:
        with self._changed:
            self._watched = watched
            if watched is None:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="graphfix-shadow-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                watched = self._watched
                if watched is None:
                    self._changed.wait()
                    continue
                before = time.monotonic()
                self._changed.wait(min(_SLICE, watched.left))
                # While the whole machine, or this process, is stopped, nobody is late: no slice counts for much more
                # than it is long.
                watched.left -= min(time.monotonic() - before, 2 * _SLICE)
                if self._watched is watched and watched.left <= 0:
                    break
        end(f"{watched.what}, and {watched.seconds:.0f} s were not enough")


_watchdog = _Watchdog()


def limit(what: str, seconds: float | None = None) -> AbstractContextManager[None]:
    """A context manager that ends the process, saying that it *what*, if the block takes too long.

    The limit is *seconds*, or that of the block around it, or `LIMIT`.
    """
    return _watchdog.limit(what, seconds)


def end(reason: str) -> NoReturn:
    """Ends this process at once, after it has said why in the log and in its record.

    Not by an exception: of a rank whose answer nobody waits for vLLM's worker logs it and goes on with the next step,
    whose collectives would then pair with those that other ranks still have queued. When a worker's process is gone,
    vLLM's executor ends the engine.
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
    """What *function* returns or raises, or a TimeoutError: then it is left behind, in a thread of its own."""
    attempt, answer = Attempt(), list[T]()

    def call() -> None:
        with attempt:
            answer.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if attempt.error is not None:
        raise attempt.error
    if not answer:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    return answer[0]
