"""Rounding told apart from corruption, on answers made by hand: equal, ties, corruption, noise."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, isinf, isnan, nan

import pytest

from vllm_graphfix.verify.comparison import (
    NOISE_FACTOR,
    ROUNDING,
    Answer,
    Judgement,
    Kind,
    compare,
    judge,
    noise_between,
    tolerance_of,
)

A, B, C, D, E, ELSEWHERE = range(6)
"""Tokens; the last is never among the best."""
CLEAR = {A: -0.1, B: -3.0, C: -4.0}
"""A is far ahead."""
CLOSE = {A: -0.70, B: -0.72, C: -4.0}
"""A and B are nearer than rounding can tell apart."""


def answer(tokens: list[int], *top: dict[int, float]) -> Answer:
    return Answer(tuple(tokens), top)


def moved(top: dict[int, float], by: float) -> dict[int, float]:
    return {token: value + by for token, value in top.items()}


REFERENCE = answer([A, A, A, A], CLEAR, CLEAR, CLOSE, CLEAR)
TIE = answer([A, A, B, D], CLEAR, CLEAR, {B: -0.70, A: -0.71, C: -4.0}, {D: -0.2, E: -2.0})
"""Beyond its third token, nothing can be compared."""
WRONG = answer([A, B, A, A], CLEAR, {B: -0.1, A: -3.0}, CLOSE, CLEAR)
LEVEL = {A: -1.00, B: -1.01, C: -1.02}
"""Three are nearer than rounding can tell apart."""


def test_equal_answers_are_equal() -> None:
    assert judge(REFERENCE, REFERENCE, ROUNDING) == Judgement(Kind.EQUAL, 4, None)


def test_log_probabilities_within_the_tolerance_are_equal_with_a_distance() -> None:
    actual = replace(REFERENCE, top=tuple(moved(top, 0.05) for top in REFERENCE.top))
    judgement = judge(REFERENCE, actual, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.EQUAL, None, 4)
    assert judgement.distance == pytest.approx(0.05)


@pytest.mark.parametrize(("distance", "kind"), [(0.249, Kind.EQUAL), (0.25, Kind.EQUAL), (0.251, Kind.CORRUPT)])
def test_log_probabilities_may_differ_by_the_tolerance_and_no_more(distance: float, kind: Kind) -> None:
    assert judge(answer([A], {A: -1.0}), answer([A], {A: -1.0 - distance}), 0.25).kind is kind


@pytest.mark.parametrize(("gap", "kind"), [(0.249, Kind.TIE), (0.25, Kind.TIE), (0.251, Kind.CORRUPT)])
def test_the_best_two_may_change_places_up_to_the_tolerance_and_no_more(gap: float, kind: Kind) -> None:
    reference, actual = answer([A], {A: -1.0, B: -1.0 - gap}), answer([B], {B: -1.0, A: -1.0})
    assert judge(reference, actual, 0.25).kind is kind


def test_two_best_that_are_close_may_change_places() -> None:
    judgement = judge(REFERENCE, TIE, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.expected, judgement.actual) == (Kind.TIE, 2, A, B)
    assert judgement.margin == pytest.approx(0.02)
    assert judgement.token_gap == pytest.approx(0.02)
    assert judgement.tokens_before_corruption == judgement.length, "a tie is no corruption"


def test_three_best_that_are_close_may_change_places() -> None:
    assert judge(answer([A], LEVEL), answer([C], {C: -1.00, A: -1.01, B: -1.02}), ROUNDING).kind is Kind.TIE


def test_what_follows_a_tie_is_not_compared() -> None:
    """The two engines have seen other tokens by then."""
    judgement = judge(REFERENCE, replace(TIE, top=(*TIE.top[:3], {D: nan})), ROUNDING)
    assert judgement.kind is Kind.TIE
    assert judgement.distance == pytest.approx(0.02)


def test_another_token_where_the_reference_was_sure_is_corrupt() -> None:
    judgement = judge(REFERENCE, WRONG, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.CORRUPT, 1, 1)
    assert judgement.token_gap == pytest.approx(2.9)


def test_another_token_is_corrupt_even_with_the_log_probabilities_of_the_reference() -> None:
    """An engine that does not take its own best token; only the gap shows it."""
    assert judge(REFERENCE, answer([A, B], CLEAR, CLEAR), ROUNDING).kind is Kind.CORRUPT


def test_a_tie_of_the_reference_with_other_log_probabilities_is_corrupt() -> None:
    """The found token was nearly as good; the numbers it was chosen by are not of the same distribution."""
    actual = answer([A, A, B, A], CLEAR, CLEAR, {B: -0.01, A: -5.0}, CLEAR)
    judgement = judge(REFERENCE, actual, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.CORRUPT, 2, 2)
    assert judgement.distance == pytest.approx(4.3)


def test_drifting_log_probabilities_are_corrupt_where_they_leave_the_tolerance() -> None:
    reference = answer([A] * 5, *[CLEAR] * 5)
    actual = replace(reference, top=tuple(moved(CLEAR, -0.03 * step) for step in range(5)))
    judgement = judge(reference, actual, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.CORRUPT, 3, 3)
    assert (judgement.expected, judgement.actual, judgement.token_gap) == (A, A, 0.0)
    assert judgement.distance == pytest.approx(0.09)


def test_a_drift_before_a_tie_is_corrupt_at_the_drift() -> None:
    actual = answer([A, A, B, A], CLEAR, moved(CLEAR, -1.0), {B: -0.70, A: -0.71}, CLEAR)
    judgement = judge(REFERENCE, actual, ROUNDING)
    assert (judgement.kind, judgement.position) == (Kind.CORRUPT, 1)


def test_a_token_that_is_not_among_the_best_of_the_reference_is_corrupt() -> None:
    actual = answer([A, ELSEWHERE], CLEAR, {ELSEWHERE: -0.1, D: -2.0})
    judgement = judge(REFERENCE, actual, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.actual) == (Kind.CORRUPT, 1, ELSEWHERE)
    assert judgement.token_gap == pytest.approx(3.9), "at least as far as the last of the best"
    assert judgement.distance == pytest.approx(3.9)


def test_a_token_just_below_the_best_of_a_level_reference_is_a_tie() -> None:
    level = {token: -1.0 - token / 100 for token in (A, B, C, D, E)}
    actual = {ELSEWHERE: -1.0, A: -1.01, B: -1.02, C: -1.03, D: -1.04}
    assert judge(answer([A], level), answer([ELSEWHERE], actual), ROUNDING).kind is Kind.TIE


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_a_log_probability_that_is_no_number_is_corrupt_at_any_tolerance(number: float) -> None:
    actual = replace(REFERENCE, top=(CLEAR, {**CLEAR, A: number}, CLOSE, CLEAR))
    judgement = judge(REFERENCE, actual, 1e9)
    assert (judgement.kind, judgement.position) == (Kind.CORRUPT, 1)
    assert isinf(judgement.distance)


def test_nan_is_corrupt_beside_a_level_reference_whose_token_is_not_among_the_best() -> None:
    judgement = judge(answer([A], LEVEL), answer([ELSEWHERE], {ELSEWHERE: nan, E: nan}), ROUNDING)
    assert (judgement.kind, judgement.distance) == (Kind.CORRUPT, inf)


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_numbers_that_are_none_do_not_agree_with_each_other(number: float) -> None:
    both = answer([A], {A: number, B: number})
    assert judge(both, both, 1e9).kind is Kind.CORRUPT


def test_a_reference_without_log_probabilities_agrees_with_nothing() -> None:
    assert judge(answer([A], {}), answer([A], CLEAR), 1e9).kind is Kind.CORRUPT
    assert judge(answer([A], {}), answer([B], {}), 1e9).kind is Kind.CORRUPT


def test_an_answer_that_ends_early_is_corrupt_where_it_ends() -> None:
    actual = Answer(REFERENCE.tokens[:3], REFERENCE.top[:3])
    judgement = judge(REFERENCE, actual, ROUNDING)
    assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.CORRUPT, 3, 3)
    assert (judgement.expected, judgement.actual) == (A, None)
    assert isinf(judgement.token_gap or 0)


def test_an_answer_that_goes_on_is_corrupt_where_the_reference_ends() -> None:
    shorter = Answer(REFERENCE.tokens[:3], REFERENCE.top[:3])
    judgement = judge(shorter, REFERENCE, ROUNDING)
    assert (judgement.kind, judgement.position) == (Kind.CORRUPT, 3)
    assert (judgement.expected, judgement.actual, judgement.margin) == (None, A, None)


def test_empty_answers_are_equal_and_differ_from_others_at_once() -> None:
    empty = Answer((), ())
    assert judge(empty, empty, ROUNDING) == Judgement(Kind.EQUAL, 0, None)
    for judgement in (judge(REFERENCE, empty, ROUNDING), judge(empty, REFERENCE, ROUNDING)):
        assert (judgement.kind, judgement.position, judgement.tokens_before_corruption) == (Kind.CORRUPT, 0, 0)


def test_a_margin_needs_two_tokens() -> None:
    assert judge(answer([A], {A: 0.0}), answer([B], {B: 0.0}), ROUNDING).margin is None


def test_noise_is_the_largest_difference_of_two_runs_without_graphs() -> None:
    again = replace(REFERENCE, top=(CLEAR, moved(CLEAR, 0.08), moved(CLOSE, -0.02), CLEAR))
    assert noise_between([REFERENCE, REFERENCE], [REFERENCE, again]) == pytest.approx(0.08)
    assert noise_between([REFERENCE], [REFERENCE]) == 0.0
    assert noise_between([], []) == 0.0


def test_noise_is_not_taken_from_beyond_a_tie_between_the_two() -> None:
    assert noise_between([REFERENCE], [replace(TIE, top=(*TIE.top[:3], {D: -9.0}))]) == pytest.approx(0.02)


def test_noise_of_eager_against_itself_raises_the_tolerance_for_graphs() -> None:
    """The same answer: corrupt beside a reference that repeats itself, rounding beside one that does not."""
    noisy = replace(REFERENCE, top=(moved(CLEAR, 0.1), *REFERENCE.top[1:]))
    actual = replace(REFERENCE, top=(moved(CLEAR, 0.2), *REFERENCE.top[1:]))
    strict = compare([REFERENCE], [actual], noise_between([REFERENCE], [REFERENCE]))
    lenient = compare([REFERENCE], [actual], noise_between([REFERENCE], [noisy]))
    assert (strict.tolerance, strict.corrupt) == (ROUNDING, True)
    assert lenient.tolerance == pytest.approx(0.1 * NOISE_FACTOR)
    assert not lenient.corrupt


def test_noise_below_the_step_of_bfloat16_does_not_lower_the_tolerance() -> None:
    assert tolerance_of(0.0) == tolerance_of(ROUNDING / NOISE_FACTOR) == ROUNDING


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_a_reference_that_gives_no_numbers_excuses_nothing(number: float) -> None:
    """Else infinite noise would call any answer rounding."""
    broken = replace(REFERENCE, top=(CLEAR, {**CLEAR, A: number}, CLOSE, CLEAR))
    noise = noise_between([REFERENCE, REFERENCE], [REFERENCE, broken])
    assert isinf(noise)
    wrong = answer([B, B, B, B], *[{B: -0.1, A: -3.0}] * 4)
    comparison = compare([REFERENCE, REFERENCE], [wrong, REFERENCE], noise)
    assert [judgement.kind for judgement in comparison.judgements] == [Kind.CORRUPT, Kind.EQUAL]


def test_a_comparison_adds_up_its_prompts() -> None:
    comparison = compare([REFERENCE] * 3, [REFERENCE, TIE, WRONG], 0.0)
    assert [judgement.kind for judgement in comparison.judgements] == [Kind.EQUAL, Kind.TIE, Kind.CORRUPT]
    assert (comparison.tokens, comparison.tokens_before_corruption, comparison.corrupt) == (12, 9, True)
    assert comparison.distance == pytest.approx(2.9)
    assert comparison.of(Kind.TIE) == comparison.judgements[1:2]


def test_no_prompts_are_no_corruption_and_no_tokens() -> None:
    comparison = compare([], [], 0.0)
    assert (comparison.tokens, comparison.tokens_before_corruption, comparison.distance, comparison.corrupt) == (
        0,
        0,
        0.0,
        False,
    )


@pytest.mark.parametrize(("reference", "actual"), [(2, 1), (1, 2), (0, 1)])
def test_answers_to_another_number_of_prompts_are_an_error(reference: int, actual: int) -> None:
    with pytest.raises(ValueError, match=r"zip"):
        compare([REFERENCE] * reference, [REFERENCE] * actual, 0.0)
    with pytest.raises(ValueError, match=r"zip"):
        noise_between([REFERENCE] * reference, [REFERENCE] * actual)


def any_answer(chance: random.Random, length: int) -> Answer:
    """Greedy: at each position some best tokens, the best of them chosen; every tenth number is none."""
    top = []
    for _ in range(length):
        best = chance.sample(range(12), k=5)
        top.append({token: -chance.expovariate(1.0) if chance.random() > 0.1 else nan for token in best})
    return Answer(tuple(max(best, key=lambda token: best[token]) for best in top), tuple(top))


@pytest.mark.parametrize("seed", range(60))
def test_what_holds_for_any_two_answers(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - cases, not secrets
    one, other = (any_answer(chance, chance.randrange(6)) for _ in range(2))
    same = chance.randrange(min(len(one.tokens), len(other.tokens)) + 1)
    other = Answer(one.tokens[:same] + other.tokens[same:], one.top[:same] + other.top[same:])
    noise = noise_between([one], [other])
    assert noise == noise_between([other], [one])
    judgements = [judge(one, other, tolerance) for tolerance in (0.0, ROUNDING, 1.0, 1e9)]
    kinds = [judgement.kind for judgement in judgements]
    for judgement in judgements:
        assert 0 <= judgement.tokens_before_corruption <= judgement.length == len(one.tokens)
        assert judgement.distance <= noise
        assert (judgement.position is None) == (judgement.kind is Kind.EQUAL)
    assert kinds == sorted(kinds, key=lambda kind: kind is not Kind.CORRUPT), (
        "a larger tolerance acquits, never convicts"
    )
    if one.tokens == other.tokens and noise < inf:
        assert kinds[-1] is Kind.EQUAL
    finite = Answer(one.tokens, tuple({t: -1.0 if isnan(v) else v for t, v in best.items()} for best in one.top))
    assert judge(finite, finite, 0.0) == Judgement(Kind.EQUAL, len(one.tokens), None)
