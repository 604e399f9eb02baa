"""Errors of a step that runs twice, and their description for the log."""

from __future__ import annotations

import traceback
from types import TracebackType

from typing_extensions import Self


class StepNotCheckable(Exception):  # noqa: N818 - no error: the next step may be checked
    """This step cannot be checked; the message says why."""


class UnsafeError(Exception):
    """No step of this model may run twice; the message says why."""


class StepError(Exception):
    """vLLM's own error in a run without a graph: the step's metadata do not fit the graph that was replayed."""


class FailedElsewhereError(Exception):
    """Another rank of the group failed."""

    def __str__(self) -> str:
        return "it failed on another rank of the same group"


def is_device_error(error: Exception) -> bool:
    """Tell an error of the GPU or of its memory from one of the step."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or is_gpu_lost(error)


def is_gpu_lost(error: Exception) -> bool:
    """Tell whether *error* leaves the CUDA context of this process unusable."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


class Attempt:
    """Catch the error of a ``with`` block, and release the tensors in the frames that it came through.

    `error` is the first one; one that was set before stays.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        clear_traceback(error)
        # Drop the block's own frame: it refers to this object, and the cycle would hold the frame's tensors.
        self.error = self.error or error.with_traceback(trace.tb_next if trace is not None else None)
        return True


def clear_traceback(error: BaseException | None) -> None:
    """Release the tensors in the frames that *error* came through.

    Otherwise they occupy GPU memory until Python collects cycles.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def description(error: Exception) -> str:
    """Format *error* in one line of a log; with its type, unless the message stands for itself."""
    text = " ".join(str(error).split())[:300]
    speaks_for_itself = isinstance(error, (StepNotCheckable, StepError, FailedElsewhereError))
    return text if speaks_for_itself else f"{type(error).__name__}: {text}"
