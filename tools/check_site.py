"""Checks build/site, which `make docs` builds, in a headless Chromium, on a wide and on a narrow window.

    python tools/check_site.py [--site FOLDER] [--screenshots FOLDER] [PAGE...]

On each page: no error on the console, nothing fetched from elsewhere, no table wider than the page, no path of the
copies of files that pages link to (`attached/`) in a text. The search finds the users' words of tools/site_pages.py,
from a server and in a folder. Chromium is the one that CHROMIUM names, or the first on PATH (Debian: `chromium`).
Exit code 1 if something is wrong, 2 without a Chromium or a site.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from site_pages import ATTACHED, USERS_WORDS

SITE = Path(__file__).parent.parent / "build" / "site"
WIDTHS = (1280, 400)
"""Pixels: a notebook and a telephone."""
TIMEOUT = 120
"""Seconds for one action, on a machine that does other things."""
RESULTS = 3
"""So many pages of a search are read."""
WIDER = """() => [...document.querySelectorAll(".md-content table, .md-content img, .md-content p")]
    .filter(part => part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(part => `${part.tagName.toLowerCase()} of ${Math.round(part.getBoundingClientRect().right)} px: `
        + part.textContent.trim().slice(0, 40))"""
META_HAS = "text => document.querySelector('.md-search-result__meta').textContent.includes(text)"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name in the base class
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve *folder* on this machine; yield its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def opened(browser: Browser, width: int, base: str, report: Callable[[str], None]) -> Page:
    """Open a window of *width* pixels that hands on what goes wrong in it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, device_scale_factor=1)
    page.set_default_timeout(TIMEOUT * 1000)

    def here(problem: str) -> None:
        report(f"{page.url.removeprefix(base)} at {width} px: {problem}")

    page.on("console", lambda message: here(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: here(f"script: {error}"))
    page.on("request", lambda request: None if request.url.startswith((base, "data:")) else here(request.url))
    return page


def look(page: Page, address: str) -> list[str]:
    """Open *address* and return what is wrong with its layout and text."""
    page.goto(address, wait_until="load")
    problems = [f"wider than the page: {part}" for part in page.evaluate(WIDER)]
    if (pixels := page.evaluate(SIDEWAYS)) > 1:
        problems.append(f"scrolls sideways by {pixels} px")
    if f"{ATTACHED}/" in page.inner_text(".md-content"):
        problems.append(f"{ATTACHED}/ in the text")
    return problems


def search(page: Page, query: str) -> list[str]:
    """Return the addresses of the first `RESULTS` pages that the site's search finds."""
    for text, awaited in (("", "Type to start"), (query, "match")):
        page.fill(".md-search__input", text)
        page.dispatch_event(".md-search__input", "keyup")  # what the theme listens to
        page.wait_for_function(META_HAS, arg=awaited)
    links = page.query_selector_all(".md-search-result__item > a")[:RESULTS]
    return [(link.get_attribute("href") or "").partition("?")[0].partition("#")[0] for link in links]


def check_search(page: Page, base: str, queries: Sequence[tuple[str, str]]) -> list[str]:
    """Return the queries, each with the page that answers it, whose page is not among the first results."""
    page.goto(f"{base}/index.html", wait_until="load")
    if not page.is_visible(".md-search__input"):
        page.click(".md-header label[for=__search]")
    problems = []
    for query, answer in queries:
        results = search(page, query)
        if not any(result.endswith(f"/{answer}") for result in results):
            problems.append(f"search for {query!r} finds {', '.join(results) or 'nothing'}, not {answer}")
    return problems


def check(
    site: Path, program: str, names: Sequence[str], screenshots: Path | None, report: Callable[[str], None]
) -> None:
    """Report what is wrong with the pages *names* of *site*; leave pictures of them in *screenshots*."""
    queries = [
        (word, page.replace(".md", ".html")) for page, words in USERS_WORDS.items() for word in words.split(", ")
    ]
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for width in WIDTHS:
            page = opened(browser, width, address, report)
            for name in names:
                for problem in look(page, f"{address}/{name}"):
                    report(f"/{name} at {width} px: {problem}")
                if screenshots is not None:
                    page.screenshot(path=screenshots / f"{name.replace('/', '-')}-{width}.png")
            for problem in check_search(page, address, queries if width == max(WIDTHS) else queries[:1]):
                report(problem)
        folder = site.resolve().as_uri()
        for problem in check_search(opened(browser, max(WIDTHS), folder, report), folder, queries[:1]):
            report(problem)
        browser.close()


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as fixes/idle-rank.html (default: all)")
    parser.add_argument("--site", type=Path, default=SITE, metavar="FOLDER", help="default: build/site")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="leave a picture of each page there")
    options = parser.parse_args()
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("check_site: no Chromium on PATH; on Debian: apt install chromium, or set CHROMIUM", file=sys.stderr)
        return 2
    if not (options.site / "index.html").is_file():
        print(f"check_site: no site in {options.site}: make docs", file=sys.stderr)
        return 2
    if options.screenshots is not None:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    all_pages = sorted(path.relative_to(options.site).as_posix() for path in options.site.rglob("*.html"))
    names = options.pages or [name for name in all_pages if name != "404.html"]
    problems: list[str] = []

    def report(problem: str) -> None:
        problems.append(problem)
        print(problem, flush=True)

    check(options.site, program, names, options.screenshots, report)
    print(f"{len(names)} pages at {' and '.join(map(str, WIDTHS))} px, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
