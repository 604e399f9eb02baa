"""The flags of a `vllm serve` and their values, read from its source."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
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
"""The files that define flags in some release from 0.14.1 on; no release has all of them."""
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9_-]*")
_OF_EACH = frozenset({"--tensor-parallel-size", "--headless"})
"""One of the engine's flags and one of the server's. If one is missing, flags are defined in other files, and none is
judged."""


RECORDED = Path(__file__).with_name("stock_flags.json")
"""The first and the last stock release that has a flag, by flag; `tools/make_manifest.py` writes it."""


def flags_of(source: Source) -> frozenset[str]:
    """Return every flag, long ones with dashes; empty if this vLLM defines them in other files."""
    if source.release is not None:
        return _flags_of_release(source.release)
    flags: set[str] = set()
    for path in _FILES:
        try:
            tree = ast.parse(source.read(path) or b"")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return frozenset()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
                flags.add(_dashed(node.value))
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                flags |= {_dashed(f"--{field.id}") for field in fields if isinstance(field, ast.Name)}
    return frozenset(flags) if flags >= _OF_EACH else frozenset()


def _flags_of_release(version: str) -> frozenset[str]:
    recorded: dict[str, str] = json.loads(RECORDED.read_text())
    ranges = ((flag, [_numbers(each) for each in releases.split()]) for flag, releases in recorded.items())
    return frozenset(flag for flag, (first, last) in ranges if first <= _numbers(version) <= last)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


_CHOICES = {
    "--kv-cache-dtype": ("vllm/config/cache.py", "CacheDType"),
    "--attention-backend": ("vllm/v1/attention/backends/registry.py", "AttentionBackendEnum"),
}
"""For each flag, the file and the name of what lists its values: a `Literal`, or an enumeration with its members."""
_NUMBERS = frozenset(
    f"--{each}-size" for each in ("tensor-parallel", "pipeline-parallel", "data-parallel", "decode-context-parallel")
)


def wrong_value(flag: str, value: str, source: Source) -> str | None:
    """Return what to write instead of *value* if vLLM refuses it; None if it does not, or if choices are unknown."""
    if flag in _NUMBERS:
        return None if re.fullmatch(r"\d{1,9}", value) else "give a number"
    choices = _choices(flag, source)
    same = value.upper() if flag == "--attention-backend" else value  # vLLM takes names of backends in any case
    if not choices or same in choices:
        return None
    from difflib import get_close_matches

    cased = [each for each in choices if each.casefold() == same.casefold()]
    close = cased or get_close_matches(same, sorted(choices), n=1)
    return f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(choices))}"


def _choices(flag: str, source: Source) -> frozenset[str]:
    """Return the values that *flag* takes; empty if its file lists none, or in a form that is not evaluated here."""
    path, name = _CHOICES.get(flag, ("", ""))
    try:
        tree = ast.parse((source.read(path) if path else None) or b"")
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == name
                and isinstance(node.value, ast.Subscript)
            ):
                members = ast.literal_eval(node.value.slice) if isinstance(node.value.slice, ast.Tuple) else ()
                return frozenset(each for each in members if isinstance(each, str))
            if isinstance(node, ast.ClassDef) and node.name == name:
                targets = (each.targets[0] for each in node.body if isinstance(each, ast.Assign))
                return frozenset(each.id for each in targets if isinstance(each, ast.Name))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    return frozenset()


def unknown(flag: str, known: frozenset[str]) -> bool:
    """Return True if a `vllm serve` with the flags *known* does not take *flag*, written without its value.

    A flag may be cut short, may have underscores, and ``--no-x`` goes with ``--x``.
    """
    name = _dashed(flag.partition(".")[0])
    if not known or name in known or name in ("-h", "--help") or re.fullmatch(r"-O\d*", name):
        return False
    if not name.startswith("--"):
        # argparse takes a value right behind a short flag: -tp8.
        return not any(name.startswith(each) for each in known if not each.startswith("--"))
    names = (name, name.replace("--no-", "--", 1)) if name.startswith("--no-") else (name,)
    return not any(each.startswith(one) for one in names for each in known)


def nearest(flag: str, known: frozenset[str]) -> str | None:
    """Return the most similar flag; None for a short flag, since all of these are similar."""
    from difflib import get_close_matches

    name = _dashed(flag.partition(".")[0])
    close = get_close_matches(name, sorted(known), n=1) if name.startswith("--") else []
    return close[0] if close else None


def _dashed(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag
