"""Ratios, targets and tables from the result file of `benchmarks/engine_cost.py`, as pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from measuring.engine_cases import CONTROL, FIXED, PATCHED, REFERENCE, STOCK

MIB = 1 << 20

CaseResult = dict[str, Any]
"""One of ``cases`` of the result file: see `benchmarks/engine_cost.py`."""


class Spread(NamedTuple):
    """The median of paired figures, with the lowest and the highest pair."""

    median: float
    lowest: float
    highest: float
    pairs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1], len(ordered)) if ordered else None

    def text(self, form: str = ".3f") -> str:
        return f"{self.median:{form}} ({self.lowest:{form}} – {self.highest:{form}})"


class Target(NamedTuple):
    """A bound on a cost, or on a gain, and its measurement."""

    what: str
    measured: str
    wanted: str
    met: bool | None
    """None: not measured."""


class Figures(NamedTuple):
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def batches(case: CaseResult) -> list[int]:
    return list(dict.fromkeys(turn["batch"] for turn in case["rounds"]))


def is_measured(case: CaseResult) -> bool:
    """Return whether *case* has turns of all engines, or steps of one."""
    return bool(case["rounds"]) or any(engine.get("steps") for engine in case["configurations"])


def throughput(case: CaseResult, name: str, reference: str, batch: int) -> Spread | None:
    """Return tokens a second of *name* over those of *reference* in the same round."""
    both = [turn["seconds"] for turn in case["rounds"] if turn["batch"] == batch]
    return Spread.of(taken[reference] / taken[name] for taken in both if name in taken and reference in taken)


def tokens_a_second(case: CaseResult, name: str, batch: int) -> float:
    """Return tokens a second of a whole batch, the median of the rounds."""
    tokens: int = batch * (case["tokens"] - 1)
    return tokens / statistics.median(seconds_of(case, name, batch))


def seconds_of(case: CaseResult, name: str, batch: int) -> list[float]:
    turns = [turn["seconds"] for turn in case["rounds"] if turn["batch"] == batch]
    return [taken[name] for taken in turns if name in taken]


def started(case: CaseResult, figure: str) -> Spread | None:
    """Return *figure* of a patched engine's start over that of the stock engine started with it."""
    return Spread.of(patched / stock for stock, patched in _starts(case, figure))


def memory(case: CaseResult, figure: str) -> Spread | None:
    """Return the MiB of a patched engine beyond those of the stock engine started with it."""
    return Spread.of((patched - stock) / MIB for stock, patched in _starts(case, figure))


def _starts(case: CaseResult, figure: str) -> list[tuple[float, float]]:
    pairs = [(pair.get(STOCK), pair.get(PATCHED)) for pair in case["starts"]]
    figures = [(stock[figure], patched[figure]) for stock, patched in pairs if stock and patched]
    return [(stock, patched) for stock, patched in figures if stock is not None and patched is not None]


def targets(case: CaseResult) -> list[Target]:
    judged = [
        _target(
            f"patched / stock full graphs, tokens a second, batch {batch}",
            throughput(case, PATCHED, STOCK, batch) if alike(case, PATCHED, STOCK) else None,
            case.get("target", 0.99),
            at_least=True,
        )
        for batch in batches(case)
    ]
    if 1 in batches(case) and engine_of(case, REFERENCE):
        first = throughput(case, PATCHED, REFERENCE, 1)
        judged.append(_target("patched / eager, tokens a second, batch 1", first, 1.5, at_least=True))
    if case["starts"]:
        judged.append(_target("patched / stock, start-up", started(case, "seconds"), 1.05, at_least=False))
        more = memory(case, "used_bytes") or memory(case, "reserved_bytes")
        judged.append(_target("patched - stock, GPU memory", more, 16, at_least=False, form=".1f", unit=" MiB"))
    return judged


def _target(
    what: str, measured: Spread | None, bound: float, *, at_least: bool, form: str = ".3f", unit: str = ""
) -> Target:
    wanted = f"{'at least' if at_least else 'at most'} {bound:g}{unit}"
    if measured is None:
        return Target(what, "not measured", wanted, None)
    met = measured.median >= bound if at_least else measured.median <= bound
    return Target(what, measured.text(form) + unit, wanted, met)


def alike(case: CaseResult, *names: str) -> bool:
    """Return whether the engines *names* started in the same way: a compiler may have failed for one of them."""
    return len({(engine_of(case, name).get("attempt"), _mode(case, name)) for name in names}) == 1


def engine_of(case: CaseResult, name: str) -> dict[str, Any]:
    return next((engine for engine in case["configurations"] if engine["name"] == name), {})


def _mode(case: CaseResult, name: str) -> tuple[str, str]:
    facts = engine_of(case, name).get("told") or {}
    return facts.get("compilation_mode", ""), facts.get("cudagraph_mode", "")


def tables(case: CaseResult) -> list[Figures]:
    made = [_decode_table(case)] if case["rounds"] else []
    if case["starts"]:
        made.append(_start_table(case))
    judged = {True: "met", False: "not met", None: ""}
    rows = tuple((t.what, t.measured, t.wanted, judged[t.met]) for t in targets(case))
    if rows:
        made.append(Figures(f"{case['title']}: targets", ("", "median (lowest – highest)", "target", ""), rows))
    return made


def _decode_table(case: CaseResult) -> Figures:
    steps = case["tokens"] - 1
    rows = []
    for batch in batches(case):
        for engine in case["configurations"]:
            name = engine["name"]
            taken = seconds_of(case, name, batch)
            if not taken:
                continue
            ratios = [throughput(case, name, reference, batch) for reference in (REFERENCE, STOCK, FIXED)]
            rows.append(
                (
                    str(batch),
                    engine["label"],
                    f"{statistics.median(taken) / steps * 1e3:.3f}",
                    f"{tokens_a_second(case, name, batch):,.0f}",
                    *("" if ratio is None else ratio.text() for ratio in ratios),
                )
            )
    count = max(sum(turn["batch"] == batch for turn in case["rounds"]) for batch in batches(case))
    return Figures(
        f"{case['title']}, vLLM {engine_of(case, STOCK).get('release')}: decoding, {count} rounds of {steps} steps",
        ("batch", "engine", "ms a token", "tokens/s", "× eager", "× stock full graphs", "× first release with the fix"),
        tuple(rows),
    )


_STARTED = (
    ("from the start of the process, s", "seconds", 1.0, ".2f"),
    ("CPU time of that, s", "cpu_seconds", 1.0, ".2f"),
    ("capture of the graphs, s", "capture_seconds", 1.0, ".2f"),
    ("GPU memory of the process, MiB", "used_bytes", MIB, ".1f"),
    ("of that, torch's, MiB", "reserved_bytes", MIB, ".1f"),
)


def _start_table(case: CaseResult) -> Figures:
    rows = []
    for what, figure, unit, form in _STARTED:
        pairs = _starts(case, figure)
        if not pairs:
            continue
        stock, patched = (statistics.median(values) / unit for values in zip(*pairs, strict=True))
        in_memory = memory(case, figure) if figure.endswith("bytes") else None
        compared = f"{in_memory.text('+.1f')} MiB" if in_memory else f"× {_text(started(case, figure))}"
        rows.append((what, f"{stock:{form}}", f"{patched:{form}}", compared))
    title = f"{case['title']}: start-up, {len(case['starts'])} pairs, stock and patched at a time, compile caches warm"
    return Figures(title, ("medians", "stock", "patched", "patched to stock"), tuple(rows))


def _text(spread: Spread | None) -> str:
    return "" if spread is None else spread.text()


def notes(case: CaseResult) -> list[str]:
    """Return remarks on the figures: what did not run and why, and engines that are not what their name says."""
    lines = [f"not run: {what}" for what in case["not_run"]]
    if not is_measured(case):
        lines.append("nothing was measured")
    for engine in case["configurations"]:
        facts = engine.get("told") or {}
        if engine["failure"]:
            lines.append(f"{engine['label']}: {engine['failure']}")
        if engine.get("attempt"):
            lines.append(f"{engine['label']}: without vLLM's compiler, which did not run: {engine['first_failure']}")
        if facts and engine["graphs"] == "full" and "FULL" not in facts["cudagraph_mode"]:
            lines.append(f"{engine['label']}: vLLM made it {facts['cudagraph_mode']}, which has no full graphs")
        if facts and engine["name"] == PATCHED and case["fixes"]:
            active = [name for name in case["fixes"] if name in facts["active"]]
            missing = [name for name in case["fixes"] if name not in active]
            lines.append(f"fixes at work in the patched engine: {', '.join(active) or 'none'}")
            if missing:
                lines.append(f"NOT at work: {', '.join(missing)}; the patched engine is not one")
    if engine_of(case, CONTROL) and case["rounds"]:
        control = [throughput(case, CONTROL, STOCK, batch) for batch in batches(case)]
        differences = ", ".join(
            f"batch {batch}: {spread.text()}"
            for batch, spread in zip(batches(case), control, strict=True)
            if spread is not None
        )
        lines.append(f"two stock engines that are the same differ by: {differences or 'not measured'}")
    if case["rounds"] and not alike(case, PATCHED, STOCK):
        lines.append("stock and patched were not started alike, and are not compared")
    return lines


def markdown(figures: Figures) -> str:
    lines: Sequence[Sequence[str]] = [figures.columns, ["---"] * len(figures.columns), *figures.rows]
    return "\n".join([f"**{figures.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
