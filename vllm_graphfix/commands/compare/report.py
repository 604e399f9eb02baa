"""What `compare` found, for eyes and for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graphfix._version import __version__
from vllm_graphfix.verify.comparison import Comparison, Kind, finite_or_none
from vllm_graphfix.verify.engine.job import EngineResult
from vllm_graphfix.verify.engine.poison_report import PoisonReport
from vllm_graphfix.verify.engine.processes import CRASH

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
NO_GRAPHS = "NONE"
"""vLLM's `cudagraph_mode` of an engine that captures none."""
_LOUD = 0.33
"""Eager's own noise, in log-probability: beyond it, rounding would end at more than 1, and corruption could pass for
it."""
_ENOUGH = 0.5
"""The part of the tokens that must be compared; fewer say too little."""
_FEWEST_DRAFTS, _ACCEPTED, _LOST = 100, 0.05, 0.5
"""Drafts are lost if, with at least so many drafted tokens of which at least this part is accepted eager, the part
accepted with graphs is less than half as large."""
_BUCKETS = 8
_BAR = 40
_SHOWN = 20
"""Prompts that get a line; JSON has all."""

_SHADES = {Kind.CORRUPT: ("red", "█"), Kind.COMPILED: ("cyan", "▒"), Kind.TIE: ("yellow", "░")}
_VERDICTS = {
    Kind.CORRUPT: "[bold red]corrupt[/]",
    Kind.COMPILED: "[cyan]compiled, without graphs too[/]",
    Kind.TIE: "[yellow]tie, rounding[/]",
}


@dataclass(frozen=True)
class Report:
    """One model, eager against graphs."""

    model: str
    flags: tuple[str, ...]
    eager: EngineResult
    graphs: EngineResult | None
    comparison: Comparison | None
    error: str | None = None
    """What the engine with graphs ended in; the same ran without."""
    note: str | None = None
    logs: str | None = None
    """The folder with the engines' logs, if one of them ended in an error."""
    poison: PoisonReport | None = None
    """What poison showed, if it was asked for."""

    @property
    def wrong(self) -> bool:
        """Exit code 1."""
        return self.corrupt or (self.poison is not None and self.poison.detected)

    @property
    def corrupt(self) -> bool:
        """Tokens are, drafts are lost, or the engine crashed as graphs make it crash."""
        if self.comparison is None:
            return bool(CRASH.search(self.error or ""))
        return self.comparison.corrupt or self.drafts_lost

    @property
    def drafts_lost(self) -> bool:
        """The draft model's graphs are wrong: the target corrects its tokens, and nothing is gained by them."""
        if self.graphs is None or not self.graphs.drafts or not self.eager.drafts:
            return False
        (right, of), (found, tried) = self.eager.drafts, self.graphs.drafts
        return min(of, tried) >= _FEWEST_DRAFTS and right >= _ACCEPTED * of and found / tried < _LOST * right / of

    @property
    def inconclusive(self) -> str | None:
        """Why it says nothing that no corruption was found; None if it does."""
        if self.wrong:
            return None
        if self.poison is not None and (why := self.poison.inconclusive):
            return why
        if self.comparison is None or self.graphs is None:
            return f"with graphs the engine failed, but not with an error that is typical of graphs: {self.error}"
        if self.graphs.cudagraph_mode == NO_GRAPHS:
            return (
                "no CUDA graphs were used (cudagraph_mode NONE): these flags, this model or this device switch them off"
            )
        if self.comparison.noise > _LOUD:
            return (
                f"eager differs from itself by up to {self.comparison.noise:.3g}, "
                "so corruption cannot be told apart from noise"
            )
        if self.comparison.compared < _ENOUGH * self.comparison.tokens:
            return (
                f"answers diverge early at ties, so only {self.comparison.compared} of {self.comparison.tokens} tokens "
                "could be compared: give your own prompts (--prompts), or more prompts with shorter answers"
            )
        return None


def as_json(report: Report) -> dict[str, Any]:
    """The stable interface; `SCHEMA` changes with it. A number that is not finite is null."""
    comparison, graphs = report.comparison, report.graphs
    return {
        "schema": SCHEMA,
        **report.eager.facts,
        "model": report.model,
        "flags": list(report.flags),
        "corrupt": report.corrupt,
        "inconclusive": report.inconclusive,
        "error": report.error,
        "note": report.note,
        "logs": report.logs,
        "cudagraph_mode": graphs.cudagraph_mode if graphs else None,
        "fixes": graphs.states if graphs else None,
        "drafts": {
            "eager": report.eager.drafts,
            "graphs": graphs.drafts if graphs else None,
            "lost": report.drafts_lost,
        },
        "poison": report.poison.as_json() if report.poison else None,
        "noise": finite_or_none(comparison.noise) if comparison else None,
        "tolerance": finite_or_none(comparison.tolerance) if comparison else None,
        "distance": finite_or_none(comparison.distance) if comparison else None,
        "tokens": comparison.tokens if comparison else None,
        "compared": comparison.compared if comparison else None,
        "prompts": [
            {
                "prompt": number,
                "kind": judgement.kind.value,
                "length": judgement.length,
                "compared": judgement.compared,
                "position": judgement.position,
                "expected": judgement.expected,
                "found": judgement.actual,
                "margin": finite_or_none(judgement.margin),
                "gap": finite_or_none(judgement.gap),
                "distance": finite_or_none(judgement.distance),
            }
            for number, judgement in enumerate(comparison.judgements if comparison else ())
        ],
    }


def show(report: Report, console: Console) -> None:
    from rich.markup import escape

    facts = report.eager.facts
    given = "".join(f" {escape(flag)}" for flag in report.flags)
    console.print(
        f"[bold]{escape(report.model)}[/]{given}: vLLM {facts['vllm']}, vllm-graphfix {__version__}, torch "
        f"{facts['torch']}, {escape(facts['device'])}, driver {facts['driver']}, {escape(facts['switches'])}, "
        f"seed {facts['seed']}",
        highlight=False,
        soft_wrap=True,
    )
    if report.graphs is not None:
        told = f"graphs: {report.graphs.cudagraph_mode or 'unknown'}; fixes: {_fixes(report.graphs.states)}"
        console.print(told, highlight=False, soft_wrap=True)
    if report.comparison is None:
        error = f"[bold red]the engine runs without graphs and fails with them:[/] {escape(report.error or '')}"
        console.print(error, highlight=False, soft_wrap=True)
        return
    _show_differences(report.comparison, console)
    _show_drafts(report, console)
    _show_verdict(report, report.comparison, console)


def _fixes(ranks: Mapping[str, Mapping[str, str]]) -> str:
    if not ranks:
        return "unknown, the workers did not answer"
    told = []
    for name in dict.fromkeys(name for rank in ranks.values() for name in rank):
        states = sorted({rank.get(name, "unknown") for rank in ranks.values()})
        if states != ["not-needed"]:
            told.append(f"{name} {' and '.join(states)}")
    on_ranks = f" ({len(ranks)} ranks)" if len(ranks) > 1 else ""
    return (", ".join(told) or "none needed") + on_ranks


def _show_differences(comparison: Comparison, console: Console) -> None:
    from rich.table import Table

    order = list(_SHADES)
    differing = [(i, j) for i, j in enumerate(comparison.judgements) if j.kind is not Kind.EQUAL]
    if not differing:
        return
    headings = ("prompt", "first difference", "without graphs", "with graphs", "margin of the top two", "verdict")
    table = Table(*headings, box=None, pad_edge=False)
    for number, judgement in sorted(differing, key=lambda pair: order.index(pair[1].kind))[:_SHOWN]:
        table.add_row(
            str(number),
            f"token {judgement.position} of {judgement.length}",
            _token(judgement.expected),
            _token(judgement.actual),
            "" if judgement.margin is None else f"{judgement.margin:.3g}",
            _VERDICTS[judgement.kind],
        )
    console.print(table)
    if len(differing) > _SHOWN:
        console.print(f"… and {len(differing) - _SHOWN} more; --json lists all", highlight=False)
    _show_chart(comparison, console)


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)


def _show_chart(comparison: Comparison, console: Console) -> None:
    """Where first differences are: how many prompts in each part of the answers."""
    rows = histogram(comparison)
    most = max(sum(counts.values()) for _, counts in rows)
    width = max(len(label) for label, _ in rows)
    console.print("\nfirst difference, by position in the answer", highlight=False)
    for label, counts in rows:
        bar = "".join(
            f"[{colour}]{block * max(1, _BAR * counts[kind] // most)}[/]"
            for kind, (colour, block) in _SHADES.items()
            if counts[kind]
        )
        console.print(f"{label:>{width}} {bar} {sum(counts.values()) or ''}".rstrip(), highlight=False)
    legend = "  ".join(f"[{colour}]{block}[/] {kind.value}" for kind, (colour, block) in _SHADES.items())
    console.print(legend, highlight=False)


def histogram(comparison: Comparison) -> list[tuple[str, dict[Kind, int]]]:
    """Parts of the answers (``first-last`` token), with the prompts whose first difference is there, by its kind."""
    longest = max((judgement.length for judgement in comparison.judgements), default=0) or 1
    step = math.ceil(longest / _BUCKETS)
    rows = [
        (f"{start}-{min(start + step, longest) - 1}", dict.fromkeys(_SHADES, 0)) for start in range(0, longest, step)
    ]
    for judgement in comparison.judgements:
        if judgement.position is not None:
            rows[min(judgement.position // step, len(rows) - 1)][1][judgement.kind] += 1
    return rows


def _show_drafts(report: Report, console: Console) -> None:
    if report.graphs is None or not report.graphs.drafts or not report.eager.drafts:
        return
    (right, of), (found, tried) = report.eager.drafts, report.graphs.drafts
    console.print(f"drafts accepted: eager {right} of {of}, with graphs {found} of {tried}", highlight=False)


def _show_verdict(report: Report, comparison: Comparison, console: Console) -> None:
    from rich.markup import escape

    counts = {kind: len(comparison.of(kind)) for kind in Kind}
    compiled = f"{counts[Kind.COMPILED]} equal to compiled without graphs, " if counts[Kind.COMPILED] else ""
    console.print(
        f"{len(comparison.judgements)} prompts: {counts[Kind.EQUAL]} equal, {counts[Kind.TIE]} diverge at a tie, "
        f"{compiled}{counts[Kind.CORRUPT]} corrupt; {comparison.compared} of {comparison.tokens} tokens compared. "
        f"Log-probabilities: eager differs from itself by up to {comparison.noise:.3g}, graphs from eager by up to "
        f"{comparison.distance:.3g}; up to {comparison.tolerance:.3g} counts as rounding",
        highlight=False,
        soft_wrap=True,
    )
    if report.poison is not None:
        for line in [report.poison.summary(), *report.poison.lines()]:
            console.print(escape(line), highlight=False, soft_wrap=True)
    if report.note:
        console.print(f"[dim]{escape(report.note)}[/]", highlight=False, soft_wrap=True)
    if comparison.corrupt:
        verdict = "[bold red]corruption[/]"
    elif report.poison is not None and report.poison.detected:
        verdict = "[bold red]poison was seen[/]: what must not matter reaches what does"
    elif report.drafts_lost:
        verdict = "[bold red]drafts lost[/]: the tokens are right, but the draft model's graphs are not"
    elif report.inconclusive:
        verdict = f"[bold yellow]inconclusive[/]: {escape(report.inconclusive)}"
    else:
        verdict = "[bold green]no corruption[/]"
    console.print(verdict, highlight=False, soft_wrap=True)
