"""What may go wrong with a step that is run twice: why, in words, and whether it is of the step or of the machine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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


def tried(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What *function* returns, or the error that it raises, whose frames hold no tensor any more."""
    try:
        return function(), None
    except Exception as error:
        let_go(error)
        return None, error


def let_go(error: BaseException | None) -> None:
    """Releases the tensors in the frames that an error has come through.

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
