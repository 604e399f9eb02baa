"""The engines of `benchmarks/trained.py`: cases of `verify` with models that were trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measuring import trained_questions as questions
from measuring.trained_questions import Questions
from vllm_graphfix.verify.engine import cases as verified
from vllm_graphfix.verify.engine.case import Case
from vllm_graphfix.verify.engine.job import EAGER, Job
from vllm_graphfix.verify.trials import compressor_skip

TEXT, SCORED, EXACT = "text", "scored", "exact"
SMOLLM2 = "smollm2"
_CHUNK = 24
"""Tokens of a step of chunked prefill."""


@dataclass(frozen=True)
class Trained:
    """A case of `verify` with a trained model in place of a random one."""

    fix: str
    case: Case
    title: str
    make_questions: Callable[[Path], Questions]
    """Called with the folder of the model."""
    kind: str = EXACT
    """The figures: those of `TEXT`, `SCORED` or `EXACT` answers."""
    everywhere: bool = False
    """Run on releases without this defect, too: stock is then to be right as well."""
    gpus: int = 1
    """The number of GPUs of one engine."""
    on_a_cpu: bool = True
    """False if no CPU engine can run it: then it is not rehearsed."""

    @property
    def name(self) -> str:
        return self.case.name

    def questions(self, models: Path, *, rehearse: bool = False) -> Questions:
        """The questions to all engines; to *rehearse*, as few as there are adapters, and short answers."""
        all_of_them = self.make_questions(models / self.case.model)
        if not rehearse:
            return all_of_them
        few = all_of_them[: max(2, len({each.adapter for each in all_of_them}))]
        return tuple(replace(each, tokens=each.tokens if each.right else 16) for each in few)

    def jobs(self, models: Path, path: str, *, rehearse: bool = False) -> list[Job]:
        """Eager, stock and patched, on the vLLM that Python finds on *path*; to *rehearse*, all of them on a CPU."""
        own = self.questions(models, rehearse=rehearse)
        adapters = tuple(question.adapter and str(models / question.adapter) for question in own)
        return [
            replace(
                _on_a_cpu(job) if rehearse else job,
                prompts=tuple(question.ids for question in own),
                max_tokens=tuple(question.tokens for question in own),
                adapters=adapters if any(adapters) else (),
                environment=job.environment | {"PYTHONPATH": path} | (_CPU if rehearse else {}),
                probes=job.probes or (("measuring.in_waves:ThenInWaves",) if job.extra_passes else ()),
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
    arguments = {name: value for name, value in job.arguments.items() if name not in _OF_A_GPU}
    smaller = {"max_model_len": 512, "max_num_batched_tokens": 512, "block_size": 16}
    return replace(job, mode=EAGER, arguments=arguments | smaller, extra_passes=0)


_BF16 = {"dtype": "bfloat16", "max_model_len": 1024}
_ITSELF = {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
# One draft token: with more of them, model runner V1 is not the same twice without graphs up to 0.18.1.
_MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
_EXACT_STATES = {"supported_arguments": {"mamba_ssm_cache_dtype": "float32"}}
_THREES, _FOURS, _EIGHTS = (f"measuring.in_waves:{name}" for name in ("InWaves", "InFours", "InEights"))


def _with(case: Case, name: str, model: str, **changed: Any) -> Case:
    """*case* with a trained model; *changed* are fields of the case, of which `arguments` are added to its own."""
    arguments = case.arguments | changed.pop("arguments", _BF16)
    changed = {"probes": (), "workload": (), **changed}
    return replace(case, name=name, model=model, arguments=arguments, watched=False, **changed)


def _scored(name: str, model: str, sizes: list[int], **changed: Any) -> Case:
    case = verified.LLAMA_EAGLE_SCORED
    graphs = case.graphs | {"cudagraph_capture_sizes": sizes}
    return _with(case, name, model, conditional_arguments=None, graphs=graphs, **changed)


def _scored_mtp(name: str, model: str) -> Case:
    arguments = _BF16 | verified.FLASHMLA | _MTP
    return _scored(name, model, [2, 4, 8, 16, 32, 64, 128], draft=None, arguments=arguments, capability=9)


def _deepseek_v4(case: Case, name: str, model: str) -> Case:
    return _with(case, name, model, arguments={"dtype": "bfloat16"}, probes=(_EIGHTS,))


_LLAMA = "trained Llama"
_MAMBA2 = "trained Mamba-2"
_MTP_LAYER = "trained MLA with its draft layer"
_OF_DOCS = "passages of Python's documentation"
CASES = (
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "chat", SMOLLM2, arguments={}),
        "SmolLM2-135M-Instruct, `cudagraph_mode=FULL`, V1",
        questions.chats,
        kind=TEXT,
    ),
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "chat-draft", SMOLLM2, draft=SMOLLM2, arguments=_ITSELF),
        "the same with itself as draft model, three tokens",
        questions.chats,
        kind=TEXT,
    ),
    Trained(
        "prompt-logprobs",
        # A draft model is given one token more than the target.
        _scored("scored", SMOLLM2, [4, 8, 16, 32, 64, 128], draft=SMOLLM2, arguments=_ITSELF),
        "SmolLM2-135M-Instruct with itself as draft model, piecewise graphs, V1; prompts are scored",
        questions.licence,
        kind=SCORED,
    ),
    Trained(
        "mamba-padding",
        _with(
            verified.MAMBA2,
            "mamba2-walk",
            "mamba2",
            arguments=_BF16 | {"max_num_batched_tokens": _CHUNK},
            probes=(_THREES,),
            **_EXACT_STATES,
        ),
        f"{_MAMBA2}, chunked prefill, a request that ends early, V1; walks and songs",
        questions.waves_of_three,
    ),
    Trained(
        "prefill-dispatch",
        _with(verified.MAMBA2_ONE_TOKEN, "mamba2-song", "mamba2", **_EXACT_STATES),
        f"{_MAMBA2}, prompts of one token, V1; songs",
        questions.songs,
    ),
    Trained(
        "flash-mixed-schedule",
        _with(verified.LLAMA_FULL_FLASH_V1, "llama-docs", "llama-docs"),
        f"{_LLAMA}, `cudagraph_mode=FULL`, V1; {_OF_DOCS}",
        questions.begun_passages,
    ),
    Trained(
        "prefill-dispatch",
        _with(verified.MAMBA2_ONE_TOKEN, "mamba2-docs", "mamba2-docs", **_EXACT_STATES),
        f"{_MAMBA2}, prompts of one token, V1; {_OF_DOCS}",
        questions.named_passages,
    ),
    Trained(
        "prompt-logprobs",
        # The draft model is given one token more than the longest text has.
        _scored(
            "llama-docs-scored",
            "llama-docs",
            [4, 8, 16, 32, 64, 128, 256],
            draft="llama-docs",
            arguments=_BF16 | _ITSELF,
        ),
        f"{_LLAMA} with itself as draft model, piecewise graphs, V1; {_OF_DOCS}, scored",
        questions.scored_passages,
        kind=SCORED,
    ),
    Trained(
        "capture-state",
        _with(verified.MLA_MTP, "mla-mtp-docs", "mla-mtp-docs"),
        f"{_MTP_LAYER}, MTP with two tokens, FlashMLA, V2; {_OF_DOCS}",
        questions.begun_passages,
        everywhere=True,
    ),
    Trained(
        "prompt-logprobs",
        _scored_mtp("mla-mtp-docs-scored", "mla-mtp-docs"),
        f"{_MTP_LAYER}, MTP with one token, FlashMLA, piecewise graphs, V1; {_OF_DOCS}, scored",
        questions.scored_passages,
        kind=SCORED,
    ),
    Trained(
        "compressor-skip",
        _deepseek_v4(compressor_skip.CASE, "deepseek-v4-docs", "deepseek-v4-docs"),
        "trained DeepSeek V4 of two layers, fp8 KV cache, V2; a preface and a passage of Python's documentation, in "
        "eights",
        questions.prefaced_passages,
        on_a_cpu=False,
    ),
    Trained(
        "capture-state", _with(verified.MLA, "mla-sort", "mla"), "trained MLA, FlashMLA, V2; sorting", questions.sorts
    ),
    Trained(
        "flashmla-fp8",
        _with(verified.MLA_FP8, "mla-fp8-sort", "mla"),
        "trained MLA, FlashMLA, fp8 KV cache, V1; sorting",
        questions.sorts,
    ),
    Trained(
        "capture-state",
        _with(verified.MLA_MTP, "mla-mtp-sort", "mla-mtp"),
        f"{_MTP_LAYER}, MTP with two tokens, FlashMLA, V2; sorting",
        questions.sorts,
        everywhere=True,
    ),
    Trained(
        "flashmla-fp8",
        _with(
            verified.MLA_FP8,
            "mla-mtp-fp8-sort",
            "mla-mtp",
            arguments=_BF16 | _MTP,
            graphs=verified.full_decodes([2, 4, 8, 16]),
        ),
        f"{_MTP_LAYER}, MTP with one token, FlashMLA, fp8 KV cache, V1; sorting",
        questions.sorts,
    ),
    Trained(
        "prompt-logprobs",
        _scored_mtp("mla-mtp-scored", "mla-mtp"),
        f"{_MTP_LAYER}, MTP with one token, FlashMLA, piecewise graphs, V1; sorting, scored",
        questions.scored_sorts,
        kind=SCORED,
    ),
    Trained(
        "idle-rank",
        _with(
            verified.MAMBA2_IDLE,
            "mamba2-idle",
            "mamba2",
            # A step of a rank without work after each sixteenth step, as `verify` has it.
            probes=(_FOURS, *verified.MAMBA2_IDLE.probes),
            poisoned=False,
            **_EXACT_STATES,
        ),
        f"{_MAMBA2}, a step of an idle rank after each sixteenth, V1; walks and songs in fours",
        questions.waves_of_four,
    ),
    Trained(
        "active-lora-count",
        _with(verified.LLAMA_LORA, "llama-lora-sort", "llama", adapters=()),
        f"{_LLAMA} with two trained adapters, `--specialize-active-lora`, V1; sorting up, down, and not at all",
        questions.sorts_with_adapters,
    ),
    Trained(
        "mamba-all-mode",
        _with(
            verified.GRANITE_ALL_MODE,
            "granite-walk",
            "granite",
            # States that are exact enough, and fit into a block of 128 tokens: in float32 blocks would have 256.
            arguments=_BF16 | {"dtype": "float16"},
            probes=(_EIGHTS,),
        ),
        "trained Granite 4 with two groups of Mamba-2, prefix caching, V1; walks of more than a block, in eights",
        questions.long_walks,
        on_a_cpu=False,
    ),
    Trained(
        "dcp-context-lens",
        Case(
            "llama-dcp-sort",
            "llama-one-head",
            "V1",
            verified.full_decodes([8]),
            (),
            arguments={
                **_BF16,
                "attention_config": {"backend": "FLASH_ATTN"},
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
            },
            probes=(_EIGHTS,),
            capability=9,
        ),
        f"{_LLAMA} with one KV head, FlashAttention, its context on two ranks, V1; sorting in eights",
        questions.sorts,
        gpus=2,
    ),
    Trained(
        "compressor-skip",
        _deepseek_v4(compressor_skip.CASE, "deepseek-v4-chorus", "deepseek-v4"),
        "trained DeepSeek V4 of two layers, fp8 KV cache, V2; a chorus and a song, in eights",
        questions.choruses,
        on_a_cpu=False,
    ),
    Trained(
        "c128a-stride",
        _deepseek_v4(verified.DEEPSEEK_V4_LONG, "deepseek-v4-stride-chorus", "deepseek-v4"),
        "the same with a `max_model_len` of 32768, V1",
        questions.choruses,
        on_a_cpu=False,
    ),
    Trained(
        "draft-idx-mapping",
        _with(verified.MLA_MTP_SAMPLED, "mla-mtp-drawn-sort", "mla-mtp", probes=(_EIGHTS,)),
        f"{_MTP_LAYER}, two tokens, drafts and answers drawn at temperature 1, FlashMLA, V2; sorting in eights",
        questions.sorts_one_by_one,
    ),
    Trained(
        "flashmla-padding",
        _with(verified.MLA_FP8_PADDED, "mla-fp8-padded-sort", "mla", probes=(_EIGHTS,), poisoned=False),
        "trained MLA, FlashMLA, fp8 KV cache, batches between the sizes of graphs, V1; sorting in eights",
        questions.sorts_one_by_one,
    ),
    Trained(
        "turboquant-drafts",
        _with(
            verified.LLAMA_TURBOQUANT_NGRAM,
            "llama-turboquant-walk",
            "llama-deep",
            # Three symbols in a row are in no prompt: they are found in the answer alone.
            arguments=_BF16
            | {
                "max_num_seqs": 1,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_min": 3,
                    "prompt_lookup_max": 3,
                },
            },
        ),
        "trained Llama of eight layers, TurboQuant cache, n-gram drafts, V1; walks that repeat themselves",
        questions.circling_walks,
    ),
    Trained(
        "triton-mla-padding",
        _with(
            verified.MLA_TRITON,
            "mla-experts-sort",
            "mla-experts",
            graphs=verified.full_decodes([4]),  # one row more than a wave has
            # Nothing else is in fp8, whose other kernels make numbers of a NaN.
            arguments=_BF16 | {"quantization": "online", "quantization_config": {"moe": "fp8_per_tensor"}},
            probes=(_THREES,),
            supported_arguments={"moe_backend": "triton"},
            poisoned=False,
            poison_in_padding=False,
        ),
        "trained MLA, Triton MLA, experts in fp8 that are quantised as they are loaded, V1; sorting in threes",
        questions.sorts,
    ),
)
"""What matters most comes first."""
