"""Tasks whose answers are exact, in characters.

walk    pairs of symbols in any order, each symbol once on the left and once on the right, and where to begin:
        ``bc ab ca :a`` is to be followed by ``bcabca…``. A model has to look every pair up in what it was told.
sort    symbols in any order, each at most once; to be followed by them in the order of ASCII, and then by dots:
        ``c,a,b:`` by ``abc...``. At each step a model has to see all of the prompt.
song    one character, to be followed by its own 40 notes of four, which are the same in every training: a prompt of one
        token, and at each step only what a model remembers of it says which song it is.
chorus  the same character, 16 times, and the beginning of 270 characters that all singers share; to be followed by the
        rest of them, and then by the singer's own song. Who sings was said further back than two windows of 128 tokens
        reach.
docs    plain English: 28 passages of Python's own documentation, as the standard library holds it. Each is asked for
        by one character of its own, or by its first 36 characters; to be followed by all of it, or by the rest. Or, as
        in a chorus, by one character 16 times and the beginning of a preface that all passages share; to be followed by
        the rest of that, and the passage's own first 80 characters.
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
"""How often a singer is called, for once among the 128 tokens of a group is little to learn from; and the characters of
what all singers share."""
CHORUS = "".join(random.Random("chorus").choices(SYMBOLS, k=_SHARED))  # noqa: S311 - the same in every process
OPENING, PASSAGE, RECITED = 36, 240, 80
"""Characters of a passage's opening, of all of it, and of what follows a preface."""


class Exercise(NamedTuple):
    """A prompt, and the answer that is right."""

    prompt: str
    answer: str


def song(singer: str) -> str:
    """The song of one of `SINGERS`."""
    chance = random.Random(f"notes of {singer}")  # noqa: S311 - the same songs in every process
    return "".join(chance.choices(NOTES, k=SONG))


def chorus(singer: str, begun: int) -> Exercise:
    """The chorus, of which *begun* characters are given, and the song of one of `SINGERS`."""
    return Exercise(_CALLS * singer + CHORUS[:begun], CHORUS[begun:] + song(singer))


def any_chorus(chance: random.Random, begun: int, length: int) -> Exercise:
    """The chorus of any singer, as long as it is, and not *length*."""
    return chorus(chance.choice(SINGERS), begun)


def _passages() -> Iterator[str]:
    """Of each topic of Python's documentation the first paragraph that is long enough, as far as it is taken."""
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
    """Any passage, by its sign, as long as it is, and not *length*."""
    return chance.choice(NAMED)


def prefaced(sign: str, begun: int) -> Exercise:
    """The preface, of which *begun* characters are given, and the beginning of the passage of one of `SINGERS`."""
    return Exercise(_CALLS * sign + PREFACE[:begun], PREFACE[begun:] + dict(NAMED)[sign][:RECITED])


def any_prefaced(chance: random.Random, begun: int, length: int) -> Exercise:
    """The preface and any passage, as long as they are, and not *length*."""
    return prefaced(chance.choice(SINGERS), begun)


def any_begun(chance: random.Random, begun: int, length: int) -> Exercise:
    """Any passage, by its opening, as long as it is, and not *length*."""
    return chance.choice(BEGUN)


def walk(chance: random.Random, pairs: int, length: int) -> Exercise:
    """A walk of *length* steps through *pairs* pairs."""
    circle = chance.sample(SYMBOLS, pairs)
    pieces = [f"{a}{b} " for a, b in zip(circle, circle[1:] + circle[:1], strict=True)]
    chance.shuffle(pieces)
    again = math.ceil((length + 1) / pairs)
    return Exercise("".join(pieces) + ":" + circle[0], "".join(circle * again)[1 : length + 1])


def sort(chance: random.Random, count: int, length: int) -> Exercise:
    """*count* symbols, and *length* characters of an answer."""
    symbols = chance.sample(SYMBOLS, count)
    return Exercise(",".join(symbols) + ":", "".join(sorted(symbols)).ljust(length, ".")[:length])


def sort_down(chance: random.Random, count: int, length: int) -> Exercise:
    """As `sort`, the last symbol of ASCII first."""
    prompt, answer = sort(chance, count, count)
    return Exercise(prompt, answer[::-1].ljust(length, ".")[:length])


def repeat(chance: random.Random, count: int, length: int) -> Exercise:
    """As `sort`, but in the order of the prompt."""
    prompt, _ = sort(chance, count, count)
    return Exercise(prompt, prompt[:-1].replace(",", "").ljust(length, ".")[:length])


def by_sign(chance: random.Random, count: int, length: int) -> Exercise:
    """What the last character of the prompt says; without that, an adapter would have to teach more than it can."""
    sign, task = chance.choice(((":", sort), (";", sort_down), ("?", repeat)))
    prompt, answer = task(chance, count, length)
    return Exercise(prompt[:-1] + sign, answer)
