"""Trials of dcp-context-lens: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.dcp_context_lens import _BACKEND

new = r"^( +)dcp_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n"
size = r"^( +)self\.max_cudagraph_size = .*\n"
room = r"torch.zeros(self.vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=self.device)\n"
kept = r"^( +)local_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n(?:.+_dcp_context_kv_lens.+\n){3}"

EDITS = (
    Edit(
        "lengths in a buffer of the builder",
        "0.19.1",
        _BACKEND,
        new,
        r"\1of_this_rank = get_dcp_local_seq_lens(\n\2\1)\n\1self.of_this_rank[:num_reqs] = of_this_rank\n"
        r"\1self.of_this_rank[num_reqs:] = 0\n\1dcp_context_kv_lens = self.of_this_rank[:num_reqs]\n",
        Verdict.FIXED,
        also=((_BACKEND, size, rf"\g<0>\1self.of_this_rank = {room}"),),
    ),
    Edit(
        "lengths copied into a buffer of the builder",
        "0.14.1",
        _BACKEND,
        new,
        r"\1self.kept[:num_reqs].copy_(get_dcp_local_seq_lens(\n\2\1))\n\1dcp_context_kv_lens = self.kept[:num_reqs]\n",
        Verdict.FIXED,
        also=((_BACKEND, size, rf"\g<0>\1self.kept = {room}"),),
    ),
    Edit(
        "rows of a buffer that nobody writes",
        "0.19.1",
        _BACKEND,
        new,
        r"\1dcp_context_kv_lens = self.kept[:num_reqs]\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "lengths that are changed once they are known",
        "0.16.0",
        _BACKEND,
        new,
        r"\g<0>\1dcp_context_kv_lens.clamp_(min=1)\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "metadata that are changed before they are returned",
        "0.18.1",
        _BACKEND,
        r"^( +)return attn_metadata\n\n    def update",
        r"\1attn_metadata.dcp_context_kv_lens = None\n\g<0>",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "without the buffer",
        "0.20.0",
        _BACKEND,
        kept,
        r"\1dcp_context_kv_lens = get_dcp_local_seq_lens(\n\2\1)\n",
        Verdict.AFFECTED,
    ),
)

SERVED = (
    Served("0.18.1", "./llama -tp 16 -dcp 2", Concern.CONCERNS, "--decode-context-parallel-size 2", "NVIDIA H100"),
    Served(
        "0.14.1",
        "./llama -tp 16 --decode-context-parallel-size=2 --attention-backend flash_attn",
        Concern.CONCERNS,
        "FLASH_ATTN",
    ),
    Served("0.18.1", "./llama -tp 16", Concern.DOES_NOT, "--decode-context-parallel-size is not given"),
    Served("0.18.1", "./llama -tp 16 -dcp 1", Concern.DOES_NOT, "--decode-context-parallel-size 1"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 --enforce-eager", Concern.DOES_NOT, "--enforce-eager", "NVIDIA H100"),
    Served("0.18.1", "./v3 -tp 16 -dcp 2", Concern.DOES_NOT, "latent attention", "NVIDIA H100"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 --attention-backend FLASHINFER", Concern.DOES_NOT, "FLASHINFER"),
    Served("0.18.1", "./llama -tp 16 -dcp 2", Concern.UNKNOWN, "attention backend", "NVIDIA B200"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 -ac.backend=FLASH_ATTN", Concern.UNKNOWN, "attention backend"),
)
