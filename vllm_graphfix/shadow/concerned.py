"""The requests whose rows a forward pass has: who is to be ended where a replay of it was wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_CALLERS = 60
"""Functions between: the check, the replay, a compiled model's."""


def requests_of_rows(wrong: Sequence[bool]) -> list[str]:
    """The requests of the step that is running of which a row is *wrong*; all of them where *wrong* does not fit.

    *wrong* has an entry for each row that is not padding. Raises LookupError where no step is running.
    """
    step = _step(sys._getframe(1))
    scheduled: dict[str, int] = step["scheduler_output"].num_scheduled_tokens
    batch = step.get("input_batch") or step["self"].input_batch
    names = [name for name in batch.req_ids if name in scheduled]
    if len(names) != len(scheduled) or sum(scheduled.values()) != len(wrong):
        return list(scheduled)
    found, row = [], 0
    for name in names:
        if any(wrong[row : row + scheduled[name]]):
            found.append(name)
        row += scheduled[name]
    return found


def has_requests() -> bool:
    """Whether the step that is running has requests, and is no dummy batch."""
    try:
        _step(sys._getframe(1))
    except LookupError:
        return False
    return True


def _step(frame: FrameType | None) -> Any:
    """The variables of the `execute_model` of a model runner that is being called."""
    for _ in range(_CALLERS):
        if frame is None or (frame.f_code.co_name == "_dummy_run" and frame.f_globals.get("__name__") in _RUNNERS):
            break
        if frame.f_code.co_name == "execute_model" and frame.f_globals.get("__name__") in _RUNNERS:
            found = frame.f_locals
            if "scheduler_output" in found:
                return found
        frame = frame.f_back
    raise LookupError("no step of requests is running")
