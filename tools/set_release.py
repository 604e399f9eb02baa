"""Writes the version, or the repository's address, wherever the tree names it.

    python tools/set_release.py version 0.3.0
    python tools/set_release.py address https://github.com/ORGANISATION/NAME

`_version.py` has the version, and `Source` in pyproject.toml the address. All other files that name one are changed
with it; a test holds them alike. `make release VERSION=…` calls this.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).parent.parent
VERSION = re.compile(
    r'(?P<before>^__version__ = "|\bvllm-graphfix==|\bvllm-graphfix:(?=[\d.]+-vllm)|/vllm-graphfix@v)\d+\.\d+\.\d+',
    re.MULTILINE,
)
"""The version in `_version.py`, in a requirement, in the tag of an image and in that of an action."""
_VERSIONED = ("vllm_graphfix/_version.py", "README.md", "deploy", "docs", "examples")
_SOURCE = re.compile(r'^Source = "https://github\.com/([^"]+)"$', re.MULTILINE)


def source(tree: Path) -> str:
    """Return owner and name of the repository that *tree* belongs to."""
    return str(_SOURCE.findall((tree / "pyproject.toml").read_text(encoding="utf-8"))[0])


def files(tree: Path, *below: str) -> list[Path]:
    """Return the text files of *tree*, by git; its history and what was built are not among them."""
    listed = subprocess.run(
        ["git", "grep", "-Ilz", "", "--", *below],  # noqa: S607 - a clone's own git
        cwd=tree,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [tree / name for name in listed.stdout.split("\0") if name]


def set_version(tree: Path, version: str) -> list[Path]:
    """Write *version* into the files of *tree* that name the version; return those that changed."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version} is not of the form 1.2.3")
    return _rewritten(files(tree, *_VERSIONED), lambda text: VERSION.sub(rf"\g<before>{version}", text))


def set_address(tree: Path, address: str) -> list[Path]:
    """Write *address* into the files of *tree* that name the repository; return those that changed."""
    new = re.fullmatch(r"https://github\.com/([\w-]+/[\w.-]+?)(?:\.git)?/?", address)
    if new is None:
        raise SystemExit(f"{address} is not of the form https://github.com/ORGANISATION/NAME")
    old = re.compile(rf"\b{re.escape(source(tree))}(?![\w-])")
    return _rewritten(files(tree), lambda text: old.sub(new[1], text))


def _rewritten(paths: list[Path], rewrite: Callable[[str], str]) -> list[Path]:
    changed = []
    for path in paths:
        text = path.read_bytes().decode()
        if (new := rewrite(text)) != text:
            path.write_bytes(new.encode())
            changed.append(path)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("version", "address"))
    parser.add_argument("value")
    arguments = parser.parse_args()
    write = set_version if arguments.what == "version" else set_address
    for path in write(PROJECT, arguments.value):
        print(path.relative_to(PROJECT))


if __name__ == "__main__":
    main()
