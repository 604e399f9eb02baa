"""Versions of what is installed in this Python, and whether they are what they were. Needs nothing but Python.

python3 installed.py list > constraints.txt
python3 installed.py compare constraints.txt vllm torch     # exit code 1 if one moved or went, or these are not there
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
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


def main(arguments: Sequence[str]) -> int:
    now = installed()
    if list(arguments) == ["list"]:
        print("\n".join(f"{name}=={version}" for name, version in sorted(now.items())))
        return 0
    if len(arguments) < 2 or arguments[0] != "compare":
        print(__doc__, file=sys.stderr)
        return 2
    lines = Path(arguments[1]).read_text(encoding="utf-8").split()
    before = {name: version for name, _, version in (line.partition("==") for line in lines)}
    moved = [f"{name} was {was} and is {now.get(name, 'gone')}" for name, was in before.items() if now.get(name) != was]
    missing = [f"{name} is not installed in this image" for name in arguments[2:] if name not in before]
    for line in moved + missing:
        print(line, file=sys.stderr)
    return 1 if moved or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
