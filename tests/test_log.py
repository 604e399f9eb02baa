"""Lines that are held until nobody has a lock: what is only told must not take a fix away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import HeldLog
from vllm_graphfix.patching import manager
from vllm_graphfix.patching.manager import FixManager, Policy
from vllm_graphfix.settings.environment import Master

if TYPE_CHECKING:
    import pytest


class Unkept(HeldLog):
    """Its list cannot be had."""

    def _lines(self) -> Any:
        raise MemoryError


def test_lines_are_logged_when_they_are_released_and_once(caplog: pytest.LogCaptureFixture) -> None:
    log = HeldLog()
    with caplog.at_level(logging.DEBUG, "vllm.graphfix"):
        log.warning("first %s", 1)
        log.info("second")
        assert caplog.messages == []
        log.release()
        log.release()
    assert caplog.messages == ["first 1", "second"]


def test_a_line_that_cannot_be_held_or_released_is_lost_and_nothing_else() -> None:
    log = Unkept()
    log.warning("lost")
    log.release()


class ScriptedLock:
    """A lock that runs *then* as soon as it is free for the first time, before its holder goes on."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock, self._then = threading.RLock(), [then]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
        if self._then:
            self._then.pop()()


@manager._exclusive
def run(me: FixManager, word: str, inside: Callable[[], object]) -> None:
    me._log.warning(word)
    inside()


def test_a_warning_is_logged_though_another_thread_is_inside_by_then(caplog: pytest.LogCaptureFixture) -> None:
    me = FixManager((), Policy(Master.ON, {}))
    inside, leave = threading.Event(), threading.Event()

    def come_in_and_stay() -> None:
        inside.set()
        assert leave.wait(60)

    other = threading.Thread(target=run, args=(me, "of the other", come_in_and_stay))

    def let_the_other_in() -> None:
        other.start()
        assert inside.wait(60)

    me._lock = ScriptedLock(let_the_other_in)  # type: ignore[assignment]  # a double
    with caplog.at_level(logging.WARNING, "vllm.graphfix"):
        run(me, "of this one", lambda: None)
        logged = list(caplog.messages)
        leave.set()
        other.join(60)
    assert logged == ["of this one"]
    assert caplog.messages == ["of this one", "of the other"]


def test_nothing_is_logged_before_the_outermost_method_returns(caplog: pytest.LogCaptureFixture) -> None:
    me = FixManager((), Policy(Master.ON, {}))
    seen: list[list[str]] = []

    def nested() -> None:
        run(me, "inner", lambda: None)
        seen.append(list(caplog.messages))

    with caplog.at_level(logging.WARNING, "vllm.graphfix"):
        run(me, "outer", nested)
    assert (seen, caplog.messages) == ([[]], ["outer", "inner"])


def test_in_a_child_that_is_forked_inside_a_method_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    me = FixManager((), Policy(Master.ON, {}))
    with caplog.at_level(logging.WARNING, "vllm.graphfix"):
        run(me, "of the parent", me.forked)
        assert me.interrupted
        run(me, "of the child", lambda: None)
    assert caplog.messages == ["of the child"]
