"""Trials of dcp-context-lens: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.dcp_context_lens import _BACKEND, _REGISTRY, _RUNNER, _UTILS

new = r"^( +)dcp_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n"
size = r"^( +)self\.max_cudagraph_size = .*\n"
room = r"torch.zeros(self.vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=self.device)\n"
again = r"^( +)local_context_kv_lens = get_dcp_local_seq_lens\(\n((?:.+\n)+?)\1\)\n(?:.+_dcp_context_kv_lens.+\n){3}"
returned = r"^( +)return attn_metadata\n\n    def update"
with_buffer = ((_BACKEND, size, rf"\g<0>\1self.kept = {room}"),)
local = r"\1local_context_kv_lens = get_dcp_local_seq_lens(\n\2\1)\n"
written = r"\1self.kept[:num_reqs] = local_context_kv_lens\n"
taken = r"\1dcp_context_kv_lens = self.kept[:num_reqs]\n"
fixed, affected, unrecognised = Verdict.FIXED, Verdict.AFFECTED, Verdict.UNRECOGNISED


def lengths(what: str, replacement: str, verdict: Verdict, release: str = "0.19.1") -> Edit:
    """An edit that makes the lengths otherwise, on a builder that has a buffer for them."""
    return Edit(what, release, _BACKEND, new, replacement, verdict, also=with_buffer)


EDITS = (
    Edit(
        "lengths in a buffer of the builder",
        "0.19.1",
        _BACKEND,
        new,
        r"\1local_context_kv_lens = get_dcp_local_seq_lens(\n\2\1)\n\1self.of_this_rank[:num_reqs] = "
        r"local_context_kv_lens\n\1self.of_this_rank[num_reqs:] = 0\n"
        r"\1dcp_context_kv_lens = self.of_this_rank[:num_reqs]\n",
        fixed,
        also=((_BACKEND, size, rf"\g<0>\1self.of_this_rank = {room}"),),
    ),
    lengths(
        "lengths copied into a buffer of the builder",
        r"\1self.kept[:num_reqs].copy_(get_dcp_local_seq_lens(\n\2\1))\n" + taken,
        fixed,
        "0.14.1",
    ),
    lengths(
        "lengths copied once they are known",
        local + r"\1self.kept[:num_reqs].copy_(local_context_kv_lens)\n\1self.kept[num_reqs:].zero_()\n" + taken,
        fixed,
        "0.16.0",
    ),
    # Right elsewhere.
    lengths("a helper keeps them", r"\g<0>\1dcp_context_kv_lens = self._in_place(dcp_context_kv_lens)\n", unrecognised),
    Edit(
        "the metadata are given rows of a buffer",
        "0.18.1",
        _BACKEND,
        r"^( +)dcp_context_kv_lens=dcp_context_kv_lens,\n( +use_cascade)",
        r"\1dcp_context_kv_lens=self._in_place(dcp_context_kv_lens),\n\2",
    ),
    Edit(
        "the metadata are put in place once they are made",
        "0.17.1",
        _BACKEND,
        returned,
        r"\1attn_metadata = self._in_place(attn_metadata)\n\g<0>",
    ),
    Edit(
        "the lengths are made in a buffer of their module",
        "0.19.1",
        _UTILS,
        r"return dcp_local_seq_lens\.squeeze\(1\)\n",
        "return _in_place(dcp_local_seq_lens.squeeze(1))\n",
    ),
    Edit(
        "the lengths are made in the graph",
        "0.19.1",
        _BACKEND,
        r"seqused_k=attn_metadata\.dcp_context_kv_lens,",
        "seqused_k=self._lengths_of_this_rank(attn_metadata),",
    ),
    # Not right, though it looks so.
    lengths("a helper that nobody calls keeps them", r"\g<0>\1self.kept.zero_()\n", affected),
    lengths(
        "kept for drafts alone",
        local + r"\1dcp_context_kv_lens = local_context_kv_lens\n\1if fast_build:\n    \1self.kept[:num_reqs] = "
        r"local_context_kv_lens\n    " + taken,
        unrecognised,
    ),
    lengths(
        "kept for one of two kinds of batches",
        r"\1if causal:\n    \1local_context_kv_lens = get_dcp_local_seq_lens(\n\2    \1)\n    "
        + written
        + "    "
        + taken
        + r"\1else:\n    \1dcp_context_kv_lens = get_dcp_local_seq_lens(\n\2    \1)\n",
        unrecognised,
    ),
    lengths(
        "written to a copy", local + r"\1self.kept.clone()[:num_reqs] = local_context_kv_lens\n" + taken, unrecognised
    ),
    lengths("written too late", local + taken + r"\1scheduler_metadata = None\n" + written, unrecognised),
    lengths("written and cleared", local + written + taken + r"\1self.kept.zero_()\n", unrecognised),
    lengths("kept in a buffer that is made anew", local + rf"\1self.kept = {room}" + written + taken, unrecognised),
    lengths(
        "kept, and a copy handed on",
        local + written + taken + r"\1dcp_context_kv_lens = dcp_context_kv_lens.clone()\n",
        unrecognised,
    ),
    lengths("other lengths are kept", local + r"\1self.kept[:num_reqs] = seq_lens\n" + taken, unrecognised),
    lengths("rows of a buffer that nobody writes", taken, unrecognised),
    Edit(
        "lengths that are changed once they are known",
        "0.16.0",
        _BACKEND,
        new,
        r"\g<0>\1dcp_context_kv_lens.clamp_(min=1)\n",
    ),
    Edit(
        "metadata that are changed before they are returned",
        "0.18.1",
        _BACKEND,
        returned,
        r"\1attn_metadata.dcp_context_kv_lens = None\n\g<0>",
    ),
    Edit("without the buffer", "0.20.0", _BACKEND, again, r"\1dcp_context_kv_lens = get_dcp_local_seq_lens(\n\2\1)\n"),
    Edit(
        "another builder has the backend",
        "0.19.1",
        _BACKEND,
        r"return FlashAttentionMetadataBuilder$",
        "return DCPFlashAttentionMetadataBuilder",
    ),
    Edit(
        "the runner hands on a copy of them",
        "0.20.0",
        _RUNNER,
        r"^( +)for layer_name in attn_group\.layer_names:\n +attn_metadata_dict",
        r"\1attn_metadata_i.dcp_context_kv_lens = attn_metadata_i.dcp_context_kv_lens.clone()\n\g<0>",
    ),
    Edit(
        "another module has the backend",
        "0.20.0",
        _REGISTRY,
        r"backends\.flash_attn\.FlashAttentionBackend",
        "backends.flash_attn_tuned.FlashAttentionBackend",
    ),
)

SERVED = (
    Served("0.18.1", "./llama -tp 16 -dcp 2", affects, "--decode-context-parallel-size 2", "NVIDIA H100"),
    Served(
        "0.14.1",
        "./llama -tp 16 --decode-context-parallel-size=2 --attention-backend flash_attn",
        affects,
        "FLASH_ATTN",
    ),
    Served("0.18.1", "./llama -tp 16", does_not, "--decode-context-parallel-size is not given"),
    Served("0.18.1", "./llama -tp 16 -dcp 1", does_not, "--decode-context-parallel-size 1"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 --enforce-eager", does_not, "--enforce-eager", "NVIDIA H100"),
    Served("0.18.1", "./v3 -tp 16 -dcp 2", does_not, "latent attention", "NVIDIA H100"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 --attention-backend FLASHINFER", does_not, "FLASHINFER"),
    Served("0.18.1", "./llama -tp 16 -dcp 2", unknown, "attention backend", "NVIDIA B200"),
    Served("0.18.1", "./llama -tp 16 -dcp 2 -ac.backend=FLASH_ATTN", unknown, "attention backend"),
)
