"""Table and JSON of a hunt."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_graphfix.commands.hunt.design import DIMENSIONS, YOURS
from vllm_graphfix.commands.hunt.run import FAILS, NO_TWIN, REFUSED, RIGHT, UNCLEAR, WRONG, Hunted, line_of
from vllm_graphfix.commands.output import say

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_VERDICTS = (WRONG, FAILS, UNCLEAR, RIGHT, REFUSED, NO_TWIN)


def as_json(hunted: Hunted) -> dict[str, Any]:
    """Return the stable interface, versioned by `SCHEMA`."""
    return {
        "schema": SCHEMA,
        "planned": hunted.planned,
        "seconds": hunted.seconds,
        "without_twin": hunted.without_twin,
        "cases": hunted.rows,
    }


def show(hunted: Hunted, console: Console) -> None:
    from rich.table import Table

    table = Table("", *_VERDICTS, box=None, pad_edge=False)
    for dimension, values in DIMENSIONS.items():
        for value in (*values, YOURS):
            counts = Counter(row["verdict"] for row in hunted.rows if row["settings"].get(dimension) == value)
            if counts:
                table.add_row(f"{dimension} {value}", *(str(counts[verdict] or "") for verdict in _VERDICTS))
    console.print(table)
    for row in hunted.rows:
        if row["verdict"] != RIGHT:
            say(console, line_of(row), markup=False)
        if row["verdict"] in (WRONG, FAILS):
            say(console, f"  {(row.get('reduced') or row)['command']}", markup=False)
    if hunted.without_twin:
        by_reason: dict[str, list[str]] = {}
        for name, why in hunted.without_twin.items():
            by_reason.setdefault(why, []).append(name)
        names = "; ".join(f"{', '.join(each)} ({why})" for why, each in by_reason.items())
        say(console, f"without a twin: {names}", markup=False)
    counts = Counter(row["verdict"] for row in hunted.rows)
    judged = {row["architecture"] for row in hunted.rows if row["verdict"] in (RIGHT, WRONG, FAILS)}
    say(
        console,
        f"{len(hunted.rows)} of {hunted.planned} cases: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS)
        + f"; {len(judged)} architectures with a verdict; {hunted.seconds:.0f} s",
    )
