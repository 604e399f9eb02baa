"""The output of `status` on a terminal: a verdict in one line, the defects of this vLLM, then the rest on request."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.commands.explain import by_default
from vllm_graphfix.commands.links import fix_name, linked
from vllm_graphfix.commands.next_step import may_be_stored, other_flags, upgrade
from vllm_graphfix.deployment import Concern
from vllm_graphfix.deployment.model import UNCACHED
from vllm_graphfix.deployment.needs import DRAFTS, briefly_here, by_choice, has_chosen
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.fixes import about
from vllm_graphfix.text import PAGES, printable

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_graphfix.commands.status import Row, Status
    from vllm_graphfix.deployment import Deployment

_NARROW = 80
"""Columns below which a table has a line for each cell."""
_GROUPS = (("NOT FIXED", "red"), ("FIXED", "green"), ("WATCHED ONLY", "cyan"))
"""Titles and colours of the tables."""


def show(status: Status, console: Console, *, everything: bool = False, verbose: bool = False) -> None:
    """Print *status*.

    *everything* adds defects that this vLLM does not have or that cannot occur in the deployment; *verbose* adds the
    evidence for each verdict, with its place in the source.
    """
    _Output(status, console, verbose=verbose).print(everything=everything)


class _Output:
    """The output of one `status` on one console."""

    def __init__(self, status: Status, console: Console, *, verbose: bool) -> None:
        self._status = status
        self._console = console
        self._verbose = verbose
        self._needed = [row for row in status.rows if row.diagnosis.needs_action]
        self._has_deployment = status.deployment is not None
        # Defects that are fixed save for cases that the deployment may have.
        self._open = [
            row
            for row in status.rows
            if row.diagnosis.verdict is Verdict.FIXED and row.answer and row.answer.concern is not Concern.DOES_NOT
        ]

    def print(self, *, everything: bool) -> None:
        self._print_head()
        concerned = [
            row
            for row in [*self._needed, *self._open]
            if row.answer is None or row.answer.concern is not Concern.DOES_NOT
        ]
        undecided = [row for row in concerned if row.answer is not None and row.answer.concern is Concern.UNKNOWN]
        for title, colour in _GROUPS:
            rows = [row for row in concerned if _group(row) == title and row not in undecided]
            if rows:
                self._print_group(title, colour, rows)
        self._print_undecided(undecided)
        if self._status.unknown:
            self._print_unknown(self._status.unknown)
        if self._status.deployment is not None:
            self._print_next_step(self._status.deployment)
        self._print_rest(everything=everything)

    @property
    def _missing(self) -> Sequence[str]:
        """Return what is missing to decide whether the deployment has the defects that it may have.

        Whoever has one item needs no other that contains it, such as an alternative to it.
        """
        answers = [row.answer for row in [*self._needed, *self._open] if row.answer and row.answer.undecided]
        missing = dict.fromkeys(
            each for answer in answers if answer.concern is Concern.UNKNOWN for each in answer.missing
        )
        return [each for each in missing if not any(other != each and other in each for other in missing)]

    def _seen(self, row: Row) -> str:
        deployment = self._status.deployment
        return about(row.fix, deployment.decode_length() if deployment else "one token").seen.replace("`", "")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(linked(text, style, folder=self._status.source.folder), soft_wrap=True)

    def _print_head(self) -> None:
        """Print the verdict on this vLLM and on the deployment, then invalid settings and notes."""
        status, needed = self._status, self._needed
        known = all(row.diagnosis.known for row in status.rows)
        origin = "stock release" if known else "no recorded stock release: judged by its code"
        if status.source.release is not None:
            origin = "the stock wheel as it was recorded: your copy was not read"
        where = f" in {printable(status.source.label)}" if self._verbose or not known else ""
        runner = f"; model runner {status.default_runner} by default" if needed and status.default_runner else ""
        if status.deployment is not None:
            self._line(_sentence_on_deployment(status, status.deployment), "bold")
            for each in self._missing:
                if each.startswith(UNCACHED):
                    self._line(f"First get {each}", "bold yellow")
        for look_alike, answer in status.look_alikes:
            self._line(look_alike.sentence(answer), "bold")
        self._line(f"vLLM {status.source.version or '(version unknown)'}{where}, {origin}{runner}")
        self._line(verdict(status), "" if self._has_deployment else "bold")
        if not self._has_deployment and (
            chosen := sum(by_choice(row.fix.needs(), status.default_runner, row.diagnosis.shape) for row in needed)
        ):
            verb = "applies" if chosen == 1 else "apply"
            self._line(f"{chosen} of these {len(needed)} {verb} only if you changed a default.")
        if status.ran_on:
            self._line(status.ran_on)
        for name, value in status.misconfigured.items():
            self._line(f"misconfigured: {name}={value}", "bold red")
        for note in status.notes:
            self._line(f"! {note}", "yellow")

    def _print_next_step(self, deployment: Deployment) -> None:
        """Print the ways out of what the deployment is or may be hit by, with their prices; or what would matter."""
        status = self._status
        rows = status.hit or [row for row in status.undecided if row.diagnosis.verdict is Verdict.AFFECTED]
        if not rows:
            if not status.undecided and (conditions := _would_matter_with(self._needed, deployment)):
                self._line(f"It would matter with: {conditions}")
            if not status.undecided and deployment.graphs().holds:
                self._line(
                    "Wrong all the same? First one pod with --enforce-eager: still wrong is no matter of graphs "
                    f"({PAGES}/am-i-hit.md#look-alikes); right: vllm-graphfix compare MODEL FLAGS"
                )
            return
        if status.elsewhere:
            plugin = "pip install vllm-graphfix there, in a container into its image; restart"
        else:
            plugin = "installed here: restart the engines that started before it"
        switched = [f"{row.fix.variable}=auto" for row in rows if row.would_be is not State.ACTIVE]
        if switched:
            plugin += f"; set {', '.join(switched)}"
        plugin += " (decodes at most 7 % slower, where measured; the first start recompiles once)"
        self._console.print()
        self._line(f"{'Do one:' if status.hit else 'If so: '}  plugin    {plugin}")
        if status.hit:
            self._line(f"         upgrade   {upgrade(status.source, deployment)}")
        judged = [(row.fix, row.diagnosis) for row in status.rows]
        self._line(f"         flags     {other_flags(status.source, judged, deployment)}")
        stored = [row.fix.name for row in status.hit if may_be_stored(row.fix)]
        if stored:
            self._line(f"Then:    empty the stores that outlive the engine, such as LMCache's ({', '.join(stored)})")
        self._line("Back:    VLLM_GRAPHFIX=off, restart: without the plugin again")

    def _print_group(self, title: str, colour: str, rows: Sequence[Row]) -> None:
        self._console.print()
        # A reason that all rows share is printed once, above them.
        reasons = {(row.would_be, row.reason) for row in rows}
        is_shared = len(rows) > 1 and len(reasons) == 1 and title == "NOT FIXED"
        if is_shared:
            self._line(f"{rows[0].would_be.value}: {rows[0].reason}", colour)
        # The plugin may not be installed there.
        title = "FIXED BY THE PLUGIN" if title == "FIXED" and self._status.elsewhere else title
        self._print_table(title, colour, rows, with_reason=not is_shared)

    def _print_table(self, title: str, colour: str, rows: Sequence[Row], *, with_reason: bool) -> None:
        from rich.table import Table
        from rich.text import Text

        folder = self._status.source.folder
        if self._console.width < _NARROW:
            self._console.print(f"[bold {colour}]{title}[/]")
            for row in rows:
                self._console.print(fix_name(row.fix.name), linked(f": {self._seen(row)}"), sep="")
                for text in self._details_of(row, with_reason=with_reason):
                    self._console.print(linked(f"  {text}", folder=folder))
            return
        deployment = "YOURS" if self._has_deployment else "ONLY WITH"
        table = Table(f"[bold {colour}]{title}[/]", "WITHOUT IT", deployment, box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        table.columns[2].overflow = "fold"  # places in the source are long words
        for row in rows:
            first, *more = self._details_of(row, with_reason=with_reason)
            details = Text("\n").join([linked(first), *(linked(text, "yellow", folder=folder) for text in more)])
            table.add_row(fix_name(row.fix.name), linked(self._seen(row)), details)
        self._console.print(table)

    def _details_of(self, row: Row, *, with_reason: bool) -> Iterator[str]:
        """Yield the deployments that have the defect, or the answer on this one; then notes, reason and evidence.

        *with_reason* includes the reason why it is not fixed.
        """
        if self._has_deployment and row.answer is not None:
            yours = row.answer.concern is Concern.CONCERNS
            yield row.answer.reason if yours else f"{row.answer.concern.value} {row.answer.reason}"
        else:
            yield briefly_here(row.fix.needs(), self._status.default_runner, row.diagnosis.shape)
        yield from row.notes
        if with_reason and row.would_be not in (State.ACTIVE, State.OBSERVING) and not row.notes:
            yield f"{row.would_be.value}: {row.reason}"
        if self._verbose or row.diagnosis.verdict is Verdict.UNRECOGNISED:
            place = f" ({row.diagnosis.where})" if row.diagnosis.where else ""
            yield f"{row.diagnosis.verdict.value}: {row.diagnosis.reason}{place}"
        if row.diagnosis.tree:
            yield f"run it: vllm-graphfix verify {row.fix.name} --device cpu, which says how to patch this very code"
        if self._verbose:
            yield f"by default {by_default(row.fix)}"

    def _print_undecided(self, rows: Sequence[Row]) -> None:
        """Print defects that may concern the deployment by what they need, then what is missing to know it, once."""
        from rich.text import Text

        if rows:
            self._console.print()
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row.answer is None:
                continue
            if row.answer.undecided:
                clauses = _joined(row.answer.undecided)
                title = f"{'ONLY' if ' here)' in clauses else 'LIKELY'} IF {clauses}:"
            else:
                title = f"CANNOT BE TOLD without {row.answer.reason}:"
            groups.setdefault(title, []).append(row)
        for title, alike in groups.items():
            self._line(title, "yellow")
            for row in alike:
                self._console.print(Text("  ") + fix_name(row.fix.name), linked(self._seen(row)), sep=": ")
                _, *more = self._details_of(row, with_reason=True)
                for text in more:
                    self._line(f"    {text}", "yellow")
        decisive = [each for each in self._missing if not each.startswith(UNCACHED)]
        if decisive:
            self._line("Decided by:", "yellow")
        for each in decisive:
            self._line(f"  {each.removeprefix('knowing ')}", "yellow")

    def _print_unknown(self, rows: Sequence[Row]) -> None:
        """Print defects of which nothing was seen in code that is new, and the command that decides."""
        from rich.text import Text

        self._console.print()
        these, them = ("it", "it") if len(rows) == 1 else ("these", "them")
        self._line(f"CANNOT BE TOLD: nothing of {these} was seen, in code that is new", "yellow")
        for row in rows:
            self._console.print(Text("  ") + fix_name(row.fix.name), linked(row.diagnosis.reason), sep=": ")
        tree = f" --vllm {printable(shlex.quote(self._status.source.label))}" if self._status.elsewhere else ""
        self._line(f"Run {them}: vllm-graphfix verify{tree} --device cpu", "yellow")

    def _print_rest(self, *, everything: bool) -> None:
        """Print the defects that are absent or ruled out, or how many there are; then hints."""
        rows = self._status.rows
        absent = [row for row in rows if row not in [*self._needed, *self._open] and not row.is_unknown]
        ruled_out = [row for row in rows if row.is_ruled_out and row not in absent]
        if everything:
            for title, group in (("does not concern you", ruled_out), ("not in this vLLM", absent)):
                if group:
                    self._console.print()
                    self._line(f"{title}:")
                for row in group:
                    reason = row.answer.reason if row.answer is not None else row.diagnosis.reason
                    self._line(f"  {row.fix.name}: {reason}")
        self._console.print()
        if not everything:
            counts = [("not yours", len(ruled_out)), ("not in this vLLM", len(absent))]
            hidden = [f"{title}: {number}" for title, number in counts if number]
            if hidden:
                self._line(f"{', '.join(hidden)} (--all)", "dim")
        yours = "" if self._has_deployment else "Yours?  vllm-graphfix status --for 'MODEL FLAGS'    "
        self._line(f"{yours}Where?  --verbose    More?  vllm-graphfix explain FIX", "dim")


def _group(row: Row) -> str:
    return {State.ACTIVE: "FIXED", State.OBSERVING: "WATCHED ONLY"}.get(row.would_be, "NOT FIXED")


def verdict(status: Status) -> str:
    """Count the known defects that this vLLM has, has not and may have, and those that will be fixed, in a sentence."""
    rows, needed = status.rows, [row for row in status.rows if row.diagnosis.needs_action]
    has = sum(row.diagnosis.verdict is Verdict.AFFECTED for row in rows)
    unknown = sum(row.diagnosis.verdict is Verdict.UNRECOGNISED for row in rows)
    if not has and not unknown:
        return f"None of {len(rows)} known defects is in it: nothing will be patched."
    text = f"{has} of {len(rows)} known defects {'is' if has == 1 else 'are'} in it, {len(rows) - has - unknown} not"
    if unknown:
        text += f", {unknown} cannot be told from its code"
    if not needed:
        return f"{text}. Nothing will be patched."
    counts = {title: sum(_group(row) == title for row in needed) for title, _ in _GROUPS}
    parts = [f"{counts['FIXED']} fixed"] if counts["FIXED"] else []
    parts += [f"{counts['WATCHED ONLY']} watched only"] if counts["WATCHED ONLY"] else []
    parts += [f"{counts['NOT FIXED']} NOT fixed"] if counts["NOT FIXED"] else []
    when = "With the plugin installed there" if status.elsewhere else "At the next start"
    return f"{text}. {when}: {', '.join(parts)}."


def _sentence_on_deployment(status: Status, deployment: Deployment) -> str:
    """Say how many defects the deployment has or may have, in a sentence."""
    places = ", ".join(filter(None, (deployment.model, printable((deployment.gpu[0] or "")[:60]))))
    vllm = f"vLLM {status.source.version or '(version unknown)'}" + (f" ({places})" if places else "")
    hit, undecided = len(status.hit), len(status.undecided)
    more = f"; {undecided} more cannot be told without more information" if undecided else ""
    if hit:
        return f"YOU ARE HIT by {hit} defect{'s' if hit > 1 else ''} of {vllm}{more}."
    if undecided:
        return f"MAYBE HIT by {undecided} defect{'s' if undecided > 1 else ''} of {vllm}: see below what decides."
    reasons = Counter(row.answer.reason for row in status.rows if row.answer and row.diagnosis.needs_action)
    # One reason often rules out most of them, such as eager mode. The model runner is named only if there is no other
    # reason, since it says least about the deployment.
    others = {each: number for each, number in reasons.items() if "MODEL_RUNNER" not in each} or reasons
    why = f" What rules out most: {Counter(others).most_common(1)[0][0]}." if others else ""
    return f"NOT HIT by a known defect of {vllm}. You do not need the plugin for these flags.{why}"


def _would_matter_with(rows: Sequence[Row], deployment: Deployment) -> str:
    """List what *deployment* lacks to have one of the defects of *rows*: at most five, where it lacks one thing.

    First come defects for which it already has a setting that is no default.
    """
    lacking = [
        (not has_chosen(row.fix.needs(), deployment, row.diagnosis.shape), row.answer.undecided[0])
        for row in rows
        if row.answer and len(row.answer.undecided) == 1
    ]
    others = {DRAFTS.text: f"{DRAFTS.text} by another method"} if deployment.drafts().holds else {}
    others |= {f"model runner V{1 + runner}": f"VLLM_USE_V2_MODEL_RUNNER={runner}" for runner in (0, 1)}
    texts = (others.get(text, text) for _, text in sorted(lacking, key=lambda each: each[0]))
    return "; ".join([*dict.fromkeys(texts)][:5])


def _joined(clauses: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(clauses[:-1]), clauses[-1])))
