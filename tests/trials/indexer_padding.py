"""Trials of indexer-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.indexer_padding import _INDEXER

in_the_kernel = r"tl\.maximum\((seq_len - max_decode_len \+ local_idx \+ 1), 0\)"
in_the_buffer = r"(self\.offsets_buffer\[:max_decode_len\]\n {16}\))$"
prepared = r"(^ {16}self\._prepare_decode_tensors\(\n(?: {20}.*\n)+ {16}\)\n {12}\)\n)"
without = ((_INDEXER, in_the_kernel, r"\1"),)
fixed, unknown = Verdict.FIXED, Verdict.UNRECOGNISED
mtp = '{"method": "mtp", "num_speculative_tokens": 1}'

EDITS = (
    *(
        Edit(
            f"remedy cut out, {release}",
            release,
            _INDEXER,
            r"(?<=^ {16}\))\.clamp_\(min=0\)$",
            "",
            Verdict.AFFECTED,
            without,
        )
        for release in ("0.28.0", "0.29.0")
    ),
    Edit(
        "clamped where they are written",
        "0.20.0",
        _INDEXER,
        in_the_buffer,
        r"\1.clamp(min=0)",
        fixed,
        also=(
            (
                _INDEXER,
                r"= (seq_len - max_decode_len \+ local_idx \+ 1)$",
                r"= tl.maximum(0, \1)",
            ),
        ),
    ),
    Edit(
        "clamped in place afterwards",
        "0.21.0",
        _INDEXER,
        prepared,
        r"\1            seq_lens.clamp_(min=0)\n",
        fixed,
    ),
    Edit("clamped afterwards", "0.27.1", _INDEXER, prepared, r"\1            seq_lens.clamp_(min=0)\n", fixed),
    Edit(
        "clamped into a new tensor",
        "0.27.1",
        _INDEXER,
        prepared,
        r"\1            seq_lens = torch.clamp(seq_lens, min=0)\n",
        unknown,
    ),
    Edit(
        "clamped into a new tensor where they are written",
        "0.27.1",
        _INDEXER,
        r"^( +)seq_lens_buffer\[:\] = \(\n((?: {20}.*\n)+) {16}\)\n\1seq_lens = seq_lens_buffer\n",
        r"\1seq_lens = (\n\2                ).clamp(min=0)\n",
        unknown,
        also=((_INDEXER, r"= (seq_len - max_decode_len \+ local_idx \+ 1)$", r"= tl.maximum(0, \1)"),),
    ),
    Edit("clamped in the buffer alone", "0.20.0", _INDEXER, in_the_buffer, r"\1.clamp_(min=0)", unknown),
    Edit("not clamped in the kernel", "0.28.0", _INDEXER, in_the_kernel, r"\1", unknown),
    Edit(
        "another function",
        "0.27.1",
        _INDEXER,
        r"_prepare_decode_tensors",
        "_tensors_of_decodes",
        unknown,
    ),
    Edit(
        "a copy of the buffer",
        "0.25.1",
        _INDEXER,
        r"seq_lens = seq_lens_buffer$",
        "seq_lens = seq_lens_buffer.clone()",
        unknown,
    ),
    Edit(
        "clamped later",
        "0.22.1",
        _INDEXER,
        r"^( {12})(decode_metadata = DeepSeekV32)",
        r"\1seq_lens.clamp_(min=0)\n\1\2",
        unknown,
    ),
    Edit(
        "something done before they are returned",
        "0.21.0",
        _INDEXER,
        r"^( {12})(return seq_lens, block_table, .*requires_padding)$",
        r"\1self.odd(seq_lens)\n\1\2",
        unknown,
    ),
    Edit(
        "something done in the kernel",
        "0.20.2",
        _INDEXER,
        r"^( *)(tl\.store\(decode_seq_lens_ptr)",
        r"\1per_token_seq_len = odd(per_token_seq_len)\n\1\2",
        unknown,
    ),
)

SERVED = (
    Served("0.21.0", f"./v32 --speculative-config '{mtp}'", Concern.CONCERNS, "sparse attention"),
    Served("0.21.0", "./v32", Concern.DOES_NOT, "no speculator"),
)
