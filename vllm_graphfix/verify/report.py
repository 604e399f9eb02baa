"""What `verify` found, for eyes and for machines."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_graphfix._version import __version__
from vllm_graphfix.fix import Diagnosis, Fix, State, Verdict
from vllm_graphfix.fixes import about
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.verify.comparison import finite_or_none
from vllm_graphfix.verify.measurement import Measurement, Watch

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_RUN = ("affected", "right", "not decided")
"""What running unrecognised code says of it; how outcomes begin."""
MODES_OF_A_PROOF = f"{PREFIX}=off (stock), every fix auto (patched)"
_TOLERANCE = 1e-6
"""The tolerance relative to the largest number. The same operations on the same device in float32 come out equal; this
is for their order."""


@dataclass(frozen=True)
class Proof:
    """One fix on one vLLM."""

    fix: Fix
    diagnosis: Diagnosis
    stock: Measurement | None
    patched: Measurement | None
    failure: str | None
    """Why a scenario came to no measurement."""
    stock_state: tuple[str, str]
    patched_state: tuple[str, str]
    """State and reason in the patched process."""
    skipped: str | None = None
    """Why it was not run."""
    watched: Mapping[str, Watch] = field(default_factory=dict)
    """What the shadow check made of an engine each, ``stock`` and ``patched``, where the defect is one that it has to
    see."""
    poisoned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What poison showed in the scenario, ``stock`` and ``patched``, where it was tried and says something."""
    poison_notes: Mapping[str, str] = field(default_factory=dict)
    """By mode: why it says nothing, or why that it showed nothing is no fault."""
    further: str | None = None
    """Name of the engines' case, if it is not the fix's first one: the fix has been judged before."""
    why_unwatched: str = ""
    """Why the shadow check cannot see the defect in a replay, as the fix's trial has it."""

    was_run: bool = False
    """Whether its scenario was to be run although its code says `fixed`: that it cannot run says nothing."""

    @property
    def title(self) -> str:
        return self.fix.name if self.further is None else f"{self.fix.name} ({self.further})"

    @property
    def outcome(self) -> str:
        """``proven``, ``nothing patched``, or what does not hold."""
        if self.skipped is not None:
            return "skipped"
        if self.diagnosis.verdict is Verdict.UNRECOGNISED:
            return self._outcome_of_a_run
        if self.diagnosis.verdict is not Verdict.AFFECTED:
            if self.stock is not None and _shows_the_defect(self.stock):
                return "affected: no patch fits"
            if self.failure is not None and not self.was_run:
                return "not left alone"
            expected = State.NOT_NEEDED.value
            return (
                "nothing patched" if self.patched_state[0] == expected else f"{self.patched_state[0]}, not {expected}"
            )
        if self.failure is not None or self.stock is None or self.patched is None:
            return "scenario failed"
        if self.stock_state[0] != State.OFF.value:
            return f"{self.stock_state[0]} in the stock process"
        if self.patched_state[0] != State.ACTIVE.value:
            return f"{self.patched_state[0]} in the patched process"
        if not self.stock.eager or differing(self.stock.eager, self.patched.eager):
            return "the references differ"
        if not _shows_the_defect(self.stock):
            return "defect not shown on stock"
        if self.patched.error or differing(self.patched.eager, self.patched.graphed):
            return "defect still there"
        # A scenario knows how often its events occur in the releases' code alone.
        if self.patched.miscounted and self.diagnosis.known:
            return "miscounted"
        if self.poisoned.get("patched"):
            return "poison is still seen"
        if "stock" in self.poisoned and not self.poisoned["stock"] and "stock" not in self.poison_notes:
            return "missed by poison"
        return self._fault_of_checks() or "proven"

    @property
    def _outcome_of_a_run(self) -> str:
        """What running it says of code that is not recognised: ``right``, ``affected: …`` or ``not decided``."""
        if self.failure is not None or self.stock is None or self.patched is None:
            return "not decided"
        if not _shows_the_defect(self.stock):
            return "right"
        if self.patched_state[0] != State.ACTIVE.value:
            return "affected: no patch fits"
        still = self.patched.error or differing(self.patched.eager, self.patched.graphed)
        return "affected: the fix does not help" if still else "affected: the fix helps"

    @property
    def names_tree(self) -> str | None:
        """The setting that patches this very code, where running it has shown that this helps."""
        helps = self.outcome == "affected: the fix helps"
        return f"{self.fix.variable}=on:{self.diagnosis.tree}" if helps else None

    def _fault_of_checks(self) -> str | None:
        """What the shadow check did wrong."""
        stock, patched = (
            (watch, *watch.further) if watch else () for watch in map(self.watched.get, ("stock", "patched"))
        )
        return next(filter(None, itertools.starmap(_fault_of_check, itertools.zip_longest(stock, patched))), None)

    @property
    def unwatched(self) -> str | None:
        """Why the shadow check cannot see the defect in a replay, if the fix was tried without it."""
        tried = self.stock is not None and self.further is None and not self.watched
        return (self.why_unwatched or None) if tried else None

    @property
    def holds(self) -> bool:
        return self.outcome in ("proven", "nothing patched", "right")


@dataclass(frozen=True)
class Report:
    """All fixes on one vLLM; further cases of a fix follow it."""

    vllm: str | None
    source: str
    device: str
    proofs: tuple[Proof, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What else a verdict depends on, by name."""
    logs: str | None = None
    """The folder with the engines' logs, if one of them ended in an error or a proof does not hold."""
    seconds: float | None = None
    """What all engines took together, side by side."""
    engines: tuple[Mapping[str, Any], ...] = ()
    """What each of them took, in seconds; `JobResult.times`."""

    @property
    def holds(self) -> bool:
        """Whether everything that was run holds, less what was not decided."""
        return all(proof.holds for proof in self.proofs if proof.skipped is None and proof.outcome != "not decided")

    @property
    def undecided(self) -> bool:
        """Whether there is code that is not recognised, and that could not be run."""
        return any(proof.outcome == "not decided" for proof in self.proofs)

    @property
    def complete(self) -> bool:
        return all(proof.skipped is None for proof in self.proofs)


def _fault_of_check(stock: Watch | None, patched: Watch | None) -> str | None:
    """What the check did wrong, or None.

    Stock may crash before it is checked, and the check may be for other engines, and says so.
    """
    for watch in (patched, None if stock and stock.error else stock):
        if watch and (watch.error or watch.state == State.FAILED.value):
            return "the shadow check failed"
        if watch and watch.state == State.ACTIVE.value and not watch.checks:
            return "nothing was checked by the shadow check"
    if stock and stock.checks and not stock.mismatches and not stock.error:
        return "missed by the shadow check"
    return "false alarm of the shadow check" if patched and patched.mismatches else None


def _shows_the_defect(stock: Measurement) -> bool:
    first = stock.deciding
    if first is None and stock.error:
        return True
    return bool(differing(stock.eager[:first], stock.graphed[:first]))


def differing(reference: tuple[float, ...], found: tuple[float, ...]) -> int:
    """How many numbers are not those of the reference; all of them if their count differs."""
    if len(reference) != len(found):
        return max(len(reference), len(found))
    scale = max((abs(number) for number in reference if math.isfinite(number)), default=1.0)
    return sum(not abs(a - b) <= _TOLERANCE * max(scale, 1.0) for a, b in zip(reference, found, strict=True))


def as_json(report: Report) -> dict[str, Any]:
    """The stable interface; `SCHEMA` changes with it. Numbers that JSON has not are null."""
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
        "poison": {mode: list(told) for mode, told in proof.poisoned.items()} or None,
        "poison_notes": dict(proof.poison_notes) or None,
        "state": proof.patched_state[0],
        "state_reason": proof.patched_state[1],
    }


def _counted(patched: Measurement | None) -> dict[str, dict[str, int]]:
    """What the fix had to count in its scenario, by event, and what it did."""
    if patched is None or patched.error:
        return {}
    return {
        event: {"expected": number, "counted": patched.events.get(event, 0)}
        for event, number in patched.counted.items()
    }


def _numbers(numbers: tuple[float, ...]) -> list[float | None]:
    return list(map(finite_or_none, numbers))


def verdict(report: Report) -> str:
    """What came of all proofs, in one line."""
    outcomes = Counter(proof.outcome for proof in report.proofs)
    proven, skipped, nothing = outcomes["proven"], outcomes["skipped"], outcomes["nothing patched"]
    run = {word: sum(n for outcome, n in outcomes.items() if outcome.startswith(word)) for word in _RUN}
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
    """Prints *report*; *verbose*: also what was compared, and what is not here, proof by proof."""
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(verdict(report))}[/]", highlight=False, soft_wrap=True)
    console.print(
        f"vLLM [bold]{report.vllm or '(version unknown)'}[/] in {escape(report.source)}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("fix", "eager", "stock, graphs", "patched, graphs", "verdict", box=None, pad_edge=False)
    for proof in report.proofs:
        if proof.outcome == "nothing patched" and not verbose:
            continue
        colours = {"proven": "bold green", "right": "bold green", "nothing patched": "dim"}
        colours |= {"skipped": "yellow", "not decided": "yellow"}
        colour = colours.get(proof.outcome, "bold red")
        first = _first_difference(proof.stock)
        table.add_row(
            f"[bold]{proof.title}[/]",
            _sample(proof.stock.eager, first) if proof.stock else "",
            f"[red]{escape(_result(proof.stock, first))}[/]" if proof.stock else "",
            f"[green]{escape(_result(proof.patched, first))}[/]" if proof.patched else "",
            f"[{colour}]{proof.outcome}[/]",
        )
    if report.environment:
        named = ", ".join(f"{name} {value}" for name, value in report.environment.items())
        console.print(f"[dim]vllm-graphfix {__version__}, {escape(named)}[/]", highlight=False, soft_wrap=True)
    console.print(table)
    if not verbose and (nothing := sum(proof.outcome == "nothing patched" for proof in report.proofs)):
        console.print(f"[dim]not in this vLLM, nothing patched: {nothing} (--verbose)[/]", highlight=False)
    for proof in report.proofs:
        if proof.skipped:
            console.print(f"[yellow]![/] {proof.title}: skipped: {escape(proof.skipped)}", highlight=False)
        elif proof.stock and proof.holds and verbose:
            console.print(f"[dim]{proof.title}: {escape(proof.stock.numbers)}[/]", highlight=False)
        elif not proof.holds:
            told = ": ".join(filter(None, [proof.title, proof.outcome, proof.failure or proof.patched_state[1]]))
            console.print(f"[red]![/] {escape(told)}", highlight=False)
            if proof.names_tree:
                console.print(f"  to patch this very code: [bold]{proof.names_tree}[/]", highlight=False)
        if not verbose and proof.holds:
            if "stock" in proof.poison_notes and "stock" in proof.poisoned:
                told = f"{proof.title}: {_told_of_poison(proof, 'stock')}"
                console.print(f"[dim]{escape(told)}[/]", highlight=False)
            continue
        for measured in (proof.stock, proof.patched):
            for line in measured.details if measured else ():
                console.print(f"[dim]  {escape(line)}[/]", highlight=False)
        for event, numbers in _counted(proof.patched).items():
            told = f"patched, counted: {event} {numbers['counted']}, {numbers['expected']} expected"
            console.print(f"[dim]  {escape(told)}[/]", highlight=False)
        for mode, watch in proof.watched.items():
            for each in (watch, *watch.further):
                told = f"{mode}, shadow check{f' ({each.graphs})' if each.graphs else ''}: {each.sentence}"
                console.print(f"[dim]  {escape(told)}[/]", highlight=False)
        for mode in dict.fromkeys((*proof.poisoned, *proof.poison_notes)):
            console.print(f"[dim]  {escape(_told_of_poison(proof, mode))}[/]", highlight=False)
        if proof.unwatched:
            console.print(f"[dim]  the shadow check cannot see it: {escape(proof.unwatched)}[/]", highlight=False)
    if report.engines and verbose:
        longest = max(report.engines, key=lambda times: float(times["seconds"]))
        told = f"{len(report.engines)} engines in {report.seconds:.0f} s; {longest['name']}: {longest['seconds']:.0f} s"
        console.print(f"[dim]{escape(told)}[/]", highlight=False)
    if report.logs:
        console.print(f"Engine logs: {escape(report.logs)}", highlight=False, soft_wrap=True)


def _told_of_poison(proof: Proof, mode: str) -> str:
    return f"{mode}, poison: {'; '.join(proof.poisoned.get(mode, ())) or proof.poison_notes.get(mode, 'nothing')}"


def _result(measured: Measurement, first: int) -> str:
    if measured.error:
        return measured.error
    wrong = differing(measured.eager, measured.graphed)
    return f"{_sample(measured.graphed, first)}  {'equal' if not wrong else f'{wrong} of {len(measured.eager)} wrong'}"


def _first_difference(measured: Measurement | None) -> int:
    """Where the numbers that are shown begin.

    There is more to see where stock goes wrong than where it is still right.
    """
    if measured is None:
        return 0
    pairs = zip(measured.eager, measured.graphed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if differing((a,), (b,))), 0)


def _sample(numbers: tuple[float, ...], first: int) -> str:
    shown = " ".join(f"{number:.4g}" for number in numbers[first : first + 3])
    return f"{'… ' if first else ''}{shown}{' …' if len(numbers) > first + 3 else ''}"
