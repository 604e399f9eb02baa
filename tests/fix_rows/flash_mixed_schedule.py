"""Trials of flash-mixed-schedule: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flash_mixed_schedule import _BACKEND, _RUNNER, _STATES

graphs = r"^( +)max_num_splits = self\.max_num_splits\n"
support = r"_cudagraph_support = \(\n +AttentionCGSupport\.ALWAYS\n(?: +.+\n)+? +\)\n"
full = '--compilation-config \'{"cudagraph_mode":"FULL"}\''

EDITS = (
    Edit(
        "the longest query of all, as runner V2 hands it on",
        "0.33.0",
        _STATES,
        r"^( *)max_query_len = input_batch\.max_query_len$",
        r"\g<0>\n\1max_query_len = num_tokens",
    ),
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
    Edit("a schedule by another name", "0.14.1", _BACKEND, "get_scheduler_metadata", "plan_ahead"),
    Edit(
        "as many tokens now and then",
        "0.21.0",
        _BACKEND,
        r"^( +)max_query_len = common_attn_metadata\.max_query_len\n",
        r"\g<0>\1if self.odd:\n\1    max_query_len = num_actual_tokens\n",
    ),
    Edit(
        "with full graphs another length", "0.33.0", _BACKEND, graphs, r"\g<0>\1max_query_len = self.max_num_splits\n"
    ),
    Edit(
        "a schedule for a length of its own",
        "0.28.0",
        _BACKEND,
        r"max_seqlen_q=max_query_len",
        "max_seqlen_q=self.longest",
    ),
    Edit(
        "a schedule with other kernels too",
        "0.25.1",
        _BACKEND,
        r"self\.aot_schedule = get_flash_attn_version\(\) == 3",
        "self.aot_schedule = get_flash_attn_version() >= 3",
    ),
    Edit(
        "a kernel launched for another length",
        "0.33.0",
        _BACKEND,
        r"^( +)max_seqlen_q = attn_metadata\.max_query_len\n( +max_seqlen_k = attn_metadata\.max_seq_len)",
        r"\1max_seqlen_q = self.longest\n\2",
    ),
)

read = r"max_query_len = common_attn_metadata\.max_query_len"
all_tokens = "max_query_len = num_actual_tokens"

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _BACKEND,
        {
            "all tokens of every step": after(read, all_tokens),
            "all tokens are read": swap(read, "max_query_len = common_attn_metadata.num_actual_tokens"),
            "the longer one": after(read, "max_query_len = max(max_query_len, num_actual_tokens)"),
            "metadata of all tokens": before(
                r"num_reqs = common_attn_metadata\.num_reqs\n +num_actual_tokens = common",
                "common_attn_metadata = common_attn_metadata.replace(",
                "    max_query_len=common_attn_metadata.num_actual_tokens",
                ")",
            ),
            "no schedule beside full graphs": after(
                r"self\.use_full_cuda_graph = \(\n.+\n +\)",
                "if self.use_full_cuda_graph:",
                "    self.aot_schedule = False",
            ),
            "the support is another": swap(
                r"return cls\._cudagraph_support", "return AttentionCGSupport.UNIFORM_BATCH"
            ),
            "all tokens in model runner V2": {
                _STATES: after(r"max_query_len = input_batch\.max_query_len", "max_query_len = num_tokens")
            },
            "all tokens in model runner V1": {
                _RUNNER: before(r"cm_base = CommonAttentionMetadata\(", "max_query_len = num_tokens_padded")
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _BACKEND,
        {
            "all tokens of a single request": after(read, "if num_reqs == 1:", f"    {all_tokens}"),
            "all tokens if debugging": after(read, "if not __debug__:", f"    {all_tokens}"),
            "all tokens with context parallelism": before(
                r"max_num_splits = 0  # 0 means", "if self.dcp_world_size > 1:", f"    {all_tokens}"
            ),
            "all tokens behind the schedule": after(
                r"scheduler_metadata = self\._store_scheduler_metadata\(scheduler_metadata\)(?=\n\n +if isinst)",
                all_tokens,
            ),
            "all tokens, and undone": after(
                read,
                "if self.use_full_cuda_graph:",
                f"    {all_tokens}",
                "max_query_len = common_attn_metadata.max_query_len",
            ),
            "all tokens on a copy": after(read, "common_attn_metadata.replace(max_query_len=num_actual_tokens)"),
            "all tokens in a helper that nobody calls": before(
                r"def _store_scheduler_metadata\(",
                "def _longest(self, max_query_len, num_actual_tokens):",
                "    if self.use_full_cuda_graph:",
                f"        {all_tokens}",
                "    return max_query_len",
                "",
            ),
            "all tokens, and a kernel for another length": both(
                after(read, "if self.use_full_cuda_graph:", f"    {all_tokens}"),
                after(r"max_seqlen_q = attn_metadata\.max_query_len\n", "max_seqlen_q = min(max_seqlen_q, 16)"),
            ),
            "no full graphs of prompts for another builder": after(
                r"return cls\._cudagraph_support",
                "",
                "@classmethod",
                "def is_uniform(cls):",
                "    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH",
                "    return _cudagraph_support",
            ),
        },
    ),
)

SERVED = (
    Served("0.21.0", f"./llama {full}", affects, "cudagraph_mode is FULL", "NVIDIA H100"),
    Served("0.33.0", "./llama -cc.cudagraph_mode=FULL", affects, "version 3", "NVIDIA H200"),
    Served(
        "0.14.1", "./llama -cc.cudagraph_mode=FULL --attention-backend FLASH_ATTN", affects, "FLASH_ATTN", "NVIDIA H100"
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
