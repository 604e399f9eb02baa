"""Where a defect shows in something else than tokens: what a case makes of what its probes have seen in an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Observed = Mapping[str, Sequence[float]]
"""By probe; one that has seen nothing may be missing, as where the engine crashed before."""


class Sign(NamedTuple):
    """What the probes saw in one engine with graphs, and what they should have seen."""

    numbers: str
    """What the numbers are, in one phrase for the report."""
    right: tuple[float, ...]
    """What they should be. On stock the defect shows only where they are others, or where the engine crashed before
    they could be."""
    found: tuple[float, ...]
    told: str = ""
    """The same for people, in a line; nothing where nothing was seen."""
    unseen: str | None = None
    """What should have been seen in an engine that came to its end, and was not: then nothing is proven."""
    hangs: bool = False
    """Whether what was seen makes an engine hang: one that was ended from outside has shown the defect then."""


Judge = Callable[[Observed], Sign]
