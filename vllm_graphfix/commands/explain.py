"""What `explain` says of a fix, and of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes import FIXES

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_OBSERVED_BY_DEFAULT = (
    "No GPU has shown this defect in an engine's answers yet (docs/evidence.md says what was shown), so the fix only "
    "counts until {}=auto or =on applies it."
)


def as_json(fix: Fix) -> dict[str, Any]:
    return {"schema": SCHEMA, "name": fix.name, "pr": fix.pr, **_sections(fix)}


def show(fix: Fix, console: Console) -> None:
    from rich.padding import Padding

    console.print(f"[bold]{fix.name}[/]  {fix.summary}")
    for title, text in _sections(fix).items():
        console.print(f"\n[bold]{title.replace('_', ' ').capitalize()}[/]")
        console.print(Padding(text, (0, 0, 0, 2)), markup=False, highlight=False)


def all_as_json() -> dict[str, Any]:
    listed = [{"name": fix.name, "pr": fix.pr, "summary": fix.summary, "releases": fix.releases} for fix in FIXES]
    return {"schema": SCHEMA, "fixes": listed}


def show_all(console: Console) -> None:
    from rich.table import Table

    table = Table("fix", "what it does", "affected releases", "upstream", box=None, pad_edge=False)
    for fix in FIXES:
        table.add_row(f"[bold]{fix.name}[/]", fix.summary, fix.releases, _references(fix))
    console.print(table)


def _references(fix: Fix) -> str:
    return ", ".join(([f"PR {fix.pr}"] if fix.pr else []) + list(fix.references))


def _sections(fix: Fix) -> dict[str, str]:
    return {
        "symptom": fix.symptom,
        "cause": fix.cause,
        "what_the_fix_does": fix.remedy,
        "what_it_counts": "\n".join(f"{event.name}: {event.meaning}" for event in fix.events),
        "upstream": _references(fix),
        "releases": fix.releases,
        "how_to_tell_that_you_are_hit": fix.detect,
        "concerns": fix.concerns,
        **({"observed_by_default": _OBSERVED_BY_DEFAULT.format(fix.variable)} if fix.default is Mode.OBSERVE else {}),
        "without_the_plugin": fix.workaround,
        "switch_it_off": f"{fix.variable}=off for this one, VLLM_GRAPHFIX=off for all; then restart the engine.",
        "no_longer_needed": fix.removable,
        **({"goes_with": "; ".join(f"{t.name}: without it {t.because}" for t in fix.together)} if fix.together else {}),
    }
