"""How often a replay is checked, as the user writes it.

It is a fraction of the replays, or a budget of the time that they take.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple, Protocol

OFF = "off"
VALID = "off, a fraction such as 1/2000, a budget such as 0.1%"
VALID_FRACTION = "off, a fraction such as 1/16"
_MOST = 10**9
NEVER = 1 << 62
"""A count of steps that no process comes to."""


class Action(str, Enum):
    """What follows from mismatches that were confirmed."""

    REPORT = "report"
    QUARANTINE = "quarantine"
    """After two of one graph it is replayed no more, and its steps run without it."""
    ABORT = "abort"
    """Requests of which a row was wrong end with an error, and their blocks leave the prefix cache."""


class MarksAction(str, Enum):
    """What follows where a finished cache block has changed."""

    REPORT = "report"
    ABORT = "abort"
    """Requests that have it end with an error, and their blocks leave the prefix cache."""


class Abort(Protocol):
    """Has requests ended, and blocks taken out of the prefix cache; of the two actions of that name."""

    def why_not(self) -> str | None:
        """Why that cannot be done; to be asked once steps run."""

    def tell(self, requests: Collection[str], blocks: Collection[int], why: str) -> None: ...


class Rate(NamedTuple):
    """One of the two is set; neither where nothing is checked."""

    every: int | None = None
    """Replays for each one that is checked."""
    share: float | None = None
    """The largest part of the time of all steps that the checks may take: 0.001 is 0.1 %."""

    def __bool__(self) -> bool:
        return self != (None, None)


def parse(text: str) -> Rate:
    """The rate that `off`, `1/2000` or `0.1%` is. Raises ValueError with what is wrong."""
    word = text.strip().lower()
    if word in ("", OFF, "0", "false", "no"):
        return Rate()
    if fraction := re.fullmatch(r"1 ?/ ?([0-9]{1,10})", word):
        every = int(fraction[1])
        if not 0 < every <= _MOST:
            raise ValueError(f"is not 1/1 to 1/{_MOST}")
        return Rate(every=every)
    if budget := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", word):
        share = float(budget[1]) / 100
        if not 0 < share <= 1:
            raise ValueError("is not more than 0 % and at most 100 %")
        return Rate(share=share)
    raise ValueError("means nothing")


def normal(text: str) -> str:
    """*text*, a rate that `parse` knows, as all ranks of an engine tell it to each other.

    Examples: ``off``, ``1/2000``, ``0.1%``.
    """
    rate = parse(text)
    if rate.every:
        return f"1/{rate.every}"
    return f"{round(100 * rate.share, 8):.8f}".rstrip("0").rstrip(".") + "%" if rate.share else OFF


def normal_fraction(text: str) -> str:
    """*text*, ``off`` or a fraction, in one spelling. Raises ValueError with what is wrong, as of a budget."""
    if parse(text).share is not None:
        raise ValueError("is not a fraction")
    return normal(text)
