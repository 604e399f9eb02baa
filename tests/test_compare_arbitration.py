"""Who vouches for the answers with graphs: eager, or an engine that is compiled alike and has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

import pytest

from vllm_graphfix.commands.compare.arbitration import accept_from_padded, accept_from_scores, judge_by_compiled
from vllm_graphfix.verify.comparison import Answer, Judgement, Kind, compare

LENGTH = 8
BEST, SECOND, OTHER = 10, 11, 12
"""Tokens: the best one, one nearly as good at a tie and far from it else, one that is far from it anywhere."""


def answer(changes: dict[int, int] | None = None, ties: Sequence[int] = ()) -> Answer:
    """`BEST` at each position but for *changes*; at *ties* the second is nearly as good.

    The engine's own choice is its best.
    """
    changes = changes or {}
    tokens = tuple(changes.get(position, BEST) for position in range(LENGTH))
    top = []
    for position, token in enumerate(tokens):
        best = {BEST: -0.1, SECOND: -0.11 if position in ties else -4.0, OTHER: -6.0}
        if token == OTHER:
            best = {BEST: -6.0, SECOND: -7.0, OTHER: -0.1}
        top.append(best)
    return Answer(tokens, tuple(top))


def judged(eager: Answer, graphs: Answer, compiled: Answer) -> tuple[Judgement, int]:
    comparison = judge_by_compiled(compare([eager], [graphs], 0.0), [graphs], [compiled])
    return comparison.judgements[0], comparison.tokens_compared


EVERYWHERE = range(LENGTH)
ARBITRATION: list[tuple[str, tuple[Answer, Answer, Answer], Kind, int | None, int]] = [
    # name, answers eager, with graphs and compiled alike without graphs; kind, position, tokens compared
    ("all the same", (answer(), answer(), answer()), Kind.EQUAL, None, 8),
    ("eager vouches, whatever the other says", (answer(), answer(), answer({3: OTHER})), Kind.EQUAL, None, 8),
    ("graphs alone differ", (answer(), answer({5: OTHER}), answer()), Kind.CORRUPT, 5, 5),
    ("without graphs it is so too", (answer(), answer({5: OTHER}), answer({5: OTHER})), Kind.COMPILED, 5, 8),
    (
        "the three differ: nobody vouches",
        (answer(), answer({5: OTHER}), answer({5: SECOND})),
        Kind.CORRUPT,
        5,
        5,
    ),
    (
        "a tie before: the other has seen nothing of it",
        (answer(), answer({5: OTHER}), answer({2: SECOND}, ties=[2])),
        Kind.CORRUPT,
        5,
        5,
    ),
    (
        "a tie after: the other has seen it",
        (answer(), answer({3: OTHER}, ties=[6]), answer({3: OTHER, 6: SECOND}, ties=[6])),
        Kind.COMPILED,
        3,
        6,
    ),
    (
        "it goes on: first compiled, then corrupt",
        (answer(), answer({2: OTHER, 6: OTHER}), answer({2: OTHER})),
        Kind.CORRUPT,
        6,
        6,
    ),
    (
        "a tie with eager hides nothing from the other",
        (answer({1: SECOND}, ties=[1]), answer({6: OTHER}, ties=[1]), answer(ties=[1])),
        Kind.CORRUPT,
        6,
        6,
    ),
    (
        "a tie with eager, and the other agrees to the end",
        (answer({1: SECOND}, ties=[1]), answer(ties=[1]), answer(ties=[1])),
        Kind.TIE,
        1,
        8,
    ),
    (
        "a tie with both",
        (answer({1: SECOND}, ties=[1]), answer(ties=[1, 4]), answer({4: SECOND}, ties=[1, 4])),
        Kind.TIE,
        1,
        4,
    ),
    (
        "the other differs where eager vouches",
        (answer({4: SECOND}, ties=[4]), answer(ties=[4]), answer({2: OTHER}, ties=[4])),
        Kind.TIE,
        4,
        4,
    ),
]


@pytest.mark.parametrize(
    ("answers", "kind", "position", "compared"), [row[1:] for row in ARBITRATION], ids=[row[0] for row in ARBITRATION]
)
def test_corrupt_is_what_one_reference_contradicts_and_the_other_does_not_vouch_for(
    answers: tuple[Answer, Answer, Answer], kind: Kind, position: int | None, compared: int
) -> None:
    judgement, seen = judged(*answers)
    assert (judgement.kind, judgement.position, seen) == (kind, position, compared)


def test_the_expected_token_is_that_of_the_reference_that_contradicts() -> None:
    eager, graphs, compiled = answer({1: SECOND}, ties=[1]), answer({6: OTHER}, ties=[1]), answer(ties=[1])
    judgement, _ = judged(eager, graphs, compiled)
    assert (judgement.expected, judgement.actual) == (BEST, OTHER)


def test_log_probabilities_alone_are_judged_like_tokens() -> None:
    """The same tokens, and log-probabilities that are not: corrupt, unless it is so without graphs."""
    moved = replace(answer(), top=(*answer().top[:3], {BEST: -2.0, SECOND: -4.0, OTHER: -6.0}, *answer().top[4:]))
    assert judged(answer(), moved, answer())[0].kind is Kind.CORRUPT
    assert judged(answer(), moved, moved)[0].kind is Kind.COMPILED


def test_a_tie_at_the_very_position_vouches_for_it() -> None:
    """Both engines of a tie found both tokens nearly as good, so the one that was not chosen is right there, too."""
    close, other_way = {SECOND: -0.10, OTHER: -0.11, BEST: -6.0}, {SECOND: -0.11, OTHER: -0.10, BEST: -6.0}
    graphs = replace(answer({5: OTHER}), top=(*answer().top[:5], other_way, *answer().top[6:]))
    compiled = replace(answer({5: SECOND}), top=(*answer().top[:5], close, *answer().top[6:]))
    assert judged(answer(), graphs, compiled)[0].kind is Kind.COMPILED
    assert judged(compiled, graphs, answer())[0].kind is Kind.TIE


def test_the_second_reference_is_judged_by_eagers_noise() -> None:
    graphs = answer({5: OTHER})
    compiled = replace(graphs, top=({BEST: -0.22, SECOND: -4.0, OTHER: -6.0}, *graphs.top[1:]))
    kinds = {
        noise: judge_by_compiled(compare([answer()], [graphs], noise), [graphs], [compiled]).judgements[0].kind
        for noise in (0.0, 0.05)
    }
    assert kinds == {0.0: Kind.CORRUPT, 0.05: Kind.COMPILED}


def test_numbers_that_are_none_are_not_vouched_for() -> None:
    broken = replace(answer(), top=({BEST: nan, SECOND: nan}, *answer().top[1:]))
    assert judged(answer(), broken, broken)[0].kind is Kind.CORRUPT


def test_each_prompt_is_judged_on_its_own() -> None:
    eager = [answer(), answer(), answer()]
    graphs = [answer(), answer({5: OTHER}), answer({4: OTHER})]
    comparison = judge_by_compiled(compare(eager, graphs, 0.02), graphs, [answer(), answer({5: OTHER}), answer()])
    assert [judgement.kind for judgement in comparison.judgements] == [Kind.EQUAL, Kind.COMPILED, Kind.CORRUPT]
    assert [judgement.tokens_compared for judgement in comparison.judgements] == [8, 8, 4]
    assert comparison.noise == 0.02


EXONERATION: list[tuple[str, tuple[Answer, Answer, Answer], Kind, int]] = [
    # name, answers eager, with graphs and padded without graphs; kind, tokens compared
    ("a batch of that size gives the same", (answer(), answer({5: OTHER}), answer({5: OTHER})), Kind.PADDED, 8),
    ("only graphs give it", (answer(), answer({5: OTHER}), answer()), Kind.CORRUPT, 5),
    (
        "it gives the same, and then not what graphs give",
        (answer(), answer({3: OTHER, 6: OTHER}), answer({3: OTHER})),
        Kind.CORRUPT,
        3,
    ),
    ("it has left the context before", (answer(), answer({5: OTHER}), answer({2: SECOND}, [2])), Kind.CORRUPT, 5),
    ("it contradicts no answer that is right", (answer(), answer(), answer({3: OTHER})), Kind.EQUAL, 8),
    ("beyond a tie it vouches", (answer(ties=[2]), answer({2: SECOND}, [2]), answer({2: SECOND}, [2])), Kind.TIE, 8),
]


@pytest.mark.parametrize(
    ("answers", "kind", "compared"), [each[1:] for each in EXONERATION], ids=[each[0] for each in EXONERATION]
)
def test_a_batch_of_the_size_of_the_graph_vouches_and_never_contradicts(
    answers: tuple[Answer, Answer, Answer], kind: Kind, compared: int
) -> None:
    eager, graphs, padded = answers
    comparison = accept_from_padded(compare([eager], [graphs], 0.0), [graphs], [padded])
    assert (comparison.judgements[0].kind, comparison.tokens_compared) == (kind, compared)


@pytest.mark.parametrize(
    ("scored", "kind"),
    [
        ([answer({5: OTHER}), answer()], Kind.BATCHED),
        ([answer(), answer()], Kind.CORRUPT),
        # One batch gives one token, another one the other.
        ([answer({2: OTHER}), answer({5: OTHER})], Kind.BATCHED),
        # There was no room for the last tokens.
        ([replace(answer({5: OTHER}), top=answer({5: OTHER}).top[:7])], Kind.CORRUPT),
    ],
)
def test_an_answer_whose_tokens_other_batches_give_is_not_corrupt(scored: list[Answer], kind: Kind) -> None:
    graphs = answer({2: OTHER, 5: OTHER}) if len(scored) == 2 and scored[0].tokens[2] == OTHER else answer({5: OTHER})
    made = accept_from_scores(compare([answer()], [graphs], 0.0), [graphs], [[each] for each in scored])
    assert made.judgements[0].kind is kind
