"""CHANGELOG.md keeps to the form that it names: https://keepachangelog.com/en/1.1.0/."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pytest
from packaging.version import Version

import vllm_graphfix

TEXT = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
DATED = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})(?: \[YANKED\])?")


def dated() -> list[tuple[Version, dt.date]]:
    found = [DATED.fullmatch(title) for title, _ in RELEASES[1:]]
    return [(Version(title[1]), dt.date.fromisoformat(title[2])) for title in found if title]


def test_what_is_not_released_stands_first() -> None:
    assert [title for title, _ in RELEASES if title == "[Unreleased]"] == [RELEASES[0][0]]


def test_every_release_has_its_version_and_date_and_the_newest_stands_first() -> None:
    assert len(dated()) == len(RELEASES) - 1
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
