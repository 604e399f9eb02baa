"""Report of `verify`, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_graphfix._version import __version__
from vllm_graphfix.fixes import about
from vllm_graphfix.verify.comparison import finite_or_none
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.proof import Proof, differing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
_OUTCOMES_OF_A_RUN = ("affected", "right", "not decided")
"""Beginnings of the outcomes for unrecognised code."""
_COLOURS = {
    "proven": "bold green",
    "right": "bold green",
    "nothing patched": "dim",
    "skipped": "yellow",
    "not decided": "yellow",
}


@dataclass(frozen=True)
class Report:
    """Proofs of all fixes on one vLLM; further cases of a fix follow it."""

    vllm: str | None
    source: str
    device: str
    proofs: tuple[Proof, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Other conditions of the verdict, by name: device, versions, seed."""
    logs: str | None = None
    """Folder with the engines' logs, if an engine failed or a proof does not hold."""
    seconds: float | None = None
    """Seconds for all engines."""
    engines: tuple[Mapping[str, Any], ...] = ()
    """Times of each engine; see `JobResult.times`."""

    @property
    def holds(self) -> bool:
        """True if every proof holds that was run and decided."""
        return all(proof.holds for proof in self.proofs if proof.skipped is None and proof.outcome != "not decided")

    @property
    def undecided(self) -> bool:
        """True if unrecognised code could not be run."""
        return any(proof.outcome == "not decided" for proof in self.proofs)

    @property
    def complete(self) -> bool:
        return all(proof.skipped is None for proof in self.proofs)


def as_json(report: Report) -> dict[str, Any]:
    """Return the stable interface, versioned by `SCHEMA`. Numbers that are not finite are null."""
    return {
        "schema": SCHEMA,
        "graphfix": __version__,
        "vllm": report.vllm,
        "source": report.source,
        "device": report.device,
        "environment": dict(report.environment),
        "holds": report.holds and report.complete and not report.undecided,
        "complete": report.complete,
        "logs": report.logs,
        "seconds": report.seconds,
        "engines": [dict(times) for times in report.engines],
        "fixes": [
            _entry(proof)
            | {
                "further": [
                    {"case": other.further} | _entry(other)
                    for other in report.proofs
                    if other.fix is proof.fix and other.further is not None
                ]
            }
            for proof in report.proofs
            if proof.further is None
        ],
    }


def _entry(proof: Proof) -> dict[str, Any]:
    return {
        "name": proof.fix.name,
        "pr": about(proof.fix).pr,
        "diagnosis": proof.diagnosis.verdict.value,
        "outcome": proof.outcome,
        "holds": proof.holds,
        "tree": proof.diagnosis.tree or None,
        "failure": proof.failure,
        "skipped": proof.skipped,
        "numbers": proof.stock.numbers if proof.stock else None,
        "eager": _numbers(proof.stock.eager) if proof.stock else None,
        "stock": _numbers(proof.stock.graphed) if proof.stock else None,
        "stock_error": proof.stock.error if proof.stock else None,
        "patched": _numbers(proof.patched.graphed) if proof.patched else None,
        "patched_error": proof.patched.error if proof.patched else None,
        "details": [line for measured in (proof.stock, proof.patched) if measured for line in measured.details],
        "counted": _counted(proof.patched) or None,
        "shadow": {mode: asdict(watch) for mode, watch in proof.watched.items()} or None,
        "unwatched": proof.unwatched,
        "poison": {mode: list(lines) for mode, lines in proof.poisoned.items()} or None,
        "poison_notes": dict(proof.poison_notes) or None,
        "state": proof.patched_state[0],
        "state_reason": proof.patched_state[1],
    }


def _counted(patched: Measurement | None) -> dict[str, dict[str, int]]:
    """Return the expected and actual counts of the fix in its scenario, by event."""
    if patched is None or patched.error:
        return {}
    return {
        event: {"expected": number, "counted": patched.events.get(event, 0)}
        for event, number in patched.counted.items()
    }


def _numbers(numbers: tuple[float, ...]) -> list[float | None]:
    return list(map(finite_or_none, numbers))


def verdict(report: Report) -> str:
    """Return all outcomes in one line."""
    outcomes = Counter(proof.outcome for proof in report.proofs)
    proven, skipped, nothing = outcomes["proven"], outcomes["skipped"], outcomes["nothing patched"]
    run = {word: sum(n for outcome, n in outcomes.items() if outcome.startswith(word)) for word in _OUTCOMES_OF_A_RUN}
    tried = len(report.proofs) - nothing - sum(run.values())
    if not tried and not any(run.values()):
        return f"No defect that is known here: nothing is patched ({report.device})."
    parts = []
    if tried:
        parts.append(f"{proven} of {tried} defects shown on stock, {'all ' if proven > 1 else ''}gone with the fixes")
    if any(run.values()):
        parts.append(f"Of unrecognised code: {', '.join(f'{number} {word}' for word, number in run.items() if number)}")
    if failed := tried - proven - skipped:
        parts.append(f"{failed} NOT proven")
    if skipped:
        parts.append(f"{skipped} not run here")
    return f"{'; '.join(parts)} ({report.device})."


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print *report*; with *verbose*, also the compared numbers and the fixes that are not needed."""
    from rich.markup import escape

    console.print(f"[bold]{escape(verdict(report))}[/]", highlight=False, soft_wrap=True)
    console.print(
        f"vLLM [bold]{report.vllm or '(version unknown)'}[/] in {escape(report.source)}",
        highlight=False,
        soft_wrap=True,
    )
    if report.environment:
        named = ", ".join(f"{name} {value}" for name, value in report.environment.items())
        console.print(f"[dim]vllm-graphfix {__version__}, {escape(named)}[/]", highlight=False, soft_wrap=True)
    console.print(_table([proof for proof in report.proofs if verbose or proof.outcome != "nothing patched"]))
    if not verbose and (nothing := sum(proof.outcome == "nothing patched" for proof in report.proofs)):
        console.print(f"[dim]not in this vLLM, nothing patched: {nothing} (--verbose)[/]", highlight=False)
    for proof in report.proofs:
        for line in (*_headings(proof, verbose=verbose), *_details(proof, verbose=verbose)):
            console.print(line, highlight=False)
    if report.engines and verbose:
        longest = max(report.engines, key=lambda times: float(times["seconds"]))
        line = f"{len(report.engines)} engines in {report.seconds:.0f} s; {longest['name']}: {longest['seconds']:.0f} s"
        console.print(f"[dim]{escape(line)}[/]", highlight=False)
    if report.logs:
        console.print(f"Engine logs: {escape(report.logs)}", highlight=False, soft_wrap=True)


def _table(proofs: Sequence[Proof]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("fix", "eager", "stock, graphs", "patched, graphs", "verdict", box=None, pad_edge=False)
    for proof in proofs:
        colour = _COLOURS.get(proof.outcome, "bold red")
        first = _first_difference(proof.stock)
        table.add_row(
            f"[bold]{proof.title}[/]",
            _sample(proof.stock.eager, first) if proof.stock else "",
            f"[red]{escape(_result(proof.stock, first))}[/]" if proof.stock else "",
            f"[green]{escape(_result(proof.patched, first))}[/]" if proof.patched else "",
            f"[{colour}]{proof.outcome}[/]",
        )
    return table


def _headings(proof: Proof, *, verbose: bool) -> Iterator[str]:
    """Yield, as markup, the reason for an outcome, or the numbers of a proof that holds."""
    from rich.markup import escape

    if proof.skipped:
        yield f"[yellow]![/] {proof.title}: skipped: {escape(proof.skipped)}"
    elif proof.stock and proof.holds and verbose:
        yield f"[dim]{proof.title}: {escape(proof.stock.numbers)}[/]"
    elif not proof.holds:
        reason = proof.failure or proof.patched_state[1]
        yield f"[red]![/] {escape(': '.join(filter(None, [proof.title, proof.outcome, reason])))}"
        if proof.names_tree:
            yield f"  to patch this very code: [bold]{proof.names_tree}[/]"


def _details(proof: Proof, *, verbose: bool) -> Iterator[str]:
    """Yield details as markup; of a proof that holds, without *verbose*, only a note on poison in stock."""
    from rich.markup import escape

    if not verbose and proof.holds:
        if "stock" in proof.poison_notes and "stock" in proof.poisoned:
            yield f"[dim]{escape(proof.title)}: {escape(_poison_line(proof, 'stock'))}[/]"
        return
    lines = [line for measured in (proof.stock, proof.patched) if measured for line in measured.details]
    lines += [
        f"patched, counted: {event} {numbers['counted']}, {numbers['expected']} expected"
        for event, numbers in _counted(proof.patched).items()
    ]
    lines += [
        f"{mode}, shadow check{f' ({each.graphs})' if each.graphs else ''}: {each.sentence}"
        for mode, watch in proof.watched.items()
        for each in (watch, *watch.further)
    ]
    lines += [_poison_line(proof, mode) for mode in dict.fromkeys((*proof.poisoned, *proof.poison_notes))]
    if proof.unwatched:
        lines.append(f"the shadow check cannot see it: {proof.unwatched}")
    yield from (f"[dim]  {escape(line)}[/]" for line in lines)


def _poison_line(proof: Proof, mode: str) -> str:
    return f"{mode}, poison: {'; '.join(proof.poisoned.get(mode, ())) or proof.poison_notes.get(mode, 'nothing')}"


def _result(measured: Measurement, first: int) -> str:
    if measured.error:
        return measured.error
    wrong = differing(measured.eager, measured.graphed)
    return f"{_sample(measured.graphed, first)}  {'equal' if not wrong else f'{wrong} of {len(measured.eager)} wrong'}"


def _first_difference(measured: Measurement | None) -> int:
    """Return the first position at which stock is wrong, where the printed sample begins; 0 if there is none."""
    if measured is None:
        return 0
    pairs = zip(measured.eager, measured.graphed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if differing((a,), (b,))), 0)


def _sample(numbers: tuple[float, ...], first: int) -> str:
    numbers_text = " ".join(f"{number:.4g}" for number in numbers[first : first + 3])
    return f"{'… ' if first else ''}{numbers_text}{' …' if len(numbers) > first + 3 else ''}"
