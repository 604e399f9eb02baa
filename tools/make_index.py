"""Regenerates vllm_graphfix/fixes/index.json from the modules of the fixes.

    python tools/make_index.py

The index is all that a process of an engine reads of a fix that its vLLM does not need. Exit code 1, and nothing
written, where a record is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import vllm_graphfix
from vllm_graphfix.fix import Fix

try:
    from vllm_graphfix import fixes
except ImportError:  # an index of another form than this one's: from the modules alone
    (Path(vllm_graphfix.__file__).parent / "fixes" / "index.json").write_text("[]")
    from vllm_graphfix import fixes


class RecordError(Exception):
    """A record is wrong; the message names the fix."""


def records() -> dict[str, Fix]:
    """The `FIX` of each module, by the name of the module."""
    names = (module.name for module in iter_modules(fixes.__path__) if not module.name.startswith("_"))
    return {name: import_module(f"{fixes.__name__}.{name}").FIX for name in names}


def in_order(found: dict[str, Fix]) -> list[Fix]:
    """Fixes by their numbers. Raises `RecordError` for one with another's number, or not in the module of its name."""
    numbers: dict[int, str] = {}
    for module, fix in found.items():
        if fix.name.replace("-", "_") != module:
            raise RecordError(f"{fix.name} is the FIX of fixes/{module}.py: a fix and its module have the same name")
        if fix.number in numbers:
            raise RecordError(
                f"{numbers[fix.number]} and {fix.name} both have the number {fix.number}; the next free one "
                f"is {max(each.number for each in found.values()) + 1}"
            )
        numbers[fix.number] = fix.name
    return sorted(found.values(), key=lambda fix: fix.number)


def text(of: Sequence[Fix]) -> str:
    """The index: a line for each fix, in the order of application."""
    return json.dumps([fixes.entry(fix) for fix in of], separators=(",", ":")).replace("},{", "},\n{") + "\n"


def main() -> int:
    try:
        made = text(in_order(records()))
    except RecordError as error:
        print(f"make_index: {error}", file=sys.stderr)
        return 1
    fixes.INDEX.write_text(made)
    print(f"wrote {fixes.INDEX.name}: {len(made) / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
