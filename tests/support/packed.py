"""The packages of this tree, made once for all tests of the group `packages`. conftest.py has the fixture."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def packages(tree: Path, umask: int, **environment: str) -> dict[str, bytes]:
    """Return the files that `make packages` makes in *tree*, by name."""
    command = [
        "make",
        "--old-file",
        ".venv/installed",
        "packages",
        f"BIN={Path(sys.executable).parent}",
        "BUILD_FLAGS=--no-isolation",
    ]
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SOURCE_DATE_EPOCH", "MAKEFLAGS", "PYTHONPATH")
    }
    done = subprocess.run(
        command, cwd=tree, env=clean | environment, umask=umask, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in (tree / "dist").iterdir()}


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a repository with this tree as its only commit, and the packages made there, which are also in `dist/`."""
    clone = tmp_path_factory.mktemp("committed") / "clone"
    unwanted = shutil.ignore_patterns(".git", ".venv", ".*_cache", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(PROJECT, clone, ignore=unwanted)
    for path in clone.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    git = shutil.which("git") or "git"
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    dated = os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z", "GIT_CONFIG_GLOBAL": os.devnull}
    for arguments in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "a"]):
        subprocess.run([git, *arguments], cwd=clone, env=dated, check=True, capture_output=True)
    return clone, packages(clone, 0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
