"""The site that `make docs` builds: complete, and nothing of it comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import site_pages
from vllm_graphfix.fixes import BY_NAME

pytestmark = pytest.mark.xdist_group("site")  # built once

PROJECT = Path(__file__).parent.parent
REMOTE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*['"]?((?:https?:)?//[^'")\s;]+)""", re.IGNORECASE)
UNRENDERED = re.compile(r"^ *(?:\||[-*] |\d+\. |#+ )|```|\]\(|\*\*|`", re.MULTILINE)
"""What is left in a page's text of Markdown that Python-Markdown reads otherwise than code forges do."""


class BuiltPage(HTMLParser):
    """The addresses that a page makes a browser fetch, its links, its ids, and its paragraphs' text without code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.classes: set[str] = set()
        self.text = ""
        self._within: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag not in {"meta", "link", "img", "input", "br", "hr", "source"}:
            self._within.append(tag)
        self.ids.update({attributes["id"]} if "id" in attributes else ())
        self.classes.update(attributes.get("class", "").split())
        self.fetched.update(attributes[name] for name in ("src", "poster", "data", "xlink:href") if name in attributes)
        self.fetched.update(part.split()[0] for part in attributes.get("srcset", "").split(",") if part.strip())
        self.fetched.update(IN_STYLE.findall(attributes.get("style", "")))
        if "href" in attributes:
            (self.links if tag == "a" else self.fetched).add(attributes["href"])

    def handle_endtag(self, tag: str) -> None:
        while tag in self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._within:
            self.fetched.update(IN_STYLE.findall(data))
        if "p" in self._within and not {"code", "pre", "script", "style"} & set(self._within):
            self.text += data


def remote(fetched: set[str]) -> set[str]:
    return {address for address in fetched if REMOTE.match(address)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall(r"^docs:.*\n\t(.*)\n", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    command = recipe.replace("$(BIN)/mkdocs", f"{sys.executable} -m mkdocs")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} --site-dir {folder}"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[a](gone.md)", "'gone.md'"),
        ("[a](other.md#gone)", "'#gone'"),
        ("[a](#gone)", "'#gone'"),
        ("![a](gone.svg)", "'gone.svg'"),
    ],
)
def test_what_is_broken_stops_make_docs(
    text: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link, an anchor, a picture; and a page that the navigation lacks, which is in every case here."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# B\n")
    settings = load_config(
        str(PROJECT / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(tmp_path / "site"), hooks=[],
        plugins=[], theme={"name": None, "custom_dir": str(tmp_path / "docs")}, nav=[{"A": "index.md"}], strict=True,
    )  # fmt: skip
    (tmp_path / "docs" / "main.html").write_text("{{ page.content }}")
    with pytest.raises(Abort, match="2 warnings in strict mode"):
        build(settings)
    assert warning in caplog.text
    assert "other.md" in caplog.text


def test_a_reference_before_a_colon_is_no_definition() -> None:
    """The text of a page stays as it is, but for targets of links; code stays whole."""
    text = "| [Rolling out][rollout]: observe, a few percent |\n`a[0](b)` [`c`][d]: e\n```\na[0](b)\n```\n"
    assert site_pages.with_links(text, "index.md") == text
    defined = "[a](docs/faq.md) [`b`](docs/fixes/idle-rank.md#switch) [c](Makefile)\n[rollout]: docs/rollout.md\n"
    led = "[a](faq.md) [`b`](fixes/idle-rank.md#switch) [c](attached/Makefile)\n[rollout]: rollout.md\n"
    assert site_pages.with_links(defined, "index.md") == led
    assert site_pages.with_links("[a](../../README.md)", "fixes/idle-rank.md") == "[a](../index.md)"
    assert site_pages.linked_files("`a[0](b)` [c](../Makefile)", "faq.md") == {"Makefile"}


def test_a_fix_is_linked_where_it_is_named(site: Path) -> None:
    page = (site / "am-i-hit.html").read_text()
    assert set(re.findall(r'<td data-column="look at"><a href="fixes/([\w-]+).html"><code class="fix">', page)) == {
        *BY_NAME
    }
    named = "<code>idle-rank</code>"
    linked = f'<a href="x">{named}</a> <a href="x">{named} here</a><h2 id="a">{named}</h2>'
    assert site_pages.NAME.sub("", linked) == linked


def test_no_page_shows_where_copies_of_files_are(pages: dict[Path, BuiltPage]) -> None:
    printed = re.compile(rf">[^<]*\b{site_pages.ATTACHED}/")
    assert [path.name for path in pages if printed.search(path.read_text())] == []


def test_every_page_leads_to_its_source(pages: dict[Path, BuiltPage]) -> None:
    edited = f"{site_pages.SOURCE}/edit/main/"
    sources = {link.removeprefix(edited) for page in pages.values() for link in page.links if link.startswith(edited)}
    assert sources == {
        *site_pages.PAGES,
        *(path.relative_to(PROJECT).as_posix() for path in (PROJECT / "docs").glob("**/*.md")),
    }


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, BuiltPage]:
    return {path: BuiltPage(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_tree_is_there(site: Path, pages: dict[Path, BuiltPage]) -> None:
    sources = {path.stem for path in (PROJECT / "docs").glob("**/*.md")}
    assert {path.stem for path in pages} == sources | {"index", "changelog", "contributing", "security"}


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, BuiltPage]) -> None:
    remote_by_file = {path.name: remote(page.fetched) for path, page in pages.items()}
    remote_by_file |= {path.name: set(IN_STYLE.findall(path.read_text())) for path in site.rglob("*.css")}
    remote_by_file |= {path.name: remote(BuiltPage(path.read_text()).fetched) for path in site.rglob("*.svg")}
    assert {name: addresses for name, addresses in remote_by_file.items() if addresses} == {}


def test_no_page_asks_the_theme_for_what_it_fetches_itself(pages: dict[Path, BuiltPage]) -> None:
    """Its script takes mermaid from a CDN for a diagram, and the stars of a repository from its forge."""
    assert {path.name for path, page in pages.items() if {"mermaid", "md-source"} & page.classes} == set()


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img src="a.png" srcset="a.png 1x, http://example.org/b.png 2x">',
        "<style>@import 'https://example.org/a.css';</style>",
        '<style>@font-face { src: url("https://example.org/a.woff2") }</style>',
        '<p style="background: url(https://example.org/a.png)">',
        '<svg><use xlink:href="https://example.org/a.svg#b"/></svg>',
    ],
)
def test_what_is_fetched_from_elsewhere_is_seen(planted: str) -> None:
    assert remote(BuiltPage(planted).fetched)


def test_a_link_to_elsewhere_is_not_fetched() -> None:
    assert BuiltPage('<a href="https://example.org/">').fetched == set()


def unreachable(page: Path, link: str, pages: dict[Path, BuiltPage]) -> bool:
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    anchored = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
    return not (target.is_file() and anchored)


def test_links_and_what_pages_need_lead_somewhere(pages: dict[Path, BuiltPage]) -> None:
    references = {(path, link) for path, page in pages.items() for link in page.links | page.fetched}
    local = {(path, link) for path, link in references if not REMOTE.match(link)}
    assert [f"{path.name}: {link}" for path, link in sorted(local) if unreachable(path, link, pages)] == []


def test_every_fix_is_in_the_navigation(site: Path, pages: dict[Path, BuiltPage]) -> None:
    assert {f"fixes/{name}.html" for name in BY_NAME} <= pages[site / "index.html"].links


RL = ("RL", "verl", "NeMo-RL", "TRL", "OpenRLHF", "GRPO", "rollout", "sleep", "reload")


@pytest.mark.parametrize(
    "query", ["RLHF", *RL, "kserve", "garbage", "!!!!", "exclamation marks", "illegal memory access", "NaN", *BY_NAME]
)
def test_each_query_has_a_page_with_all_of_its_words(query: str, site: Path) -> None:
    """There is a page that has all words of the query, cut where the search of the site cuts."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    cut = re.compile(index["config"]["separator"])
    pages = [
        set(cut.split(unescape(re.sub("<[^>]+>", " ", f"{doc['title']} {doc['text']}")).lower()))
        for doc in index["docs"]
    ]
    assert [words for words in pages if set(cut.split(query.lower())) <= words]


def test_every_cell_of_a_table_knows_its_column(site: Path) -> None:
    """On a narrow page, a cell begins with the name of its column."""
    for path in site.rglob("*.html"):
        for table in re.findall(r"<table>.*?</table>", path.read_text(), re.DOTALL):
            columns = [
                unescape(re.sub("<[^>]+>", "", column)) for column in re.findall(r"<th\b[^>]*>(.*?)</th>", table)
            ]
            for row in table.split("<tr>")[2:]:
                assert [unescape(name) for name in re.findall(r'<td data-column="([^"]*)"', row)] == columns


def test_threads_of_upstream_are_links(site: Path) -> None:
    page = (site / "fixes" / "c128a-stride.html").read_text()
    inside = page.partition('id="inside"')[2]
    named = re.findall(r"(.{30})\bPR (\d+)", inside, re.DOTALL)
    assert named
    assert [number for before, number in named if f'/pull/{number}">' not in before] == []


def test_no_markdown_shows_through(pages: dict[Path, BuiltPage]) -> None:
    """Lists want an empty line before them here, tables too, and a pipe in the code of a table is `&#124;`."""
    assert {
        path.name: unrendered for path, page in pages.items() if (unrendered := UNRENDERED.findall(page.text))
    } == {}
    assert [path.name for path in pages if re.search(r"<td>.*\\\|", path.read_text())] == []
