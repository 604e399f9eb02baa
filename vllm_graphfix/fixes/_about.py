"""Pages of fixes: the text for people beside each module, from which `explain` and the documentation are made.

A page has lines such as ``Releases: 0.19.0 - 0.21.0``, then a section ``## Field`` for each longer one. ``{newest}``
stands for `NEWEST`, ``{decode}`` for the length of a decode, which drafts make longer.
"""

# No `from __future__ import annotations`: as in `fix.py`, for the named tuple.

import re
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graphfix.fix import Rationale

NEWEST = "0.33.0"
"""The newest recorded stock release. A page of a fix that it needs names ``{newest}`` as the last affected release."""

RESTS_ON: dict[Rationale, str] = {
    "answers": "an engine on a GPU gave wrong answers, or none, and right ones with the fix",
    "memory": "an engine on a GPU wrote to memory that belongs to others, and with the fix did not",
    "upstream": "upstream has merged the same remedy, with a reproduction",
    None: "no engine on a GPU has shown both the defect, in answers or in memory of others, and its remedy, and "
    "upstream has merged no such remedy with a reproduction",
}
"""The reason for which a fix is applied by default, or is not."""


class About(NamedTuple):
    """One fix, for people: plain text. In `seen`, `first_test`, `in_caches` and `how_sure` code is in backticks."""

    pr: int | None
    """Upstream's pull request with the remedy."""
    references: tuple[str, ...]
    """Other upstream references, such as ``issue 56551``."""
    summary: str
    """The effect of the fix, as a clause without a full stop."""
    releases: str
    """Affected stock releases, ``first - last`` with remarks; a diagnosis never reads it."""
    seen: str
    """The symptom for an operator in few words, by which the fix is searched for."""
    first_test: str
    """The quickest test for the defect, in few words."""
    symptom: str
    cause: str
    remedy: str
    """The correction."""
    detect: str
    """The way to detect that a deployment is hit."""
    workaround: str
    """A workaround without the plugin."""
    removable: str
    """The first release that does not need the fix."""
    in_caches: str
    """Possible damage in a KV cache that outlives the engine."""
    how_sure: str
    """The evidence for the record."""
    ran_on: str = ""
    """The GPUs on which engines ran with the fix, by name; empty if no GPU has run it."""
    absent: str = ""
    """Stock releases without the component, as in `releases`."""
    already_right: str = ""
    """The effect where a fork, a subclass or another plugin has its own remedy, and the reason why it is harmless."""


_FIELD = re.compile(
    r"^(?:## (?P<section>[A-Z][\w ]*)\n+|(?P<line>Summary|PR|References|Releases|Absent|Removable|Ran on): )",
    re.MULTILINE,
)


def read_about(page: Path, decode: str) -> About:
    """Parse *page*; *decode* is the length of a decode, such as ``one token``.

    Raises ValueError that names the page and the wrong field, OSError.
    """
    text = page.read_text(encoding="utf-8").replace("{newest}", NEWEST).replace("{decode}", decode)
    title, _, rest = text.partition("\n\n")
    fields: dict[str, Any] = {}
    starts = list(_FIELD.finditer(rest))
    for start, end in zip(starts, [*(each.start() for each in starts[1:]), len(rest)], strict=True):
        name = (start["section"] or start["line"]).lower().replace(" ", "_")
        if name not in About._fields or name in fields:
            raise ValueError(f"{page.name}: {name!r} is {'there twice' if name in fields else 'no field of a fix'}")
        fields[name] = " ".join(rest[start.end() : end].split())
    try:
        number = fields.pop("pr", None)
        fields["references"] = tuple(filter(None, fields.get("references", "").split(", ")))
        return About(pr=None if number is None else int(number), **fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{page.name} ({title.strip()}): {error}") from error
