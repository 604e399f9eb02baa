"""The GPU memory that a run without a graph takes, measured before the graph was captured, and whether as much is free.

vLLM runs each batch size without a graph just before it captures it: the peak of what torch has allocated then, less
what was allocated before, is what such a run takes. When vLLM measures how large its cache may be, it reads the same
peak; no run is measured there (V1: such runs have no attention metadata; V2: it has been read when graphs are captured
for a trial).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

RESERVE = 512 << 20
"""Bytes that are left free beside what was measured: for the comparison, copies of outputs, and pieces of free memory
that are too small."""

T = TypeVar("T")


class Memory:
    """What is known, in one process, of the memory that runs without a graph need."""

    def __init__(self) -> None:
        self.measuring = True
        """Graphs may still be captured."""
        self.needs: dict[tuple[object, object], int] = {}
        """Bytes, by what keeps the graphs, an id, and the number of tokens."""
        self._in_graphs: int | None = None

    def measured(self, owner: object, tokens: object, run: Callable[[], T]) -> T:
        """The result of *run*, a warm-up of *tokens* tokens for the graphs of *owner*, an id.

        The memory that it needs is remembered.
        """
        begun = self.begin()
        output = run()
        self.finish(owner, tokens, begun)
        return output

    def begin(self) -> int | None:
        """Bytes that are allocated before a run; None where nothing can be measured."""
        with suppress(Exception):
            return _peak_from_here()
        return None

    def finish(self, owner: object, tokens: object, begun: int | None) -> None:
        if begun is not None:
            with suppress(Exception):
                self.needs[owner, tokens] = max(self.needs.get((owner, tokens), 0), _peak() - begun)

    def lacks(self, copies: int, owner: object, tokens: object, *, must_know: bool) -> str | None:
        """Why there is no room for a further run; None if there is.

        The room is for *copies* bytes and a run without the graph of *tokens* tokens of *owner*. *must_know*: other
        ranks depend on it, so that a run of which it is not known what it takes must not be tried.
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
        """What the device and the allocator have left; None without a GPU.

        Memory of graphs is not free, though torch counts it as unused.
        """
        if self._in_graphs is None:  # it does not change after the last capture
            self._in_graphs = _unused_in_graphs()
        free, unused = _free_and_unused()
        return None if free is None else free + max(0, unused - self._in_graphs)


def _gpu() -> Any:
    """torch.cuda, where this process uses it."""
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _peak_from_here() -> int | None:
    """Bytes that are allocated, from which on torch measures a new peak."""
    gpu = _gpu()
    if gpu is None or gpu.is_current_stream_capturing():
        return None
    gpu.reset_peak_memory_stats()
    return int(gpu.memory_allocated())


def _peak() -> int:
    return int(_gpu().max_memory_allocated())


def _free_and_unused() -> tuple[int | None, int]:
    """Bytes that the device has free, and that torch's allocator keeps without using them."""
    gpu = _gpu()
    if gpu is None:
        return None, 0
    return int(gpu.mem_get_info()[0]), int(gpu.memory_reserved() - gpu.memory_allocated())


def _unused_in_graphs() -> int:
    """Bytes that the allocator keeps for the replays of graphs alone, in pools of their own."""
    gpu = _gpu()
    if gpu is None:
        return 0
    segments = [each for each in gpu.memory_snapshot() if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(int(each["total_size"] - each["allocated_size"]) for each in segments)
