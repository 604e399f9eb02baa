"""`idle-rank` where clearing a buffer fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import idle_rank


def test_after_an_error_buffers_are_restored_once_and_before_the_step() -> None:
    events: list[str] = []

    def clear(runner: Any, shape: str, undo: list[Callable[[], object]]) -> None:
        undo.append(lambda: events.append("restored"))
        raise RuntimeError("the second buffer")

    activity = Activity((idle_rank.IDLE_STEP_ON_REAL_BLOCKS,))
    with mock.patch.object(idle_rank, "_clear_buffers", clear):
        step = idle_rank._name_no_block(lambda worker: events.append("step"), activity, shape="slots")
        step(SimpleNamespace(model_runner=None))
    assert (events, activity.error) == (["restored", "step"], "RuntimeError: the second buffer")
