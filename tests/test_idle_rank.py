"""`idle-rank` where clearing a buffer fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import idle_rank


def test_after_an_error_buffers_are_restored_once_and_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def clear(runner: Any, shape: str, undo: list[Callable[[], object]]) -> None:
        undo.append(lambda: events.append("restored"))
        raise RuntimeError("the second buffer")

    monkeypatch.setattr(idle_rank, "_clear_buffers", clear)
    activity = Activity((idle_rank.IDLE_STEP_ON_REAL_BLOCKS,))
    step = idle_rank._name_no_block(lambda worker: events.append("step"), activity, shape="slots")
    step(SimpleNamespace(model_runner=None))
    assert (events, activity.error) == (["restored", "step"], "RuntimeError: the second buffer")
