"""What `status` shows on a terminal: one line of verdict, then what this vLLM has, then the rest if it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.commands.explain import by_default
from vllm_graphfix.commands.links import fix_name, linked
from vllm_graphfix.deployment import Concern
from vllm_graphfix.deployment.needs import briefly_here, by_choice
from vllm_graphfix.deployment.runner import Default
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.fixes import about
from vllm_graphfix.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_graphfix.commands.status import Row, Status

_NARROW = 80
"""Columns below which a table has a line for each cell."""


def show(found: Status, console: Console, *, everything: bool = False, verbose: bool = False) -> None:
    """Prints *found*.

    *everything*: also what this vLLM does not have, and with a deployment what does not concern it. *verbose*: what
    each verdict rests on, with its place in the source.
    """
    from rich.text import Text

    folder = found.source.folder

    def line(text: str, style: str = "") -> None:
        console.print(linked(text, style, folder=folder), soft_wrap=True)

    needed = [row for row in found.rows if row.diagnosis.needs_action]
    asked = any(row.answer for row in found.rows)
    opened = [
        row
        for row in found.rows
        if row.diagnosis.verdict is Verdict.FIXED and row.answer and row.answer.concern is not Concern.DOES_NOT
    ]
    concerned = [row for row in [*needed, *opened] if row.answer is None or row.answer.concern is not Concern.DOES_NOT]
    known = all(row.diagnosis.known for row in found.rows)
    origin = "stock release" if known else "no stock release that was looked at: judged by its code"
    where = f" in {printable(found.source.label)}" if verbose or not known else ""
    runner = f"; model runner {found.default_runner} by default" if needed and found.default_runner else ""
    line(f"vLLM {found.source.version or '(version unknown)'}{where}, {origin}{runner}")
    line(verdict(found), "bold")
    if asked:
        line(_sentence_on_deployment(needed) + (f" {len(opened)} more cannot be told." if opened else ""), "bold")
    elif chosen := sum(by_choice(row.fix.needs(), found.default_runner, row.diagnosis.shape) for row in needed):
        verb = "needs" if chosen == 1 else "need"
        line(f"{chosen} of these {len(needed)} {verb} a model runner or a mode that is not the default of this vLLM.")
    for name, value in found.misconfigured.items():
        line(f"misconfigured: {name}={value}", "bold red")
    for note in found.notes:
        line(f"! {note}", "yellow")
    groups = [("NOT FIXED", "red"), ("FIXED", "green"), ("COUNTED", "cyan")]
    untold = [row for row in concerned if row.answer is not None and row.answer.concern is Concern.UNKNOWN]
    of_group = {title: [row for row in concerned if _group(row) == title and row not in untold] for title, _ in groups}
    for title, colour in groups:
        rows = of_group[title]
        if rows:
            console.print()
            # What is said of all of them is said once.
            whys = {(row.would_be, row.reason) for row in rows}
            said = len(rows) > 1 and len(whys) == 1 and title == "NOT FIXED"
            if said:
                line(f"{rows[0].would_be.value}: {rows[0].reason}", colour)
            _table(title, colour, rows, console, found, asked=asked, verbose=verbose, why=not said)
    if untold:
        console.print()
    for answer in dict.fromkeys(row.answer for row in untold if row.answer is not None):  # mostly one thing is missing
        line(f"{answer.concern.value} {answer.reason}:", "yellow")
        for row in (row for row in untold if row.answer == answer):
            console.print(Text("  ") + fix_name(row.fix.name), linked(_plain(about(row.fix).seen)), sep=": ")
            _, *more = _details_of(row, found.default_runner, asked=asked, verbose=verbose, why=True)
            for text in more:
                line(f"    {text}", "yellow")
    if found.unknown:
        _show_unknown(found.unknown, console, line, named=found.source.label if found.elsewhere else None)
    absent = [row for row in found.rows if row not in [*needed, *opened] and not row.is_unknown]
    left_out = [row for row in found.rows if row.is_ruled_out and row not in absent]
    if everything:
        for title, rows in (("does not concern you", left_out), ("not in this vLLM", absent)):
            if rows:
                console.print()
                line(f"{title}:")
            for row in rows:
                reason = row.answer.reason if row.answer is not None else row.diagnosis.reason
                line(f"  {row.fix.name}: {reason}")
    console.print()
    if not everything:
        parts = [(len(left_out), "not yours"), (len(absent), "not in this vLLM")]
        hidden = [f"{what}: {number}" for number, what in parts if number]
        if hidden:
            line(f"{', '.join(hidden)} (--all)", "dim")
    yours = "" if asked else 'Yours?  vllm-graphfix status --for "MODEL FLAGS"    '
    line(f"{yours}Where?  --verbose    More?  vllm-graphfix explain FIX", "dim")


def _group(row: Row) -> str:
    return {State.ACTIVE: "FIXED", State.OBSERVING: "COUNTED"}.get(row.would_be, "NOT FIXED")


def _show_unknown(rows: Sequence[Row], console: Console, line: Callable[..., None], *, named: str | None) -> None:
    """Print what cannot be told, since nothing of it was seen in code that is new, and how to find out."""
    from rich.text import Text

    console.print()
    line(f"CANNOT BE TOLD: nothing of {'it' if len(rows) == 1 else 'these'} was seen, in code that is new", "yellow")
    for row in rows:
        console.print(Text("  ") + fix_name(row.fix.name), linked(row.diagnosis.reason), sep=": ")
    tree = f" --vllm {named}" if named else ""
    line(f"Run {'it' if len(rows) == 1 else 'them'}: vllm-graphfix verify{tree} --device cpu", "yellow")


def verdict(found: Status) -> str:
    """Say how many of the known defects this vLLM has, has not and may have, and what will be done about them."""
    rows, needed = found.rows, [row for row in found.rows if row.diagnosis.needs_action]
    has = sum(row.diagnosis.verdict is Verdict.AFFECTED for row in rows)
    unknown = sum(row.diagnosis.verdict is Verdict.UNRECOGNISED for row in rows)
    if not has and not unknown:
        return f"None of {len(rows)} known defects is in it: nothing will be patched."
    said = f"{has} of {len(rows)} known defects {'is' if has == 1 else 'are'} in it, {len(rows) - has - unknown} not"
    if unknown:
        said += f", {unknown} cannot be told from its code"
    if not needed:
        return f"{said}. Nothing will be patched."
    each = {title: sum(_group(row) == title for row in needed) for title in ("FIXED", "COUNTED", "NOT FIXED")}
    told = [f"{each['FIXED']} fixed"] if each["FIXED"] else []
    told += [f"{each['COUNTED']} only counted"] if each["COUNTED"] else []
    told += [f"{each['NOT FIXED']} NOT fixed"] if each["NOT FIXED"] else []
    when = "With the plugin installed there" if found.elsewhere else "At the next start"
    return f"{said}. {when}: {', '.join(told)}."


def _sentence_on_deployment(needed: Sequence[Row]) -> str:
    """Which of what this vLLM has the deployment is hit by."""
    said = {concern: [row for row in needed if row.answer and row.answer.concern is concern] for concern in Concern}
    hit, unknown, spared = said[Concern.CONCERNS], said[Concern.UNKNOWN], said[Concern.DOES_NOT]
    if not needed:
        return "So none concerns you."
    parts = []
    if hit:
        verb = "concerns" if len(hit) == 1 else "concern"
        parts.append(f"{len(hit)} of these {len(needed)} {verb} you: {', '.join(row.fix.name for row in hit)}")
    elif not unknown:
        # Most often one thing spares it from most of them: that it has no graphs, say. Who names a model asks for more
        # than which model runner he has.
        whys = Counter(row.answer.reason for row in spared if row.answer)
        told = {each: number for each, number in whys.items() if "MODEL_RUNNER" not in each} or whys
        (why, often), *_ = Counter(told).most_common(1)
        because = f": {why}" if often == len(needed) else f"; most often since {why}"
        parts.append(f"None of these {len(needed)} concerns you{because}")
    else:
        parts.append(f"None of these {len(needed)} certainly concerns you")
    if unknown:
        parts.append(f"{len(unknown)} cannot be told without more")
    return "; ".join(parts) + "."


def _table(
    title: str,
    colour: str,
    rows: Sequence[Row],
    console: Console,
    found: Status,
    *,
    asked: bool,
    verbose: bool,
    why: bool,
) -> None:
    from rich.table import Table
    from rich.text import Text

    folder, default = found.source.folder, found.default_runner
    if console.width < _NARROW:
        console.print(f"[bold {colour}]{title}[/]")
        for row in rows:
            console.print(fix_name(row.fix.name), linked(f": {_plain(about(row.fix).seen)}"), sep="")
            for text in _details_of(row, default, asked=asked, verbose=verbose, why=why):
                console.print(linked(f"  {text}", folder=folder))
        return
    table = Table(
        f"[bold {colour}]{title}[/]", "WITHOUT IT", "YOURS" if asked else "ONLY WITH", box=None, pad_edge=False
    )
    table.columns[0].no_wrap = True
    table.columns[2].overflow = "fold"  # places are long words
    for row in rows:
        last, *more = _details_of(row, default, asked=asked, verbose=verbose, why=why)
        said = Text("\n").join([linked(last), *(linked(text, "yellow", folder=folder) for text in more)])
        table.add_row(fix_name(row.fix.name), linked(_plain(about(row.fix).seen)), said)
    console.print(table)


def _details_of(row: Row, default: Default, *, asked: bool, verbose: bool, why: bool) -> Iterator[str]:
    """Who is hit, or why this deployment is; then what there is to say of this fix here.

    *why*: also why it is not fixed.
    """
    if asked and row.answer is not None:
        yours = row.answer.concern is Concern.CONCERNS
        yield row.answer.reason if yours else f"{row.answer.concern.value} {row.answer.reason}"
    else:
        yield briefly_here(row.fix.needs(), default, row.diagnosis.shape)
    yield from row.notes
    if why and row.would_be not in (State.ACTIVE, State.OBSERVING) and not row.notes:
        yield f"{row.would_be.value}: {row.reason}"
    if verbose or row.diagnosis.verdict is Verdict.UNRECOGNISED:
        place = f" ({row.diagnosis.where})" if row.diagnosis.where else ""
        yield f"{row.diagnosis.verdict.value}: {row.diagnosis.reason}{place}"
    if row.diagnosis.tree:
        yield f"run it: vllm-graphfix verify {row.fix.name} --device cpu, which says how to patch this very code"
    if verbose:
        yield f"by default {by_default(row.fix)}"


def _plain(text: str) -> str:
    return text.replace("`", "")
