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

_INDEX = Path(vllm_graphfix.__file__).parent / "fixes" / "index.json"
_ORDER = [entry["name"] for entry in json.loads(_INDEX.read_bytes())] if _INDEX.exists() else []
try:
    from vllm_graphfix import fixes
except ImportError:  # an index of another form than this one's: from the modules alone
    _BEFORE = _INDEX.read_bytes() if _INDEX.exists() else None
    _INDEX.write_text("[]")
    try:
        from vllm_graphfix import fixes
    finally:  # it has the order, and what is wrong with a module shows later
        if _BEFORE is None:
            _INDEX.unlink()
        else:
            _INDEX.write_bytes(_BEFORE)


class RecordError(Exception):
    """A record is wrong; the message names the fix."""


def records() -> dict[str, Fix]:
    """Return the `FIX` of each module, by the module's name."""
    names = (module.name for module in iter_modules(fixes.__path__) if not module.name.startswith("_"))
    return {name: import_module(f"{fixes.__name__}.{name}").FIX for name in names}


def in_order(by_module: dict[str, Fix]) -> list[Fix]:
    """Return fixes in the order of the existing index, new ones last: the order of application and of tables.

    Raises `RecordError` for one that is not in the module of its name.
    """
    for module, fix in by_module.items():
        if fix.name.replace("-", "_") != module:
            raise RecordError(f"{fix.name} is the FIX of fixes/{module}.py: a fix and its module have the same name")
    place = {name: number for number, name in enumerate(_ORDER)}
    return sorted(by_module.values(), key=lambda fix: (place.get(fix.name, len(place)), fix.name))


def text(of: Sequence[Fix]) -> str:
    """Return the index: a line for each fix, in the order of application."""
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
