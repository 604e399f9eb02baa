"""All that a process of an engine can import of this package: lines, and the modules of vLLM that it names.

The contract "border" in pyproject.toml holds that none of it imports what proves and what commands do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "vllm_graphfix"
TOOLS = {"commands", "verify", "__main__.py"}
"""Packages that no process of an engine imports: commands and proofs."""
LOGGER = "vllm.graphfix"
"""The name of a logger, not of a module."""
_MODULE = re.compile(r"vllm(\.\w+)+")


def modules() -> list[Path]:
    """Return the modules, sorted by folder."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted((path for path in paths if path.parts[0] not in TOOLS), key=lambda path: (path.parent, path.name))


def of_vllm(path: Path) -> list[str]:
    """Return the modules of vLLM that the module at *path* imports, or names in a string to wrap what is in them."""
    tree = ast.parse((PACKAGE / path).read_text("utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return sorted(name for name in names if _MODULE.fullmatch(name) and name != LOGGER)


def lines_of(path: Path) -> int:
    return len((PACKAGE / path).read_text("utf-8").splitlines())


def summary() -> Iterator[str]:
    """Yield a row for each folder, and their sum."""
    yield "| folder | modules | lines |"
    yield "|---|---|---|"
    by_folder = [(path.parts[0] if len(path.parts) > 1 else "(the package)", path) for path in modules()]
    for folder, group in groupby(sorted(by_folder), key=lambda each: each[0]):
        paths = [path for _, path in group]
        yield f"| {folder} | {len(paths)} | {sum(map(lines_of, paths)):,} |"
    yield f"| all | {len(by_folder)} | {sum(lines_of(path) for _, path in by_folder):,} |"


def table() -> Iterator[str]:
    """Yield a row for each module."""
    yield "| module | lines | what it is | of vLLM |"
    yield "|---|---|---|---|"
    for path in modules():
        text = ast.get_docstring(ast.parse((PACKAGE / path).read_text("utf-8"))) or ""
        touched = ", ".join(f"`{name}`" for name in of_vllm(path))
        about = text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield f"| `{path}` | {lines_of(path)} | {about} | {touched} |"
