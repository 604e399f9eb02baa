"""The pages beside the fixes: what people read is complete, and a page that is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_graphfix.fixes import FIXES, OBSERVED_BY_DEFAULT, about
from vllm_graphfix.fixes._about import NEWEST, read_about

FOLDER = Path(__file__).parents[1] / "vllm_graphfix" / "fixes"
EVIDENCE = Path(__file__).parents[1] / "docs" / "fixes"
PAGE = (FOLDER / "mamba_padding.md").read_text()


def test_each_fix_has_a_page_and_each_page_a_fix() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {fix.name.replace("-", "_") for fix in FIXES}
    for fix in FIXES:
        assert (FOLDER / f"{fix.name.replace('-', '_')}.md").read_text().startswith(f"# {fix.name}\n\n")
        assert all(isinstance(value, str) and value for name, value in about(fix)._asdict().items() if name in REQUIRED)


def test_a_fix_that_no_gpu_has_run_only_counts_by_default() -> None:
    assert {fix.name for fix in FIXES if not about(fix).ran_on} <= OBSERVED_BY_DEFAULT
    for fix in FIXES:
        recorded = (EVIDENCE / f"{fix.name}.md").read_text().partition("## Evidence")[2]
        assert all(gpu in recorded for gpu in about(fix).ran_on.split(", ")), fix.name


REQUIRED = {"summary", "releases", "removable", "seen", "symptom", "cause", "remedy", "detect", "workaround"}


def test_a_page_is_read_field_by_field(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text(
        PAGE.replace("Removable: with vLLM 0.22.0", "Removable: not up to {newest}\nReferences: PR 1, issue 2")
    )
    fields = read_about(page, "one token")
    assert (fields.pr, fields.references) == (41873, ("PR 1", "issue 2"))
    assert fields.removable == f"not up to {NEWEST}"
    assert fields.cause.endswith("and the persistent buffers that the graph reads are not refreshed."), "joined"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("## Cause", "## Causes", "'causes' is no field of a fix"),
        ("## Cause", "## Remedy", "'remedy' is there twice"),
        ("PR: 41873", "PR: many", "invalid literal for int"),
        ("## Symptom", "Symptom", "missing 1 required positional argument: 'symptom'"),
    ],
)
def test_a_page_that_is_wrong_is_named_with_its_field(old: str, new: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text(PAGE.replace(old, new))
    with pytest.raises(ValueError, match=rf"x\.md.*{message}"):
        read_about(page, "one token")
