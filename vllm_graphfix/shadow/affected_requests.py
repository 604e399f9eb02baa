"""The requests whose rows are in the running forward pass: those to end if a replay of it was wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_MAX_FRAMES = 60
"""Frames between a check and `execute_model`: the replay's, and a compiled model's."""


def requests_of_rows(wrong: Sequence[bool]) -> list[str]:
    """Return the requests of the running step that have a *wrong* row; all of them if *wrong* has another length.

    *wrong*: (rows,), without padding. Raises LookupError if no step of requests is running.
    """
    step = _execute_model_variables(sys._getframe(1))
    scheduled: dict[str, int] = step["scheduler_output"].num_scheduled_tokens
    batch = step.get("input_batch") or step["self"].input_batch
    names = [name for name in batch.req_ids if name in scheduled]
    if len(names) != len(scheduled) or sum(scheduled.values()) != len(wrong):
        return list(scheduled)
    affected, row = [], 0
    for name in names:
        if any(wrong[row : row + scheduled[name]]):
            affected.append(name)
        row += scheduled[name]
    return affected


def has_requests() -> bool:
    """Tell a running step of requests from a dummy batch."""
    try:
        _execute_model_variables(sys._getframe(1))
    except LookupError:
        return False
    return True


def _execute_model_variables(frame: FrameType | None) -> Any:
    """Return the variables of the model runner's `execute_model` that *frame* was called from."""
    for _ in range(_MAX_FRAMES):
        if frame is None or (frame.f_code.co_name == "_dummy_run" and frame.f_globals.get("__name__") in _RUNNERS):
            break
        if frame.f_code.co_name == "execute_model" and frame.f_globals.get("__name__") in _RUNNERS:
            variables = frame.f_locals
            if "scheduler_output" in variables:
                return variables
        frame = frame.f_back
    raise LookupError("no step of requests is running")
