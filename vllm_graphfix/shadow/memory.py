"""The GPU memory that a run without a graph needs, measured before its graph is captured, and the free memory.

vLLM runs each batch size without a graph just before it captures it: the peak of torch's allocations during that run,
less those before, is what such a run needs. Runs by which vLLM measures how large its cache may be read the same peak,
and must not be measured here (V1: such runs have no attention metadata; V2: the peak has been read when graphs are
captured for a trial).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

RESERVE = 512 << 20
"""Bytes that stay free beside what was measured: for the comparison, copies of outputs, and fragments."""

T = TypeVar("T")


class Memory:
    """The measurements of one process."""

    def __init__(self) -> None:
        self.measuring = True
        """Graphs may still be captured."""
        self.needs: dict[tuple[object, object], int] = {}
        """Bytes, by owner of the graphs (an id) and number of tokens."""
        self._in_graphs: int | None = None
        """Bytes in the pools of graphs that no graph uses at the moment; None until they are needed."""

    def end_capture(self) -> None:
        """Measure no more; called after each capture of graphs that serve, which changes their pools."""
        self.measuring, self._in_graphs = False, None

    def measured(self, owner: object, tokens: object, run: Callable[[], T]) -> T:
        """Return the result of *run*, a warm-up of *tokens* tokens for the graphs of *owner*, and record its need."""
        before = self.begin()
        output = run()
        self.finish(owner, tokens, before)
        return output

    def begin(self) -> int | None:
        """Return the bytes allocated before a run; None where nothing can be measured."""
        # vLLM is about to capture: a measurement must not end that.
        with suppress(Exception):
            return _reset_peak()
        return None

    def finish(self, owner: object, tokens: object, before: int | None) -> None:
        if before is not None:
            with suppress(Exception):
                self.needs[owner, tokens] = max(self.needs.get((owner, tokens), 0), _peak() - before)

    def shortage(self, copies: int, owner: object, tokens: object, *, must_know: bool) -> str | None:
        """Return why there is no room for *copies* bytes and a run without a graph; None if there is.

        The run has *tokens* tokens, and *owner* has its graphs. *must_know*: other ranks depend on it, so that a run
        that was not measured must not be tried.
        """
        free = self._free()
        if free is None:
            return None
        if copies > free // 4:
            return f"copies of its inputs and recurrent state need {copies >> 20} MiB, which are not free"
        need = self.needs.get((owner, tokens))
        if need is None:
            return "what a run without its graph takes was not measured when it was captured" if must_know else None
        if copies + need + RESERVE <= free:
            return None
        return (
            f"a run without its graph takes {need >> 20} MiB, copies {copies >> 20} and the reserve {RESERVE >> 20}, "
            f"and {free >> 20} MiB are free"
        )

    def _free(self) -> int | None:
        """Return the free bytes of the device and of torch's allocator; None without a GPU.

        The pools of graphs are not free, though torch counts what no graph uses at the moment as unused.
        """
        if self._in_graphs is None:  # the same from one capture to the next
            self._in_graphs = _unused_in_graphs()
        free, unused = _free_and_unused()
        return None if free is None else free + max(0, unused - self._in_graphs)


def _gpu() -> Any:
    """Return torch.cuda, if this process uses it."""
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _reset_peak() -> int | None:
    """Return the bytes allocated now, from which torch measures a new peak; None where it must not be reset."""
    gpu = _gpu()
    if gpu is None or gpu.is_current_stream_capturing():
        return None
    gpu.reset_peak_memory_stats()
    return int(gpu.memory_allocated())


def _peak() -> int:
    return int(_gpu().max_memory_allocated())


def _free_and_unused() -> tuple[int | None, int]:
    """Return the bytes that the device has free, and those that torch's allocator holds unused."""
    gpu = _gpu()
    if gpu is None:
        return None, 0
    return int(gpu.mem_get_info()[0]), int(gpu.memory_reserved() - gpu.memory_allocated())


def _unused_in_graphs() -> int:
    """Return the bytes that the allocator holds in the pools of graphs, for their replays alone."""
    gpu = _gpu()
    if gpu is None:
        return 0
    segments = [each for each in gpu.memory_snapshot() if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(int(each["total_size"] - each["allocated_size"]) for each in segments)
