"""Trials of indexer-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.indexer_padding import _INDEXER, _LAYER

in_the_kernel = r"tl\.maximum\((seq_len - max_decode_len \+ local_idx \+ 1), 0\)"
in_the_buffer = r"(self\.offsets_buffer\[:max_decode_len\]\n {16}\))$"
prepared = r"(^ {16}self\._prepare_decode_tensors\(\n(?: {20}.*\n)+ {16}\)\n {12}\)\n)"
without = ((_INDEXER, in_the_kernel, r"\1"),)
SCHEDULED = r"if current_platform\.is_cuda\(\) and has_deep_gemm\(\):\n +self\.scheduler_metadata_buffer"
LENGTHS = r"seq_lens = common_attn_metadata\.seq_lens\[:num_decodes\]\n +block_table"
RETURNED = r"return seq_lens, block_table, decode_lens, num_decodes, requires_padding"
TAKEN = r"seq_lens = seq_lens_buffer\n"
STORED = r"tl\.store\(decode_seq_lens_ptr"
fixed = Verdict.FIXED
mtp = '{"method": "mtp", "num_speculative_tokens": 1}'

EDITS = (
    *(
        Edit(f"remedy cut out, {release}", release, _INDEXER, r"(?<=^ {16}\))\.clamp_\(min=0\)$", "", also=without)
        for release in ("0.28.0", "0.29.0")
    ),
    Edit(
        "clamped where they are written",
        "0.20.0",
        _INDEXER,
        in_the_buffer,
        r"\1.clamp(min=0)",
        fixed,
        also=((_INDEXER, r"= (seq_len - max_decode_len \+ local_idx \+ 1)$", r"= tl.maximum(0, \1)"),),
    ),
    Edit("clamped in place afterwards", "0.21.0", _INDEXER, prepared, r"\1            seq_lens.clamp_(min=0)\n", fixed),
    Edit("clamped afterwards", "0.27.1", _INDEXER, prepared, r"\1            seq_lens.clamp_(min=0)\n", fixed),
    Edit(
        "clamped into a new tensor",
        "0.27.1",
        _INDEXER,
        prepared,
        r"\1            seq_lens = torch.clamp(seq_lens, min=0)\n",
    ),
    Edit(
        "clamped into a new tensor where they are written",
        "0.27.1",
        _INDEXER,
        r"^( +)seq_lens_buffer\[:\] = \(\n((?: {20}.*\n)+) {16}\)\n\1seq_lens = seq_lens_buffer\n",
        r"\1seq_lens = (\n\2                ).clamp(min=0)\n",
        also=((_INDEXER, r"= (seq_len - max_decode_len \+ local_idx \+ 1)$", r"= tl.maximum(0, \1)"),),
    ),
    Edit("clamped in the buffer alone", "0.20.0", _INDEXER, in_the_buffer, r"\1.clamp_(min=0)"),
    Edit("not clamped in the kernel", "0.28.0", _INDEXER, in_the_kernel, r"\1"),
    Edit("another function", "0.27.1", _INDEXER, r"_prepare_decode_tensors", "_tensors_of_decodes"),
    Edit(
        "a copy of the buffer", "0.25.1", _INDEXER, r"seq_lens = seq_lens_buffer$", "seq_lens = seq_lens_buffer.clone()"
    ),
    Edit(
        "clamped later",
        "0.22.1",
        _INDEXER,
        r"^( {12})(decode_metadata = DeepSeekV32)",
        r"\1seq_lens.clamp_(min=0)\n\1\2",
    ),
    Edit(
        "something done before they are returned",
        "0.21.0",
        _INDEXER,
        r"^( {12})(return seq_lens, block_table, .*requires_padding)$",
        r"\1self.odd(seq_lens)\n\1\2",
    ),
    Edit(
        "something done in the kernel",
        "0.20.2",
        _INDEXER,
        r"^( *)(tl\.store\(decode_seq_lens_ptr)",
        r"\1per_token_seq_len = odd(per_token_seq_len)\n\1\2",
    ),
    Edit(
        "a builder from elsewhere",
        "0.28.0",
        _INDEXER,
        r"return DeepseekV32IndexerMetadataBuilder$",
        "return DeepseekV4IndexerMetadataBuilder",
    ),
    Edit(
        "a copy clamped by the layer",
        "0.27.1",
        _LAYER,
        r"decode_metadata\.seq_lens\[:batch_size\]$",
        r"\g<0>.clamp(min=0)",
    ),
)

SERVED = (
    Served("0.21.0", f"./v32 --speculative-config '{mtp}'", affects, "sparse attention"),
    Served("0.21.0", "./v32", does_not, "no speculator"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.27.1",
        _INDEXER,
        {
            "in front of the schedule": before(SCHEDULED, "seq_lens.clamp_(min=0)"),
            "in place by another name": before(RETURNED, "torch.clamp_(seq_lens, min=0)"),
            "in the buffer, at the end": before(RETURNED, "self.decode_seq_lens_buffer.clamp_(min=0)"),
            "by relu": before(SCHEDULED, "seq_lens.relu_()"),
            "by the rows": before(
                RETURNED, "seq_lens.masked_fill_(seq_lens < 0, 0) if use_native and next_n > 1 else None"
            ),
            "in the buffer and in the kernel": both(
                before(TAKEN, "seq_lens_buffer.clamp_(min=0)"),
                before(STORED, "per_token_seq_len = tl.maximum(per_token_seq_len, 0)"),
            ),
            "by lengths that are large enough": before(
                r"seq_lens, block_table, decode_lens, batch_size, requires_padding = \(",
                "seq_lens = torch.where(seq_lens > 0, seq_lens, max_decode_len - 1)",
            ),
            "in the layer": {
                _LAYER: swap(
                    r"seq_lens = decode_metadata\.seq_lens\[:batch_size\]",
                    "seq_lens = decode_metadata.seq_lens[:batch_size].clamp_(min=0)",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.27.1",
        _INDEXER,
        {
            "clamped on a copy": before(SCHEDULED, "seq_lens.clone().clamp_(min=0)"),
            "clamped and not taken": before(SCHEDULED, "seq_lens.clamp(min=0)"),
            "clamped if debugging": before(SCHEDULED, "if not __debug__:", "    seq_lens.clamp_(min=0)"),
            "clamped where lengths are compressed": before(
                SCHEDULED, "if self.compress_ratio > 1:", "    seq_lens.clamp_(min=0)"
            ),
            "clamped before they are prepared": after(LENGTHS, "seq_lens.clamp_(min=0)"),
            "clamped the other way": before(SCHEDULED, "seq_lens.clamp_(max=0)"),
            "clamped at -1": before(SCHEDULED, "seq_lens.clamp_(min=-1)"),
            "clamped in the kernel alone": before(STORED, "per_token_seq_len = tl.maximum(per_token_seq_len, 0)"),
            "clamped and written again": before(
                RETURNED, "seq_lens.clamp_(min=0)", "if use_native and next_n > 1:", "    seq_lens -= 1"
            ),
            "clamped after the return": after(RETURNED, "seq_lens.clamp_(min=0)"),
            "clamped by a helper that nobody calls": before(
                r"def _prepare_decode_tensors\(", "def _clamp(self, seq_lens):", "    return seq_lens.clamp_(min=0)", ""
            ),
        },
    ),
)

OBSERVED = ([-1.0], [0.0])
"""The values of its probe on stock, and with the fix."""
