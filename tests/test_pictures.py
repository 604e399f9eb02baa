"""What pictures and pages show of commands is what these print today: tools/record_terminal.py records the pictures."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import record_terminal
from stock import release_root
from table import affected_by
from vllm_graphfix import __version__
from vllm_graphfix.commands.status import status
from vllm_graphfix.commands.status_table import verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
COUNTED = re.compile(r"\d+ of \d+ known defects are in it, \d+ not\.")
"""The count of `status`, wherever it is shown."""
PAGES = [
    page
    for page in (PROJECT / "README.md", *sorted(DOCS.glob("*.md")))
    if COUNTED.search(page.read_text(encoding="utf-8"))
]


def text(picture: str) -> str:
    lines = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / f"{picture}.svg").read_text())
    return html.unescape("\n".join(lines)).replace("\xa0", " ")


def test_the_picture_of_status_is_what_it_prints_today(tmp_path: Path) -> None:
    (release,) = set(re.findall(r"--vllm vllm-([\d.]+)", text("status")))
    assert record_terminal.record("status", release, tmp_path / "status.svg") == 0
    assert (tmp_path / "status.svg").read_text() == (DOCS / "status.svg").read_text()


def test_the_picture_of_verify_has_todays_version_and_the_defects_that_can_be_shown() -> None:
    words = text("verify")
    (release,) = set(re.findall(r"--vllm vllm-([\d.]+)", words))
    needed, known = affected_by(release), len(BY_NAME)
    assert f"{len(needed)} of {len(needed)} defects shown on stock, all gone with the fixes (CPU double)." in words
    assert f"vllm-graphfix {__version__}, torch " in words
    assert f"not in this vLLM, nothing patched: {known - len(needed)} " in words
    assert [name for name in needed if name not in words] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_count_of_status_on_a_page_is_todays(page: Path) -> None:
    page_text = page.read_text(encoding="utf-8")
    for count in COUNTED.finditer(page_text):
        release = re.findall(r"vLLM (\d+\.\d+\.\d+)", page_text[: count.start()])[-1]
        assert verdict(status(open_source(release_root(release)), {})).startswith(count[0])
