"""Facts about a deployment, each true, false or not known, and the answers that follow from them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Concern(str, Enum):
    """The possible answers to the question if a defect can show in a deployment."""

    CONCERNS = "concerns you"
    DOES_NOT = "does not"
    UNKNOWN = "cannot tell without"


class Answer(NamedTuple):
    """One answer, with its reason in one sentence; for `Concern.UNKNOWN` the reason names what is missing."""

    concern: Concern
    reason: str
    undecided: tuple[str, ...] = ()
    """For `Concern.UNKNOWN` the preconditions that are not known, as clauses; for `Concern.DOES_NOT` those that are not
    met, as nouns."""
    missing: tuple[str, ...] = ()
    """For `Concern.UNKNOWN` the items of `reason`."""


class Fact(NamedTuple):
    """A property of a deployment: true, false, or None where it is not known."""

    holds: bool | None
    source: str
    """The flag or file that decides it. Where it is not known, the information that would decide it; this completes a
    sentence that begins with `cannot tell without`."""


def all_of(*facts: Fact) -> Answer:
    """Answer for a defect that needs all of *facts*."""
    for fact in facts:
        if fact.holds is False:
            return Answer(Concern.DOES_NOT, fact.source)
    missing = list(dict.fromkeys(fact.source for fact in facts if fact.holds is None))
    if missing:
        return Answer(Concern.UNKNOWN, "; and ".join(missing), missing=tuple(missing))
    return Answer(Concern.CONCERNS, ", ".join(dict.fromkeys(fact.source for fact in facts)))


def any_of(*facts: Fact) -> Fact:
    """Combine *facts* into one that holds if any of them does."""
    for fact in facts:
        if fact.holds:
            return fact
    missing = [fact.source for fact in facts if fact.holds is None]
    if missing:
        return Fact(None, "; or ".join(dict.fromkeys(missing)))
    return Fact(False, ", ".join(dict.fromkeys(fact.source for fact in facts)))
