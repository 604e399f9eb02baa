"""Links in output: where a terminal can show them, of what exists, and nothing else is changed by them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from stock import release_root
from vllm_graphfix.commands import explain, links, status_table
from vllm_graphfix.commands.status import status
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source
from vllm_graphfix.text import PAGES

PROJECT = Path(__file__).parents[1]
LINK = re.compile(r"\x1b\]8;id=\d+;([^\x1b]*)\x1b\\(.*?)\x1b\]8;;\x1b\\", re.DOTALL)
STYLE = re.compile(r"\x1b\[[\d;]*m")


def printed(show: object, *, terminal: bool = True, width: int = 120) -> str:
    """Return the text that *show* prints on a console."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, color_system="standard" if terminal else None, width=width)
    show(console)  # type: ignore[operator]
    return stream.getvalue()


def linked(text: str) -> dict[str, str]:
    """Each text that is a link, and where it leads."""
    return {STYLE.sub("", label): address for address, label in LINK.findall(text)}


def test_the_pages_are_those_of_this_project() -> None:
    source = re.search(r'^Source = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert source is not None
    assert f"{source[1]}/blob/main/docs" == PAGES
    assert all((PROJECT / "docs" / links.page(name).removeprefix(f"{PAGES}/")).is_file() for name in BY_NAME)


def test_threads_of_upstream_are_links() -> None:
    addresses = linked(printed(lambda console: explain.show(BY_NAME["triton-mla-padding"], console)))
    assert addresses["issue 57017"] == "https://github.com/vllm-project/vllm/issues/57017"
    assert addresses["PR 57094"] == "https://github.com/vllm-project/vllm/pull/57094"
    assert addresses["triton-mla-padding"] == links.page("triton-mla-padding")


def test_where_nobody_can_click_nothing_is_different() -> None:
    for fix in BY_NAME.values():
        plain = printed(lambda console, fix=fix: explain.show(fix, console), terminal=False)
        assert "\x1b" not in plain
        on_a_terminal = printed(lambda console, fix=fix: explain.show(fix, console))
        assert STYLE.sub("", LINK.sub(r"\2", on_a_terminal)) == plain


@pytest.mark.release
@pytest.mark.parametrize("width", [60, 120])
def test_places_lead_to_the_lines_of_the_file_and_are_not_cut(width: int) -> None:
    root = release_root("0.18.1")
    report = status(open_source(root), {})
    text = printed(lambda console: status_table.show(report, console, verbose=True), width=width)
    places = [
        row.diagnosis.where or "" for row in report.rows if row.is_unapplied or row.diagnosis.verdict == "affected"
    ]
    addresses = {address for address, _ in LINK.findall(text) if address.startswith("file://")}
    wanted = {f"{(root / path).resolve().as_uri()}#{line}" for path, _, line in (p.partition(":") for p in places)}
    assert wanted
    assert wanted <= addresses
    visible = re.sub(r"\s+", "", STYLE.sub("", LINK.sub(r"\2", text)))
    assert all(place in visible for place in places)
    assert "…" not in text


def test_a_place_that_is_not_there_is_no_link(tmp_path: Path) -> None:
    text = links.linked("vllm/gone.py:3, PR 1", folder=tmp_path)
    assert [str(span.style) for span in text.spans] == [f"link {links.thread('PR', '1')}"]


def test_no_name_of_a_fix_is_cut_on_a_narrow_terminal() -> None:
    text = printed(explain.show_all, terminal=False, width=60)
    assert all(name in text for name in BY_NAME)
