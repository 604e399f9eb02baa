"""What may go wrong with a step that is run twice: why, in words, and whether it is of the step or of the machine."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

A = TypeVar("A", bound="Attempt")


class UnfitStep(Exception):  # noqa: N818 - no error: the next step may be checked
    """This step cannot be checked."""


class UnsafeError(Exception):
    """No step of this model may run twice; the message says why."""


class StepError(Exception):
    """vLLM's own error in a run of a step that its graph has gone through.

    Graph and attention metadata are of two kinds.
    """


class FailedElsewhereError(Exception):
    """Nothing failed here."""

    def __str__(self) -> str:
        return "it failed on another rank of the same group"


def is_of_the_device(error: Exception) -> bool:
    """Whether an error is of the GPU or of its memory: of the machine, and not of the step."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or is_lost(error)


def is_lost(error: Exception) -> bool:
    """Whether nothing runs on the GPU any more in this process."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


class Attempt:
    """Catch the error of a ``with`` block in `error`, and release the tensors in the frames that it came through."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        clear_traceback(error)
        # Without the block's own frame, which refers to this object: such a cycle would hold the frame's tensors.
        self.error = self.error or error.with_traceback(trace.tb_next if trace is not None else None)
        return True


def clear_traceback(error: BaseException | None) -> None:
    """Release the tensors in the frames that *error* came through.

    On a GPU they would be held until Python looks for cycles.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def description(error: Exception) -> str:
    """*error* on one line of a log; its type too, unless the message stands for itself."""
    text = " ".join(str(error).split())[:300]
    return (
        text if isinstance(error, (UnfitStep, StepError, FailedElsewhereError)) else f"{type(error).__name__}: {text}"
    )
