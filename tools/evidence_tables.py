"""Tables of what was measured, from docs/evidence/, for tools/update_docs.py.

A table has columns and runs: GPU, date, torch, command, the commit whose tree has the command, and figures, each of
which is a row. docs/evidence/*.json has one table a file, of all fixes; docs/evidence/fixes/*.json has the tables that
only a fix's own page shows.
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


ON_GPUS = "On [GPUs](../evidence.md#on-a-gpu-each-fix)"
COLUMNS = {"release": "vLLM", "stock": "stock", "patched": "patched"}
"""Title and columns of a fix's own table that has none."""
NOT_TRIED = {"shadow": "not tried", "poison": "not tried", "marks": "not tried", "metadata": "–"}
"""What the detectors see of a fix that has no file."""
SHARED = {
    "vectors": "[Engines that `verify` has not](../evidence.md#engines-that-verify-has-not)",
    "trained": "[Trained weights](../evidence.md#trained-weights)",
    "observe": "[`observe`](../evidence.md#on-a-gpu-observe) on a GPU, equal to stock to the last bit",
    "shadow-double": "The shadow check [on the CPU double](../evidence.md#on-the-cpu-double), every replay checked",
    "shadow-caught": "[The shadow check](../evidence.md#on-a-gpu-the-shadow-check) on a GPU, every replay checked",
    "shadow-answers": "The workload of `verify` three times under the shadow check, every fix off",
}
"""Titles on a fix's page of the tables of all fixes of which the page has that fix's rows, without commands."""


@cache
def load(name: str) -> dict[str, Any]:
    """Return the table of the file *name*. Raises `ValueError` if a run lacks a fact or a figure a column."""
    return _checked(json.loads((FOLDER / f"{name}.json").read_text()), name)


@cache
def of_fix(fix: str) -> list[dict[str, Any]]:
    """Return the tables of *fix* alone, with their titles. Raises `ValueError` like `load`."""
    tables = _content_of(fix)["tables"]
    return [_checked({"title": ON_GPUS, "columns": COLUMNS} | each, f"fixes/{fix}") for each in tables]


def _content_of(fix: str) -> dict[str, Any]:
    path = FOLDER / "fixes" / f"{fix}.json"
    content: dict[str, Any] = {"detectors": NOT_TRIED, "tables": []}
    return content | json.loads(path.read_text()) if path.exists() else content


def _checked(content: dict[str, Any], name: str) -> dict[str, Any]:
    for number, run in enumerate(content["runs"], 1):
        if set(run) != FACTS or not run["figures"]:
            raise ValueError(f"{name}.json: run {number} needs {', '.join(sorted(FACTS))}")
        if any(list(figures) != list(content["columns"]) for figures in run["figures"]):
            raise ValueError(f"{name}.json: run {number} lacks a column, or has another order")
    return content


def names() -> list[str]:
    """Return the names of all files with one table, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def runs() -> list[dict[str, Any]]:
    """Return the runs of all tables."""
    tables = [*map(load, names()), *(each for fix in BY_NAME for each in of_fix(fix))]
    return [run for content in tables for run in content["runs"]]


def table(name: str) -> Iterator[str]:
    """Yield a row for each figure of the file *name*, and below the table a list of the runs."""
    return _table(load(name))


def tables_of_fix(fix: str) -> Iterator[str]:
    """Yield the tables of *fix* alone, then its rows of the tables of all fixes."""
    for content in of_fix(fix):
        yield from ("", f"{content['title']}:", "", *_table(content))
    for name, title in SHARED.items():
        if rows := list(_rows_of(fix, name)):
            columns = [column for key, column in load(name)["columns"].items() if key != "fix"]
            yield from ("", f"{title}:", "", f"| {' | '.join(columns)} | GPU, date |", "|---" * len(rows[0]) + "|")
            yield from (f"| {' | '.join(cells)} |" for cells in rows)
    yield ""


def _rows_of(fix: str, name: str) -> Iterator[list[str]]:
    """Yield the cells of each row of *fix* in the file *name*; beside the release, other fixes that the row is of."""
    for run in load(name)["runs"]:
        for figures in run["figures"]:
            cells = dict(figures)
            fixes = cells.pop("fix").split(", ")
            if fix in fixes:
                others = " and ".join(f"`{each}`" for each in fixes if each != fix)
                cells["release"] += f"; with {others}" * bool(others)
                yield [*cells.values(), f"{run['gpu']}, {run['date']}".removeprefix("no GPU, ")]


def detectors() -> Iterator[str]:
    """Yield a row for each fix: where each detector has seen its defect, or why it cannot."""
    yield from ("| defect | shadow check | poison | marks | metadata |", "|---|---|---|---|---|")
    for fix in BY_NAME:
        yield f"| `{fix}` | {' | '.join((NOT_TRIED | _content_of(fix)['detectors']).values())} |"


def _table(content: dict[str, Any]) -> Iterator[str]:
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
