"""The prompts that `compare` makes up, for whatever model and tokenizer there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graphfix.verify.engine.job import GRAPHS, Job
from vllm_graphfix.verify.engine.questions import made_up_prompts


class TokenizerDouble:
    """A tokenizer of 90 tokens, three of them special, and a placeholder of images that was added."""

    all_special_ids = (0, 1, 88)
    added_tokens_encoder = {"<image>": 89}  # noqa: RUF012 - as a tokenizer's, an attribute

    def __len__(self) -> int:
        return 90


def prompts(
    tokenizer: Any = None, *, vocabulary: int = 100, context: int = 4096, count: int = 16, answer: int = 128
) -> tuple[tuple[int, ...], ...]:
    def get_tokenizer() -> Any:
        if tokenizer is None:
            raise ValueError("Cannot get tokenizer when `skip_tokenizer_init` is True")
        return tokenizer

    config = SimpleNamespace(max_model_len=context, get_vocab_size=lambda: vocabulary)
    engine: Any = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config), get_tokenizer=get_tokenizer)
    return made_up_prompts(Job("", GRAPHS, generated=count, max_tokens=(answer,) * count), engine)


def test_they_are_the_same_in_every_process() -> None:
    assert prompts() == prompts()
    assert len(set(prompts())) == 16


def test_they_are_of_many_lengths() -> None:
    lengths = [len(prompt) for prompt in prompts()]
    assert len(set(lengths)) == 16
    assert (min(lengths), max(lengths)) == (120, 1017)


def test_they_are_words_of_the_tokenizer() -> None:
    """No special token, no placeholder that wants an image, and no id that only fills up the model's vocabulary."""
    used = {token for prompt in prompts(TokenizerDouble()) for token in prompt}
    assert used == set(range(2, 88))


def test_without_a_tokenizer_all_but_the_first_few_tokens_are_words() -> None:
    assert {token for prompt in prompts() for token in prompt} == set(range(10, 100))


def test_a_vocabulary_without_words_is_used_as_it_is() -> None:
    assert {token for prompt in prompts(vocabulary=5) for token in prompt} == set(range(5))


@pytest.mark.parametrize("context", [2, 16, 100, 256, 512, 8192, 1_000_000])
@pytest.mark.parametrize("answer", [1, 128, 100_000])
def test_they_fit_into_the_context(context: int, answer: int) -> None:
    """With room for one token of an answer at least, and for whole answers where there is."""
    lengths = [len(prompt) for prompt in prompts(context=context, answer=answer)]
    assert min(lengths) >= 1
    assert max(lengths) <= min(1024, context - 1)
    if answer + 32 <= context:
        assert max(lengths) + answer <= context
