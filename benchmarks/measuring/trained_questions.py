"""The prompts of `benchmarks/trained.py`: what each engine is to answer, and the right answer where there is one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import PROJECT
from measuring.trained_tasks import (
    BEGUN,
    NAMED,
    OPENING,
    SINGERS,
    Exercise,
    chorus,
    prefaced,
    repeat,
    song,
    sort,
    sort_down,
    walk,
)
from vllm_graphfix.verify.engine import cases as verified

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 11
"""Prompts differ from those of any training, but for songs, choruses and passages, of which there are few."""
ANSWER = 96
"""Tokens of an answer in text."""
_END = "<|im_end|>"
_SHORT = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Explain in three sentences what a prime number is.",
    "Write a short story about a dog that finds a key.",
)
_LONG = (700, 1100, 1500, 1900)
"""Characters of a licence that the other questions are about."""
_WAVES, _WAVES_OF_FOUR = 16, 8
_BEGINNINGS = (8, 16, 24)
"""Characters of the chorus, or the preface, that each wave of eight begins with."""
_SCORED_LENGTHS, _SCORED_TOKENS = (16, 32, 64, 128), 8


@dataclass(frozen=True)
class Question:
    """One prompt of an engine."""

    ids: tuple[int, ...]
    prompt: str
    tokens: int
    """Length of the answer."""
    right: str | None = None
    """The answer, where there is one that is right."""
    unscored: int = 0
    """Tokens of the prompt whose log-probabilities do not count in its perplexity."""
    adapter: str | None = None
    """The folder of its LoRA adapter, within that of the models."""


Questions = tuple[Question, ...]


class Words:
    """The tokenizer of a folder, and its chat template."""

    def __init__(self, folder: Path) -> None:
        import jinja2
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        # S701: the result is no page
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)  # noqa: S701

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def chat(self, question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        return self.ids(self._template.render(messages=messages, add_generation_prompt=True))

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of *ids*, up to where the model ends its turn."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)).partition(_END)[0]


# -- text, which is compared with the eager engine's


def chats(folder: Path) -> Questions:
    words = Words(folder)
    about = [f"Summarize this text in simple words:\n\n{_licence()[:length]}" for length in _LONG]
    return tuple(Question(words.chat(text), text, ANSWER) for text in (*_SHORT, *about))


def licence(folder: Path) -> Questions:
    """Pieces of a licence, one after the other, of as many tokens as graphs have."""
    words = Words(folder)
    ids, begin, pieces = words.ids(_licence()[300:]), 0, []
    for length, tokens in verified.LLAMA_EAGLE_SCORED.workload:
        piece = ids[begin : begin + length]
        pieces.append(Question(piece, words.text(piece), tokens))
        begin += length
    return tuple(pieces)


def _licence() -> str:
    return " ".join((PROJECT / "LICENSE").read_text().split())


# -- exact answers; *folder* is that of the model


def waves_of_three(folder: Path) -> Questions:
    """Three requests a wave: one ends before the long prompt is computed, and the batch is padded over its slot."""
    chance, most = _chance(), _most(folder)
    waves = [(walk(chance, 2, 4), Exercise(it, song(it)), walk(chance, most, most)) for it in SINGERS[:_WAVES]]
    return _exact(exercise for wave in waves for exercise in wave)


def waves_of_four(folder: Path) -> Questions:
    """Four requests a wave: the first ends first, and then that one of the others which comes last takes its row.

    So each request is in the first row of the batch at some time of its answer, for twenty steps or more. Prompts of
    songs have their first note, too: in a batch of prompts of one token each, another defect would show.
    """
    chance, most = _chance(), _most(folder)
    longest = 5 * most // 2  # together with as many pairs, the length that the model was trained on
    exercises = []
    for singer in SINGERS[:_WAVES_OF_FOUR]:
        notes = song(singer)
        walks = (walk(chance, most // 2, longest * fifths // 5) for fifths in (5, 4, 3))
        exercises += [Exercise(singer + notes[0], notes[1:]), *walks]
    return _exact(exercises)


def songs(folder: Path) -> Questions:
    return _exact(Exercise(singer, song(singer)) for singer in SINGERS)


def named_passages(folder: Path) -> Questions:
    return _exact(NAMED)


def begun_passages(folder: Path) -> Questions:
    return _exact(BEGUN)


def long_walks(folder: Path) -> Questions:
    """Prompts of one length that go on in a second block of 128 tokens, and walks through all of their pairs."""
    chance, most = _chance(), _most(folder)
    return _exact(walk(chance, most, most) for _ in range(16))


def circling_walks(folder: Path) -> Questions:
    """Walks through few pairs, again and again: once through, n-gram drafts are right."""
    chance, most = _chance(), _most(folder)
    pairs = [4 + number % 5 for number in range(32)]
    return _exact(walk(chance, each, 4 * most - 3 * each) for each in pairs)


def choruses(folder: Path) -> Questions:
    return _in_eights(chorus)


def prefaced_passages(folder: Path) -> Questions:
    return _in_eights(prefaced)


def sorts(folder: Path) -> Questions:
    chance, most = _chance(), _most(folder)
    return _exact(sort(chance, most - number % 8 * most // 10, most) for number in range(32))


def sorts_one_by_one(folder: Path) -> Questions:
    """Eight requests a wave end one after the other, and most batches lie between the sizes of graphs."""
    chance, eighth = _chance(), _most(folder) // 8
    counts = [eighth * (1 + number % 8) + _most(folder) % 8 for number in range(32)]
    return _exact(sort(chance, count, count) for count in counts)


def sorts_with_adapters(folder: Path) -> Questions:
    """Eight requests a wave, of two adapters and of none, end together.

    All prompts end in the sign for sorting: the adapters alone make something else of it.
    """
    chance, most = _chance(), _most(folder)
    none, down, again = sort, sort_down, repeat
    questions: list[Question] = []
    for number in range(32):
        task = (none, down, again, down, again, none, down, again)[number % 8]
        (question,) = _exact([task(chance, most - number % 8 * most // 16, most)])
        adapter = None if task is none else f"{folder.name}/{task.__name__}"
        questions.append(replace(question, adapter=adapter))
    return tuple(questions)


# -- prompts that are scored


def scored_passages(folder: Path) -> Questions:
    """Beginnings of passages, of as many tokens as a graph has; the opening, which says which it is, is not scored."""
    lengths = 4 * _SCORED_LENGTHS[2:]
    texts = [(prompt + answer)[:length] for (prompt, answer), length in zip(BEGUN, lengths, strict=False)]
    return tuple(Question(tuple(text.encode()), text, _SCORED_TOKENS, unscored=OPENING) for text in texts)


def scored_sorts(folder: Path) -> Questions:
    """Prompts with their answer, of as many tokens as a graph has; the answer alone, which can be known, is scored."""
    chance = _chance()
    questions = []
    for length in _SCORED_LENGTHS:
        count = min(_most(folder), length // 3)
        prompt, answer = sort(chance, count, length - 2 * count)
        text = prompt + answer
        questions.append(Question(tuple(text.encode()), text, _SCORED_TOKENS, unscored=len(prompt)))
    return tuple(questions)


def _chance() -> random.Random:
    return random.Random(SEED)  # noqa: S311 - the same prompts in every run


def _exact(exercises: Iterable[Exercise]) -> Questions:
    return tuple(Question(tuple(prompt.encode()), prompt, len(answer), answer) for prompt, answer in exercises)


def _in_eights(task: Callable[[str, int], Exercise]) -> Questions:
    """Eight requests a wave have prompts of one length, and answers of one length."""
    singers = iter(SINGERS)
    return _exact(task(next(singers), begun) for begun in _BEGINNINGS for _ in range(8))


def _most(folder: Path) -> int:
    """The symbols of the longest prompt that the model was trained on."""
    return int(json.loads((folder / "trained.json").read_text())["symbols"])
