"""What `benchmarks/trained.py` runs: engines with models that were trained, what they are asked, and what is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import PROJECT
from measuring.trained_tasks import (
    BEGUN,
    NAMED,
    OPENING,
    SINGERS,
    Asked,
    chorus,
    prefaced,
    repeat,
    song,
    sort,
    sort_down,
    walk,
)
from vllm_graphfix.verify.engine import cases as verified
from vllm_graphfix.verify.engine.cases import Case
from vllm_graphfix.verify.engine.job import EAGER, Job
from vllm_graphfix.verify.trials import compressor_skip

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT, SCORED, EXACT = "text", "scored", "exact"
SMOLLM2 = "smollm2"
SEED = 11
"""Prompts are others than those of any training, but for songs, choruses and passages, of which there are few."""
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
_WAVES, _CHUNK = 16, 24
_WAVES_OF_FOUR = 8
_BEGUN = (8, 16, 24)
"""Characters of the chorus, or the preface, that each wave of eight is given."""
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


@dataclass(frozen=True)
class Trained:
    """A case of `verify` with a trained model in place of a random one."""

    fix: str
    case: Case
    title: str
    kind: str
    """What is counted: `TEXT`, `SCORED` or `EXACT`."""
    questions: Callable[[Path], tuple[Question, ...]]
    """Given the folder of the model."""
    everywhere: bool = False
    """Run on a vLLM that has not this defect, too: stock is then to be right as well."""
    gpus: int = 1
    """How many one engine takes."""
    on_a_cpu: bool = True
    """Whether a CPU engine can run it: if not, it is not rehearsed."""

    @property
    def name(self) -> str:
        return self.case.name

    def asked(self, models: Path, *, rehearse: bool = False) -> tuple[Question, ...]:
        """What the engines are asked; to *rehearse*, the least of it."""
        asked = self.questions(models / self.case.model)
        if not rehearse:
            return asked
        few = asked[: max(2, len({each.adapter for each in asked}))]  # with each adapter, and without
        return tuple(replace(each, tokens=each.tokens if each.right else 16) for each in few)

    def jobs(self, models: Path, path: str, *, rehearse: bool = False) -> list[Job]:
        """Eager, stock and patched, on the vLLM that Python finds on *path*; to *rehearse*, all of them on a CPU."""
        asked = self.asked(models, rehearse=rehearse)
        return [
            replace(
                _on_a_cpu(job) if rehearse else job,
                prompts=tuple(question.ids for question in asked),
                max_tokens=tuple(question.tokens for question in asked),
                adapters=tuple(question.adapter and str(models / question.adapter) for question in asked)
                if any(question.adapter for question in asked)
                else (),
                environment=job.environment | {"PYTHONPATH": path} | (_CPU if rehearse else {}),
                probes=job.probes or (("measuring.in_waves:ThenInWaves",) if job.again else ()),
            )
            for job in self.case.jobs(models)
        ]


_CPU: dict[str, str | None] = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # which wants Triton
    "VLLM_MLA_DISABLE": "1",  # latent attention spelled out: the same function, which a CPU has
}
_OF_A_GPU = (
    *("attention_config", "block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    *("quantization", "quantization_config"),
    *("tensor_parallel_size", "decode_context_parallel_size"),
)


def _on_a_cpu(job: Job) -> Job:
    kept = {name: value for name, value in job.arguments.items() if name not in _OF_A_GPU}
    smaller = {"max_model_len": 512, "max_num_batched_tokens": 512, "block_size": 16}
    return replace(job, mode=EAGER, arguments=kept | smaller, again=0)


class Words:
    """The tokenizer of a folder, and its chat template."""

    def __init__(self, folder: Path) -> None:
        import jinja2
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        # S701: what is made is no page
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)  # noqa: S701

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)

    def chat(self, question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        return self.ids(self._template.render(messages=messages, add_generation_prompt=True))

    def text(self, ids: tuple[int, ...]) -> str:
        """Up to where the model ends its turn."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)).partition(_END)[0]


def _licence() -> str:
    return " ".join((PROJECT / "LICENSE").read_text().split())


def _chats(folder: Path) -> tuple[Question, ...]:
    words = Words(folder)
    about = [f"Summarize this text in simple words:\n\n{_licence()[:length]}" for length in _LONG]
    return tuple(Question(words.chat(text), text, ANSWER) for text in (*_SHORT, *about))


def _passages(folder: Path) -> tuple[Question, ...]:
    """Pieces of one text, one after the other, as long as graphs are large."""
    words = Words(folder)
    ids, begin, found = words.ids(_licence()[300:]), 0, []
    for length, tokens in verified.LLAMA_EAGLE_SCORED.workload:
        piece = ids[begin : begin + length]
        found.append(Question(piece, words.text(piece), tokens))
        begin += length
    return tuple(found)


def _exact(asked: Asked) -> Question:
    return Question(tuple(asked.prompt.encode()), asked.prompt, len(asked.answer), asked.answer)


def _in_waves(folder: Path) -> tuple[Question, ...]:
    """Of each three, one has ended before the long one's prompt is computed, and the batch is padded over its slot."""
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    most = _most(folder)
    waves = [(walk(chance, 2, 4), Asked(it, song(it)), walk(chance, most, most)) for it in SINGERS[:_WAVES]]
    return tuple(_exact(asked) for wave in waves for asked in wave)


def _first_in_turn(folder: Path) -> tuple[Question, ...]:
    """Of each four, the first ends first, and then that one of the others which comes last: it takes the first row.

    So each request is in the first row of the batch at some time of its answer, for twenty steps or more. Songs begin
    with a note that is given: in a batch of prompts of one token each, another defect would show.
    """
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    most = _most(folder)
    longest = 5 * most // 2  # together with as many pairs, what the model was trained on
    found = []
    for singer in SINGERS[:_WAVES_OF_FOUR]:
        walks = (walk(chance, most // 2, longest * fifths // 5) for fifths in (5, 4, 3))
        notes = song(singer)
        found += [_exact(asked) for asked in (Asked(singer + notes[0], notes[1:]), *walks)]
    return tuple(found)


def _songs(folder: Path) -> tuple[Question, ...]:
    return tuple(_exact(Asked(singer, song(singer))) for singer in SINGERS)


def _by_their_names(folder: Path) -> tuple[Question, ...]:
    return tuple(map(_exact, NAMED))


def _by_their_openings(folder: Path) -> tuple[Question, ...]:
    return tuple(map(_exact, BEGUN))


def _scored_passages(folder: Path) -> tuple[Question, ...]:
    """Beginnings of passages, of as many tokens as a graph is large; which passage it is, the opening says."""
    lengths = 4 * _SCORED_LENGTHS[2:]
    texts = [(asked.prompt + asked.answer)[:length] for asked, length in zip(BEGUN, lengths, strict=False)]
    return tuple(Question(tuple(text.encode()), text, _SCORED_TOKENS, unscored=OPENING) for text in texts)


def _long_walks(folder: Path) -> tuple[Question, ...]:
    """Prompts that go on in a second block of 128 tokens, of one length, and walks that meet every pair of them."""
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    most = _most(folder)
    return tuple(_exact(walk(chance, most, most)) for _ in range(16))


def _choruses(folder: Path) -> tuple[Question, ...]:
    return _called(chorus)


def _prefaced_passages(folder: Path) -> tuple[Question, ...]:
    return _called(prefaced)


def _called(task: Callable[[str, int], Asked]) -> tuple[Question, ...]:
    """Of each eight, prompts are of one length, and answers too."""
    singers = iter(SINGERS)
    return tuple(_exact(task(next(singers), begun)) for begun in _BEGUN for _ in range(8))


def _sorts(folder: Path) -> tuple[Question, ...]:
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    most = _most(folder)
    return tuple(_exact(sort(chance, most - number % 8 * most // 10, most)) for number in range(32))


def _sorts_one_by_one(folder: Path) -> tuple[Question, ...]:
    """Of each eight, one after the other ends, and most batches lie between the sizes of graphs."""
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    eighth = _most(folder) // 8
    counts = [eighth * (1 + number % 8) + _most(folder) % 8 for number in range(32)]
    return tuple(_exact(sort(chance, count, count)) for count in counts)


def _sorts_with_adapters(folder: Path) -> tuple[Question, ...]:
    """In each eight, requests of two adapters and of none; they end together.

    All of them end in the sign for sorting: the adapters alone make something else of it.
    """
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    most = _most(folder)
    none, down, again = sort, sort_down, repeat
    found = []
    for number in range(32):
        task = (none, down, again, down, again, none, down, again)[number % 8]
        asked = _exact(task(chance, most - number % 8 * most // 16, most))
        found.append(asked if task is none else replace(asked, adapter=f"{folder.name}/{task.__name__}"))
    return tuple(found)


def _sorted(folder: Path) -> tuple[Question, ...]:
    """Prompts of as many tokens as a graph is large, with the answer, which alone can be known."""
    chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
    found = []
    for length in _SCORED_LENGTHS:
        count = min(_most(folder), length // 3)
        prompt, answer = sort(chance, count, length - 2 * count)
        text = prompt + answer
        found.append(Question(tuple(text.encode()), text, _SCORED_TOKENS, unscored=len(prompt)))
    return tuple(found)


def _most(folder: Path) -> int:
    """Symbols of the longest prompt that the model was trained on."""
    return int(json.loads((folder / "trained.json").read_text())["symbols"])


def _with(case: Case, name: str, model: str, **changed: Any) -> Case:
    arguments = case.arguments | changed.pop("arguments", {})
    return replace(case, name=name, model=model, arguments=arguments, watched=False, **{"probes": (), **changed})


_ITSELF = {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
_BF16 = {"dtype": "bfloat16", "max_model_len": 1024}
# One draft token: with more of them, model runner V1 is not the same twice without graphs up to 0.18.1.
_MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def _of_mtp_scored(name: str, model: str) -> Case:
    return _with(
        verified.LLAMA_EAGLE_SCORED,
        name,
        model,
        draft=None,
        where_said=None,
        arguments=_BF16 | verified.FLASHMLA | _MTP,
        graphs=verified.LLAMA_EAGLE_SCORED.graphs | {"cudagraph_capture_sizes": [2, 4, 8, 16, 32, 64, 128]},
        capability=9,
    )


def _of_deepseek_v4(case: Case, name: str, model: str) -> Case:
    return _with(
        case,
        name,
        model,
        workload=(),
        arguments={"dtype": "bfloat16"},
        probes=("measuring.in_waves:InEights",),
    )


CASES = (
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "chat", SMOLLM2),
        "SmolLM2-135M-Instruct, `cudagraph_mode=FULL`, V1",
        TEXT,
        _chats,
    ),
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "chat-draft", SMOLLM2, draft=SMOLLM2, arguments=_ITSELF),
        "the same with itself as draft model, three tokens",
        TEXT,
        _chats,
    ),
    Trained(
        "prompt-logprobs",
        _with(
            verified.LLAMA_EAGLE_SCORED,
            "scored",
            SMOLLM2,
            draft=SMOLLM2,
            where_said=None,
            arguments=_ITSELF,
            # A draft model is given one token more than the target.
            graphs=verified.LLAMA_EAGLE_SCORED.graphs | {"cudagraph_capture_sizes": [4, 8, 16, 32, 64, 128]},
        ),
        "SmolLM2-135M-Instruct with itself as draft model, piecewise graphs, V1; prompts are scored",
        SCORED,
        _passages,
    ),
    Trained(
        "mamba-padding",
        _with(
            verified.MAMBA2,
            "mamba2-walk",
            "mamba2",
            workload=(),
            arguments=_BF16 | {"max_num_batched_tokens": _CHUNK},
            probes=("measuring.in_waves:InWaves",),
            where_known={"mamba_ssm_cache_dtype": "float32"},
        ),
        "trained Mamba-2, chunked prefill, a request that ends early, V1; walks and songs",
        EXACT,
        _in_waves,
    ),
    Trained(
        "prefill-dispatch",
        _with(
            verified.MAMBA2_ONE_TOKEN,
            "mamba2-song",
            "mamba2",
            workload=(),
            arguments=_BF16,
            where_known={"mamba_ssm_cache_dtype": "float32"},
        ),
        "trained Mamba-2, prompts of one token, V1; songs",
        EXACT,
        _songs,
    ),
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "llama-docs", "llama-docs", workload=(), arguments=_BF16),
        "trained Llama, `cudagraph_mode=FULL`, V1; passages of Python's documentation",
        EXACT,
        _by_their_openings,
    ),
    Trained(
        "prefill-dispatch",
        _with(
            verified.MAMBA2_ONE_TOKEN,
            "mamba2-docs",
            "mamba2-docs",
            workload=(),
            arguments=_BF16,
            where_known={"mamba_ssm_cache_dtype": "float32"},
        ),
        "trained Mamba-2, prompts of one token, V1; passages of Python's documentation",
        EXACT,
        _by_their_names,
    ),
    Trained(
        "prompt-logprobs",
        _with(
            verified.LLAMA_EAGLE_SCORED,
            "llama-docs-scored",
            "llama-docs",
            draft="llama-docs",
            where_said=None,
            workload=(),
            arguments=_BF16 | _ITSELF,
            # The draft model is given one token more than the longest text has.
            graphs=verified.LLAMA_EAGLE_SCORED.graphs | {"cudagraph_capture_sizes": [4, 8, 16, 32, 64, 128, 256]},
        ),
        "trained Llama with itself as draft model, piecewise graphs, V1; passages of Python's documentation, scored",
        SCORED,
        _scored_passages,
    ),
    Trained(
        "capture-state",
        _with(verified.MLA_MTP, "mla-mtp-docs", "mla-mtp-docs", workload=(), arguments=_BF16),
        "trained MLA with its draft layer, MTP with two tokens, FlashMLA, V2; passages of Python's documentation",
        EXACT,
        _by_their_openings,
        everywhere=True,
    ),
    Trained(
        "prompt-logprobs",
        _of_mtp_scored("mla-mtp-docs-scored", "mla-mtp-docs"),
        "trained MLA with its draft layer, MTP with one token, FlashMLA, piecewise graphs, V1; passages of Python's "
        "documentation, scored",
        SCORED,
        _scored_passages,
    ),
    Trained(
        "compressor-skip",
        _of_deepseek_v4(compressor_skip.CASE, "deepseek-v4-docs", "deepseek-v4-docs"),
        "trained DeepSeek V4 of two layers, fp8 KV cache, V2; a preface and a passage of Python's documentation, in "
        "eights",
        EXACT,
        _prefaced_passages,
        on_a_cpu=False,
    ),
    Trained(
        "capture-state",
        _with(verified.MLA, "mla-sort", "mla", workload=(), arguments=_BF16),
        "trained MLA, FlashMLA, V2; sorting",
        EXACT,
        _sorts,
    ),
    Trained(
        "flashmla-fp8",
        _with(verified.MLA_FP8, "mla-fp8-sort", "mla", workload=(), arguments=_BF16),
        "trained MLA, FlashMLA, fp8 KV cache, V1; sorting",
        EXACT,
        _sorts,
    ),
    Trained(
        "capture-state",
        _with(verified.MLA_MTP, "mla-mtp-sort", "mla-mtp", workload=(), arguments=_BF16),
        "trained MLA with its draft layer, MTP with two tokens, FlashMLA, V2; sorting",
        EXACT,
        _sorts,
        everywhere=True,
    ),
    Trained(
        "flashmla-fp8",
        _with(
            verified.MLA_FP8,
            "mla-mtp-fp8-sort",
            "mla-mtp",
            workload=(),
            arguments=_BF16 | _MTP,
            graphs=verified.full_decodes([2, 4, 8, 16]),
        ),
        "trained MLA with its draft layer, MTP with one token, FlashMLA, fp8 KV cache, V1; sorting",
        EXACT,
        _sorts,
    ),
    Trained(
        "prompt-logprobs",
        _of_mtp_scored("mla-mtp-scored", "mla-mtp"),
        "trained MLA with its draft layer, MTP with one token, FlashMLA, piecewise graphs, V1; sorting, scored",
        SCORED,
        _sorted,
    ),
    Trained(
        "idle-rank",
        _with(
            verified.MAMBA2_IDLE,
            "mamba2-idle",
            "mamba2",
            workload=(),
            arguments=_BF16,
            # A step of a rank without work after each sixteenth step, as `verify` has it.
            probes=("measuring.in_waves:InFours", *verified.MAMBA2_IDLE.probes),
            where_known={"mamba_ssm_cache_dtype": "float32"},
            poisoned=False,
        ),
        "trained Mamba-2, a step of an idle rank after each sixteenth, V1; walks and songs in fours",
        EXACT,
        _first_in_turn,
    ),
    Trained(
        "active-lora-count",
        _with(verified.LLAMA_LORA, "llama-lora-sort", "llama", workload=(), adapters=(), arguments=_BF16),
        "trained Llama with two trained adapters, `--specialize-active-lora`, V1; sorting up, down, and not at all",
        EXACT,
        _sorts_with_adapters,
    ),
    Trained(
        "mamba-all-mode",
        _with(
            verified.GRANITE_ALL_MODE,
            "granite-walk",
            "granite",
            workload=(),
            # States that are exact enough, and fit into a block of 128 tokens: in float32 blocks would have 256.
            arguments=_BF16 | {"dtype": "float16"},
            probes=("measuring.in_waves:InEights",),
        ),
        "trained Granite 4 with two groups of Mamba-2, prefix caching, V1; walks of more than a block, in eights",
        EXACT,
        _long_walks,
        on_a_cpu=False,
    ),
    Trained(
        "dcp-context-lens",
        verified.Case(
            "llama-dcp-sort",
            "llama-one-head",
            "V1",
            verified.full_decodes([8]),
            (),
            arguments=_BF16
            | {
                "attention_config": {"backend": "FLASH_ATTN"},
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
            },
            probes=("measuring.in_waves:InEights",),
            capability=9,
        ),
        "trained Llama with one KV head, FlashAttention, its context on two ranks, V1; sorting in eights",
        EXACT,
        _sorts,
        gpus=2,
    ),
    Trained(
        "compressor-skip",
        _of_deepseek_v4(compressor_skip.CASE, "deepseek-v4-chorus", "deepseek-v4"),
        "trained DeepSeek V4 of two layers, fp8 KV cache, V2; a chorus and a song, in eights",
        EXACT,
        _choruses,
        on_a_cpu=False,
    ),
    Trained(
        "c128a-stride",
        _of_deepseek_v4(verified.DEEPSEEK_V4_LONG, "deepseek-v4-stride-chorus", "deepseek-v4"),
        "the same with a `max_model_len` of 32768, V1",
        EXACT,
        _choruses,
        on_a_cpu=False,
    ),
    Trained(
        "draft-idx-mapping",
        _with(
            verified.MLA_MTP_SAMPLED,
            "mla-mtp-drawn-sort",
            "mla-mtp",
            workload=(),
            arguments=_BF16,
            probes=("measuring.in_waves:InEights",),
        ),
        "trained MLA with its draft layer, two tokens, drafts and answers drawn at temperature 1, FlashMLA, V2; "
        "sorting in eights",
        EXACT,
        _sorts_one_by_one,
    ),
    Trained(
        "flashmla-padding",
        _with(
            verified.MLA_FP8_PADDED,
            "mla-fp8-padded-sort",
            "mla",
            workload=(),
            arguments=_BF16,
            probes=("measuring.in_waves:InEights",),
            poisoned=False,
        ),
        "trained MLA, FlashMLA, fp8 KV cache, batches between the sizes of graphs, V1; sorting in eights",
        EXACT,
        _sorts_one_by_one,
    ),
    Trained(
        "triton-mla-padding",
        _with(
            verified.MLA_TRITON,
            "mla-experts-sort",
            "mla-experts",
            workload=(),
            graphs=verified.full_decodes([4]),  # one row more than a wave has
            # Nothing else is in fp8, whose other kernels make numbers of a NaN.
            arguments=_BF16 | {"quantization": "online", "quantization_config": {"moe": "fp8_per_tensor"}},
            probes=("measuring.in_waves:InWaves",),
            where_known={"moe_backend": "triton"},
            poisoned=False,
            poison_in_padding=False,
        ),
        "trained MLA, Triton MLA, experts in fp8 that are quantised as they are loaded, V1; sorting in threes",
        EXACT,
        _sorts,
    ),
)
"""What matters most comes first."""
