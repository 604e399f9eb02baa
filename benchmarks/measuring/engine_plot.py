"""The picture of `benchmarks/engine_cost.py`, an SVG: tokens a second of each engine over those of eager."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from measuring.engine_cases import CONTROL, REFERENCE
from measuring.engine_figures import CaseResult, Spread, batches, engine_of, throughput, tokens_a_second

COLOURS = {"eager": "#8c8c8c", "piecewise": "#5b8db8", "stock": "#c0504d", "patched": "#3a8a4d", "fixed": "#8064a2"}
LABELS, PANEL, GAP, BAR, PITCH, HEAD = 285, 200, 24, 14, 20, 46
"""In pixels: widths of labels, panels and gaps; heights of a bar, of a line, and of a case's heading."""
MARGIN = 16
TITLE = "Decoding: tokens a second, relative to eager"


def svg(result: dict[str, Any]) -> str:
    """Return the picture of *result*, the content of a result file."""
    cases = [case for case in result["cases"] if case["rounds"] and engine_of(case, REFERENCE)]
    across = max((len(batches(case)) for case in cases), default=1)
    width = 2 * MARGIN + LABELS + across * (PANEL + GAP)
    body: list[str] = []
    y = MARGIN + 24
    for case in cases:
        lines, height = _case(case, y)
        body += lines
        y += height
    device = result["device"]
    foot = (
        f"{device['name']}, driver {device['driver']}, torch {device['torch']}, {result['date'][:10]}. Median of "
        "paired rounds; line: lowest to highest."
    )
    size = f'width="{width}" height="{y + 24}"'
    font = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {y + 24}" {font} role="img">',
            f"<title>{TITLE}</title>",
            f'<rect {size} fill="#fff"/>',
            _text(MARGIN, MARGIN + 8, TITLE, size=15, weight="bold"),
            *body,
            _text(MARGIN, y + 10, foot, fill="#666", size=11),
            "</svg>\n",
        ]
    )


def _case(case: CaseResult, y: int) -> tuple[list[str], int]:
    engines = [engine for engine in case["configurations"] if engine["name"] != CONTROL]
    release = next(engine["release"] for engine in engines if engine["name"] == REFERENCE)
    ratios = {
        (engine["name"], batch): throughput(case, engine["name"], REFERENCE, batch)
        for engine in engines
        for batch in batches(case)
    }
    longest = max((spread.highest for spread in ratios.values() if spread is not None), default=1.0)
    scale = (PANEL - 44) / max(longest, 1.0)  # room for the number behind the bar
    top, bottom = y + HEAD, y + HEAD + PITCH * len(engines)
    lines = [_text(MARGIN, y + 18, f"{case['title']} – vLLM {release}", weight="bold", size=13)]
    for number, engine in enumerate(engines):
        lines.append(_text(MARGIN, top + PITCH * number + BAR, engine["label"]))
    for column, batch in enumerate(batches(case)):
        x = MARGIN + LABELS + column * (PANEL + GAP)
        lines.append(_text(x, y + 38, f"batch {batch}", fill="#666"))
        for number, engine in enumerate(engines):
            name = engine["name"]
            absolute = (
                f" – {tokens_a_second(case, name, batch):,.0f} tokens/s"
                if name == REFERENCE and ratios[name, batch]
                else ""
            )
            lines += _bar(x, top + PITCH * number, ratios[name, batch], scale, COLOURS[name], absolute)
        one = x + scale
        lines.append(f'<path d="M{one:.1f} {top - 3}V{bottom}" stroke="#222" stroke-dasharray="2 3"/>')
    return lines, HEAD + PITCH * len(engines) + 14


def _bar(x: int, y: int, spread: Spread | None, scale: float, colour: str, absolute: str) -> Iterator[str]:
    if spread is None:
        yield _text(x + scale + 5, y + BAR, "did not run", fill="#999", size=11)
        return
    end = x + spread.median * scale
    yield f'<rect x="{x}" y="{y + 3}" width="{end - x:.1f}" height="{BAR}" fill="{colour}"/>'
    low, high = x + spread.lowest * scale, x + spread.highest * scale
    if high > low:
        yield f'<path d="M{low:.1f} {y + 3 + BAR / 2}H{high:.1f}" stroke="#222" stroke-width="1.5"/>'
    yield _text(max(end, high) + 5, y + BAR, f"{spread.median:.2f}×{absolute}")


def _text(x: float, y: float, text: str, *, fill: str = "", size: int = 0, weight: str = "") -> str:
    values = {"fill": fill, "font-size": str(size) if size else "", "font-weight": weight}
    attributes = "".join(f' {name}="{value}"' for name, value in values.items() if value)
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'
