"""Verdict of a case on what its probes observed, for defects that show in something else than tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Observed = Mapping[str, Sequence[float]]
"""Numbers by probe. A probe that has observed nothing may be missing, as in an engine that crashed first."""


class ProbeVerdict(NamedTuple):
    """Numbers that the probes observed in one engine with graphs, and the right ones."""

    numbers: str
    """Description of the numbers, in one phrase for the report."""
    right: tuple[float, ...]
    """The right numbers. On stock the defect shows only if others were observed, or if the engine crashed before."""
    observed: tuple[float, ...]
    summary: str = ""
    """The observed numbers in a line for people; empty if nothing was observed."""
    unseen: str | None = None
    """Event that the probes should have observed in an engine that finished, and did not: nothing is proven then."""
    hangs: bool = False
    """True if what was observed makes an engine hang: one that was killed at its time limit then shows the defect."""


Judge = Callable[[Observed], ProbeVerdict]


def none_may_be(probe: str, numbers: str, summary: str, unseen: str) -> Judge:
    """Judge by *probe*, which counts the wrong ones and all of them: none may be wrong.

    *summary* is formatted with `wrong` and `all`; *unseen* says that there were none at all.
    """

    def judge(observed: Observed) -> ProbeVerdict:
        wrong, of = observed.get(probe, (0.0, 0.0))
        line = summary.format(wrong=f"{wrong:.0f}", all=f"{of:.0f}")
        return ProbeVerdict(numbers, right=(0.0,), observed=(wrong,), summary=line, unseen=None if of else unseen)

    return judge
