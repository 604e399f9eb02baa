"""A hook of MkDocs: pages of the site that are no files of docs/, and links that lead out of it.

README.md is the first page, CHANGELOG.md and others of the root are pages too; a link to any other file of the tree
leads to a copy of it in the site. So every page stays readable where it is, on a code forge, and is written once.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files, InclusionLevel

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
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    section = next(entry["The fixes"] for entry in config.nav or () if "The fixes" in entry)
    section += [{fix.name: f"fixes/{fix.name}.md"} for fix in FIXES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(PROJECT / source)))
    for file in list(files.documentation_pages()):
        for target in LINK.findall(file.content_string):
            path = in_tree(file.src_uri, target)
            if in_site(path) == f"{ATTACHED}/{path}" and (PROJECT / path).is_file():
                copy = File.generated(config, in_site(path), abs_src_path=str(PROJECT / path))
                copy.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def led(found: re.Match[str]) -> str:
        return posixpath.relpath(in_site(in_tree(page.file.src_uri, found[0])), here or ".")

    return LINK.sub(led, markdown)


def in_tree(page: str, target: str) -> str:
    """The file of the tree that *target* on *page* of the site names.

    It is in `docs/` for a page of docs/, in the root for one of `PAGES`.
    """
    source = PurePosixPath(SOURCES.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(source.parent, target))


def in_site(path: str) -> str:
    """Where the site has a file of the tree."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{ATTACHED}/{path}"
