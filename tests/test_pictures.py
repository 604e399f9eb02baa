"""The figures in the pictures of terminals are those of today: tools/record_terminal.py records them."""

from __future__ import annotations

import html
import re
from pathlib import Path

from table import affected_by
from vllm_graphfix.fixes import BY_NAME

DOCS = Path(__file__).parent.parent / "docs"


def text(picture: str) -> str:
    lines = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / f"{picture}.svg").read_text())
    return html.unescape("\n".join(lines)).replace("\xa0", " ")


def test_the_picture_of_status_counts_todays_fixes() -> None:
    words = text("status")
    (release,) = set(re.findall(r"--vllm vllm-([\d.]+)", words))
    needed, known = affected_by(release), len(BY_NAME)
    assert f"{len(needed)} of {known} known defects are in it, {known - len(needed)} not." in words
    assert [name for name in needed if name not in words] == []
