"""Tasks whose answers are exact, in characters.

walk    Prompt: pairs of symbols in any order, each symbol once on the left and once on the right, and a start, as
        ``bc ab ca :a``. Answer: ``bcabca…``. The model must look each pair up in the prompt.
sort    Prompt: symbols in any order, each at most once, as ``c,a,b:``. Answer: the symbols in ASCII order and dots, as
        ``abc...``. At each step the model must see the whole prompt.
song    Prompt: a singer, one character. Answer: its song of 40 notes out of four, the same in every training. The
        prompt is one token, and afterwards only the model's state says which song it is.
chorus  Prompt: a singer, 16 times, and the beginning of 270 characters that all singers share. Answer: the rest of
        them, and the singer's song. The singer is further back than two windows of 128 tokens reach.
docs    28 passages of Python's documentation, plain English, from the standard library. Prompt: a passage's own
        character, or its first 36 characters. Answer: all of it, or the rest. Or, as in a chorus, prompt: one character
        16 times and the beginning of a preface that all passages share; answer: the rest of the preface, and the first
        80 characters of the passage.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

SYMBOLS = string.ascii_letters + string.digits
SINGERS = "!\"#$%&'()*+-/;<=>?@[]^_`{|}~"
NOTES, SONG = "acgt", 40
_CALLS, _SHARED = 16, 270
"""How often a singer is in the prompt, since once among the 128 tokens of a group is little to learn from; and the
length of the shared characters."""
CHORUS = "".join(random.Random("chorus").choices(SYMBOLS, k=_SHARED))  # noqa: S311 - the same in every process
OPENING, PASSAGE, RECITED = 36, 240, 80
"""Characters of a passage's opening, of all of it, and of its part after a preface."""


class Exercise(NamedTuple):
    """A prompt, and its right answer."""

    prompt: str
    answer: str


def song(singer: str) -> str:
    """Return the song of one of `SINGERS`."""
    chance = random.Random(f"notes of {singer}")  # noqa: S311 - the same songs in every process
    return "".join(chance.choices(NOTES, k=SONG))


def chorus(singer: str, begun: int) -> Exercise:
    """Ask for the chorus after its first *begun* characters, and for the song of one of `SINGERS`."""
    return Exercise(_CALLS * singer + CHORUS[:begun], CHORUS[begun:] + song(singer))


def any_chorus(chance: random.Random, begun: int, length: int) -> Exercise:
    """Ask for the chorus of any singer, whatever the *length*."""
    return chorus(chance.choice(SINGERS), begun)


def _passages() -> Iterator[str]:
    """Yield the beginning of the first paragraph of each topic that is long enough."""
    for topic in topics.values():
        for paragraph in topic.split("\n\n"):
            text = " ".join(paragraph.split())
            if len(text) >= PASSAGE and text.isascii() and text[0].isupper() and "::=" not in text:  # no grammar
                yield text[:PASSAGE]
                break


# Topics may share a paragraph. Of another Python's documentation the passages may be other ones.
_TEXTS = tuple(dict.fromkeys(_passages()))
NAMED = tuple(Exercise(sign, text) for sign, text in zip(SINGERS, _TEXTS, strict=False))
BEGUN = tuple(Exercise(text[:OPENING], text[OPENING:]) for _, text in NAMED)
PREFACE = " ".join(_TEXTS[len(SINGERS) :])[:_SHARED]


def any_named(chance: random.Random, begun: int, length: int) -> Exercise:
    """Ask for any passage by its sign, whatever the *length*."""
    return chance.choice(NAMED)


def prefaced(sign: str, begun: int) -> Exercise:
    """Ask for the preface after its first *begun* characters, and for the beginning of a passage."""
    return Exercise(_CALLS * sign + PREFACE[:begun], PREFACE[begun:] + dict(NAMED)[sign][:RECITED])


def any_prefaced(chance: random.Random, begun: int, length: int) -> Exercise:
    """Ask for the preface and any passage, whatever the *length*."""
    return prefaced(chance.choice(SINGERS), begun)


def any_begun(chance: random.Random, begun: int, length: int) -> Exercise:
    """Ask for any passage by its opening, whatever the *length*."""
    return chance.choice(BEGUN)


def walk(chance: random.Random, pairs: int, length: int) -> Exercise:
    """Ask for a walk of *length* steps through *pairs* pairs."""
    circle = chance.sample(SYMBOLS, pairs)
    pieces = [f"{a}{b} " for a, b in zip(circle, circle[1:] + circle[:1], strict=True)]
    chance.shuffle(pieces)
    again = math.ceil((length + 1) / pairs)
    return Exercise("".join(pieces) + ":" + circle[0], "".join(circle * again)[1 : length + 1])


def sort(chance: random.Random, count: int, length: int) -> Exercise:
    """Ask for *count* symbols in order, and dots up to *length* characters."""
    symbols = chance.sample(SYMBOLS, count)
    return Exercise(",".join(symbols) + ":", "".join(sorted(symbols)).ljust(length, ".")[:length])


def sort_down(chance: random.Random, count: int, length: int) -> Exercise:
    """Ask for the symbols in reverse order."""
    prompt, answer = sort(chance, count, count)
    return Exercise(prompt, answer[::-1].ljust(length, ".")[:length])


def repeat(chance: random.Random, count: int, length: int) -> Exercise:
    """Ask for the symbols in the order of the prompt."""
    prompt, _ = sort(chance, count, count)
    return Exercise(prompt, prompt[:-1].replace(",", "").ljust(length, ".")[:length])


def by_sign(chance: random.Random, count: int, length: int) -> Exercise:
    """Ask for one of three orders by the last character of the prompt.

    A model that knows only one would leave an adapter more to teach than it can.
    """
    sign, task = chance.choice(((":", sort), (";", sort_down), ("?", repeat)))
    prompt, answer = task(chance, count, length)
    return Exercise(prompt[:-1] + sign, answer)
