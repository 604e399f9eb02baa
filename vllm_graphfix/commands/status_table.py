"""What `status` shows on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_graphfix.commands.status import Status

_COLOURS = {
    Verdict.AFFECTED.value: "yellow",
    Verdict.UNRECOGNISED.value: "red",
    Verdict.FIXED.value: "green",
    Verdict.ABSENT.value: "dim",
    State.ACTIVE.value: "bold green",
    State.OBSERVING.value: "cyan",
    State.OFF.value: "red",
    State.NOT_IN_CANARY.value: "yellow",
    State.INCOMPATIBLE.value: "red",
    State.NOT_NEEDED.value: "dim",
}

_CONCERN_COLOURS = {"concerns you": "yellow", "does not": "green", "cannot tell without": "cyan"}


def show(found: Status, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    known = all(row.diagnosis.known for row in found.rows)
    origin = "a known stock release" if known else "not a known stock release; judged by its code"
    console.print(
        f"vLLM [bold]{found.source.version or '(version unknown)'}[/] in {escape(printable(found.source.label))}, "
        f"{origin}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("fix", "diagnosis", "mode", "would be", "because", box=None, pad_edge=False)
    for row in found.rows:
        verdict, would_be = row.diagnosis.verdict.value, row.would_be.value
        place = (
            f" [dim]({escape(row.diagnosis.where)})[/]"
            if row.diagnosis.where and row.diagnosis.verdict is not Verdict.FIXED
            else ""
        )
        because = "\n".join(
            [escape(row.diagnosis.reason) + place, *(f"[yellow]{escape(note)}[/]" for note in row.notes)]
        )
        table.add_row(
            f"[bold]{row.fix.name}[/]",
            f"[{_COLOURS.get(verdict, '')}]{verdict}[/]",
            row.mode.value,
            f"[{_COLOURS.get(would_be, '')}]{would_be}[/]",
            because,
        )
    console.print(table)
    if found.misconfigured:
        told = ", ".join(f"{name}={value}" for name, value in found.misconfigured.items())
        console.print(f"[bold red]misconfigured:[/] {escape(told)}", highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"[yellow]![/] {escape(note)}", highlight=False)
    if any(row.answer for row in found.rows):
        console.print()
        concerned = Table("fix", "with these flags", "because", box=None, pad_edge=False)
        for row in found.rows:
            if row.answer is not None:
                colour = _CONCERN_COLOURS[row.answer.concern.value]
                concerned.add_row(
                    f"[bold]{row.fix.name}[/]", f"[{colour}]{row.answer.concern.value}[/]", escape(row.answer.reason)
                )
        console.print(concerned)
