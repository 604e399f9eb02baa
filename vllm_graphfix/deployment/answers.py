"""Facts about a deployment, each true, false or not known, and the answers that follow from them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Concern(str, Enum):
    """Whether a defect can show in a deployment."""

    CONCERNS = "concerns you"
    DOES_NOT = "does not"
    UNKNOWN = "cannot tell without"


class Answer(NamedTuple):
    """Whether a fix concerns a deployment, and why in one sentence; for `Concern.UNKNOWN`, what is missing."""

    concern: Concern
    reason: str


class Fact(NamedTuple):
    """Something that holds for a deployment, or does not, or is not known."""

    holds: bool | None
    told: str
    """What says so; where it is not known, what would: the end of a sentence that begins with `cannot tell without`."""


def all_of(*facts: Fact) -> Answer:
    """The defect needs each of *facts*."""
    for fact in facts:
        if fact.holds is False:
            return Answer(Concern.DOES_NOT, fact.told)
    missing = list(dict.fromkeys(fact.told for fact in facts if fact.holds is None))
    if missing:
        return Answer(Concern.UNKNOWN, "; and ".join(missing))
    return Answer(Concern.CONCERNS, ", ".join(dict.fromkeys(fact.told for fact in facts)))


def any_of(*facts: Fact) -> Fact:
    """Holds where one of *facts* does."""
    for fact in facts:
        if fact.holds:
            return fact
    missing = [fact.told for fact in facts if fact.holds is None]
    if missing:
        return Fact(None, "; or ".join(dict.fromkeys(missing)))
    return Fact(False, ", ".join(dict.fromkeys(fact.told for fact in facts)))
