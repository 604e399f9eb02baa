"""Memory and objects that a call leaves behind.

It is measured by tracemalloc, by Python's own count of blocks and by its garbage collector's count of objects.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import vllm_graphfix
from vllm_graphfix.fix import Activity

WARM_UP = 0.05
"""So many calls more, as a share, and no fewer than 70 or all, before anything is measured: caches and free lists
fill."""


class Growth(NamedTuple):
    """Memory and objects that were not there before all calls, and are after."""

    ours: int
    """Bytes that lines of the package and of these files have allocated."""
    blocks: int
    """Blocks of up to 512 bytes, whoever has them."""
    objects: int
    garbage: int
    """Objects in cycles, which nothing but Python's collector finds; it is kept from it meanwhile."""


def growth_by(call: Callable[[], object], calls: int, after_warm_up: Callable[[], object] = lambda: None) -> Growth:
    """Return the growth by so many *calls*."""
    package, cases = str(Path(vllm_graphfix.__file__).parent / "*"), str(Path(__file__).with_name("endurance_*.py"))
    filters = [tracemalloc.Filter(inclusive=True, filename_pattern=pattern) for pattern in (package, cases)]

    def traced() -> int:
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(filters).traces)

    def counted_objects() -> int:
        return len(gc.get_objects()) + gc.get_freeze_count()

    tracemalloc.start()
    try:
        for _ in itertools.repeat(None, max(min(70, calls), round(WARM_UP * calls))):
            call()
        after_warm_up()
        traced()
        gc.freeze()  # what is there already is none of it, and takes the collector a second
        gc.disable()
        gc.collect()  # and empties the free lists
        ours = traced()
        blocks, objects = sys.getallocatedblocks(), counted_objects()
        for _ in itertools.repeat(None, calls):
            call()
        garbage = gc.collect()
        objects, blocks = counted_objects() - objects, sys.getallocatedblocks() - blocks
        return Growth(traced() - ours, blocks, objects, garbage)
    finally:
        gc.enable()
        gc.unfreeze()
        tracemalloc.stop()


class Case(NamedTuple):
    call: Callable[[], object]
    counted: tuple[str, ...] = ()
    """Events that each call has to count, and no other."""
    failing: str | None = None
    """The fix that has an error of its own at each call."""
    activities: Mapping[str, Activity] = {}
    """What the fixes that are called do, by their names."""
