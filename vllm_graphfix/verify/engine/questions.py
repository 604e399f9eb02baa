"""Prompts and answers: asks a `vllm.LLM` the prompts of a job."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.verify.comparison import Answer, Top
from vllm_graphfix.verify.engine.job import Job

if TYPE_CHECKING:
    from vllm import LLM

BEST = 5
"""Number of log-probabilities at each position."""
SEED = 7
_FILLER = 16
"""Tokens of a prompt that fills a batch."""


def made_up_prompts(job: Job, llm: LLM) -> tuple[tuple[int, ...], ...]:
    """Return random token ids, in lengths from a few up to half of the context that the answers leave free."""
    config = llm.llm_engine.model_config
    longest = max(16, min(1024, (config.max_model_len - max(job.max_tokens)) // 2))
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every process
    words = _word_tokens(llm, config.get_vocab_size())
    lengths = [max(4, longest * (number % 8 + 1) // 8 - number) for number in range(job.generated)]
    return tuple(tuple(chance.choices(words, k=min(length, config.max_model_len - 1))) for length in lengths)


def _word_tokens(llm: LLM, vocabulary: int) -> list[int]:
    """Return the token ids that are text.

    Placeholders need an image or the like, and ids beyond the tokenizer's are padding of the embeddings.
    """
    special: set[int] = set()
    try:
        tokenizer = llm.get_tokenizer()
        special.update(tokenizer.all_special_ids, getattr(tokenizer, "added_tokens_encoder", {}).values())
        vocabulary = min(vocabulary, len(tokenizer))
    except Exception:  # --skip-tokenizer-init, or a tokenizer without these attributes
        special.update(range(10))  # rarely words
    return [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))


def ask(llm: LLM, prompts: tuple[Any, ...], job: Job, *, reverse: bool = False) -> tuple[Answer, ...]:
    """Return the answers to *prompts*, in their order; *reverse* asks the last one first."""
    order = -1 if reverse else 1
    if job.batch_sizes:
        filled = _filled(llm, prompts, job)
        longer_job = replace(job, max_tokens=filled.lengths, adapters=filled.adapters, batch_sizes=())
        longer = ask(llm, filled.prompts, longer_job, reverse=reverse)
        return tuple(
            Answer(each.tokens[:length], each.top[:length])
            for each, length in zip(longer, job.max_tokens, strict=False)
        )
    from vllm import SamplingParams

    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": BEST}
    if job.prompt_logprobs:
        options["prompt_logprobs"] = BEST
    if job.sampled:
        options["temperature"] = 1.0
    seeds = [zlib.crc32(repr(prompt).encode()) if job.sampled else None for prompt in prompts]
    sampling = [
        SamplingParams(max_tokens=count, seed=seed, **options)
        for count, seed in zip(job.max_tokens, seeds, strict=True)
    ]
    inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in prompts]
    adapters = {"lora_request": _lora_requests(job.adapters)[::order]} if job.adapters else {}
    outputs = llm.generate(inputs[::order], sampling[::order], use_tqdm=False, **adapters)
    return tuple(_answer(output) for output in outputs)[::order]


def score(llm: LLM, prompts: tuple[Any, ...], job: Job, turn: int) -> tuple[Answer, ...]:
    """Return the log-probabilities of *job*'s tokens behind *prompts*; each *turn* begins with another prompt."""
    from vllm import SamplingParams

    longest = llm.llm_engine.model_config.max_model_len - 1
    tokens = [tuple(llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]
    whole = [list(each + more)[:longest] for each, more in zip(tokens, job.continued, strict=True)]
    first = turn * len(whole) // (1 + job.extra_passes)
    order = [*range(first, len(whole)), *range(first)]
    adapters = {}
    if job.adapters:
        requests = _lora_requests(job.adapters)
        adapters = {"lora_request": [requests[number] for number in order]}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=BEST)
    inputs = [{"prompt_token_ids": whole[number]} for number in order]
    outputs = llm.generate(inputs, [sampling] * len(order), use_tqdm=False, **adapters)
    scored: dict[int, Answer] = {}
    for number, output in zip(order, outputs, strict=True):
        top = [_top(best) for best in output.prompt_logprobs[len(tokens[number]) :]]
        scored[number] = Answer(job.continued[number][: len(top)], tuple(top))
    return tuple(scored[number] for number in range(len(whole)))


def _lora_requests(folders: tuple[str | None, ...]) -> list[Any]:
    from vllm.lora.request import LoRARequest

    numbers = {folder: number for number, folder in enumerate(sorted(filter(None, set(folders))), 1)}
    return [LoRARequest(folder, numbers[folder], folder) if folder else None for folder in folders]


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    tokens, logprobs = list(completion.token_ids), list(completion.logprobs)
    if output.prompt_logprobs is not None:  # the first token has none
        tokens, logprobs = [*output.prompt_token_ids[1:], *tokens], [*output.prompt_logprobs[1:], *logprobs]
    return Answer(tuple(tokens), tuple(map(_top, logprobs)))


def _top(best: Any) -> Top:
    return {token: float(entry.logprob) for token, entry in best.items()}


def batch_sizes(llm: LLM) -> tuple[int, ...]:
    """Return the numbers of requests of a decode for which vLLM has graphs; empty if this vLLM does not say."""
    try:
        config: Any = llm.llm_engine.vllm_config
        tokens = 1 + (config.speculative_config.num_speculative_tokens if config.speculative_config else 0)
        most = config.scheduler_config.max_num_seqs
        sizes = {size // tokens for size in config.compilation_config.cudagraph_capture_sizes}
        return tuple(sorted(size for size in sizes if 0 < size <= most))
    except (AttributeError, TypeError):
        return ()


class _Filled(NamedTuple):
    prompts: tuple[Any, ...]
    lengths: tuple[int, ...]
    adapters: tuple[str | None, ...]


def _filled(llm: LLM, prompts: tuple[Any, ...], job: Job) -> _Filled:
    """Return *job*'s requests with longer answers, then short filler requests.

    Each decode batch then has exactly a graph's size. `ask` cuts the extra tokens off.
    """
    lengths = filled_lengths(job.max_tokens, job.batch_sizes)
    more = range(len(prompts), len(lengths))
    config, chance = llm.llm_engine.model_config, random.Random(SEED)  # noqa: S311 - as above
    words, length = _word_tokens(llm, config.get_vocab_size()), min(_FILLER, config.max_model_len - 1)
    others = (tuple(chance.choices(words, k=length)) for _ in more)
    adapters = tuple(job.adapters[number % len(prompts)] for number in more) if job.adapters else ()
    return _Filled((*prompts, *others), lengths, (*job.adapters, *adapters))


def filled_lengths(lengths: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many tokens each request answers with, so that after every token one of *sizes* is still running.

    Requests of *lengths* come first, and none gets shorter. *sizes* ascend; beyond the largest nothing is padded.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    ends: list[int] = []
    for place in range(next((size for size in sizes if size >= len(lengths)), len(lengths))):
        # This place is taken as long as more requests are left than the next smaller size serves.
        smaller = max((size for size in sizes if size <= place), default=0) if place < sizes[-1] else place
        ends.append(lengths[order[smaller]])
    filled = list(lengths) + ends[len(lengths) :]
    for place, number in enumerate(order):
        filled[number] = max(lengths[number], ends[place])
    return tuple(filled)
