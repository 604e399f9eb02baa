"""The rate of checks: a fraction of the replays, or a budget, as a share of the time of all steps."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple, Protocol

OFF = "off"
VALID = "off, a fraction such as 1/2000, a budget such as 0.1%, and an action behind a comma: 0.1%,abort"
VALID_FRACTION = "off, a fraction such as 1/16, and an action behind a comma: 1/16,abort"
_MOST = 10**9
NEVER = 1 << 62
"""A number of steps that no process reaches."""


class Action(str, Enum):
    """The response to confirmed mismatches."""

    REPORT = "report"
    QUARANTINE = "quarantine"
    """After two mismatches of one graph, run its steps without it."""
    ABORT = "abort"
    """End requests that had a wrong row with an error, and remove their blocks from the prefix cache."""


class ShadowGraphs(str, Enum):
    """The graphs whose replays are checked."""

    FULL = "full"
    ALL = "all"
    """Piecewise and breakable ones of mixed batches, too."""


class MarksAction(str, Enum):
    """The response to a finished cache block that has changed."""

    REPORT = "report"
    ABORT = "abort"
    """End requests that have the block with an error, and remove their blocks from the prefix cache."""


class Abort(Protocol):
    """Ends requests and removes blocks from the prefix cache, for both actions named `abort`."""

    def why_not(self) -> str | None:
        """Return the reason why this engine cannot abort, None if it can; known only once steps run."""

    def deliver(self, requests: Collection[str], blocks: Collection[int], why: str) -> None: ...


class Rate(NamedTuple):
    """A rate in one of its two forms; with neither, nothing is checked."""

    every: int | None = None
    """Check one replay of this many."""
    share: float | None = None
    """Largest share of the time of all steps that checks may take: 0.001 is 0.1 %."""

    def __bool__(self) -> bool:
        return self != (None, None)


def parse(text: str) -> Rate:
    """Parse ``off``, ``1/2000`` or ``0.1%``; raise ValueError, whose message follows the value."""
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
    """Return the one spelling of a rate, which ranks compare: ``off``, ``1/2000``, ``0.1%``. Raises as `parse`."""
    rate = parse(text)
    if rate.every:
        return f"1/{rate.every}"
    return f"{round(100 * rate.share, 8):.8f}".rstrip("0").rstrip(".") + "%" if rate.share else OFF


def normal_fraction(text: str) -> str:
    """Return the one spelling of ``off`` or a fraction; raise ValueError for a budget, and as `parse`."""
    if parse(text).share is not None:
        raise ValueError("is not a fraction")
    return normal(text)
