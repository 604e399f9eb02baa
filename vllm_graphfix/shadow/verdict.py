"""What checks have found in this process: for the log, the records and the report of a mismatch."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

TARGET = "target model"
"""How the name of a graph begins that is no drafter's."""
_KEPT = 50
"""Mismatches that are told one by one, the first ones; the others are counted."""
_ROWS = 64
"""Rows of a mismatch whose errors are told."""
_STEPS = 64
"""Steps that are remembered."""
_SOUGHT = 2
"""Checks of a wrong graph in which its first wrong layer is sought."""


class Graph(NamedTuple):
    """A graph, for people."""

    name: str
    """The name of the model and the descriptor: ``target model, BatchDescriptor(num_tokens=8, …)``."""
    padded_rows: int
    backends: tuple[str, ...]
    """Classes of the attention metadata."""
    adapters: bool = False
    """Whether kernels of LoRA adapters may run in it."""


class Mismatch(NamedTuple):
    """A replay whose output was not that of two eager runs of the same step."""

    graph: Graph
    rows: int
    """The number of rows that are not padding."""
    errors: tuple[float, ...]
    """The relative error of each real row; empty where another rank of the group found it."""
    noise: float
    """The largest error of eager runs among themselves, in this step or, fading, in steps of its graph before; 0 where
    this step's are equal."""
    first_layer: str | None
    """The first layer whose cache the replay and an eager run have written differently; None until the second mismatch
    of a graph."""
    check: int
    """The number of the check in this process."""
    at: float
    """Seconds since the epoch."""
    here: bool
    """Whether this rank found it."""
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
        """Steps that were due and of which nothing is said: for want of memory, or because two runs without the graph
        differ by much."""
        self.steps: deque[int] = deque(maxlen=_STEPS)
        """The steps that were due last: in a pipeline the same on all stages."""
        self.mismatches = 0
        self.seconds = 0.0
        """The seconds that checks took, their replays included."""
        self.noise = 0.0
        """The largest error of runs of one step among themselves so far, of any graph."""
        self.kept: list[Mismatch] = []
        self.quarantined: list[Graph] = []
        self.given_up = 0
        """The number of quarantined graphs that are replayed again, since their steps cannot be run without."""
        self.changed_inputs: set[str] = set()
        """Input buffers that eager runs were seen to change; they were put back."""

    def to_report(self, most: int) -> list[Mismatch]:
        """The first of each graph that this rank has found, with the layer that a later one has told."""
        found: dict[Graph, Mismatch] = {}
        for each in self.kept:
            if each.here:
                first = found.setdefault(each.graph, each)
                found[each.graph] = first._replace(first_layer=first.first_layer or each.first_layer)
        return list(found.values())[:most]

    def add(self, mismatch: Mismatch) -> None:
        self.mismatches += 1
        if len(self.kept) < _KEPT:
            self.kept.append(mismatch._replace(errors=mismatch.errors[:_ROWS]))


class GraphHistory:
    """What the checks of one graph have found so far."""

    def __init__(self) -> None:
        self.checks = self.mismatches = 0
        self.noise = 0.0
        """The largest error of runs of one step among themselves, fading from check to check."""
        self.graph: Graph | None = None
        """Where it was found wrong."""
        self.failed = 0
        """Steps in quarantine that could not be run without it, since one that could."""
        self.layer: str | None = None
        """Where it goes wrong first."""
        self.sought = 0
        """Checks in which that layer was sought, with copies of all caches."""
        self.left_out = 0
        """Steps that were due and left out, since the last check: too noisy, or unfit."""

    @property
    def wants_layer(self) -> bool:
        return bool(self.mismatches) and self.layer is None and self.sought < _SOUGHT
