"""Releases with their source in shapes that nobody has looked at."""

from __future__ import annotations

from edited import Change, swap
from remedies import (
    CLEARED,
    DIVIDES,
    KERNELS_LENGTH,
    SCORED_FIRST_NOW_AND_THEN,
    UNPACKED,
    WITHOUT_ITS_ARGUMENT,
)
from vllm_files import (
    BLOCK_TABLE,
    BLOCK_TABLE_V2,
    CUDAGRAPHS,
    EAGLE_CUDAGRAPHS,
    EAGLE_FIRST,
    FLASHMLA,
    INDEXER,
    MAMBA,
    PREFILL,
    PROPOSER,
    RUNNER,
    RUNNER_V2,
    TRITON_DECODE,
    TRITON_MLA,
    UTILS,
    WORKER,
    WORKSPACE,
)

UNSEEN: list[tuple[str, str, dict[str, Change]]] = [
    (
        "indexer-padding",
        "0.20.0",
        {INDEXER: swap(r"(self\.offsets_buffer\[:max_decode_len\]\n {16}\))$", r"\1.clamp_(min=0)")},
    ),
    ("indexer-padding", "0.28.0", {INDEXER: swap(KERNELS_LENGTH, r"\1")}),
    ("indexer-padding", "0.27.1", {INDEXER: swap(r"_prepare_decode_tensors", "_tensors_of_decodes")}),
    (
        "indexer-padding",
        "0.25.1",
        {INDEXER: swap(r"seq_lens = seq_lens_buffer$", "seq_lens = seq_lens_buffer.clone()")},
    ),
    (
        "indexer-padding",
        "0.22.1",
        {INDEXER: swap(r"^( {12})(decode_metadata = DeepSeekV32)", r"\1seq_lens.clamp_(min=0)\n\1\2")},
    ),
    (
        "indexer-padding",
        "0.21.0",
        {INDEXER: swap(r"^( {12})(return seq_lens, block_table, .*requires_padding)$", r"\1self.odd(seq_lens)\n\1\2")},
    ),
    (
        "indexer-padding",
        "0.20.2",
        {
            INDEXER: swap(
                r"^( *)(tl\.store\(decode_seq_lens_ptr)", r"\1per_token_seq_len = odd(per_token_seq_len)\n\1\2"
            )
        },
    ),
    (
        "prompt-logprobs",
        "0.21.0",
        {RUNNER: swap(UNPACKED, r"\1\2\1if self.odd:\n\1    hidden_states = hidden_states.clone()\n")},
    ),
    ("prompt-logprobs", "0.20.0", {RUNNER: SCORED_FIRST_NOW_AND_THEN}),
    ("prompt-logprobs", "0.18.1", {RUNNER: WITHOUT_ITS_ARGUMENT}),
    ("prompt-logprobs", "0.17.1", {RUNNER: swap(UNPACKED, r"\1\2\1hidden_states = self.keep(hidden_states)\n")}),
    (
        "prompt-logprobs",
        "0.33.0",
        {RUNNER: swap(r"or spec_config\.uses_extract_hidden_states\(\)", "or spec_config.uses_another()")},
    ),
    (
        "prompt-logprobs",
        "0.25.1",
        {
            RUNNER: swap(
                r"num_prompt_logprobs_dict = self\.num_prompt_logprobs", "num_prompt_logprobs_dict = self.asked()"
            )
        },
    ),
    (
        "prompt-logprobs",
        "0.14.1",
        {
            RUNNER: swap(
                r"^( {4})hidden_states: torch\.Tensor\n( {4}sample_hidden_states)", r"\1states: torch.Tensor\n\2"
            )
        },
    ),
    (
        "capture-state",
        "0.18.1",
        {
            CUDAGRAPHS: swap(
                r"forward_fn = create_forward_fn\(desc\)", "forward_fn = self.forward_of(create_forward_fn, desc)"
            )
        },
    ),
    ("capture-state", "0.17.1", {CUDAGRAPHS: swap(r"= prepare_inputs_to_capture\(", "= self.prepare(")}),
    (
        "draft-prefill-state",
        "0.22.1",
        {EAGLE_CUDAGRAPHS: swap(r"full_cg_attn_states\[desc\]", "full_cg_attn_states.get(desc)")},
    ),
    (
        "draft-prefill-state",
        "0.23.0",
        {PREFILL: swap(r"if warmup else attn_state_pair\.captured", "or attn_state_pair.captured")},
    ),
    ("draft-decode-mode", "0.17.1", {EAGLE_CUDAGRAPHS: swap(r"cudagraph_mode\.decode_mode\(\)", "cudagraph_mode")}),
    (
        "mamba-padding",
        "0.20.0",
        {RUNNER: swap(r"is_prefilling = .* < .*", "is_prefilling = self._prefilling(num_reqs_padded)")},
    ),
    (
        "mamba-padding",
        "0.20.0",
        {MAMBA: swap(r"treat_short_extends_as_decodes=False", "treat_short_extends_as_decodes=self.treat_so")},
    ),
    (
        "flashmla-fp8",
        "0.18.1",
        {
            FLASHMLA: swap(
                r"scheduler_metadata\.tile_scheduler_metadata = .*", "scheduler_metadata.take(tile_scheduler_metadata)"
            )
        },
    ),
    ("flashmla-padding", "0.18.1", {RUNNER: swap(r"(num_reqs:num_reqs_padded\]\.fill_)\(-1\)", r"\1(self.pad)")}),
    (
        "capture-state",
        "0.18.1",
        {
            CUDAGRAPHS: swap(
                r"^( {20})forward_fn\(CUDAGraphMode\.NONE\)\n",
                r"\1for _ in range(2):\n\1    forward_fn(CUDAGraphMode.NONE)\n",
            )
        },
    ),
    (
        "capture-state",
        "0.21.0",
        {
            CUDAGRAPHS: swap(
                r"^( {20})(forward_fn, attn_state = create_forward_fn\(desc\))\n",
                r"\1if self.pool:\n\1    \2\n\1else:\n\1    \2\n",
            )
        },
    ),
    (
        "capture-state",
        "0.16.0",
        {EAGLE_FIRST: swap(r"^( {8})generate_fn\((.*)\)\n", r"\1generate_fn(\2)\n\1generate_fn(\2)\n")},
    ),
    (
        "flashmla-padding",
        "0.19.1",
        {
            RUNNER: swap(
                r"^( *)(blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_)\(-1\)\n",
                r"\1if self.odd:\n\1    \2(NULL_BLOCK_ID)\n\1else:\n\1    \2(-1)\n",
            )
        },
    ),
    (
        "mamba-padding",
        "0.21.0",
        {
            RUNNER: swap(
                r"^( *)(is_prefilling = .* < .*)\n", r"\1\2\n\1if self.odd:\n\1    is_prefilling[num_reqs:] = False\n"
            )
        },
    ),
    ("prefill-dispatch", "0.20.0", {RUNNER: swap(r"= self\._is_uniform_decode\(", "= self.tells(")}),
    (
        "prefill-dispatch",
        "0.33.0",
        {RUNNER: swap(r"num_tokens == max_num_scheduled_tokens \* num_reqs", "not self.mixed")},
    ),
    (
        "prefill-dispatch",
        "0.20.0",
        {RUNNER: swap(r"(num_tokens == max_num_scheduled_tokens \* num_reqs)", r"\1 and not num_reqs.mixed")},
    ),
    (
        "prefill-dispatch",
        "0.20.0",
        {
            RUNNER: swap(
                r"^( *)(has_encoder_output = \(\n)", r"\1uniform_decode = uniform_decode and self.decoding\n\1\2"
            )
        },
    ),
    (
        "prefill-dispatch",
        "0.27.1",
        {
            RUNNER: swap(
                r"^( *)num_encoder_reqs=len\(", r"\1force_uniform_decode=self.phase(num_reqs),\n\1num_encoder_reqs=len("
            )
        },
    ),
    ("prefill-dispatch", "0.19.0", {RUNNER: swap(r"force_uniform_decode=uniform_decode", "force_uniform_decode=None")}),
    (
        "prefill-dispatch",
        "0.26.0",
        {CUDAGRAPHS: swap(r"^( {4}if )(\(max_query_len == num_tokens)", r"\1not num_reqs.prefilling and \2")},
    ),
    (
        "prefill-dispatch",
        "0.25.1",
        {RUNNER_V2: swap(r"^( *)(uniform_tok_count = get_uniform.*)\n", r"\1\2\n\1uniform_tok_count = self.one(0)\n")},
    ),
    (
        "prefill-dispatch",
        "0.23.0",
        {RUNNER_V2: swap(r"out=self\.req_states\.num_computed_prefill", "out=self.req_states.num")},
    ),
    ("prefill-dispatch", "0.28.0", {UTILS: swap(r"if not has_prefill and is_uniform", "if is_uniform")}),
    (
        "prefill-dispatch",
        "0.33.0",
        {RUNNER_V2: swap(r"is_prefilling_np = num_computed.* < .*", "is_prefilling_np = self.x")},
    ),
    ("workspace-growth", "0.20.0", {WORKSPACE: swap(CLEARED, r"\1kept.append(current_workspace)\n\1\2")}),
    (
        "workspace-growth",
        "0.19.1",
        {WORKSPACE: swap(CLEARED, r"\1if self._odd:\n\1    self._outgrown.append(current_workspace)\n\1\2")},
    ),
    (
        "workspace-growth",
        "0.22.1",
        {WORKSPACE: swap(r"^( {8})(return self\._locked)", r"\1self._current_workspaces[0] = self._spare\n\1\2")},
    ),
    ("workspace-growth", "0.28.0", {WORKSPACE: swap(r"= torch\.empty\(", "= self._take(")}),
    (
        "workspace-growth",
        "0.16.0",
        {WORKSPACE: swap(r"return current_workspace\n", "return current_workspace.clone()\n")},
    ),
    ("workspace-growth", "0.18.1", {RUNNER_V2: swap(r"^( {8})return 0\n\n", r"\1return self._profiled()\n\n")}),
    ("workspace-growth", "0.21.0", {RUNNER_V2: swap(r"^( {8})(start_time = .*\n {8}gc)", r"\1lock_workspace()\n\1\2")}),
    (
        "workspace-growth",
        "0.21.0",
        {RUNNER_V2: swap(r"^( {8})(end_time = .*\n {8}end_free)", r"\1current_workspace_manager().lock()\n\1\2")},
    ),
    (
        "workspace-growth",
        "0.30.0",
        {RUNNER_V2: swap(r"if not profile_only:\n(?= +# Lock)", "if not profile_only and self.odd:\n")},
    ),
    ("idle-rank", "0.14.1", {WORKER: swap(r"self\.model_runner\._dummy_run\(1,", "self.model_runner.run_idle(1,")}),
    (
        "idle-rank",
        "0.21.0",
        {
            WORKER: swap(
                r"(self\.model_runner\._dummy_run\(num_tokens, uniform_decode=True\))", r"\1; self.model_runner.tidy()"
            )
        },
    ),
    (
        "idle-rank",
        "0.20.0",
        {RUNNER: swap(r"^( *)sm\.fill_\(-1\)\n", r"\1if self.odd:\n\1    sm.fill_(-1)\n\1else:\n\1    sm.fill_(-1)\n")},
    ),
    ("idle-rank", "0.20.0", {RUNNER: swap(r"slot_mappings_by_group\.values\(\):", "self.mappings():")}),
    (
        "idle-rank",
        "0.18.1",
        {
            RUNNER: swap(
                r"blk_table = self\.input_batch\.block_table\[kv_cache_gid\]", "blk_table = self.tables[kv_cache_gid]"
            )
        },
    ),
    (
        "idle-rank",
        "0.25.1",
        {BLOCK_TABLE: swap(r"self\.block_table\.copy_to_gpu\(num_reqs\)", "self.block_table.copy_dirty_rows()")},
    ),
    (
        "idle-rank",
        "0.33.0",
        {
            PROPOSER: swap(
                r"self\._get_slot_mapping\(num_input_tokens\)", "self._get_slot_mapping(num_input_tokens, self.slots)"
            )
        },
    ),
    ("idle-rank", "0.25.1", {BLOCK_TABLE_V2: swap(r"self\.slot_mappings\.fill_\(PAD_SLOT_ID\)", "self.pad()")}),
]
UNSEEN += [
    ("triton-mla-padding", release, {path: change})
    for release, path, change in (
        ("0.33.0", TRITON_DECODE, swap(DIVIDES, r"\1result = _merged(acc, e_sum)\n")),
        ("0.22.0", TRITON_DECODE, swap(DIVIDES, r"\1result = tl.where(mask_d, acc / e_sum, 0.0)\n")),
        ("0.28.0", TRITON_DECODE, swap(r"e_max \+ tl\.log\(e_sum\)$", "e_max + tl.log(tl.where(e_sum > 0, e_sum, 1))")),
        (
            "0.30.0",
            TRITON_DECODE,
            swap(r"^    is_mla=False,\n\):\n    assert", "    is_mla=False,\n    pad=0,\n):\n    assert"),
        ),
        (
            "0.25.1",
            TRITON_MLA,
            swap(
                r"^( *)return o, lse\n",
                r"\1if self.odd:\n\1    o.masked_fill_(padded[:, None, None], 0.0)\n\1return o, lse\n",
            ),
        ),
        ("0.26.0", TRITON_MLA, swap(r"^            o,\n            lse,\n", "            out,\n            lse,\n")),
        (
            "0.23.0",
            TRITON_MLA,
            swap(
                r"^(    _cudagraph_support.*)\n",
                r"\1\n\n    def _build_decode(self, **given):\n        return super()._build_decode(**given)\n",
            ),
        ),
        ("0.22.1", TRITON_MLA, swap(r"TritonMLAMetadataBuilder", "PaddedMLABuilder")),
    )
]
