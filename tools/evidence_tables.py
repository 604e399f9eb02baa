"""Tables of what was measured, from docs/evidence/*.json, for tools/update_docs.py.

A file has the columns of its table, and runs: GPU, date, torch, command, the commit whose tree has the command, and
figures, each of which is a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vllm_graphfix.fixes import BY_NAME

FOLDER = Path(__file__).parent.parent / "docs" / "evidence"
NAME = re.compile(rf"(?<![\w`/-])({'|'.join(map(re.escape, BY_NAME))})(?![\w`-])")
FACTS = {"gpu", "date", "torch", "command", "commit", "figures"}
"""What is known of each run."""


@cache
def load(name: str) -> dict[str, Any]:
    """Return the content of the file *name*. Raises `ValueError` if a run lacks a fact or a figure a column."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    for number, run in enumerate(content["runs"], 1):
        if set(run) != FACTS or not run["figures"]:
            raise ValueError(f"{name}.json: run {number} needs {', '.join(sorted(FACTS))}")
        if any(list(figures) != list(content["columns"]) for figures in run["figures"]):
            raise ValueError(f"{name}.json: run {number} lacks a column, or has another order")
    return content


def names() -> list[str]:
    """Return the names of all files, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def table(name: str) -> Iterator[str]:
    """Yield a row for each figure of the file *name*, and below the table a list of the runs."""
    content = load(name)
    columns, runs = content["columns"], content["runs"]
    numbered = len(runs) > 1
    yield f"| {' | '.join([*columns.values(), *(['run'] if numbered else [])])} |"
    yield "|---" * (len(columns) + numbered) + "|"
    for number, run in enumerate(runs, 1):
        for figures in run["figures"]:
            cells = [_linked(value) if column == "fix" else value for column, value in figures.items()]
            yield f"| {' | '.join([*cells, *([str(number)] if numbered else [])])} |"
    yield ""
    for number, run in enumerate(runs, 1):
        facts = f"{run['gpu']}, {run['date']}, torch {run['torch']}"
        yield f"{f'{number}. ' if numbered else ''}{facts}, at {run['commit']}: `{run['command']}`"


def _linked(names_of_fixes: str) -> str:
    return NAME.sub(r"[`\1`](fixes/\1.md#evidence)", names_of_fixes)
