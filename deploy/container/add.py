"""Adds a package to a Python whose own packages stay as they are. Needs nothing but pip 22.2 or later.

python3 add.py add FOLDER REQUIREMENT   # what REQUIREMENT needs and this Python lacks, into FOLDER
python3 add.py link FOLDER              # lets this Python import what is in FOLDER, behind all that it has itself
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path


def installed() -> dict[str, str]:
    """Normalised name to version; pip's `freeze` would name files and repositories, which are no constraints."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and distribution.version:
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return found


def add(folder: Path, requirement: str) -> None:
    """All that is installed is a constraint: pip adds what is missing, or says which two versions do not go together.

    Only what it would add is put into *folder*. With `--target` alone pip would put there whatever the package needs,
    and another version of a library could come before the one that vLLM was built with.
    """
    with tempfile.TemporaryDirectory() as scratch:
        constraints, plan = Path(scratch, "constraints.txt"), Path(scratch, "plan.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(installed().items())))
        _pip("--dry-run", "--report", str(plan), "--constraint", str(constraints), requirement)
        missing = [
            f"{each['metadata']['name']} @ {each['download_info']['url']}"
            for each in json.loads(plan.read_text())["install"]
        ]
        folder.mkdir(parents=True, exist_ok=True)
        if missing:
            _pip("--no-deps", "--target", str(folder), *missing)


def link(folder: Path) -> None:
    """A .pth file puts *folder* at the end of the path, in every process of this Python; its commands get links."""
    Path(sysconfig.get_path("purelib"), "vllm-graphfix.pth").write_text(f"{folder.resolve()}\n")
    for command in (folder / "bin").glob("vllm-graphfix"):
        Path(sysconfig.get_path("scripts"), command.name).symlink_to(command.resolve())


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-cache-dir", *arguments], check=True)


def main(arguments: Sequence[str]) -> int:
    try:
        if len(arguments) == 3 and arguments[0] == "add":
            add(Path(arguments[1]), arguments[2])
        elif len(arguments) == 2 and arguments[0] == "link":
            link(Path(arguments[1]))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except subprocess.CalledProcessError as failed:  # pip has said why
        return failed.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
