"""Parts of docs/looked-at.md and docs/am-i-hit.md, from docs/looked-at.json, for tools/update_docs.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "docs" / "looked-at.json"
COLUMNS = {
    "verdicts": {"candidate": "candidate", "verdict": "verdict", "releases": "stock releases", "answers": "answers"},
    "detectors": {"candidate": "candidate", "shadow": "shadow check", "addresses": "addresses"},
    "starts": {
        "reported": "reported",
        "verdict": "verdict, and cause",
        "releases": "stock releases",
        "avoided": "what avoids it, and its cost",
    },
    "no-fix": {"seen": "what you see", "releases": "stock releases", "only": "only with", "avoided": "what avoids it"},
    "look-alikes": {"seen": "what you see", "apart": "how to tell it apart", "reported": "reported in"},
}
"""By table: the keys of its rows, and the heads of its columns."""
SHOWN = ("Symptom", "Threads", "Which engines", "What you can do", "Why no fix", "Not decided")
"""What the page says of a candidate. Code, and what was run, stay in the data."""


@cache
def _load() -> dict[str, list[dict[str, Any]]]:
    content: dict[str, list[dict[str, Any]]] = json.loads(DATA.read_text())
    return content


def table(name: str) -> Iterator[str]:
    """Yield the table *name* of `COLUMNS`."""
    columns = COLUMNS[name]
    yield f"| {' | '.join(columns.values())} |"
    yield "|---" * len(columns) + "|"
    yield from (f"| {' | '.join(row[key] for key in columns)} |" for row in _load()[name])


def sections() -> Iterator[str]:
    """Yield a heading for each candidate without a page of its own, and what an operator needs of it."""
    for section in _load()["sections"]:
        yield from ("", f"### {section['title']}", "", "| | |", "|---|---|")
        yield from (f"| {key} | {section[key]} |" for key in SHOWN if key in section)
    yield ""
