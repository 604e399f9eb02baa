"""Inputs of graphs that are freed between capture and replay, by PyTorch's own check (2.13 and later).

`CUDAGraph.capture_begin(check_input_liveness=True)` remembers each tensor that an operation of the capture reads from
elsewhere; a replay raises if one of them is gone. An engine of vLLM must not end in it: what such a graph reads may be
nothing that matters, as memory of padded rows. So the error is caught, its first line counted, and the replay goes on.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_graphfix.log import logger

KEYWORD = "check_input_liveness"
FREED_INPUTS = "graphs with freed inputs"
"""The name of the observation."""
freed: Counter[str] = Counter()
"""Graphs of this process whose inputs were freed before a replay, by what PyTorch says of them."""


def watch_captures() -> bool:
    """Switch the check on for all captures of this process from now on; False where this PyTorch has none."""
    try:
        import torch
        import torch.utils

        kind: Any = torch.cuda.CUDAGraph
        begin = kind.capture_begin
        if KEYWORD not in inspect.signature(begin).parameters or hasattr(begin, "__wrapped__"):
            return False
        kind.capture_begin, kind.replay = _checked(begin), _reported(kind.replay)
        # To name the functions of a C++ backtrace takes milliseconds, for thousands of inputs.
        utils: Any = torch.utils
        utils.get_cpp_backtrace = lambda *_, **__: ""
    except Exception as error:
        logger.warning("graphfix: inputs of graphs are not checked: %s: %s", type(error).__name__, error)
        return False
    return True


def _checked(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        # torch.cuda.graph passes the keyword itself, as False.
        begin(self, *args, **kwargs | {KEYWORD: True})

    return capture_begin


def _reported(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(replay)
    def checked_replay(self: Any) -> None:
        # Hidden from PyTorch's own replay, which would raise.
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.check_alive(self.pool())
            except RuntimeError as error:
                tracker = None  # each further replay would say the same
                if not freed:
                    logger.warning("graphfix: an input of a CUDA graph was freed before its replay: %s", error)
                freed[str(error).partition("\n")[0]] += 1
        replay(self)
        self._tracker = tracker

    return checked_replay
