"""A hook of MkDocs: pages of the site that are no files of docs/, and links that lead out of it.

README.md is the first page, CHANGELOG.md and others of the root are pages too; a link to any other file of the tree
leads to a copy of it in the site. So every page stays readable where it is, on a code forge, and is written once.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files, InclusionLevel

from vllm_graphfix.commands.links import thread
from vllm_graphfix.fixes import BY_NAME, FIXES

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
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(rf"{CODE.pattern}|(\]\(|^ {{0,3}}\[[^]\n]+\]: +)(?!https?://|mailto:|#|<)([^)#\s]+)", CODE.flags)
"""Code, or the target of a relative link and what stands before it: `](` of a link, or a definition at a line's start.

`[text][name]: word` in running text is no definition.
"""
BADGES = re.compile(r"^\[!\[.*\n\n", re.MULTILINE)
"""Pictures of other sites, on a line of their own: the site fetches nothing."""
THREAD = re.compile(r"(?<!\[)\b(PR|issue) (\d{4,})\b(?![^\[\n]*\]\()")
"""A thread of upstream that is no link yet."""
USERS_WORDS = {
    "am-i-hit.md": "garbage, gibberish, wrong tokens, exclamation marks, NaN, symptoms, illegal memory access",
    "performance.md": "overhead, cost, slowdown, latency, throughput, benchmark",
    "rollout.md": "rollback, roll back, uninstall, canary, kill switch, disable, upgrade",
    "argo-rollouts.md": "Argo Rollouts, canary analysis",
    "alerts.md": "runbook, on call, alert fired, incident",
    "configuration.md": "environment variables, settings, options",
    "stacks.md": "Kubernetes, Docker, Helm, KServe, Ray Serve",
    "reinforcement-learning.md": "verl, RLHF, GRPO, log-probabilities differ",
    "metrics.md": "Prometheus, Grafana, dashboard, alerts, monitoring",
    "faq.md": "bug report, workaround, does it take my engine down",
    "exit-codes.md": "exit code, CI",
    "long-lived-caches.md": "poisoned cache, LMCache, prefix cache",
}
"""Page to words of users that the search leads to it, whether its own text has them or not."""
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
NAME = re.compile(r'(?<!">)<code>([a-z\d-]+)</code>(?![^<]*</a>)')
"""Code that may be the name of a fix, outside of links and headings."""
LINKED_NAME = re.compile(r'(<a href="(?:[./]*fixes/)?[\w-]+\.html"><code)(>[\w-]+</code></a>)')
"""The name of a fix that a page links itself."""
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    section = next(entry["The fixes"] for entry in config.nav or () if "The fixes" in entry)
    section += [{fix.name: f"fixes/{fix.name}.md"} for fix in FIXES]
    config.edit_uri = f"{SOURCE}/edit/main/"
    if "MIKE_DOCS_VERSION" in os.environ:  # set by mike; elsewhere the switch would ask for a list that is not there
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(PROJECT / source)))
    pages = list(files.documentation_pages())
    for path in {path for file in pages for path in linked_files(file.content_string, file.src_uri)}:
        if in_site(path) == f"{ATTACHED}/{path}" and (PROJECT / path).is_file():
            copy = File.generated(config, in_site(path), abs_src_path=str(PROJECT / path))
            copy.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(copy)
    for file in pages:
        file.edit_uri = SOURCES.get(file.src_uri, f"docs/{file.src_uri}")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if words := USERS_WORDS.get(page.file.src_uri):
        page.meta["tags"] = words.split(", ")
    return with_threads(with_links(BADGES.sub("", markdown), page.file.src_uri))


def linked_files(markdown: str, page: str) -> set[str]:
    """Return the files of the tree to which *page* of the site links."""
    return {in_tree(page, target) for *_, target in LINK.findall(markdown) if target}


def with_links(markdown: str, page: str) -> str:
    """Return the *markdown* of *page* with links that lead to the pages and files of the site."""

    def led(match: re.Match[str]) -> str:
        code, before, target = match.groups()
        if code:
            return code
        return before + posixpath.relpath(in_site(in_tree(page, target)), posixpath.dirname(page) or ".")

    return LINK.sub(led, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the names of fixes, and add to each cell of a table its column, which docs/site.css shows on a telephone."""
    html = NAME.sub(lambda match: linked_name(match, posixpath.dirname(page.url)), html)
    html = LINKED_NAME.sub(r'\1 class="fix"\2', html)

    def named(table: re.Match[str]) -> str:
        columns = [re.sub("<[^>]+>", "", column).replace('"', "&quot;") for column in HEAD.findall(table[0])]
        rows = table[0].split("<tr>")
        return "<tr>".join(_named(row, columns) for row in rows)

    return TABLE.sub(named, html)


def linked_name(match: re.Match[str], folder: str) -> str:
    """Return the code of a `NAME` on a page in *folder* with a link to the page of the fix, if it is one."""
    if match[1] not in BY_NAME:
        return match[0]
    address = posixpath.relpath(f"fixes/{match[1]}.html", folder or ".")
    return f'<a href="{address}"><code class="fix">{match[1]}</code></a>'


def _named(row: str, columns: list[str]) -> str:
    names = iter(columns)
    return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names)}"', row)


def with_threads(markdown: str) -> str:
    """Return *markdown* with a link on each upstream thread that its prose, not its code, names."""
    parts = CODE.split(markdown)
    parts[::2] = (THREAD.sub(lambda match: f"[{match[0]}]({thread(*match.groups())})", text) for text in parts[::2])
    return "".join(parts)


def in_tree(page: str, target: str) -> str:
    """Return the file of the tree at *target*, relative to the source of *page* of the site."""
    source = PurePosixPath(SOURCES.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(source.parent, target))


def in_site(path: str) -> str:
    """Return the path of a file of the tree on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{ATTACHED}/{path}"
