"""Which flags a `vllm serve` takes, read from its source."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source

_FILES = (
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/openai/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/common/cli_args.py",
    "vllm/entrypoints/cli/serve.py",
    "vllm/utils/argparse_utils.py",
)
"""Where the releases from 0.14.1 to 0.33.0 have them; none has all of these files."""
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9_-]*")
_OF_EACH = frozenset({"--tensor-parallel-size", "--headless"})
"""One of the engine's flags and one of the server's: where one is not found, they stand somewhere else, and nothing is
said of any."""


def flags_of(source: Source) -> frozenset[str]:
    """Every flag, long ones with dashes; empty where it is not known where this vLLM has them."""
    found: set[str] = set()
    for path in _FILES:
        try:
            tree = ast.parse(source.read(path) or b"")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return frozenset()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
                found.add(_dashed(node.value))
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found |= {_dashed(f"--{field.id}") for field in fields if isinstance(field, ast.Name)}
    return frozenset(found) if found >= _OF_EACH else frozenset()


def unknown(flag: str, known: frozenset[str]) -> bool:
    """Whether no `vllm serve` with the flags *known* takes *flag*, given as on the line, without its value.

    A flag may be cut short, may have underscores, and ``--no-x`` goes with ``--x``.
    """
    name = _dashed(flag.partition(".")[0])
    if not known or name in known or name in ("-h", "--help") or re.fullmatch(r"-O\d*", name):
        return False
    if not name.startswith("--"):
        # argparse takes a value right behind a short flag: -tp8.
        return not any(name.startswith(each) for each in known if not each.startswith("--"))
    asked = (name, name.replace("--no-", "--", 1)) if name.startswith("--no-") else (name,)
    return not any(each.startswith(one) for one in asked for each in known)


def nearest(flag: str, known: frozenset[str]) -> str | None:
    """The flag that was meant; None for a short one, which has nothing to go by."""
    from difflib import get_close_matches

    name = _dashed(flag.partition(".")[0])
    close = get_close_matches(name, sorted(known), n=1) if name.startswith("--") else []
    return close[0] if close else None


def _dashed(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag
