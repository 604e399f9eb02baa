"""Cases that run on a GPU: for each, a tiny model and the engine in which a defect of CUDA graphs shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_graphfix.verify.engine import adapters
from vllm_graphfix.verify.engine.case import Case


def full_decodes(sizes: list[int]) -> dict[str, Any]:
    """Return the `compilation_config` of full graphs for decodes of *sizes* tokens, without torch.compile."""
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


MIXED_FULL = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
"""Full graphs of prompts and decodes together, without torch.compile."""
FLASHMLA: dict[str, Any] = {"block_size": 64, "attention_config": {"backend": "FLASHMLA"}}
_LENGTHS = (5, 33, 64, 65, 130, 257, 400, 511)
TOGETHER = tuple((length, 65) for length in _LENGTHS)
"""Answers of one length: all requests of the batch end together."""
ONE_BY_ONE = tuple((length, 20 + 9 * number) for number, length in enumerate(_LENGTHS))
"""Answers of different lengths: the batch shrinks through every size, most of them between capture sizes."""

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
# The long prompt is prefilled in chunks in the last slot while the first request finishes; the next decode batch is
# padded over the slot that it leaves.
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
# Steps of an idle rank, between those of its requests, use one row, which belongs to a waiting request.
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
# The batch shrinks through every size, so that drafts are made in graphs with more rows than requests.
MLA_MTP_SAMPLED = replace(
    MLA_MTP, name="mla-mtp-sampled", workload=ONE_BY_ONE, probes=("drafts",), sampled=True, padded=True, watched=True
)
LLAMA_EAGLE = Case(
    name="llama-eagle",
    model="llama",
    draft="eagle",
    runner="V2",
    # Piecewise graphs of compiled code, which rounds differently from eager: answers may diverge at ties.
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
# Every layer uses the shared workspace. The probe grows it after graphs are captured. While serving, a layer would do
# so that profiling has not seen, such as sparse attention, which needs a larger model.
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

# A state for each block of 128 tokens, more than one for most requests. All prompts are in one step, and the batch
# keeps its size: a padded row would show the defect of another fix.
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
# The first step has the shape of a decode but consists of prompts.
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
# The same on model runner V2, which supports recurrent layers in hybrids only.
LFM2_ONE_TOKEN = Case(
    name="lfm2-one-token",
    model="lfm2",
    runner="V2",
    graphs=full_decodes([1, 2, 4, 8]),
    workload=((1, 48),) * 8,
    watched=True,
)
# GDN layers treat a one-token prompt as a decode without graphs too. With drafts, eager distinguishes a prompt with as
# many tokens as a decode from a decode, and the graph does not: `prefill-dispatch`. That fix has other cases, which
# compile less; benchmarks/shadow_check.py runs this one.
GDN_MTP = Case(
    name="gdn-mtp",
    model="qwen3-next",
    runner="V1",
    graphs=full_decodes([3, 6, 12, 24]),
    workload=((3, 48),) * 8,
    arguments={
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer's takes even longer to compile
        "max_num_batched_tokens": 2048,
    },
    supported_arguments={"moe_backend": "triton"},
    compiles=True,
)
# On 0.25.1 its stock engine crashes during the capture of the draft's prefill, in FlashAttention 3's kernel that
# combines splits; a Llama with an Eagle head does not.
GDN_MTP_V2 = replace(GDN_MTP, name="gdn-mtp-v2", runner="V2", capability=9)
# Answers of different lengths, so that padded rows come and go. A request has two tokens in a step, one a draft.
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
# One prompt per step, in one chunk, as long as a graph: eager then computes in the same shapes. The drafter has graphs
# only if they are piecewise; the backend `eager` makes them run the same kernels as eager.
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
    # There a drafter of more than one token increments lengths on the host while they still wait to be copied to a busy
    # GPU: the target then attends to later tokens, without graphs too.
    conditional_arguments=(
        "vllm/v1/worker/gpu_model_runner.py",
        "_seq_lens_cpu=self.seq_lens.cpu",
        {"speculative_config": {"method": "eagle", "num_speculative_tokens": 1}},
    ),
    environment={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    prompt_logprobs=True,
)
# Full graphs of prompts and decodes together, with FlashAttention 3: decodes replay graphs that were captured for
# prompts.
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
# Model runner V2 captures short queries, and so replays graphs for prompts, some of them next to decodes.
LLAMA_FULL_FLASH_V2 = replace(
    LLAMA_FULL_FLASH_V1,
    name="llama-full-flash-v2",
    runner="V2",
    arguments=LLAMA_FULL_FLASH_V1.arguments | {"max_num_batched_tokens": 256, "enable_chunked_prefill": True},
)
# No step has more than 32 tokens: DeepGEMM and TileLang compile kernels for each size of a step, for seconds each.
# Every prompt has a group of 128 tokens or more, and all requests end in the same step, the 129th without a prompt:
# each one completes another group in a graph, and no batch is padded, as eager's would not be.
DEEPSEEK_V4 = Case(
    name="deepseek-v4",
    model="deepseek-v4",
    runner="V2",
    graphs=full_decodes([8]),
    workload=((135, 200), (150, 195), (180, 190), (200, 183), (260, 173), (300, 162), (380, 148), (440, 130)),
    arguments={"block_size": 256, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 32},
    supported_arguments={"moe_backend": "triton", "kernel_config": {"enable_jit_warmup": False}},
    environment={
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # like the JIT warm-up, it compiles kernels for every size of a batch
        # FlashInfer takes 80 s to compile a kernel that replaces DeepGEMM's in small batches.
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    },
    probes=("vllm_graphfix.verify.engine.compressed:UnwrittenEntries",),
    capability=9,
    compiles=True,
)
# With a context of more than 16384 tokens, rows are wider in a capture than these requests need. vLLM's default there
# is V1. All prompts are in one step and answers have one length, as in the run that proved the fix; small steps are
# untested.
DEEPSEEK_V4_LONG = replace(
    DEEPSEEK_V4,
    name="deepseek-v4-long",
    runner="V1",
    workload=tuple((length, 150) for length, _ in DEEPSEEK_V4.workload),
    arguments=DEEPSEEK_V4.arguments | {"max_model_len": 32768, "max_num_batched_tokens": 2048},
    probes=("vllm_graphfix.verify.engine.compressed:ForeignSlots",),
)
# A graph for each number of adapters. A batch with two adapters and rows without one replays the graph for two, which
# drops the adapter that was loaded last. Which one that is varies, so both have as many prompts. No step has 128
# tokens, so that all engines compute the same sums (see `adapters`).
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
# Only the layers in the middle have the quantised cache: vLLM leaves out the first two and the last two, which run on
# FlashAttention 2. The fix leaves piecewise graphs, here without Inductor. Without async scheduling the lengths on the
# host are exact, which this backend takes them for.
LLAMA_TURBOQUANT_EAGLE = Case(
    name="llama-turboquant-eagle",
    model="llama-8",
    draft="eagle",
    runner="V1",
    graphs={
        "mode": 3,
        "backend": "eager",
        "custom_ops": ["all"],
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [4, 8, 16, 32],
    },
    workload=TOGETHER,
    arguments={
        "kv_cache_dtype": "turboquant_k8v4",
        "async_scheduling": False,
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 3},
    },
    needs="vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    compiles=True,
)
# One request: a full graph is replayed only in a step in which each request has all its drafts, and n-grams draft where
# a token occurs again.
LLAMA_TURBOQUANT_NGRAM = replace(
    LLAMA_TURBOQUANT_EAGLE,
    name="llama-turboquant-ngram",
    draft=None,
    workload=((511, 200),),
    arguments=LLAMA_TURBOQUANT_EAGLE.arguments
    | {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    },
)
LLAMA_TURBOQUANT_NGRAM_V2 = replace(
    LLAMA_TURBOQUANT_NGRAM,
    name="llama-turboquant-ngram-v2",
    runner="V2",
    arguments=LLAMA_TURBOQUANT_NGRAM.arguments
    | {"speculative_config": LLAMA_TURBOQUANT_NGRAM.arguments["speculative_config"] | {"method": "ngram_gpu"}},
)
MIMO_TURBOQUANT_MTP = replace(
    LLAMA_TURBOQUANT_EAGLE,
    name="mimo-turboquant-mtp",
    model="mimo",
    draft=None,
    graphs=LLAMA_TURBOQUANT_EAGLE.graphs | {"cudagraph_capture_sizes": [2, 4, 8, 16]},
    arguments=LLAMA_TURBOQUANT_EAGLE.arguments | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
)
