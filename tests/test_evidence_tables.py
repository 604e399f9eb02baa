"""docs/evidence/: complete, on the pages, and what these add up of it by hand is its sum."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import evidence_tables
from vllm_graphfix.fixes import BY_NAME

DOCS = Path(__file__).parents[1] / "docs"
RIGHT = re.compile(r"(\d+) of (\d+)")


@pytest.mark.parametrize("name", evidence_tables.names())
def test_each_file_is_a_table_of_a_page_and_names_fixes_that_exist(name: str) -> None:
    content = evidence_tables.load(name)
    assert any(f"<!-- generated: evidence/{name} -->" in page.read_text() for page in DOCS.rglob("*.md"))
    words = {
        word for run in content["runs"] for figures in run["figures"] for word in figures.get("fix", "").split(", ")
    }
    assert words - {"", "none"} <= BY_NAME.keys()


def test_each_run_names_a_commit() -> None:
    assert [run for run in evidence_tables.runs() if not re.fullmatch(r"[0-9a-f]{7}", run["commit"])] == []


def test_each_file_of_a_fix_is_one_of_a_fix_that_exists() -> None:
    assert {path.stem for path in (evidence_tables.FOLDER / "fixes").iterdir()} <= BY_NAME.keys()


def test_a_fix_without_a_file_has_no_tables_of_its_own_and_no_detector_has_tried_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evidence_tables, "FOLDER", tmp_path)
    assert evidence_tables.of_fix.__wrapped__("idle-rank") == []
    assert "| `idle-rank` | not tried | not tried | not tried | – |" in list(evidence_tables.detectors())


def test_each_page_of_a_fix_has_its_tables_and_its_rows_of_those_of_all_fixes() -> None:
    assert all(f"<!-- generated: {fix}/evidence -->" in (DOCS / f"fixes/{fix}.md").read_text() for fix in BY_NAME)
    page = (DOCS / "fixes" / "flashmla-padding.md").read_text()
    assert "| 0.18.1; with `flashmla-fp8` | MLA, fp8, eight at a time |" in page
    assert "| 0.19.1 | lengths down to 0 and block ids down to -1; illegal memory access |" in page


@pytest.mark.parametrize("lack", ["gpu", "date", "command", "commit", "column"])
def test_a_run_that_lacks_something_is_named(lack: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = json.loads((evidence_tables.FOLDER / "trained.json").read_text())
    run = content["runs"][1]
    del (run["figures"][0] if lack == "column" else run)["eager" if lack == "column" else lack]
    (tmp_path / "planted.json").write_text(json.dumps(content))
    monkeypatch.setattr(evidence_tables, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"planted\.json: run 2"):
        evidence_tables.load("planted")


def test_the_page_adds_up_the_answers_of_models_that_were_trained_here() -> None:
    """SmolLM2 is not one: of its answers it is only known that they are as without graphs."""
    figures = [row for run in evidence_tables.load("trained")["runs"] for row in run["figures"]]
    counted = [row for row in figures if row["counted"] == "answers right" and row["fix"] != "none"]

    def right(engine: str) -> int:
        return sum(int(match[1]) for row in counted if (match := RIGHT.match(row[engine])))

    every = sum(int(RIGHT.sub(r"\2", row["eager"])) for row in counted)
    text = (DOCS / "evidence.md").read_text()
    assert f"stock had {right('stock')} of {every} answers right, patched {right('patched')}" in text
