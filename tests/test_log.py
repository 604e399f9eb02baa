"""Lines that are held until nobody has a lock: what is only told must not take a fix away."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import HeldLog

if TYPE_CHECKING:
    import pytest


class Unkept(HeldLog):
    """Its list cannot be had."""

    def _lines(self) -> Any:
        raise MemoryError


def test_lines_are_said_when_they_are_released_and_once(caplog: pytest.LogCaptureFixture) -> None:
    log = HeldLog()
    with caplog.at_level(logging.DEBUG, "vllm.graphfix"):
        log.warning("first %s", 1)
        log.info("second")
        assert caplog.messages == []
        log.release()
        log.release()
    assert caplog.messages == ["first 1", "second"]


def test_a_line_that_cannot_be_kept_or_released_is_lost_and_nothing_else() -> None:
    log = Unkept()
    log.warning("lost")
    log.release()
