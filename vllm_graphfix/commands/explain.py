"""The output of `explain`, for one fix or for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.commands.links import fix_name, linked
from vllm_graphfix.deployment import needs
from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes import FIXES, about
from vllm_graphfix.fixes._about import RESTS_ON, About

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_TITLES = {"concerns": "You need all of this", "no_longer_needed": "Fixed upstream"}
"""Headings that are no key of the JSON in other letters."""


def as_json(fix: Fix) -> dict[str, Any]:
    return {"schema": SCHEMA, "name": fix.name, "pr": about(fix).pr, **_sections(fix)}


def show(fix: Fix, console: Console) -> None:
    from rich.padding import Padding

    console.print(fix_name(fix.name), about(fix).summary, sep="  ", highlight=False)
    for title, text in _sections(fix).items():
        console.print(f"\n[bold]{_TITLES.get(title) or title.replace('_', ' ').capitalize()}[/]")
        console.print(Padding(linked(text), (0, 0, 0, 2)))


def all_as_json() -> dict[str, Any]:
    described = {fix.name: about(fix) for fix in FIXES}
    listed = [
        {"name": name, "pr": each.pr, "summary": each.summary, "releases": each.releases}
        for name, each in described.items()
    ]
    return {"schema": SCHEMA, "fixes": listed}


def show_all(console: Console) -> None:
    from rich.table import Table

    table = Table("fix", "what it does", "affected releases", "upstream", box=None, pad_edge=False)
    table.columns[0].no_wrap = True  # a name has to be copied whole
    for fix in FIXES:
        description = about(fix)
        links = linked(references(description))
        table.add_row(fix_name(fix.name), description.summary, description.releases, links)
    console.print(table)


def references(description: About) -> str:
    """Name upstream's threads about the defect."""
    return ", ".join(([f"PR {description.pr}"] if description.pr else []) + list(description.references))


def by_default(fix: Fix) -> str:
    """Say what the fix does by default, and why."""
    action = "applied" if fix.default is Mode.AUTO else f"only counted, until {fix.variable}=auto or =on applies it"
    return f"{action}: {RESTS_ON[fix.default_rationale]}"


def _sections(fix: Fix) -> dict[str, str]:
    description = about(fix)
    return {
        "symptom": description.symptom,
        "without_the_plugin": description.workaround,
        "cause": description.cause,
        "what_the_fix_does": description.remedy,
        "what_it_counts": "\n".join(f"{event.name}: {event.meaning}" for event in fix.events),
        "upstream": references(description),
        "releases": description.releases,
        "how_to_tell_that_you_are_hit": description.detect,
        "concerns": needs.described(fix.needs()),
        "by_default": by_default(fix),
        "switch_it_off": f"{fix.variable}=off for this one, VLLM_GRAPHFIX=off for all; then restart the engine.",
        "no_longer_needed": description.removable,
        **({"goes_with": "; ".join(f"{t.name}: without it {t.because}" for t in fix.requires)} if fix.requires else {}),
    }
