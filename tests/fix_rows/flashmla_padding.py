"""Trials of flashmla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import Change, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flashmla_padding import _BACKEND, _OPERATORS, _RUNNER

COMMON = "vllm/model_executor/layers/attention/mla_attention.py"
filled = r"(num_reqs:num_reqs_padded\]\.fill_)"
PART = "blk_table_tensor[num_reqs:num_reqs_padded]"
LENGTHS = r"query_lens_cpu = query_start_loc_cpu\[1:\]"
hopper = "NVIDIA H100 80GB HBM3"


def _filled(*lines: str) -> Change:
    """*lines* for the line that pads a block table."""
    statement = r"blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_\(-1\)"
    return swap(rf"^( +){statement}", "\n".join(rf"\1{line}" for line in lines))


EDITS = (
    Edit("padded with -1", "0.23.0", _RUNNER, rf"{filled}\(NULL_BLOCK_ID\)", r"\1(-1)", runs=True),
    Edit("padded with the null block", "0.19.1", _RUNNER, rf"{filled}\(-1\)", r"\1(NULL_BLOCK_ID)", Verdict.FIXED),
    Edit("padded with 0", "0.19.1", _RUNNER, rf"{filled}\(-1\)", r"\1(0)", remedy=True),
    Edit("padded with 0, 0.17.1", "0.17.1", _RUNNER, rf"{filled}\(-1\)", r"\1(0)", remedy=True),
    Edit("padded with another", "0.18.1", _RUNNER, rf"{filled}\(-1\)", r"\1(self.pad)"),
    Edit(
        "padded with either",
        "0.19.1",
        _RUNNER,
        r"^( *)(blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_)\(-1\)\n",
        r"\1if self.odd:\n\1    \2(NULL_BLOCK_ID)\n\1else:\n\1    \2(-1)\n",
    ),
    Edit(
        "-1 for all rows without tokens, by the builder",
        "0.20.0",
        COMMON,
        r"block_table_tensor = common_attn_metadata\.block_table_tensor$",
        r"\g<0>.masked_fill_((common_attn_metadata.seq_lens == 0).unsqueeze(1), -1)",
    ),
)

SERVED = (
    Served("0.18.1", "/usr/bin/vllm serve ./v3 --kv-cache-dtype fp8", affects, "fp8", hopper),
    Served("0.18.1", "./v3 --kv-cache-dtype fp8 --enforce-eager", does_not, "--enforce-eager", hopper),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.17.1",
        _RUNNER,
        {
            "as upstream": _filled("NULL_BLOCK_ID = 0", f"{PART}.fill_(NULL_BLOCK_ID)"),
            "by zero": _filled(f"{PART}.zero_()"),
            "by assignment": _filled(f"{PART} = 0"),
            "by masked fill": _filled(f"{PART}.fill_(-1)", f"{PART}.clamp_(min=0)"),
            "in the builder": {_BACKEND: before(LENGTHS, "block_table_tensor = block_table_tensor.clamp(min=0)")},
            "in the metadata of the first group": before(
                r"cm_base = CommonAttentionMetadata\(", "block_table_gid_0[num_reqs:] = 0"
            ),
            "in the common builder": {
                COMMON: swap(
                    r"block_table_tensor=block_table_tensor\[:num_decodes, \.\.\.\]",
                    "block_table_tensor=block_table_tensor[:num_decodes, ...].clamp(min=0)",
                )
            },
            "for the kernel": {
                _BACKEND: swap(
                    r"(flash_mla_with_kvcache_fp8\((?:\n.*){2}\n +block_table=attn_metadata\.decode\.block_table)",
                    r"\1.clamp(min=0)",
                )
            },
            "in front of the kernel": {
                _OPERATORS: before(
                    r"out, softmax_lse = torch\.ops\._flashmla_extension_C\.fwd_kvcache_mla_fp8\(",
                    "block_table = block_table.clamp(min=0)",
                )
            },
            "in the builder in place": {_BACKEND: before(LENGTHS, "block_table_tensor.clamp_(min=0)")},
        },
    ),
    Wording(
        LOOKALIKE,
        "0.17.1",
        _RUNNER,
        {
            "null is minus one": _filled("NULL_BLOCK_ID = -1", f"{PART}.fill_(NULL_BLOCK_ID)"),
            "null is minus one for the module": both(
                _filled(f"{PART}.fill_(NULL_BLOCK_ID)"), before(r"class GPUModelRunner", "NULL_BLOCK_ID = -1", "")
            ),
            "filled and filled again": _filled("NULL_BLOCK_ID = 0", f"{PART}.fill_(NULL_BLOCK_ID)", f"{PART} = -1"),
            "filled and filled all": _filled(
                "NULL_BLOCK_ID = 0", f"{PART}.fill_(NULL_BLOCK_ID)", "blk_table_tensor[num_reqs:].fill_(-1)"
            ),
            "filled under a condition": _filled(
                "NULL_BLOCK_ID = 0",
                "if not __debug__:",
                f"    {PART}.fill_(NULL_BLOCK_ID)",
                "else:",
                "    blk_table_tensor[num_reqs:].fill_(-1)",
            ),
            "a copy filled": _filled(
                "NULL_BLOCK_ID = 0",
                "filled = blk_table_tensor",
                "blk_table_tensor[num_reqs:] = -1",
                "blk_table_tensor = blk_table_tensor.clone()",
                f"{PART}.fill_(NULL_BLOCK_ID)",
                "return filled",
            ),
            "the wrong rows": _filled("blk_table_tensor[num_reqs_padded:].fill_(-1)"),
            "minus two": _filled(f"{PART}.fill_(-2)"),
            "minus one by name": _filled("PAD_BLOCK_ID = -1", f"{PART}.fill_(PAD_BLOCK_ID)"),
            "minus one by keyword": _filled(f"{PART}.fill_(value=-1)"),
            "minus one by assignment": _filled(f"{PART} = -1"),
            "minus one in a helper": both(
                _filled("self._pad(blk_table_tensor, num_reqs, num_reqs_padded)"),
                before(
                    r"def _build_attention_metadata",
                    "def _pad(self, table, first, last):",
                    "    table[first:last].fill_(-1)",
                    "",
                ),
            ),
            "not padded": _filled("pass"),
            "a copy clamped in the builder": {_BACKEND: before(LENGTHS, "block_table_tensor.clone().clamp_(min=0)")},
            "clamped in the builder if debugging": {
                _BACKEND: before(LENGTHS, "if not __debug__:", "    block_table_tensor.clamp_(min=0)")
            },
            "clamped in the builder without fp8": {
                _BACKEND: before(LENGTHS, "if not self.is_fp8_kvcache:", "    block_table_tensor.clamp_(min=0)")
            },
            "the wrong way in the common builder": {
                COMMON: swap(
                    r"block_table_tensor=block_table_tensor\[:num_decodes, \.\.\.\]",
                    "block_table_tensor=block_table_tensor[:num_decodes, ...].clamp(max=0)",
                )
            },
            "clamped by a helper that nobody calls": {
                _BACKEND: before(
                    r"def _build_decode\(", "def _clamp(self, table):", "    return table.clamp(min=0)", ""
                )
            },
        },
    ),
    Wording(
        SHAPE,
        "0.17.1",
        _BACKEND,
        {
            "keyword only": swap(
                r"def _build_decode\(\n        self,\n", "def _build_decode(\n        self,\n        *,\n"
            ),
            "keyword only from the middle": swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        *,\n"),
            "positional only": swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        /,\n"),
            "more by keyword": swap(r"(def _build_decode\((?:\n.*){8}\n)", r"\1        **more,\n"),
            "the flag renamed": swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            "the flag turned round": both(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
            "lengths copied first": before(LENGTHS, "seq_lens_device = seq_lens_device.clone()"),
            "tables copied first": before(LENGTHS, "block_table_tensor = block_table_tensor.contiguous()"),
            "lengths by another name": swap(r"\bseq_lens_device\b", "seq_lens"),
        },
    ),
)

OBSERVED = ([0.0, -1.0], [1.0, 0.0])
"""The values of its probe on stock, and with the fix."""
