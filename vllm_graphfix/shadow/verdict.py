"""The findings of the checks in this process, for the log, the records and the report of a mismatch."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

TARGET = "target model"
"""The start of the name of a graph that is no drafter's."""
_MAX_MISMATCHES = 50
"""Mismatches that are stored, the first ones; later ones are only counted."""
_MAX_ROWS = 64
"""Rows of a stored mismatch."""
_MAX_STEPS = 64
_MAX_SEARCHES = 2
"""Checks of a wrong graph that search for its first wrong layer."""


class Graph(NamedTuple):
    """A graph, as people see it."""

    name: str
    """Model and descriptor: ``target model, BatchDescriptor(num_tokens=8, …)``."""
    rows: int
    """All rows, padding included: `num_tokens` of its descriptor, of a drafter's graph the requests."""
    backends: tuple[str, ...]
    """Classes of the attention metadata."""
    adapters: bool = False
    """True if kernels of LoRA adapters may run in it."""


class Mismatch(NamedTuple):
    """A replay whose output differed from two eager runs of the same step."""

    graph: Graph
    rows: int
    """The number of rows that are not padding."""
    errors: tuple[float, ...]
    """The relative error of each real row; empty if another rank of the group found the mismatch."""
    noise: float
    """The largest error of eager runs among themselves, in this step or, decaying, in earlier steps of its graph; 0 if
    this step's runs are equal."""
    first_layer: str | None
    """The first layer whose cache the replay and an eager run wrote differently; None until the second mismatch of a
    graph."""
    check: int
    """The number of the check in this process."""
    at: float
    """Seconds since the epoch."""
    here: bool
    """True if this rank found it."""
    failure: str | None = None
    """vLLM's own error in both runs without the graph."""

    @property
    def worst(self) -> float:
        return max(self.errors, default=0.0)

    def sentence(self) -> str:
        if not self.here:
            return f"another rank found that a replay of {self.graph.name} differs from the same step without a graph"
        if self.failure is not None:
            return (
                f"a CUDA graph was replayed for a step that cannot run without it: {self.graph.name}; two such runs "
                f"ended in {self.failure}. Attention: {', '.join(self.graph.backends) or 'unknown'}"
            )
        wrong = sum(error > 0 for error in self.errors)
        return (
            f"a replayed CUDA graph was wrong: {self.graph.name}; {wrong} of {self.rows} rows differ from two runs of "
            f"the same step without it, by up to {self.worst:.3g} of their largest value (runs without it differ by "
            f"{self.noise:.3g} from each other). Attention: {', '.join(self.graph.backends) or 'unknown'}"
        )


class Results:
    """Counts that only grow, and the first mismatches."""

    def __init__(self) -> None:
        self.checks = 0
        self.skipped = 0
        """Steps that were due and were not judged: no memory, or two runs without the graph differ by much."""
        self.steps: deque[int] = deque(maxlen=_MAX_STEPS)
        """The latest steps that were due; in a pipeline the same on all stages."""
        self.mismatches = 0
        self.seconds = 0.0
        """Duration of all checks, their replays included."""
        self.noise = 0.0
        """The largest error of eager runs of one step among themselves so far, of any graph."""
        self.first_mismatches: list[Mismatch] = []
        self.rounding = 0.0
        """The largest error of a replay that was right: noise, adapters, or a launch as captured explain it."""
        self.as_captured = 0.0
        """The largest error of a replay that equals, to the last bit, a run whose kernels split their work by the upper
        bounds that the capture has passed."""
        self.quarantined: list[Graph] = []
        self.quarantines_ended = 0
        """Graphs in quarantine that are replayed again, since their steps cannot run without them."""
        self.changed_inputs: set[str] = set()
        """Input buffers that eager runs changed; they were restored."""

    def to_report(self, most: int) -> list[Mismatch]:
        """Return the first mismatch of each graph that this rank found, at most *most*, with the layer once known."""
        by_graph: dict[Graph, Mismatch] = {}
        for each in self.first_mismatches:
            if each.here:
                first = by_graph.setdefault(each.graph, each)
                by_graph[each.graph] = first._replace(first_layer=first.first_layer or each.first_layer)
        return list(by_graph.values())[:most]

    def add(self, mismatch: Mismatch) -> None:
        self.mismatches += 1
        if len(self.first_mismatches) < _MAX_MISMATCHES:
            self.first_mismatches.append(mismatch._replace(errors=mismatch.errors[:_MAX_ROWS]))


class GraphHistory:
    """The checks of one graph so far."""

    def __init__(self) -> None:
        self.checks = self.mismatches = 0
        self.noise = 0.0
        """The largest error of eager runs of one step among themselves, decaying from check to check."""
        self.graph: Graph | None = None
        """The graph, once it was wrong."""
        self.quarantine_failures = 0
        """Steps in quarantine that could not run without the graph, since one that could."""
        self.first_layer: str | None = None
        """The first layer that goes wrong."""
        self.layer_searches = 0
        """Checks that searched for that layer, with copies of all caches."""
        self.skipped_in_a_row = 0
        """Steps that were due and were skipped since the last check: too noisy, or not checkable."""

    @property
    def wants_layer(self) -> bool:
        return bool(self.mismatches) and self.first_layer is None and self.layer_searches < _MAX_SEARCHES
