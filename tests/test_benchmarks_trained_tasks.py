"""The tasks of the benchmark of trained models: what is asked, and what is right."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from measuring import trained_deepseek_v4 as deepseek_v4
from measuring import trained_recipes
from measuring.trained_tasks import (
    BEGUN,
    CHORUS,
    NAMED,
    PASSAGE,
    PREFACE,
    RECITED,
    SINGERS,
    SYMBOLS,
    Exercise,
    by_sign,
    chorus,
    prefaced,
    repeat,
    song,
    sort,
    sort_down,
    walk,
)


def test_a_walk_goes_from_pair_to_pair_and_round_again() -> None:
    exercise = walk(random.Random(3), 5, 12)  # noqa: S311 - no secret
    *pairs, begin = exercise.prompt.split(" ")
    following = {pair[0]: pair[1] for pair in pairs}
    assert sorted(following) == sorted(following.values())
    assert len(following) == 5
    here, expected = begin.removeprefix(":"), ""
    for _ in range(12):
        here = following[here]
        expected += here
    assert exercise.answer == expected


def test_the_longest_walk_meets_every_symbol() -> None:
    chance = random.Random(0)  # noqa: S311 - no secret
    assert set(walk(chance, len(SYMBOLS), len(SYMBOLS)).answer) == set(SYMBOLS)


def test_what_is_sorted_ends_in_dots() -> None:
    exercise = sort(random.Random(3), 4, 7)  # noqa: S311 - no secret
    assert exercise.answer == "".join(sorted(exercise.prompt[:-1].split(","))) + "..."


def test_tasks_of_adapters_have_the_prompts_of_the_model_and_other_answers() -> None:
    up, down, again = (task(random.Random(3), 4, 7) for task in (sort, sort_down, repeat))  # noqa: S311 - no secret
    assert up.prompt == down.prompt == again.prompt
    assert down.answer == up.answer[3::-1] + "..."
    assert again.answer == up.prompt[:-1].replace(",", "") + "..."


def test_the_last_character_of_a_prompt_says_how_to_order_it() -> None:
    chance = random.Random(3)  # noqa: S311 - no secret
    exercises = [by_sign(chance, 3, 3) for _ in range(20)]
    assert {each.prompt[-1] for each in exercises} == set(":;?")
    for prompt, answer in exercises:
        symbols = prompt[:-1].split(",")
        expected = {":": sorted(symbols), ";": sorted(symbols, reverse=True), "?": symbols}[prompt[-1]]
        assert answer == "".join(expected)


def test_songs_are_the_same_everywhere_and_each_its_own() -> None:
    assert song("!")[:12] == "gcaacaccatcg"
    assert len(set(map(song, SINGERS))) == len(SINGERS)


@pytest.mark.parametrize(
    ("task", "shared", "own"), [(chorus, CHORUS, song("!")), (prefaced, PREFACE, dict(NAMED)["!"][:RECITED])]
)
def test_what_is_a_singers_own_begins_further_behind_the_name_than_two_windows_reach(
    task: Callable[[str, int], Exercise], shared: str, own: str
) -> None:
    exercise = task("!", 8)
    text = exercise.prompt + exercise.answer
    assert text.endswith(shared + own)
    window = deepseek_v4.CONFIG["sliding_window"]
    first = len(text) - len(own)
    assert first - 1 - text.rindex("!", 0, first) > 2 * (window - 1), "the token before the first one sees so far"
    assert text.rindex("!", 0, first) < deepseek_v4.CONFIG["compress_ratios"][0], "the name is in one group"


def test_passages_are_of_pythons_documentation_each_with_its_own_sign_and_opening() -> None:
    from pydoc_data.topics import topics

    documentation = " ".join(" ".join(topics.values()).split())
    texts = dict(NAMED)
    assert list(texts) == list(SINGERS)
    assert len({exercise.prompt for exercise in BEGUN}) == len(SINGERS)
    for (prompt, answer), text in zip(BEGUN, texts.values(), strict=True):
        assert prompt + answer == text
        assert text in documentation
        assert PREFACE not in text, "what passages share is no beginning of one"
        assert len(text.encode()) == PASSAGE < 256, "on stock, FlashAttention was right of longer texts"
        assert max(text.encode()) < trained_recipes.VOCABULARY
