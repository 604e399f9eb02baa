"""Each release that the last version patched is patched still, or the changelog says so."""

from __future__ import annotations

import json
from pathlib import Path

import record_verdicts

PROJECT = Path(__file__).parents[1]


def test_no_stock_release_loses_a_fix_without_a_line_in_the_changelog() -> None:
    recorded = {name: text.split() for name, text in json.loads(record_verdicts.RECORDED.read_text()).items()}
    patched = record_verdicts.patched()
    news = [page.read_text() for page in (PROJECT / "changelog.d").glob("*.md")]
    lost = [
        (name, version)
        for name, versions in recorded.items()
        for version in versions
        if version not in patched.get(name, ()) and not any(f"`{name}`" in text and version in text for text in news)
    ]
    assert sum(map(len, recorded.values())) > 300, "the record is whole"
    assert not lost
