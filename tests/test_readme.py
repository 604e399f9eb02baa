"""What README.md and docs/ say is so: releases, commands, variables, targets of make, links."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fetch_vllm
import update_docs
from fetch_vllm import ALL_RELEASES
from vllm_graphfix import manifest
from vllm_graphfix.commands.cli import app
from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes import BY_NAME, FIXES, about
from vllm_graphfix.settings import environment

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
FIXES_PAGE = PROJECT / "docs" / "fixes.md"
PAGES = (
    *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((PROJECT / "docs").glob("**/*.md")),
)
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
TOOL_VARIABLES = {"GRAPHFIX_RELEASES"}
"""Variables of the project's tools, not of the plugin."""


def commands(page: Path, program: str) -> list[list[str]]:
    """The arguments of every line in a code block that starts *program*."""
    lines = [line for block in FENCE.findall(page.read_text()) for line in block.splitlines()]
    calls = [re.split(r"[|>]", line.removeprefix("$ "))[0] for line in lines]
    split = [shlex.split(call, comments=True) for call in calls if program in call]
    return [words[1:] for words in split if words and words[0] == program]


ALL_COMMANDS = [(page.name, arguments) for page in PAGES for arguments in commands(page, "vllm-graphfix")]


def rows_of(page: Path, table: str) -> dict[str, list[str]]:
    """Release to the cells of its row, as a reader takes them from the page; under "vLLM" the header's."""
    header, _, *rows = re.findall(r"^\|.*\|$", page.read_text().split(f"generated: {table}")[1], re.MULTILINE)
    found = {"vLLM": [cell.strip(" `") for cell in header.strip("|").split("|")][1:]}
    for row in rows:
        span, *cells = (cell.strip(" *") for cell in row.strip("|").split("|"))
        if not span[:1].isdigit():
            break  # the next table
        first, _, last = span.partition(" – ")
        start, end = ALL_RELEASES.index(first), ALL_RELEASES.index(last or first)
        for release in ALL_RELEASES[start : end + 1]:
            assert release not in found
            found[release] = cells
    return found


def test_the_readme_is_read_in_a_few_minutes() -> None:
    """Its details are on the pages that it links to."""
    assert len(README.read_text().split()) <= 900


def test_the_readme_counts_the_fixes_and_names_the_releases() -> None:
    text = " ".join(re.sub("<!--.*?-->", "", README.read_text()).split())
    assert f"{len(FIXES)} CUDA-graph defects of stock vLLM {ALL_RELEASES[0]} to {ALL_RELEASES[-1]}" in text
    assert f"{sum(fix.default is Mode.OBSERVE for fix in FIXES)} of them, which no GPU" in text


@pytest.mark.parametrize("table", ["defects", "verdicts"])
def test_the_tables_cover_every_release(table: str) -> None:
    assert list(rows_of(FIXES_PAGE, table)) == ["vLLM", *ALL_RELEASES]


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_the_tables_say_what_the_manifest_says(fix: Fix) -> None:
    """Read as text, not through the tool that wrote it."""
    entries = manifest.load()["fixes"][fix.name]
    expected = {release: entry["verdict"] for entry in entries for release in entry["releases"]}
    verdicts, defects = rows_of(FIXES_PAGE, "verdicts"), rows_of(FIXES_PAGE, "defects")
    column = verdicts["vLLM"].index(fix.name)
    assert {release: verdicts[release][column] for release in ALL_RELEASES} == expected
    assert {release for release in ALL_RELEASES if f"`{fix.name}`" in defects[release][0]} == {
        release for release, verdict in expected.items() if verdict == "affected"
    }


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert update_docs.updated(text) == text, "run tools/update_docs.py"


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_every_fix_has_a_page_with_its_facts(fix: Fix) -> None:
    page, said = update_docs.FIXES_PAGES[fix.name].read_text(), about(fix)
    assert page.startswith(f"# {fix.name}\n\n<!-- generated: {fix.name} -->")
    assert all(f"| {fact} |" in page for fact in (said.symptom, said.cause, said.releases))
    assert f"| Variable | `{fix.variable}`{', `observe` by default' if fix.default is Mode.OBSERVE else ''} |" in page


def test_every_page_of_a_fix_is_of_one_that_is_there() -> None:
    assert set((PROJECT / "docs" / "fixes").iterdir()) == set(update_docs.FIXES_PAGES.values())


def test_a_fix_without_a_page_gets_one_with_its_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "capture-state.md"
    monkeypatch.setitem(update_docs.FIXES_PAGES, "capture-state", page)
    monkeypatch.setattr(update_docs, "PAGES", (page,))
    ((written_to, empty),) = update_docs._written()
    made = update_docs.updated(empty)
    assert written_to == page
    assert made.startswith("# capture-state\n\n<!-- generated: capture-state -->\n")
    assert about(BY_NAME["capture-state"]).symptom in made


def test_a_page_of_no_fix_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(update_docs, "PAGES", (tmp_path / "faq.md",))
    monkeypatch.setattr(update_docs, "PROJECT", tmp_path)
    with pytest.raises(update_docs.DocsError, match=r"faq\.md is missing"):
        list(update_docs._written())


def test_a_generated_part_of_nothing_is_an_error_that_names_it() -> None:
    with pytest.raises(
        update_docs.DocsError, match=r"capture-sate is neither a fix nor a table; tables are defects, .* caches"
    ):
        update_docs.updated("<!-- generated: capture-sate -->\n<!-- end -->")


def _without_a_fix(made: dict[str, Any]) -> None:
    del made["fixes"]["capture-state"]


def _without_a_release(made: dict[str, Any]) -> None:
    for entry in made["fixes"]["capture-state"]:
        entry["releases"] = [release for release in entry["releases"] if release != "0.17.1"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without_a_fix, "the manifest lacks capture-state"),
        (_without_a_release, "the manifest lacks capture-state on vLLM 0.17.1"),
        (dict.clear, "manifest.json of vllm-graphfix cannot be read ('schema')"),
    ],
    ids=["fix", "release", "everything"],
)
def test_a_manifest_that_lacks_something_is_said_in_a_line_and_nothing_is_written(
    change: Callable[[dict[str, Any]], None],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A manifest lacks something for a fix that is new, or after `make manifest` has failed."""
    made = json.loads(manifest.PATH.read_text())
    change(made)
    (tmp_path / "manifest.json").write_text(json.dumps(made))
    written = tmp_path / "fixes.md"
    written.write_text("<!-- generated: variables -->\n<!-- end -->\n<!-- generated: defects -->\n<!-- end -->\n")
    before = written.read_text()
    monkeypatch.setattr(manifest, "PATH", tmp_path / "manifest.json")
    monkeypatch.setattr(update_docs, "PROJECT", tmp_path)
    monkeypatch.setattr(update_docs, "PAGES", [written])
    monkeypatch.setattr("sys.argv", ["update_docs.py"])
    manifest.load.cache_clear()
    try:
        assert update_docs.main() == 2
    finally:
        manifest.load.cache_clear()
    assert capsys.readouterr().err == f"update_docs: {told}; run `make manifest`\n"
    assert written.read_text() == before


@pytest.mark.parametrize("page", ["am-i-hit.md", "long-lived-caches.md", "verifying.md"])
@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_pages_that_tell_the_defects_apart_have_a_row_for_every_fix(fix: Fix, page: str) -> None:
    rows = [line for line in (PROJECT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if f"`{fix.name}`" in row]


VALUES = {"PATH", "FIX", "gpu", "cpu"}
"""Words of commands that are no names of fixes."""


@pytest.mark.parametrize(("page", "arguments"), ALL_COMMANDS, ids=[" ".join([p, *a]) for p, a in ALL_COMMANDS])
def test_commands_are_understood(page: str, arguments: list[str]) -> None:
    """Options are parsed before --help is obeyed, so an unknown one fails; names of fixes are looked up."""
    done = CliRunner().invoke(app, [*arguments, "--help"])
    assert done.exit_code == 0, f"{page}: {done.output}"
    if arguments and arguments[0] in ("explain", "verify"):
        named = [word for word in arguments[1:] if not word.startswith("-") and word not in VALUES]
        assert set(named) <= set(BY_NAME)


def test_there_are_commands_to_check() -> None:
    assert {arguments[0] for page, arguments in ALL_COMMANDS if page == README.name} >= {"status", "verify", "explain"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets
    assert {arguments[0] for arguments in commands(page, "make")} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_exist(page: Path) -> None:
    scripts = [words[0] for words in commands(page, "python") if words[0].endswith(".py")]
    missing = [script for script in scripts if not (PROJECT / script).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_no_wider_than_120_columns(page: Path) -> None:
    """Tables, commands, what a page quotes and generated parts are as wide as they are."""
    left_out = r"^ *```.*?^ *```$|<!-- generated.*?<!-- end -->"
    text = re.sub(left_out, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "#"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files, pictures and headings; addresses on the net are not followed."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        path, _, heading = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_file(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in headings], (
                target
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    named = set(re.findall(r"VLLM_GRAPHFIX(?:_[A-Z0-9]+)*\b(?!_|…)", page.read_text()))
    assert named <= {*environment.names(BY_NAME), *TOOL_VARIABLES}


def test_configuration_has_every_variable() -> None:
    text = (PROJECT / "docs" / "configuration.md").read_text()
    assert [name for name in environment.names(BY_NAME) if f"`{name}`" not in text] == []


def test_the_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#\s]+)", README.read_text()))
    assert {path.name for path in (PROJECT / "docs").glob("*.md")} <= linked


def test_every_picture_is_on_a_page() -> None:
    shown = {Path(target).name for page in PAGES for target in re.findall(r"!\[[^]]+\]\(([^)\s]+)\)", page.read_text())}
    assert {path.name for path in (PROJECT / "docs").iterdir() if path.suffix in {".svg", ".png"}} <= shown


def test_releases_of_the_demo_are_stock_releases() -> None:
    demo = re.search(r"^DEMO_RELEASES := (.+)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert demo
    assert set(demo[1].split()) <= set(fetch_vllm.ALL_RELEASES)
    assert all(release in README.read_text() for release in demo[1].split())
