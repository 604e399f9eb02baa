"""README.md and docs/ are true: releases, commands, variables, targets of make, links."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import record_evidence
import update_docs
from fetch_vllm import ALL_RELEASES
from table import affected_by
from vllm_graphfix import manifest
from vllm_graphfix.commands.cli import app
from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes import BY_NAME, FIXES, about
from vllm_graphfix.fixes._about import NEWEST
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
    lines = [line for block in FENCE.findall(page.read_text().replace("\\\n", "")) for line in block.splitlines()]
    calls = [re.split(r"[|>]", line.removeprefix("$ "))[0] for line in lines]
    split = [shlex.split(call, comments=True) for call in calls if program in call]
    return [words[1:] for words in split if words and words[0] == program]


ALL_COMMANDS = [(page.name, arguments) for page in PAGES for arguments in commands(page, "vllm-graphfix")]


def rows_of(table: str) -> dict[str, list[str]]:
    """First cell of each row of a generated table to the others, as a reader takes them; under "" the header's."""
    header, _, *rows = re.findall(r"^\|.*\|$", FIXES_PAGE.read_text().split(f"generated: {table}")[1], re.MULTILINE)
    cells_by_name = {"": [cell.strip() for cell in header.strip("|").split("|")][1:]}
    for row in rows:
        first, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if len(cells) != len(cells_by_name[""]) or first == "vLLM":
            break  # the next table
        assert first not in cells_by_name
        cells_by_name[first] = cells
    return cells_by_name


def releases_in(spans: str) -> list[str]:
    """The releases of "0.15.0 – 0.16.0, 0.18.0"."""
    releases: list[str] = []
    for span in filter(None, spans.split(", ")):
        first, _, last = span.partition(" – ")
        releases += ALL_RELEASES[ALL_RELEASES.index(first) : ALL_RELEASES.index(last or first) + 1]
    return releases


def test_the_readme_is_read_in_a_few_minutes() -> None:
    """Its details are on the pages that it links to."""
    assert len(README.read_text().split()) <= 900


def test_the_readme_counts_the_fixes_and_names_the_releases() -> None:
    text = " ".join(re.sub("<!--.*?-->", "", README.read_text()).split())
    assert f"{len(FIXES)} CUDA-graph defects of stock vLLM {ALL_RELEASES[0]} to {ALL_RELEASES[-1]}" in text
    assert ALL_RELEASES[-1] == NEWEST
    assert f"{sum(fix.default is Mode.OBSERVE for fix in FIXES)} of them it only counts by default" in text


def test_the_tables_cover_every_release() -> None:
    defects, verdicts = rows_of("defects"), rows_of("verdicts")
    del defects[""], verdicts[""]
    assert sorted(release for spans in defects for release in releases_in(spans)) == sorted(ALL_RELEASES)
    for cells in verdicts.values():
        assert sorted(release for spans in cells for release in releases_in(spans)) == sorted(ALL_RELEASES)


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_the_tables_say_what_the_manifest_says(fix: Fix) -> None:
    """Read as text, not through the tool that wrote it."""
    entries = manifest.load()["fixes"][fix.name]
    expected = {release: entry["verdict"] for entry in entries for release in entry["releases"]}
    verdicts, defects = rows_of("verdicts"), rows_of("defects")
    row = verdicts[f"[`{fix.name}`](fixes/{fix.name}.md)"]
    assert {
        r: verdict for verdict, spans in zip(verdicts[""], row, strict=True) for r in releases_in(spans)
    } == expected
    assert {
        r for spans, (names,) in defects.items() if spans and f"`{fix.name}`" in names for r in releases_in(spans)
    } == {release for release, verdict in expected.items() if verdict == "affected"}


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert update_docs.updated(text) == text, "run tools/update_docs.py"


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_every_fix_has_a_page_in_the_order_in_which_one_asks(fix: Fix) -> None:
    page, description = update_docs.FIXES_PAGES[fix.name].read_text(), about(fix)
    assert page.startswith(f"# {fix.name}\n\n<!-- generated: {fix.name} -->")
    titles = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert titles[:5] == ["Am I hit?", "Switch", "Without the plugin", "Evidence", "Cause and remedy"]
    parts = dict(zip(titles, re.split(r"^## .+$", page, flags=re.MULTILINE)[1:], strict=True))
    facts = update_docs.with_threads
    assert f"| Symptom | {facts(description.symptom)} |" in parts["Am I hit?"]
    assert f"| Affected | {facts(description.releases)} |" in parts["Am I hit?"]
    assert f"| `{fix.variable}` | `{fix.default.value}` |" in parts["Switch"]
    assert f"| Workaround | {facts(description.workaround)} |" in parts["Without the plugin"]
    assert "equal to eager" in parts["Evidence"]
    assert f"| Cause | {facts(description.cause)} |" in parts["Cause and remedy"]


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_evidence_of_the_double_is_recorded_for_every_affected_release(fix: Fix) -> None:
    page = update_docs.FIXES_PAGES[fix.name].read_text()
    part = record_evidence.PART.findall(page)
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| all \d+ equal to eager \|$", part[0], re.MULTILINE)
    assert len(rows) == len(part[0].splitlines()) - 2
    affected = [release for release, verdict in update_docs.verdicts(fix).items() if verdict == "affected"]
    assert sorted(release for span in rows for release in releases_in(span)) == sorted(affected)


@pytest.mark.parametrize("before", ["old\n", ""], ids=["recorded before", "a new page"])
def test_what_is_recorded_anew_replaces_its_rows_alone(before: str) -> None:
    outcome = record_evidence.Outcome("sums", "1 of 2 numbers wrong", "all 2 equal to eager")
    rows = record_evidence.table_rows({"0.17.0": None, "0.17.1": outcome, "0.18.0": outcome, "0.18.1": None})
    behind = "<!-- end -->\nb\n<!-- generated: cause -->\nc\n<!-- end -->\n"
    made = record_evidence.with_rows(f"a\n<!-- recorded: cpu double -->\n{before}{behind}", rows)
    row = "| 0.17.1 – 0.18.0 | sums | 1 of 2 numbers wrong | all 2 equal to eager |\n"
    assert made == f"a\n<!-- recorded: cpu double -->\n{record_evidence.HEAD}{row}{behind}"


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_what_is_recorded_of_other_releases_stays(fix: Fix) -> None:
    page = update_docs.FIXES_PAGES[fix.name].read_text()
    assert record_evidence.with_rows(page, record_evidence.table_rows(record_evidence.recorded(page))) == page


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_upstreams_threads_are_linked(fix: Fix) -> None:
    description, page = about(fix), update_docs.FIXES_PAGES[fix.name].read_text()
    for named in (*([f"PR {description.pr}"] if description.pr else []), *description.references):
        kind, _, number = named.rpartition(" ")
        path = {"PR": "pull", "issue": "issues"}.get(kind)
        address = f"https://github.com/vllm-project/vllm/{path}/{number}" if path else number
        assert (f"[{named}]({address})" if path else address) in page
    generated = "".join(re.findall(r"<!-- generated.*?<!-- end -->", page, re.DOTALL))
    assert not re.search(r"(?<!\[)\b(PR|issue) \d{4}", generated)


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
    assert record_evidence.PART.search(made)
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
    ("change", "message"),
    [
        (_without_a_fix, "the manifest lacks capture-state"),
        (_without_a_release, "the manifest lacks capture-state on vLLM 0.17.1"),
        (dict.clear, "manifest.json of vllm-graphfix cannot be read ('schema')"),
    ],
    ids=["fix", "release", "everything"],
)
def test_an_incomplete_manifest_is_reported_in_a_line_and_nothing_is_written(
    change: Callable[[dict[str, Any]], None],
    message: str,
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
    assert capsys.readouterr().err == f"update_docs: {message}; run `make manifest`\n"
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
    excluded = r"^ *```.*?^ *```$|<!-- generated.*?<!-- end -->"
    text = re.sub(excluded, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "#"))] == []


def targets(page: Path) -> list[str]:
    """Return the targets of the links and pictures of *page*, inline and by reference."""
    text = page.read_text()
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]\n]+\]: (\S+)$", text, re.MULTILINE)


def leads_somewhere(page: Path, target: str) -> bool:
    """Return whether *target* on *page* is a file of the tree, and a heading in it if it names one."""
    path, _, heading = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not heading or not file.is_file():
        return file.is_file()
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return heading in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files, pictures and headings; addresses on the net are not followed."""
    local = [target for target in targets(page) if not target.startswith(("https://", "http://"))]
    assert [target for target in local if not leads_somewhere(page, target)] == []


def test_the_readme_uses_each_reference_and_fetches_nothing_but_badges() -> None:
    text = README.read_text()
    references = dict(re.findall(r"^\[([^]\n]+)\]: (\S+)$", text, re.MULTILINE))
    named = set(re.findall(r"\]\[([^]\n]+)\]", text)) | {
        name.lower() for name in re.findall(r"(?<!\])\[(\w+)\](?![:\[(])", text)
    }
    assert named == set(references)
    (badges,) = re.findall(r"^\[!\[.*$", text, re.MULTILINE)
    assert 1 <= badges.count("[![") <= 4
    others = {target for target in targets(README) if target.startswith(("https://", "http://"))}
    assert others == {references[name] for name in re.findall(r"\]\[(\w+)\]", badges)} - {references["license"]}
    assert (PROJECT / ".github" / "workflows" / references["workflow"].rpartition("/")[2]).is_file()
    assert references["pypi"] == "https://pypi.org/project/vllm-graphfix/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    named = set(re.findall(r"VLLM_GRAPHFIX(?:_[A-Z0-9]+)*\b(?!_|…)", page.read_text()))
    assert named <= {*environment.names(BY_NAME), *TOOL_VARIABLES}


def test_configuration_has_every_variable() -> None:
    text = (PROJECT / "docs" / "configuration.md").read_text()
    assert [name for name in environment.names(BY_NAME) if f"`{name}`" not in text] == []


def test_the_readme_links_every_page_or_one_that_does() -> None:
    pages = {path.name: path for path in (PROJECT / "docs").glob("*.md")}
    first = {target.removeprefix("docs/").partition("#")[0] for target in targets(README)} & pages.keys()
    second = {target.partition("#")[0] for name in first for target in targets(pages[name])}
    assert pages.keys() <= first | second


def test_every_picture_is_on_a_page() -> None:
    pictures = {Path(target).name for page in PAGES for target in targets(page)}
    assert {path.name for path in (PROJECT / "docs").iterdir() if path.suffix in {".svg", ".png"}} <= pictures


def test_the_picture_of_the_layers_has_those_that_make_lint_holds() -> None:
    _, contract = (PROJECT / "pyproject.toml").read_text().split("\nlayers = [")
    layers = re.findall(r'"(\w+)"', contract.partition("]")[0])
    boxes = re.findall(r'class="name"[^>]*>(\w+)<', (PROJECT / "docs" / "layers.svg").read_text())
    assert boxes == layers


def test_each_release_of_the_demo_has_a_defect_of_its_own() -> None:
    (names,) = re.findall(r"^DEMO_RELEASES := (.+)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    demo = names.split()
    assert all(release in README.read_text() for release in demo)
    for release in demo:
        others = {name for other in demo if other != release for name in affected_by(other)}
        assert set(affected_by(release)) - others


def test_the_table_of_detectors_has_each_fix_and_says_something_of_each_detector() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (PROJECT / "docs" / "detectors.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == list(BY_NAME)
    assert all(len(row) == 5 and all(row) for row in rows)
