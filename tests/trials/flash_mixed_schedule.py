"""Trials of flash-mixed-schedule: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flash_mixed_schedule import _BACKEND

graphs = r"^( +)max_num_splits = self\.max_num_splits\n"
support = r"_cudagraph_support = \(\n +AttentionCGSupport\.ALWAYS\n(?: +.+\n)+? +\)\n"
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
full = '--compilation-config \'{"cudagraph_mode":"FULL"}\''

EDITS = (
    Edit(
        "schedules for as many tokens as a graph has",
        "0.21.0",
        _BACKEND,
        graphs,
        r"\g<0>\1max_query_len = num_actual_tokens\n",
        Verdict.FIXED,
    ),
    Edit(
        "the same, and given before it is stored",
        "0.33.0",
        _BACKEND,
        r"^( +)max_query_len = common_attn_metadata\.max_query_len\n( +max_seq_len = )",
        r"\1max_query_len = common_attn_metadata.max_query_len\n\1if self.use_full_cuda_graph:\n"
        r"\1    max_query_len = num_actual_tokens\n\2",
        Verdict.UNRECOGNISED,
        also=(
            (
                _BACKEND,
                (
                    r"^( +)(self\.scheduler_metadata\[:n\] = scheduler_metadata\n"
                    r"(?:.*\n)*?)( +return self\.scheduler_metadata\[:n\]\n)"
                ),
                r"\3\1\2",
            ),
        ),
    ),
    Edit(
        "the same wherever there are full graphs",
        "0.33.0",
        _BACKEND,
        r"^( +)max_query_len = common_attn_metadata\.max_query_len\n( +max_seq_len = )",
        r"\1max_query_len = common_attn_metadata.max_query_len\n\1if self.use_full_cuda_graph:\n"
        r"\1    max_query_len = num_actual_tokens\n\2",
        Verdict.FIXED,
    ),
    Edit(
        "no full graphs of prompts",
        "0.25.1",
        _BACKEND,
        support,
        "_cudagraph_support = AttentionCGSupport.UNIFORM_BATCH\n",
        Verdict.FIXED,
    ),
    Edit("no schedule before a step", "0.14.1", _BACKEND, "get_scheduler_metadata", "plan_ahead", Verdict.ABSENT),
    Edit(
        "as many tokens now and then",
        "0.21.0",
        _BACKEND,
        r"^( +)max_query_len = common_attn_metadata\.max_query_len\n",
        r"\g<0>\1if self.odd:\n\1    max_query_len = num_actual_tokens\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "with full graphs another length",
        "0.33.0",
        _BACKEND,
        graphs,
        r"\g<0>\1max_query_len = self.max_num_splits\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "a schedule for a length of its own",
        "0.28.0",
        _BACKEND,
        r"max_seqlen_q=max_query_len",
        "max_seqlen_q=self.longest",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "a schedule with other kernels too",
        "0.25.1",
        _BACKEND,
        r"self\.aot_schedule = get_flash_attn_version\(\) == 3",
        "self.aot_schedule = get_flash_attn_version() >= 3",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "a kernel launched for another length",
        "0.33.0",
        _BACKEND,
        r"^( +)max_seqlen_q = attn_metadata\.max_query_len\n( +max_seqlen_k = attn_metadata\.max_seq_len)",
        r"\1max_seqlen_q = self.longest\n\2",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.21.0", f"./llama {full}", affects, "cudagraph_mode is FULL", "NVIDIA H100"),
    Served("0.33.0", "./llama -cc.cudagraph_mode=FULL", affects, "version 3", "NVIDIA H200"),
    Served(
        "0.14.1",
        "./llama -cc.cudagraph_mode=FULL --attention-backend FLASH_ATTN",
        affects,
        "FLASH_ATTN",
        "NVIDIA H100",
    ),
    Served("0.21.0", "./llama", does_not, "FULL_AND_PIECEWISE", "NVIDIA H100"),
    Served("0.21.0", "./llama -cc.cudagraph_mode=FULL_DECODE_ONLY", does_not, "FULL_DECODE_ONLY", "NVIDIA H100"),
    Served("0.21.0", f"./llama {full}", does_not, "NVIDIA A100", "NVIDIA A100"),
    Served("0.21.0", f"./v3 {full}", does_not, "latent attention", "NVIDIA H100"),
    Served("0.21.0", f"./llama {full} --attention-backend FLASHINFER", does_not, "FLASHINFER", "NVIDIA H100"),
    Served("0.21.0", f"./llama {full}", unknown, "GPU"),
    Served("0.21.0", "./llama -cc.pass_config.fuse_attn_quant=true", unknown, "pass_config", "NVIDIA H100"),
    Served("0.21.0", f"./llama {full} -ac.flash_attn_version=2", unknown, "attention backend", "NVIDIA H100"),
)
