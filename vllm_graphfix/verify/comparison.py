"""Tells rounding from corruption: the greedy answers of two engines to the same prompts, position by position.

Up to and including the first position where two answers differ, both engines saw the same tokens, so their
log-probabilities there are of the same distribution and can be compared; beyond it they cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

ROUNDING = 0.0625
"""Log-probabilities this close are never called different: bfloat16 has this step between 8 and 16, where logits tend
to be."""
NOISE_FACTOR = 3.0
"""The factor by which a difference may exceed the largest one that was seen between two runs without graphs, and still
count as rounding."""

Top = dict[int, float]
"""The best tokens at one position, the chosen one among them, with their log-probabilities (natural)."""


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt."""

    tokens: tuple[int, ...]
    top: tuple[Top, ...]
    """The best tokens at each position of the answer: as many entries as there are tokens."""


class Kind(str, Enum):
    EQUAL = "equal"
    TIE = "tie"
    """The two best tokens were closer than rounding can tell apart; nothing can be said of what follows."""
    COMPILED = "compiled"
    """Beyond rounding, and the same engine without graphs gives it too: not the graphs' doing."""
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class Judgement:
    """One prompt: an engine's answer against the reference."""

    kind: Kind
    length: int
    """Tokens of the reference's answer."""
    position: int | None
    """Where they first differ, in the tokens or beyond rounding in the log-probabilities; None if they do not."""
    expected: int | None = None
    found: int | None = None
    """The tokens there."""
    margin: float | None = None
    """Between the two best log-probabilities of the reference there."""
    gap: float | None = None
    """How much less likely than its own token the reference finds the other one: at least this, if that is not among
    its best."""
    distance: float = 0.0
    """The largest difference of log-probabilities, up to and including the first difference of tokens."""
    vouched: int = 0
    """Tokens for which a second reference had the same context, if there is one; see `compare.arbitration`."""

    @property
    def agreed(self) -> int:
        """Tokens before corruption; a tie is none, and nothing is said of what follows it."""
        return self.position if self.kind is Kind.CORRUPT and self.position is not None else self.length

    @property
    def compared(self) -> int:
        """Tokens for which a reference had the same context: those before its first difference of any kind."""
        return max(self.length if self.position is None else self.position, self.vouched)


@dataclass(frozen=True)
class Comparison:
    """All prompts."""

    judgements: tuple[Judgement, ...]
    noise: float
    """The largest difference of log-probabilities between two runs without graphs."""
    tolerance: float

    @property
    def tokens(self) -> int:
        return sum(judgement.length for judgement in self.judgements)

    @property
    def agreed(self) -> int:
        return sum(judgement.agreed for judgement in self.judgements)

    @property
    def compared(self) -> int:
        return sum(judgement.compared for judgement in self.judgements)

    @property
    def distance(self) -> float:
        return max((judgement.distance for judgement in self.judgements), default=0.0)

    def of(self, kind: Kind) -> tuple[Judgement, ...]:
        return tuple(judgement for judgement in self.judgements if judgement.kind is kind)

    @property
    def corrupt(self) -> bool:
        return bool(self.of(Kind.CORRUPT))


def tolerance_of(noise: float) -> float:
    """The distance up to which a difference counts as rounding, from the *noise* of the reference.

    Noise that is not finite excuses nothing: then the reference itself is in question, not what is compared with it.
    """
    return max(ROUNDING, NOISE_FACTOR * noise) if math.isfinite(noise) else ROUNDING


def noise_between(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest difference of log-probabilities between two runs that are both right.

    Only the same tokens in the same place are compared. Infinite if one of them is no number.
    """
    noise = 0.0
    for a, b in zip(one, other, strict=True):
        for position in range(_comparable(a, b)):
            noise = max(noise, _distance(a, b, position))
    return noise


def compare(reference: Sequence[Answer], found: Sequence[Answer], noise: float) -> Comparison:
    """Raises ValueError if the engines did not answer the same number of prompts."""
    tolerance = tolerance_of(noise)
    judgements = tuple(judge(a, b, tolerance) for a, b in zip(reference, found, strict=True))
    return Comparison(judgements, noise, tolerance)


def judge(reference: Answer, found: Answer, tolerance: float) -> Judgement:
    length = len(reference.tokens)
    differs = _first_difference(reference, found)
    farthest = 0.0
    for position in range(_comparable(reference, found)):
        distance = _distance(reference, found, position)
        farthest = max(farthest, distance)
        if not distance <= tolerance:
            return _difference_at(position, Kind.CORRUPT, reference, found, farthest)
    if differs is None:
        return Judgement(Kind.EQUAL, length, None, distance=farthest)
    gap = _gap(reference, found, differs)
    return _difference_at(differs, Kind.TIE if gap <= tolerance else Kind.CORRUPT, reference, found, farthest)


def _difference_at(position: int, kind: Kind, reference: Answer, found: Answer, distance: float) -> Judgement:
    best = sorted(reference.top[position].values(), reverse=True) if position < len(reference.top) else []
    return Judgement(
        kind,
        len(reference.tokens),
        position,
        expected=_token(reference, position),
        found=_token(found, position),
        margin=best[0] - best[1] if len(best) > 1 else None,
        gap=_gap(reference, found, position),
        distance=distance,
    )


def _first_difference(a: Answer, b: Answer) -> int | None:
    """The first position where the tokens differ; where one answer ends, if the other goes on."""
    shared = min(len(a.tokens), len(b.tokens))
    differing = (i for i in range(shared) if a.tokens[i] != b.tokens[i])
    return next(differing, None if len(a.tokens) == len(b.tokens) else shared)


def _comparable(a: Answer, b: Answer) -> int:
    """How many positions had the same context."""
    first = _first_difference(a, b)
    return min(len(a.tokens), len(b.tokens)) if first is None else min(first + 1, len(a.tokens), len(b.tokens))


def _distance(a: Answer, b: Answer, position: int) -> float:
    """The largest difference between the two engines' log-probabilities of the tokens they chose.

    Infinite where one of them is no number.
    """
    one, other = a.top[position], b.top[position]
    chosen = {a.tokens[position], b.tokens[position]}
    return max(_distance_of_token(one, other, token) for token in chosen)


def _distance_of_token(one: Top, other: Top, token: int) -> float:
    # A token that is not among the best is at most as likely as the last of them.
    x, y = one.get(token), other.get(token)
    if x is None or y is None:
        missing, known = (one, y) if x is None else (other, x)
        if known is None or not missing:
            return math.inf
        worst = min(missing.values())
        return _or_infinite(max(0.0, known - worst))
    return _or_infinite(abs(x - y))


def _gap(reference: Answer, found: Answer, position: int) -> float:
    expected, other = _token(reference, position), _token(found, position)
    if expected is None or other is None:
        return math.inf
    top = reference.top[position]
    return _or_infinite(top.get(expected, math.nan) - top.get(other, min(top.values(), default=math.nan)))


def _token(answer: Answer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None


def finite_or_none(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and math.isfinite(number) else None


def _or_infinite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
