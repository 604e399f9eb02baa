"""Report of `compare`, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graphfix._version import __version__
from vllm_graphfix.commands.compare import gap
from vllm_graphfix.commands.compare.gap import EngineGap
from vllm_graphfix.commands.compare.twin import FittedTwin
from vllm_graphfix.commands.output import say
from vllm_graphfix.shadow.judge import MAX_ROUNDING
from vllm_graphfix.verify.comparison import Comparison, Kind, finite_or_none
from vllm_graphfix.verify.engine.exact_report import ExactReport
from vllm_graphfix.verify.engine.job import EngineResult
from vllm_graphfix.verify.engine.poison_report import PoisonReport
from vllm_graphfix.verify.engine.processes import CRASH

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
NO_GRAPHS = "NONE"
"""The `cudagraph_mode` of an engine that captures no graphs."""
_MAX_NOISE = 0.33
"""Limit of eager's own noise, in log-probability. Beyond it the tolerance would exceed 1, and hide corruption."""
_MIN_DRAFTS, _MIN_ACCEPTED, _LOST_BELOW = 100, 0.05, 0.5
"""Drafts are lost if eager accepts at least `_MIN_ACCEPTED` of at least `_MIN_DRAFTS` tokens, and the engine with
graphs less than `_LOST_BELOW` times that share."""
_BUCKETS = 8
_BAR = 40
_LISTED_PROMPTS = 20
"""Prompts with a line of their own; JSON has all."""

_SHADES = {
    Kind.CORRUPT: ("red", "█"),
    Kind.PADDED: ("blue", "▓"),
    Kind.BATCHED: ("blue", "▒"),
    Kind.COMPILED: ("cyan", "▒"),
    Kind.TIE: ("yellow", "░"),
}
_VERDICTS = {
    Kind.CORRUPT: "[bold red]corrupt[/]",
    Kind.PADDED: "[blue]batch size, without graphs too[/]",
    Kind.BATCHED: "[blue]another batch, without graphs too[/]",
    Kind.COMPILED: "[cyan]compiled, without graphs too[/]",
    Kind.TIE: "[yellow]tie, rounding[/]",
}


@dataclass(frozen=True)
class Report:
    """Comparison of one model with graphs and eager."""

    model: str
    flags: tuple[str, ...]
    eager: EngineResult
    graphs: EngineResult | None
    comparison: Comparison | None
    error: str | None = None
    """Error of the engine with graphs; without graphs it ran."""
    note: str | None = None
    logs: str | None = None
    """Folder with the engines' logs, if one of them failed."""
    poison: PoisonReport | None = None
    """Report on poison, if it was asked for."""
    exact: ExactReport | None = None
    """Comparison of each replay, if it was asked for."""
    gaps: tuple[EngineGap, ...] = ()
    """The gap between eager and graphs, by source, if it was asked for."""
    twin: FittedTwin | None = None
    """The twin that was compared in place of the model."""

    @property
    def wrong(self) -> bool:
        """True if corruption, a wrong replay or poison was detected: exit code 1."""
        return self.corrupt or any(part.detected for part in (self.poison, self.exact) if part is not None)

    @property
    def corrupt(self) -> bool:
        """True if tokens are wrong, drafts are lost, or the engine crashed in a way that is typical of graphs."""
        if self.comparison is None:
            return bool(CRASH.search(self.error or ""))
        return self.comparison.corrupt or self.drafts_lost

    @property
    def drafts_lost(self) -> bool:
        """True if the draft model's graphs are wrong: the target rejects its tokens, and drafting gains nothing."""
        if self.graphs is None or not self.graphs.drafts or not self.eager.drafts:
            return False
        (eager_accepted, eager_proposed), (accepted, proposed) = self.eager.drafts, self.graphs.drafts
        return (
            min(eager_proposed, proposed) >= _MIN_DRAFTS
            and eager_accepted >= _MIN_ACCEPTED * eager_proposed
            and accepted / proposed < _LOST_BELOW * eager_accepted / eager_proposed
        )

    @property
    def inconclusive(self) -> str | None:
        """Reason why a report without corruption proves nothing; None if it does, or if there is corruption."""
        if self.wrong:
            return None
        if self.comparison is None or self.graphs is None:
            return f"with graphs the engine failed, but not with an error that is typical of graphs: {self.error}"
        if self.graphs.cudagraph_mode == NO_GRAPHS:
            return (
                "no CUDA graphs were used (cudagraph_mode NONE): these flags, this model or this device switch them off"
            )
        for part in (self.poison, self.exact):
            if part is not None and (why := part.inconclusive):
                return why
        if self._is_explained(self.comparison):
            return None
        if self.comparison.noise > _MAX_NOISE:
            return (
                f"eager differs from itself by up to {self.comparison.noise:.3g}, "
                "so corruption cannot be told apart from noise: set VLLM_BATCH_INVARIANT=1, where vLLM supports it"
            )
        if not self.comparison.enough_compared:
            return (
                f"answers diverge early at ties, so only {self.comparison.tokens_compared} of {self.comparison.tokens} "
                "tokens could be compared: give your own prompts (--prompts), or more prompts with shorter answers"
            )
        return None

    def _is_explained(self, comparison: Comparison) -> bool:
        """Return True if replays and poison prove the graphs right, whatever eager's noise is and where ties diverge.

        Every replay was compared with its step without the graph, and poison has shown nothing of what the two share.
        Where replays differ by rounding, cache entries were not compared: then part of each answer has to be compared.
        So it has where the capture's way to split work makes a large difference, unless eager's batches do, too: else a
        kernel may be wrong when it splits so.
        """
        if self.exact is None or not self.exact.sees_all or self.poison is None:
            return False
        if comparison.noise > _MAX_NOISE:
            return self.exact.is_exact
        as_captured = max((rank.as_captured for rank in self.exact.ranks), default=0.0)
        return (self.exact.is_exact and as_captured <= MAX_ROUNDING) or all(
            judgement.tokens_compared for judgement in comparison.judgements
        )


def as_json(report: Report) -> dict[str, Any]:
    """Return the stable interface, versioned by `SCHEMA`. Numbers that are not finite are null."""
    comparison, graphs = report.comparison, report.graphs
    return {
        "schema": SCHEMA,
        **report.eager.facts,
        "model": report.model,
        "flags": list(report.flags),
        "twin": report.twin.as_json() if report.twin else None,
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
        "exact": report.exact.as_json() if report.exact else None,
        "gap": gap.as_json(report.gaps) if report.gaps else None,
        "noise": finite_or_none(comparison.noise) if comparison else None,
        "tolerance": finite_or_none(comparison.tolerance) if comparison else None,
        "distance": finite_or_none(comparison.distance) if comparison else None,
        "tokens": comparison.tokens if comparison else None,
        "compared": comparison.tokens_compared if comparison else None,
        "prompts": [
            {
                "prompt": number,
                "kind": judgement.kind.value,
                "length": judgement.length,
                "compared": judgement.tokens_compared,
                "position": judgement.position,
                "expected": judgement.expected,
                "found": judgement.actual,
                "margin": finite_or_none(judgement.margin),
                "gap": finite_or_none(judgement.token_gap),
                "distance": finite_or_none(judgement.distance),
            }
            for number, judgement in enumerate(comparison.judgements if comparison else ())
        ],
    }


def show(report: Report, console: Console) -> None:
    from rich.markup import escape

    facts = report.eager.facts
    flags = "".join(f" {escape(flag)}" for flag in report.flags)
    say(
        console,
        f"[bold]{escape(report.model)}[/]{flags}: vLLM {facts['vllm']}, vllm-graphfix {__version__}, torch "
        f"{facts['torch']}, {escape(facts['device'])}, driver {facts['driver']}, {escape(facts['switches'])}, "
        f"seed {facts['seed']}",
    )
    if report.twin is not None:
        for line in report.twin.lines():
            say(console, escape(line))
    if report.graphs is not None:
        line = f"graphs: {report.graphs.cudagraph_mode or 'unknown'}; fixes: {_fixes(report.graphs.states)}"
        say(console, line)
    if report.comparison is None:
        error = f"[bold red]the engine runs without graphs and fails with them:[/] {escape(report.error or '')}"
        say(console, error)
        return
    _show_differences(report.comparison, console)
    _show_drafts(report, console)
    if report.gaps:
        _show_gaps(report.gaps, console)
    _show_verdict(report, report.comparison, console)


def _fixes(ranks: Mapping[str, Mapping[str, str]]) -> str:
    if not ranks:
        return "unknown, the workers did not answer"
    parts = []
    for name in dict.fromkeys(name for rank in ranks.values() for name in rank):
        states = sorted({rank.get(name, "unknown") for rank in ranks.values()})
        if states != ["not-needed"]:
            parts.append(f"{name} {' and '.join(states)}")
    on_ranks = f" ({len(ranks)} ranks)" if len(ranks) > 1 else ""
    return (", ".join(parts) or "none needed") + on_ranks


def _show_differences(comparison: Comparison, console: Console) -> None:
    from rich.table import Table

    order = list(_SHADES)
    differing = [(i, j) for i, j in enumerate(comparison.judgements) if j.kind is not Kind.EQUAL]
    if not differing:
        return
    headings = ("prompt", "first difference", "without graphs", "with graphs", "margin of the top two", "verdict")
    table = Table(*headings, box=None, pad_edge=False)
    for number, judgement in sorted(differing, key=lambda pair: order.index(pair[1].kind))[:_LISTED_PROMPTS]:
        table.add_row(
            str(number),
            f"token {judgement.position} of {judgement.length}",
            _token(judgement.expected),
            _token(judgement.actual),
            "" if judgement.margin is None else f"{judgement.margin:.3g}",
            _VERDICTS[judgement.kind],
        )
    console.print(table)
    if len(differing) > _LISTED_PROMPTS:
        say(console, f"… and {len(differing) - _LISTED_PROMPTS} more; --json lists all")
    _show_chart(comparison, console)


def _token(token: int | None) -> str:
    return "none" if token is None else str(token)


def _show_chart(comparison: Comparison, console: Console) -> None:
    """Print a bar chart of the positions of first differences."""
    rows = histogram(comparison)
    most = max(sum(counts.values()) for _, counts in rows)
    width = max(len(label) for label, _ in rows)
    say(console, "\nfirst difference, by position in the answer")
    for label, counts in rows:
        bar = "".join(
            f"[{colour}]{block * max(1, _BAR * counts[kind] // most)}[/]"
            for kind, (colour, block) in _SHADES.items()
            if counts[kind]
        )
        say(console, f"{label:>{width}} {bar} {sum(counts.values()) or ''}".rstrip())
    legend = "  ".join(f"[{colour}]{block}[/] {kind.value}" for kind, (colour, block) in _SHADES.items())
    say(console, legend)


def histogram(comparison: Comparison) -> list[tuple[str, dict[Kind, int]]]:
    """Return ranges of tokens (``first-last``), each with the number of prompts that first differ there, by kind."""
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
    eager, graphs = (f"{accepted} of {proposed}" for accepted, proposed in (report.eager.drafts, report.graphs.drafts))
    say(console, f"drafts accepted: eager {eager}, with graphs {graphs}")


def _show_gaps(gaps: Sequence[EngineGap], console: Console) -> None:
    from rich.table import Table

    headings = ("log-probabilities apart by", "tokens", "mean", "largest", "answers that diverge", "share")
    table = Table(*headings, box=None, pad_edge=False)
    for each in gaps:
        part = gap.share(each, gaps)
        numbers = (str(each.tokens), f"{each.mean:.3g}", f"{each.largest:.3g}", str(each.diverging))
        table.add_row(each.source, *numbers, "" if part is None else f"{part:.0%}")
    console.print(table)


def _show_verdict(report: Report, comparison: Comparison, console: Console) -> None:
    from rich.markup import escape

    counts = {kind: len(comparison.of(kind)) for kind in Kind}
    elsewhere = "".join(
        f"{counts[kind]} equal to {name} without graphs, "
        for kind, name in (
            (Kind.COMPILED, "compiled"),
            (Kind.PADDED, "compiled and padded"),
            (Kind.BATCHED, "other batches"),
        )
        if counts[kind]
    )
    say(
        console,
        f"{len(comparison.judgements)} prompts: {counts[Kind.EQUAL]} equal, {counts[Kind.TIE]} diverge at a tie, "
        f"{elsewhere}{counts[Kind.CORRUPT]} corrupt; {comparison.tokens_compared} of {comparison.tokens} tokens "
        f"compared. Log-probabilities: eager differs from itself by up to {comparison.noise:.3g}, graphs from eager by "
        f"up to {comparison.distance:.3g}; up to {comparison.tolerance:.3g} counts as rounding",
    )
    if report.poison is not None:
        for line in [report.poison.summary(), *report.poison.lines()]:
            say(console, escape(line))
    for line in report.exact.lines() if report.exact is not None else ():
        say(console, escape(line))
    if report.note:
        say(console, f"[dim]{escape(report.note)}[/]")
    if comparison.corrupt:
        verdict = "[bold red]corruption[/]"
    elif report.exact is not None and report.exact.detected:
        verdict = "[bold red]wrong replays[/]: graphs differ from the same steps without them"
    elif report.poison is not None and report.poison.detected:
        verdict = "[bold red]poison was seen[/]: memory that belongs to no request affects the results"
    elif report.drafts_lost:
        verdict = "[bold red]drafts lost[/]: the tokens are right, but the draft model's graphs are not"
    elif report.inconclusive:
        verdict = f"[bold yellow]inconclusive[/]: {escape(report.inconclusive)}"
    else:
        verdict = "[bold green]no corruption[/]"
    say(console, verdict)
