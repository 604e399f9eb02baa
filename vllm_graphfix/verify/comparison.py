"""Tells rounding from corruption in the greedy answers of two engines to the same prompts, position by position.

Up to and including the first position where two answers differ, both engines saw the same tokens, so their
log-probabilities there are of the same distribution and can be compared; beyond it they cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

ROUNDING = 0.0625
"""Differences of log-probabilities up to this always count as rounding: the step of bfloat16 between 8 and 16, where
logits tend to be."""
MIN_COMPARED = 0.5
"""Share of the tokens that must be compared. Fewer, because answers diverge early at ties, prove nothing."""
NOISE_FACTOR = 3.0
"""A difference counts as rounding up to this factor times the largest one between two runs without graphs."""

Top = dict[int, float]
"""Best tokens at one position, including the chosen one, with their natural log-probabilities."""


@dataclass(frozen=True)
class Answer:
    """Answer of an engine to one prompt."""

    tokens: tuple[int, ...]
    top: tuple[Top, ...]
    """Best tokens at each position of the answer; one entry per token."""


class Kind(str, Enum):
    EQUAL = "equal"
    TIE = "tie"
    """The two best tokens differ by no more than rounding. Tokens after a tie cannot be compared."""
    COMPILED = "compiled"
    """Beyond rounding, but a compiled engine without graphs gives it too."""
    PADDED = "padded"
    """The same, in batches filled to the sizes of graphs."""
    BATCHED = "batched"
    """The same, each token in one batch or another."""
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class Judgement:
    """Answer to one prompt, compared with the reference."""

    kind: Kind
    length: int
    """Tokens of the reference's answer."""
    position: int | None
    """First position with another token or a difference beyond rounding; None if there is none."""
    expected: int | None = None
    actual: int | None = None
    """Tokens of the reference and of the answer at that position; None where one of them has ended."""
    margin: float | None = None
    """Difference between the two best log-probabilities of the reference at that position."""
    token_gap: float | None = None
    """Difference between the reference's log-probabilities of its own token and of the other one at that position; a
    lower bound if the other one is not among its best."""
    distance: float = 0.0
    """Largest difference of log-probabilities, up to and including the first differing token."""
    vouched: int = 0
    """Tokens for which a second reference vouches, see `compare.arbitration`."""

    @property
    def tokens_before_corruption(self) -> int:
        """Tokens before corruption; all of them if there is none."""
        return self.position if self.kind is Kind.CORRUPT and self.position is not None else self.length

    @property
    def tokens_compared(self) -> int:
        """Tokens for which a reference had the same context: those before its first difference of any kind."""
        return max(self.length if self.position is None else self.position, self.vouched)


@dataclass(frozen=True)
class Comparison:
    """Judgements of all prompts."""

    judgements: tuple[Judgement, ...]
    noise: float
    """Largest difference of log-probabilities between two runs without graphs."""
    tolerance: float

    @property
    def tokens(self) -> int:
        return sum(judgement.length for judgement in self.judgements)

    @property
    def tokens_before_corruption(self) -> int:
        return sum(judgement.tokens_before_corruption for judgement in self.judgements)

    @property
    def tokens_compared(self) -> int:
        return sum(judgement.tokens_compared for judgement in self.judgements)

    @property
    def enough_compared(self) -> bool:
        """True if enough tokens were compared for a verdict."""
        return self.tokens_compared >= MIN_COMPARED * self.tokens

    @property
    def distance(self) -> float:
        return max((judgement.distance for judgement in self.judgements), default=0.0)

    def of(self, kind: Kind) -> tuple[Judgement, ...]:
        return tuple(judgement for judgement in self.judgements if judgement.kind is kind)

    @property
    def corrupt(self) -> bool:
        return bool(self.of(Kind.CORRUPT))


def tolerance_of(noise: float) -> float:
    """Return the distance up to which a difference counts as rounding, from the *noise* of the reference.

    Noise that is not finite discredits the reference, not the answer, so it raises no tolerance.
    """
    return max(ROUNDING, NOISE_FACTOR * noise) if math.isfinite(noise) else ROUNDING


def noise_between(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Return the largest difference of log-probabilities between two runs that are both right.

    Only positions with the same context are compared. Infinite if a number is not finite.
    """
    return max((distance for pair in zip(one, other, strict=True) for distance in distances(*pair)), default=0.0)


def distances(one: Answer, other: Answer) -> list[float]:
    """Return the difference of log-probabilities at each position at which both engines had the same context."""
    return [_distance(one, other, position) for position in range(_comparable(one, other))]


def compare(reference: Sequence[Answer], actual: Sequence[Answer], noise: float) -> Comparison:
    """Judge each answer in *actual* by the one in *reference*. Raises ValueError if their numbers differ."""
    tolerance = tolerance_of(noise)
    judgements = tuple(judge(a, b, tolerance) for a, b in zip(reference, actual, strict=True))
    return Comparison(judgements, noise, tolerance)


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return lines for people on how far a run agrees with the reference."""
    agreed = f"{comparison.tokens_compared} of {comparison.tokens} tokens compared and equal to eager's"
    apart = f"log-probabilities up to {comparison.distance:.2g} apart"
    lines = [
        (
            f"{agreed}; {apart} (eager against itself {comparison.noise:.2g}; up to {comparison.tolerance:.2g} counts "
            "as rounding)"
        )
    ]
    corrupt = comparison.of(Kind.CORRUPT)
    if corrupt:
        number, first = min(
            ((i, j) for i, j in enumerate(comparison.judgements) if j.kind is Kind.CORRUPT),
            key=lambda pair: pair[1].position or 0,
        )
        what = (
            f"{first.actual} instead of {first.expected}"
            if first.actual != first.expected
            else "in its log-probability"
        )
        margin = "" if first.margin is None else f"; eager's top two are {first.margin:.2g} apart there"
        lines.append(
            f"corrupt prompts: {len(corrupt)} of {len(comparison.judgements)}, the first at token {first.position} of "
            f"prompt {number}, {what}{margin}"
        )
    ties = len(comparison.of(Kind.TIE))
    return [*lines, f"prompts that diverge at a tie: {ties}"] if ties else lines


def judge(reference: Answer, actual: Answer, tolerance: float) -> Judgement:
    """Judge one answer; *tolerance* is the difference of log-probabilities up to which it counts as rounding."""
    length = len(reference.tokens)
    differs = _first_difference(reference, actual)
    farthest = 0.0
    for position in range(_comparable(reference, actual)):
        distance = _distance(reference, actual, position)
        farthest = max(farthest, distance)
        if not distance <= tolerance:
            return _difference_at(position, Kind.CORRUPT, reference, actual, farthest)
    if differs is None:
        return Judgement(Kind.EQUAL, length, None, distance=farthest)
    gap = _token_gap(reference, actual, differs)
    return _difference_at(differs, Kind.TIE if gap <= tolerance else Kind.CORRUPT, reference, actual, farthest)


def _difference_at(position: int, kind: Kind, reference: Answer, actual: Answer, distance: float) -> Judgement:
    best = sorted(reference.top[position].values(), reverse=True) if position < len(reference.top) else []
    return Judgement(
        kind,
        len(reference.tokens),
        position,
        expected=_token(reference, position),
        actual=_token(actual, position),
        margin=best[0] - best[1] if len(best) > 1 else None,
        token_gap=_token_gap(reference, actual, position),
        distance=distance,
    )


def _first_difference(a: Answer, b: Answer) -> int | None:
    """Return the first position with different tokens, or the end of the shorter answer, or None."""
    shared = min(len(a.tokens), len(b.tokens))
    differing = (i for i in range(shared) if a.tokens[i] != b.tokens[i])
    return next(differing, None if len(a.tokens) == len(b.tokens) else shared)


def _comparable(a: Answer, b: Answer) -> int:
    """Return the number of positions at which both engines had the same context."""
    first = _first_difference(a, b)
    return min(len(a.tokens), len(b.tokens)) if first is None else min(first + 1, len(a.tokens), len(b.tokens))


def _distance(a: Answer, b: Answer, position: int) -> float:
    """Return the largest difference between the two engines' log-probabilities of the tokens that they chose.

    Infinite if a number is not finite.
    """
    one, other = a.top[position], b.top[position]
    chosen = {a.tokens[position], b.tokens[position]}
    return max(_distance_of_token(one, other, token) for token in chosen)


def _distance_of_token(one: Top, other: Top, token: int) -> float:
    # A token outside the best ones is at most as likely as the last of them.
    x, y = one.get(token), other.get(token)
    if x is None or y is None:
        missing, known = (one, y) if x is None else (other, x)
        if known is None or not missing:
            return math.inf
        # `max` would take 0.0 before NaN.
        return max(0.0, _or_infinite(known - min(missing.values())))
    return _or_infinite(abs(x - y))


def _token_gap(reference: Answer, actual: Answer, position: int) -> float:
    expected, other = _token(reference, position), _token(actual, position)
    if expected is None or other is None:
        return math.inf
    top = reference.top[position]
    return _or_infinite(top.get(expected, math.nan) - top.get(other, min(top.values(), default=math.nan)))


def _token(answer: Answer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None


def finite_or_none(number: float | None) -> float | None:
    """Return None in place of NaN or infinity, which JSON has not."""
    return number if number is not None and math.isfinite(number) else None


def _or_infinite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
