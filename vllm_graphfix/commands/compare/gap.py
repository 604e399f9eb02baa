"""The gap between the log-probabilities of eager and of the engine with graphs, split by what it comes from.

Engines stand in a row, each with one thing more than the one before: torch.compile, the sizes to which graphs pad
batches, graphs. Two neighbours are compared token by token, up to and including the first token that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm_graphfix.verify.comparison import Answer, distances, finite_or_none
from vllm_graphfix.verify.engine.job import EngineResult


class EngineGap(NamedTuple):
    """The log-probabilities of two engines' chosen tokens."""

    source: str
    """The feature that the second engine adds to the first one."""
    tokens: int
    """Tokens that both engines chose in the same context."""
    mean: float
    largest: float
    diverging: int
    """Answers with another token."""
    in_chain: bool = True
    """False for eager against itself, and for the whole."""


def measure(
    eager: EngineResult, compiled: EngineResult | None, padded: EngineResult | None, graphs: EngineResult
) -> tuple[EngineGap, ...]:
    """Return the gap of each step from *eager* to *graphs*, then that of all; engines that did not run are left out."""
    chain = [("torch.compile", compiled), ("batch size and padding", padded), ("CUDA graphs", graphs)]
    return tuple(_gaps(eager, [(source, engine) for source, engine in chain if engine is not None], graphs))


def _gaps(eager: EngineResult, chain: Sequence[tuple[str, EngineResult]], graphs: EngineResult) -> Iterator[EngineGap]:
    yield _between("eager itself, asked in another order", *eager.passes[:2])._replace(in_chain=False)
    before = eager
    for source, engine in chain:
        yield _between(source, before.passes[0], engine.passes[0])
        before = engine
    yield _between("all of these", eager.passes[0], graphs.passes[0])._replace(in_chain=False)


def _between(source: str, one: Sequence[Answer], other: Sequence[Answer]) -> EngineGap:
    pairs = list(zip(one, other, strict=True))
    apart = [distance for pair in pairs for distance in distances(*pair)]
    mean = math.fsum(apart) / len(apart) if apart and math.isfinite(max(apart)) else math.inf if apart else 0.0
    diverging = sum(a.tokens != b.tokens for a, b in pairs)
    return EngineGap(source, len(apart), mean, max(apart, default=0.0), diverging)


def share(gap: EngineGap, gaps: Sequence[EngineGap]) -> float | None:
    """Return the share of *gap* in the means of all steps; None outside of these, or if nothing differs."""
    whole = math.fsum(each.mean for each in gaps if each.in_chain)
    return gap.mean / whole if gap.in_chain and 0 < whole < math.inf else None


def as_json(gaps: Sequence[EngineGap]) -> list[dict[str, Any]]:
    return [
        {
            "source": gap.source,
            "tokens": gap.tokens,
            "mean": finite_or_none(gap.mean),
            "largest": finite_or_none(gap.largest),
            "diverging": gap.diverging,
            "share": share(gap, gaps),
        }
        for gap in gaps
    ]
