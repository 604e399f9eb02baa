"""tools/set_release.py: the version and the repository's address are the same wherever the tree names them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import set_release
from vllm_graphfix import __version__

PROJECT = Path(__file__).parents[1]
ADDRESS = re.compile(r"(?:github\.com/|githubusercontent\.com/|uses: )([\w-]+/vllm-graphfix)\b")

NAME = "a-b/vllm-graphfix"
"""The repository of a made-up tree. It is written out nowhere, so that the search finds the project's alone."""


def test_every_place_that_names_the_version_names_this_one() -> None:
    named = {
        (path.name, match[0].removeprefix(match["before"]))
        for path in set_release.files(PROJECT, *set_release._VERSIONED)
        for match in set_release.VERSION.finditer(path.read_text())
    }
    assert {name for name, _ in named} >= {"_version.py", "Dockerfile", "workload.yaml", "stacks.md", "fork-action.md"}
    assert {version for _, version in named} == {__version__}


def test_every_place_that_names_the_repository_names_that_of_pyproject() -> None:
    named = {
        (path.name, match[1])
        for path in set_release.files(PROJECT)
        if path != Path(__file__)  # its tree below has an address of its own
        for match in ADDRESS.finditer(path.read_text(encoding="utf-8"))
    }
    assert {name for name, _ in named} >= {"text.py", "README.md", "prometheus-rule.yaml", "fork-action.md"}
    assert {address for _, address in named} == {set_release.source(PROJECT)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git = shutil.which("git") or "git"
    subprocess.run([git, "init", "--quiet"], cwd=tmp_path, check=True)
    texts = {
        "pyproject.toml": f'Source = "https://github.com/{NAME}"\n',
        "vllm_graphfix/_version.py": '__version__ = "0.1.0"\n',
        "docs/page.md": f"vllm-graphfix==0.1.0 vllm-graphfix:0.1.0-vllm0.18.1 {NAME}@v0.1.0 vllm==0.1.0\n",
        "rules.yml": f"https://github.com/{NAME}/blob/main/docs https://github.com/{NAME}-more\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run([git, "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_the_version_is_written_where_it_is_that_of_this_package(tree: Path) -> None:
    changed = set_release.set_version(tree, "1.2.3")
    assert {path.name for path in changed} == {"_version.py", "page.md"}
    assert (tree / "docs" / "page.md").read_text() == (
        f"vllm-graphfix==1.2.3 vllm-graphfix:1.2.3-vllm0.18.1 {NAME}@v1.2.3 vllm==0.1.0\n"
    )


def test_the_address_is_written_wherever_it_stands_alone(tree: Path) -> None:
    changed = set_release.set_address(tree, "https://github.com/c/d")
    assert {path.name for path in changed} == {"pyproject.toml", "page.md", "rules.yml"}
    assert set_release.source(tree) == "c/d"
    assert (tree / "rules.yml").read_text() == (
        f"https://github.com/c/d/blob/main/docs https://github.com/{NAME}-more\n"
    )


@pytest.mark.parametrize(("write", "value"), [("set_version", "1.2"), ("set_address", "https://example.org/a/b")])
def test_what_is_no_version_or_address_is_refused(tree: Path, write: str, value: str) -> None:
    with pytest.raises(SystemExit, match="not of the form"):
        getattr(set_release, write)(tree, value)
