"""Measurement of one scenario in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Watch:
    """Verdict of the shadow check on one engine, or on one scenario on the CPU double, with every replay checked."""

    checks: int
    mismatches: int
    first: int | None = None
    """Number of the check with the first mismatch."""
    state: str | None = None
    """State of the shadow check in that engine; None if the engine failed."""
    error: str | None = None
    graphs: str = ""
    """Kind of graphs that were checked on the CPU double, a name of `shadow.runners.RUNNERS`."""
    further: tuple[Watch, ...] = ()
    """Verdicts on graphs of other kinds."""

    @property
    def sentence(self) -> str:
        if self.error:
            return f"the engine ended in {self.error}"
        if not self.checks:
            return f"nothing was checked ({self.state or 'state unknown'})"
        if not self.mismatches:
            return f"no replay of {self.checks} was found wrong"
        return f"{self.mismatches} of {self.checks} replays were found wrong, the first one in check {self.first}"


@dataclass(frozen=True)
class Measurement:
    """Numbers of the same computation without and with CUDA graphs."""

    numbers: str
    """Description of the numbers, in one phrase for the report."""
    eager: tuple[float, ...]
    """Reference: the same inputs without a graph."""
    graphed: tuple[float, ...]
    """Results of a captured and replayed graph; empty if that failed."""
    error: str | None = None
    """First line of the graph run's error."""
    details: tuple[str, ...] = ()
    """Further lines for the report."""
    deciding: int | None = None
    """Count of leading numbers that show the defect if one of them is wrong on stock; the others, or an error, may come
    from another defect. None: any number, or an error, shows it."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Counts, by event, that the scenario expects of the fix on an affected release; empty if it expects none."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Counts of the fix, by event; empty if they were not read."""

    @property
    def miscounted(self) -> bool:
        """True if a count is not the expected one: the fix's events then do not tell how often the defect occurs."""
        return any(self.events.get(event, 0) != number for event, number in self.counted.items())
