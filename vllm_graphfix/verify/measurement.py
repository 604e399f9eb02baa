"""What one scenario measured in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Watch:
    """What the shadow check made of one engine, or of one scenario on the CPU double.

    Every replay in it was checked.
    """

    checks: int
    mismatches: int
    first: int | None = None
    """The check that found the first mismatch."""
    state: str | None = None
    """The check's, in that engine; None of one that has ended in an error."""
    error: str | None = None
    graphs: str = ""
    """Those that were checked on the CPU double, a name of `shadow.runners.RUNNERS`."""
    further: tuple[Watch, ...] = ()
    """The same of graphs of other kinds."""

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
    """The same computation without and with CUDA graphs."""

    numbers: str
    """What the numbers are, in one phrase for the report."""
    eager: tuple[float, ...]
    """The reference: the same inputs, no graph."""
    graphed: tuple[float, ...]
    """Through a captured and replayed graph; empty if that ended in an error."""
    error: str | None = None
    """The graph run's error, first line."""
    details: tuple[str, ...] = ()
    """What else is worth a line in the report."""
    deciding: int | None = None
    """The number of first numbers that have to be wrong on stock to show the defect: the others, or an error, may be
    another defect's doing. None: any of them, or an error, shows it."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """What the fix has to count meanwhile on an affected release, by event, where the scenario knows."""
    events: Mapping[str, int] = field(default_factory=dict)
    """What the fix did count meanwhile, by event; empty where nobody has looked."""

    @property
    def miscounted(self) -> bool:
        """The fix has not counted what it had to, so that its events say nothing of how often the defect is met."""
        return any(self.events.get(event, 0) != number for event, number in self.counted.items())
