"""What people read of a fix: `explain`, its page, and the tables of the other pages are made of it."""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

from typing import NamedTuple

from vllm_graphfix.fix import Ground

NEWEST = "0.33.0"
"""The newest stock release that was looked at. The record of a fix that it needs goes up to this, not to its number."""

RESTS_ON: dict[Ground, str] = {
    "answers": "an engine on a GPU gave wrong answers, or none, and right ones with the fix",
    "memory": "an engine on a GPU wrote to memory that belongs to others, and with the fix did not",
    "upstream": "upstream has merged the same remedy, with a reproduction",
    None: "no engine on a GPU has shown both the defect, in answers or in memory of others, and its remedy, and "
    "upstream has merged no such remedy",
}
"""Why a fix is applied by default, or is not."""


class About(NamedTuple):
    """One fix, for people: plain text. In `seen`, `first_test`, `in_caches` and `how_sure` code is in backticks."""

    pr: int | None
    """Upstream's pull request with the remedy."""
    references: tuple[str, ...]
    """What else upstream knows it by, such as ``issue 56551``."""
    summary: str
    """What the fix does, as a clause without a full stop."""
    releases: str
    """Affected stock releases, ``first - last`` and what else there is to say; a diagnosis never reads it."""
    seen: str
    """What an operator sees of the defect, in few words: how somebody finds the fix who only knows that."""
    first_test: str
    """The quickest way to tell, in few words."""
    symptom: str
    cause: str
    remedy: str
    """What the fix does about it."""
    detect: str
    """How to tell that a deployment is hit."""
    workaround: str
    """Without the plugin."""
    removable: str
    """From which release on the fix is not needed."""
    in_caches: str
    """What the defect may have left in a KV cache that outlives the engine."""
    how_sure: str
    """How that is known."""
    absent: str = ""
    """Stock releases without the component, as in `releases`."""
