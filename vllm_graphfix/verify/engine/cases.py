"""What is run on a GPU for each fix: a tiny model, an engine, a workload, and where its defect shows."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_graphfix.fix import variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.llm import EXTENSION
from vllm_graphfix.verify.engine.models import VOCABULARY
from vllm_graphfix.verify.engine.probe_verdict import Judge
from vllm_graphfix.verify.engine.questions import SEED

MODES = ("eager", "stock", "patched")
WATCHED = {"watched stock": "stock", "watched patched": "patched"}
"""Two more in which every replay is checked, and whose they are otherwise."""


@dataclass(frozen=True, eq=False)  # cases are told apart by which they are
class Case:
    """One tiny model on one engine; it is run eager, with graphs stock, and with graphs and the fixes."""

    name: str
    model: str
    runner: str
    """``V1`` or ``V2``."""
    graphs: dict[str, Any]
    """vLLM's `compilation_config`."""
    workload: tuple[tuple[int, int], ...]
    """Tokens of each prompt and of its answer."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keywords of `vllm.LLM`."""
    supported_arguments: dict[str, Any] = field(default_factory=dict)
    """More of them, for releases that know them."""
    conditional_arguments: tuple[str, str, dict[str, Any]] | None = None
    """A file of vLLM, a word in it, and what takes the place of *arguments* of that name where the word is."""
    draft: str | None = None
    adapters: tuple[str | None, ...] = ()
    """The LoRA adapter of each prompt, a name of `adapters.NAMES` or None for none; or nothing at all."""
    probes: tuple[str, ...] = ()
    """What looks inside the engine: a name of `probes.PROBES`, or ``module:class`` of a
    `Probe`."""
    prompt_logprobs: bool = False
    """The prompts are scored too, and their tokens count as the answers' do."""
    sampled: bool = False
    """Answers and drafts are drawn, with seeds, and not the likeliest tokens."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Further variables."""
    capability: int | None = None
    """Major compute capability that the attention kernels need."""

    needs: str | None = None
    """A package that its kernels come from, and that vLLM may be without."""
    shows_with: tuple[str, str, str] | None = None
    """A file of vLLM, and a word in it without which this case is right on stock too; and what is wrong there
    instead."""
    shows_on: Callable[[Source], bool] | None = None
    """Whether a given vLLM can run this further case of a fix and gets it wrong. On another one the case is not
    mentioned."""
    seconds: float | None = None
    """From the last thing that a probe saw to the end of the stock engine, if its defect is a hang."""
    judge: Judge | None = None
    """What it makes of what its probes saw, if its defect shows in something else than tokens."""
    padded: bool = False
    """Some batches lie between the sizes of the graphs: the defect is about padding."""
    watched: bool = False
    """Whether the defect shows in what a replay puts out: the shadow check then has to see it in a fourth engine, and
    nothing in a fifth with the fixes."""
    poisoned: bool = False
    """Whether poison is to show the defect: stock and patched are asked once more with it, after all else."""
    poison_in_padding: bool = False
    """It then shows as NaN in padded rows of the model's output, which reach no other row."""
    compiles: bool = False
    """Kernels of it are compiled for minutes the first time, FlashInfer's, DeepGEMM's or Triton's: it begins first."""

    @property
    def models(self) -> tuple[str, ...]:
        """The tiny models and adapters that it takes."""
        return tuple(filter(None, dict.fromkeys((self.model, self.draft, *self.adapters))))

    def on(self, source: Source) -> Case:
        """The case as it is run with the vLLM of *source*."""
        if self.conditional_arguments is None or not source.contains_word(*self.conditional_arguments[:2]):
            return self
        return replace(self, arguments=self.arguments | self.conditional_arguments[2], conditional_arguments=None)

    def jobs(self, models: Path) -> list[Job]:
        """Eager twice in one process, for its own noise; stock and patched once each.

        *models* holds the models' folders.
        """
        chance = random.Random(SEED)  # noqa: S311 - the same prompts in every run
        prompts = tuple(tuple(chance.choices(range(1, VOCABULARY), k=length)) for length, _ in self.workload)
        arguments = _ENGINE | {"model": str(models / self.model)} | self.arguments
        if self.draft is not None:
            arguments["speculative_config"] = {**arguments["speculative_config"], "model": str(models / self.draft)}
        return [
            Job(
                name=f"{self.name} {mode}",
                mode=EAGER if mode == "eager" else GRAPHS,
                arguments=arguments | {"compilation_config": self.graphs},
                supported_arguments=_SUPPORTED_ARGUMENTS | self.supported_arguments,
                environment=_ENVIRONMENT
                | (_NOTHING_COMPILED if self.graphs.get("mode") == 0 else {})
                | self.environment
                # What the user has set would decide about fixes in place of the proof.
                | dict.fromkeys((*settings.names(BY_NAME), *filter(settings.is_ours, os.environ)))
                | dict.fromkeys(map(variable, BY_NAME), "auto")  # also those that are observed by default
                | {settings.PREFIX: "on" if mode == "patched" else "off"}
                | {"VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "V2" else "0"},
                prompts=prompts,
                max_tokens=tuple(count for _, count in self.workload),
                adapters=tuple(name and str(models / name) for name in self.adapters),
                prompt_logprobs=self.prompt_logprobs,
                sampled=self.sampled,
                extra_passes=int(mode == "eager"),
                probes=self.probes,
                poison_last=self.poisoned and mode != "eager",
                untuned=True,
                # Without graphs, kernels are compiled after a probe saw the first batch.
                seconds=self.seconds * _PATIENCE[mode] if self.seconds and mode in _PATIENCE else None,
            )
            for mode in MODES
        ]

    def watched_jobs(self, models: Path) -> list[Job]:
        """The jobs of stock and patched, but with every replay checked.

        The plugin is there on stock too, with every fix off.
        """
        jobs = dict(zip(MODES, self.jobs(models), strict=True))
        checked: dict[str, str | None] = {settings.PREFIX: "on", settings.SHADOW: "1/1"}
        off: dict[str, str | None] = dict.fromkeys(map(variable, BY_NAME), "off")
        return [
            replace(
                jobs[mode],
                name=f"{self.name} {name}",
                probes=(),
                poison_last=False,
                environment=jobs[mode].environment | checked | (off if mode == "stock" else {}),
            )
            for name, mode in WATCHED.items()
        ]


_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 30,  # keeps vLLM's memory profiling out of a GPU that several engines share
    "gpu_memory_utilization": 0.05,  # with the above, only what vLLM asks to be free at the start
    "enable_prefix_caching": False,
    "disable_log_stats": False,  # counts drafts
    "worker_extension_cls": EXTENSION,
    "seed": 0,
}
_SUPPORTED_ARGUMENTS = {
    "enable_flashinfer_autotune": False
}  # nothing here uses what it would tune, in a batch of 8192 tokens
GIB_PER_ENGINE = 5
"""GPU memory for one engine: the cache, CUDA's context, FlashInfer's workspace, graphs."""

_ENVIRONMENT: dict[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that probes see the engine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # From 0.21.0 on, an engine would compile FlashInfer's top-k and top-p for two minutes when it starts, and nothing
    # here uses them.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "2",  # engines share the machine
    "TQDM_DISABLE": "1",
}


_PATIENCE = {"stock": 1.0, "patched": 2.5}
"""With the fixes, an engine that is merely slow must not pass for one that hangs."""
_NOTHING_COMPILED: dict[str, str | None] = {"TORCHDYNAMO_DISABLE": "1"}
"""What vLLM compiles beside the model, as a count of better tokens for log-probabilities, is not compiled either:
torch.compile takes longer for it than an engine for all answers."""


def full_decodes(sizes: list[int]) -> dict[str, Any]:
    """Full graphs of decodes, of batches of so many tokens; nothing is compiled."""
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


MIXED_FULL = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
"""Full graphs of prompts and decodes together; nothing is compiled."""
FLASHMLA: dict[str, Any] = {"block_size": 64, "attention_config": {"backend": "FLASHMLA"}}
_LENGTHS = (5, 33, 64, 65, 130, 257, 400, 511)
TOGETHER = tuple((length, 65) for length in _LENGTHS)
"""Answers of one length: the batch is full, or there is none."""
ONE_BY_ONE = tuple((length, 20 + 9 * number) for number, length in enumerate(_LENGTHS))
"""Answers of different lengths: the batch shrinks through every size, and most are between capture sizes."""

MLA = Case(
    name="mla",
    model="mla",
    runner="V2",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=TOGETHER,
    arguments=FLASHMLA,
    capability=9,
    watched=True,
)
MLA_FP8 = Case(
    name="mla-fp8",
    model="mla",
    runner="V1",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=TOGETHER,
    arguments=FLASHMLA | {"kv_cache_dtype": "fp8"},
    capability=9,
    watched=True,
)
MLA_FP8_PADDED = replace(
    MLA_FP8,
    watched=False,
    name="mla-fp8-padded",
    workload=ONE_BY_ONE,
    probes=("padded-rows",),
    padded=True,
    poisoned=True,
)
MLA_TRITON = Case(
    name="mla-triton",
    model="mla",
    runner="V1",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=ONE_BY_ONE,
    arguments={"attention_config": {"backend": "TRITON_MLA"}},
    probes=("empty-rows",),
    padded=True,
    poisoned=True,
    poison_in_padding=True,
)
MLA_TRITON_MTP = Case(
    name="mla-triton-mtp",
    model="mla-mtp",
    runner="V2",
    graphs=full_decodes([2, 4, 8, 16]),
    workload=TOGETHER,
    arguments={
        "attention_config": {"backend": "TRITON_MLA"},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    },
    probes=("drafts",),
)
MLA_MTP = Case(
    name="mla-mtp",
    model="mla-mtp",
    runner="V2",
    graphs=full_decodes([3, 6, 12, 24]),
    workload=TOGETHER,
    arguments=FLASHMLA | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    probes=("planners-in-draft-graphs", "drafts"),
    capability=9,
)
# The long prompt is prefilled in chunks in the last slot, the first request finishes meanwhile, and the decode batch
# that follows is padded over the slot left behind.
MAMBA2 = Case(
    name="mamba2",
    model="mamba2",
    runner="V1",
    graphs=full_decodes([4]),
    workload=((5, 4), (7, 160), (420, 160)),
    arguments={"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True},
    padded=True,
    poisoned=True,
    compiles=True,
    watched=True,
)
# Steps of a rank without work between those of its requests: one row, which is that of a request that waits.
MAMBA2_IDLE = Case(
    name="mamba2-idle",
    model="mamba2",
    runner="V1",
    graphs=full_decodes([1, 2, 3, 4]),
    workload=((5, 40), (9, 60), (33, 80), (70, 100)),
    arguments={"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28},
    probes=("blocks-changed-by-an-idle-step",),
    poisoned=True,
    compiles=True,
)
# The batch shrinks through every size, and drafts are made in graphs with more rows than it has.
MLA_MTP_SAMPLED = replace(
    MLA_MTP, name="mla-mtp-sampled", workload=ONE_BY_ONE, probes=("drafts",), sampled=True, padded=True, watched=True
)
LLAMA_EAGLE = Case(
    name="llama-eagle",
    model="llama",
    draft="eagle",
    runner="V2",
    # Cut into pieces and compiled, which rounds otherwise than eager does: answers may go apart at ties.
    graphs={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 8, 16, 32]},
    workload=ONE_BY_ONE,
    arguments={
        "attention_config": {"backend": "FLASHINFER"},
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 3},
    },
    probes=("piecewise-draft-decodes",),
    needs="flashinfer",
    padded=True,
    compiles=True,
)
# Every layer works in the shared workspace. The probe makes it grow when graphs are captured, in place of a batch that
# does: what grows it while serving is another layer than the one that profiling has seen, such as sparse attention, and
# needs a larger model.
MIXTRAL = Case(
    name="mixtral",
    model="mixtral",
    runner="V2",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=TOGETHER,
    arguments={"max_num_batched_tokens": 2048},
    supported_arguments={
        "moe_backend": "triton"
    },  # 0.20.0-0.22.1 would have FlashInfer's, which takes minutes to compile
    probes=("outgrown-workspace",),
)

# A state for each block of 128 tokens, which most prompts or their answers go beyond. All prompts in one step, and then
# a batch of one size: a padded row would be another fix's.
GRANITE_ALL_MODE = Case(
    name="granite-all-mode",
    model="granite",
    runner="V1",
    graphs=full_decodes([8]),
    workload=TOGETHER,
    arguments={"enable_prefix_caching": True, "max_num_batched_tokens": 2048},
    supported_arguments={"mamba_cache_mode": "all"},  # 0.14.1 has no other
    compiles=True,
    watched=True,
)
# The first step has the shape of a decode, and all of it is prompts.
MAMBA2_ONE_TOKEN = Case(
    name="mamba2-one-token",
    model="mamba2",
    runner="V1",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=((1, 48),) * 8,
    compiles=True,
    shows_with=(
        "vllm/v1/attention/backends/mamba_attn.py",
        "treat_short_extends_as_decodes",
        "Mamba layers treat every one-token row as a decode, even without graphs; only GDN layers with drafts go wrong",
    ),
    watched=True,
)
# The same on model runner V2, which serves recurrent layers in hybrids alone.
LFM2_ONE_TOKEN = Case(
    name="lfm2-one-token",
    model="lfm2",
    runner="V2",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=((1, 48),) * 8,
    watched=True,
)
# GDN layers take a one-token prompt for a decode without graphs too. With drafts, a prompt of as many tokens as a
# request of a decode has is told from one, but by the graph: `prefill-dispatch`. No case of that fix, which has
# others that compile less; benchmarks/shadow_check.py runs it.
GDN_MTP = Case(
    name="gdn-mtp",
    model="qwen3-next",
    runner="V1",
    graphs=full_decodes([3, 6, 12, 24]),
    workload=((3, 48),) * 8,
    arguments={
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer's is compiled for longer still
        "max_num_batched_tokens": 2048,
    },
    supported_arguments={"moe_backend": "triton"},
    compiles=True,
)
# On 0.25.1 its stock engine ends while graphs of the draft's prefill are captured, in FlashAttention 3's kernel that
# combines splits; a Llama with an Eagle head starts there.
GDN_MTP_V2 = replace(GDN_MTP, name="gdn-mtp-v2", runner="V2", capability=9)
# Answers of different lengths, so that padded rows come and go: two tokens a request, one of them a draft.
SPARSE_MTP = Case(
    name="sparse-mtp",
    model="sparse-mtp",
    runner="V1",
    graphs=full_decodes([2, 4, 8, 16]),
    workload=ONE_BY_ONE,
    arguments={
        "block_size": 64,
        "attention_config": {"backend": "FLASHMLA_SPARSE"},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    },
    probes=("indexer-lengths",),
    capability=9,
    seconds=40.0,
    padded=True,
    compiles=True,
)
# One prompt a step, in one chunk, as long as a graph is large: eager computes in the same shapes. Cut into pieces,
# without which the drafter has no graphs, and not compiled further, so that the same kernels run as in eager.
LLAMA_EAGLE_SCORED = Case(
    name="llama-eagle-scored",
    model="llama",
    draft="eagle",
    runner="V1",
    graphs={
        "mode": 3,
        "backend": "eager",
        "custom_ops": ["all"],
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [4, 8, 16, 32, 64],
    },
    workload=((8, 8), (16, 8), (32, 8), (64, 8)),
    arguments={"max_num_seqs": 1, "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}},
    # There a drafter of more than one token counts up, on the host, the very lengths that are still to be copied to the
    # GPU: where that is busy, the target attends to tokens that come later, without graphs too.
    conditional_arguments=(
        "vllm/v1/worker/gpu_model_runner.py",
        "_seq_lens_cpu=self.seq_lens.cpu",
        {"speculative_config": {"method": "eagle", "num_speculative_tokens": 1}},
    ),
    environment={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    prompt_logprobs=True,
)
# Full graphs of prompts and decodes together, and FlashAttention 3: each decode is in a graph that was captured for a
# prompt.
LLAMA_FULL_FLASH_V1 = Case(
    name="llama-full-flash-v1",
    model="llama",
    runner="V1",
    graphs=MIXED_FULL,
    workload=TOGETHER,
    arguments={"attention_config": {"backend": "FLASH_ATTN"}},
    capability=9,
    watched=True,
)
# Model runner V2 captures short queries: it takes prompts in a graph, some of them next to decodes.
LLAMA_FULL_FLASH_V2 = replace(
    LLAMA_FULL_FLASH_V1,
    name="llama-full-flash-v2",
    runner="V2",
    arguments=LLAMA_FULL_FLASH_V1.arguments | {"max_num_batched_tokens": 256, "enable_chunked_prefill": True},
)
# No step has more than 32 tokens: DeepGEMM and TileLang compile kernels for sizes of steps, one after the other, for
# seconds each. Every request begins with a group of 128 tokens or more, and all end in the same step, the 129th that
# computes no prompt: so each completes another group in a graph, and no batch is padded, which eager's would not be.
DEEPSEEK_V4 = Case(
    name="deepseek-v4",
    model="deepseek-v4",
    runner="V2",
    graphs=full_decodes([8]),
    workload=((135, 200), (150, 195), (180, 190), (200, 183), (260, 173), (300, 162), (380, 148), (440, 130)),
    arguments={"block_size": 256, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 32},
    supported_arguments={"moe_backend": "triton", "kernel_config": {"enable_jit_warmup": False}},
    environment={
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # as the JIT warm-up: of every size of a batch that there may be
        # FlashInfer compiles a kernel for 80 s that takes the place of DeepGEMM's where a batch is small.
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    },
    probes=("vllm_graphfix.verify.engine.compressed:UnwrittenEntries",),
    capability=9,
    compiles=True,
)
# With more than 16384 tokens rows are wider in a capture than these requests need. The default there is V1. All prompts
# are in one step, and answers of one length, as it was proven: in small steps it was not tried.
DEEPSEEK_V4_LONG = replace(
    DEEPSEEK_V4,
    name="deepseek-v4-long",
    runner="V1",
    workload=tuple((length, 150) for length, _ in DEEPSEEK_V4.workload),
    arguments=DEEPSEEK_V4.arguments | {"max_model_len": 32768, "max_num_batched_tokens": 2048},
    probes=("vllm_graphfix.verify.engine.compressed:ForeignSlots",),
)
# A graph for each number of adapters. A batch of two of them and of rows without one is in the graph for two, which
# leaves out the adapter that was loaded last. Chance decides which one that is: as many prompts have the one as the
# other. No step has 128 tokens, so that all engines come to the same sums (see `adapters`).
LLAMA_LORA = Case(
    name="llama-lora",
    model="llama",
    runner="V1",
    graphs=full_decodes([8]),
    workload=tuple((length, 33) for length in (3, 5, 9, 12, 16, 17, 24, 33)),
    arguments={
        "enable_lora": True,
        "max_loras": len(adapters.NAMES),
        "max_lora_rank": adapters.RANK,
        "specialize_active_lora": True,
        "max_num_batched_tokens": 2048,
    },
    adapters=(None, *adapters.NAMES, *adapters.NAMES, None, *adapters.NAMES),
    compiles=True,
    watched=True,
)
