"""CHANGELOG.md keeps to the form that it names, https://keepachangelog.com/en/1.1.0/, with upgrade notes before it."""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import vllm_graphfix
from vllm_graphfix.commands.cli import app
from vllm_graphfix.fixes import BY_NAME

PROJECT = Path(__file__).parent.parent
TEXT = (PROJECT / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
KINDS = ["Upgrade", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
DATED = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})(?: \[YANKED\])?")


def dated() -> list[tuple[Version, dt.date]]:
    matches = [DATED.fullmatch(title) for title, _ in RELEASES]
    return [(Version(title[1]), dt.date.fromisoformat(title[2])) for title in matches if title]


README = (PROJECT / "changelog.d" / "README.md").read_text()
SUBJECTS = {
    *BY_NAME,
    *(command.name or command.callback.__name__ for command in app.registered_commands if command.callback),
    *re.findall(r"`([a-z-]+)`", README.partition("\n- SUBJECT:")[2].partition("\n- KIND:")[0]),
}


def is_named_by_subject(name: str) -> bool:
    what, kind, _ = name.split(".")
    return kind.title() in KINDS and any(f"{what}-".startswith(f"{subject}-") for subject in SUBJECTS)


def test_fragments_are_named_by_subject_and_kind() -> None:
    fragments = [path for path in (PROJECT / "changelog.d").glob("*") if path.stem not in ("README", "template")]
    assert [path.name for path in fragments if not is_named_by_subject(path.name)] == []
    texts = [path.read_text() for path in fragments]
    assert all(text.strip() and not text.startswith("- ") for text in texts)
    assert is_named_by_subject("status-running.added.md")
    assert not is_named_by_subject("a-fix-that-was-taken.fixed.md")


def test_the_subjects_that_are_no_fix_and_no_command_exist() -> None:
    detectors = {"shadow", "kv-marks", "addresses", "claims", "metadata", "traced", "abort"}
    assert detectors <= SUBJECTS
    assert {"status", "fleet", "verify", "compare", "explain", "doctor", "report", "mamba-padding", "docs"} <= SUBJECTS


def test_the_newest_release_can_be_read_in_minutes() -> None:
    assert len(RELEASES[0][1].split()) <= 1500


def test_a_release_is_put_together_of_the_fragments(tmp_path: Path) -> None:
    """By towncrier, from this project's settings: every fragment once, under its kind, above the releases before it."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "changelog.d").mkdir()
    shutil.copy(PROJECT / "changelog.d" / "template.md", tmp_path / "changelog.d")
    (tmp_path / "changelog.d" / "status.fixed.md").write_text("It is mended,\non two lines.\n")
    (tmp_path / "changelog.d" / "fleet.added.md").write_text("It is new.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--keep", "--version", "9.8.7", "--date", "2030-01-02"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    made = (tmp_path / "CHANGELOG.md").read_text()
    new = "## [9.8.7] - 2030-01-02\n\n### Added\n\n- It is new.\n\n### Fixed\n\n- It is mended,\n  on two lines.\n"
    assert new in made
    assert f"{new}\n## {RELEASES[0][0]}\n" in made


def test_every_release_has_its_version_and_date_and_the_newest_stands_first() -> None:
    assert len(dated()) == len(RELEASES)
    assert dated() == sorted(dated(), reverse=True)
    assert len({version for version, _ in dated()}) == len(dated())


def test_the_newest_release_is_the_version_of_the_package() -> None:
    assert str(dated()[0][0]) == vllm_graphfix.__version__


@pytest.mark.parametrize(("title", "text"), RELEASES, ids=[title.split("]")[0].strip("[") for title, _ in RELEASES])
def test_changes_are_sorted_by_their_kind(title: str, text: str) -> None:
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert kinds == [kind for kind in KINDS if kind in kinds]
    for part in text.split("\n### ")[1:]:
        lines = [line for line in part.splitlines()[1:] if line]
        assert lines, part
        assert all(line.startswith(("- ", "  ")) for line in lines)
