"""A hook of MkDocs: pages of the site that are no files of docs/, and links that lead out of it.

README.md is the first page, CHANGELOG.md and others of the root are pages too; a link to any other file of the tree
leads to a copy of it in the site. So every page stays readable where it is, on a code forge, and is written once.
PyPI shows README.md without the tree, so its links begin with the project's address: here they lead to pages again.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files, InclusionLevel

from vllm_graphfix.commands.links import thread
from vllm_graphfix.fixes import FIXES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""File of the root to page of the site."""
SOURCES = {page: source for source, page in PAGES.items()}
ATTACHED = "attached"
"""Folder of the site for copies of files that pages link to."""
SOURCE = re.findall(r'^Source = "([^"]+)"$', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)[0]
"""The project's address."""
TREE = (f"{SOURCE}/blob/main/", f"{SOURCE.replace('//github.com', '//raw.githubusercontent.com')}/main/")
"""Beginnings of the addresses of files of the tree, and of its pictures."""
LINK = re.compile(rf"(?:(?<=\]\()|(?<=\]: ))(?:{'|'.join(map(re.escape, TREE))}|(?!https?://|#|<))([^)#\s]+)")
"""The target of a link to a file of the tree: inline, or as a reference; relative, or by the project's address."""
BADGES = re.compile(r"^\[!\[.*\n\n", re.MULTILINE)
"""Pictures of other sites, on a line of their own: the site fetches nothing."""
THREAD = re.compile(r"(?<!\[)\b(PR|issue) (\d{4,})\b(?![^\[\n]*\]\()")
"""A thread of upstream that is no link yet."""
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    section = next(entry["The fixes"] for entry in config.nav or () if "The fixes" in entry)
    section += [{fix.name: f"fixes/{fix.name}.md"} for fix in FIXES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(PROJECT / source)))
    for file in list(files.documentation_pages()):
        for match in LINK.finditer(file.content_string):
            path = in_tree(file.src_uri, match)
            if in_site(path) == f"{ATTACHED}/{path}" and (PROJECT / path).is_file():
                copy = File.generated(config, in_site(path), abs_src_path=str(PROJECT / path))
                copy.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def led(match: re.Match[str]) -> str:
        return posixpath.relpath(in_site(in_tree(page.file.src_uri, match)), here or ".")

    return with_threads(LINK.sub(led, BADGES.sub("", markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the name of its column to each cell of a table, which docs/site.css shows on a narrow page."""

    def named(table: re.Match[str]) -> str:
        columns = [re.sub("<[^>]+>", "", column).replace('"', "&quot;") for column in HEAD.findall(table[0])]
        rows = table[0].split("<tr>")
        return "<tr>".join(_named(row, columns) for row in rows)

    return TABLE.sub(named, html)


def _named(row: str, columns: list[str]) -> str:
    names = iter(columns)
    return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names)}"', row)


def with_threads(markdown: str) -> str:
    """Return *markdown* with a link on each upstream thread that its prose, not its code, names."""
    parts = CODE.split(markdown)
    parts[::2] = (THREAD.sub(lambda match: f"[{match[0]}]({thread(*match.groups())})", text) for text in parts[::2])
    return "".join(parts)


def in_tree(page: str, match: re.Match[str]) -> str:
    """Return the file of the tree that a `LINK` on *page* of the site names.

    It is in `docs/` for a page of docs/, in the root for one of `PAGES`, and for an address.
    """
    if match[0] != match[1]:
        return match[1]
    source = PurePosixPath(SOURCES.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(source.parent, match[1]))


def in_site(path: str) -> str:
    """Return the path of a file of the tree on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{ATTACHED}/{path}"
