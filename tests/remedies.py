"""Releases with a remedy cut out of their source, or written into it."""

from __future__ import annotations

from edited import Change, cut, swap
from vllm_files import (
    CUDAGRAPHS,
    EAGLE,
    FLASHMLA,
    INDEXER,
    PROPOSER,
    RUNNER,
    RUNNER_V2,
    TRITON_DECODE,
    TRITON_MLA,
    WORKER,
    WORKSPACE,
)

DIVIDES = r"^( *)result = acc / e_sum\n"
WITHOUT_PLAN_IN_BUFFERS = cut(
    r"^ *self\.cg_buf_\w+\[:n\]\.copy_\(\w+\)\n",
    r"^ *\w+ = self\.cg_buf_\w+\[:n\]\n",
    r"^ *assert .*self\.cg_buf_.*\n",
)
PADDED_WITH_MINUS_ONE = swap(r"(num_reqs:num_reqs_padded\]\.fill_)\(NULL_BLOCK_ID\)", r"\1(-1)")
KERNELS_LENGTH = r"tl\.maximum\((seq_len - max_decode_len \+ local_idx \+ 1), 0\)"


def LENGTHS_BELOW_ZERO(text: str) -> str:  # noqa: N802 - one of the changes
    return swap(KERNELS_LENGTH, r"\1")(cut(r"(?<=^ {16}\))\.clamp_\(min=0\)$")(text))


WITHOUT_LOCK = cut(
    r"lock_workspace, (?=use_workspace_lane)", r"^ {8}if not profile_only:\n(?: +#.*\n)* +lock_workspace\(\)\n"
)
WITHOUT_THE_FIX: list[tuple[str, str, dict[str, Change]]] = [
    ("capture-state", "0.22.0", {CUDAGRAPHS: cut(r"^ {24}forward_fn, attn_state = create_forward_fn\(desc\)\n")}),
    ("mamba-padding", "0.23.0", {RUNNER: cut(r"^ *is_prefilling\[num_reqs:\] = False\n")}),
    ("flashmla-fp8", "0.23.0", {FLASHMLA: WITHOUT_PLAN_IN_BUFFERS}),
    ("flashmla-fp8", "0.33.0", {FLASHMLA: WITHOUT_PLAN_IN_BUFFERS}),
    ("flashmla-padding", "0.23.0", {RUNNER: PADDED_WITH_MINUS_ONE}),
    ("indexer-padding", "0.28.0", {INDEXER: LENGTHS_BELOW_ZERO}),
    ("indexer-padding", "0.29.0", {INDEXER: LENGTHS_BELOW_ZERO}),
    (
        "triton-mla-padding",  # the release before full graphs, with full graphs
        "0.21.0",
        {
            TRITON_MLA: swap(
                r"^class TritonMLABackend\(",
                "class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):\n"
                "    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH\n\n\nclass TritonMLABackend(",
            )
        },
    ),
    ("workspace-growth", "0.30.0", {RUNNER_V2: WITHOUT_LOCK}),
]


def PHASE_IN_THE_PREDICATE(text: str) -> str:  # noqa: N802 - a constant, but for what must not change between its parts
    """As in PR 53059: the predicate is told whether every row is past its prompt."""
    text = swap(
        r"^( *)force_uniform_decode: bool \| None = None,\n( *)\) -> bool:",
        r"\1force_uniform_decode: bool | None = None,\n\1past_prompt: bool = True,\n\2) -> bool:",
    )(text)
    text = swap(r"\(max_num_scheduled_tokens == uniform_decode_query_len\)\n", r"past_prompt\n")(text)
    return swap(
        r"^( *)force_uniform_decode=force_uniform_decode,\n",
        r"\1force_uniform_decode=force_uniform_decode,\n\1past_prompt=bool((self.input_batch.num_computed_tokens_cpu[:num_reqs] "
        r">= self.input_batch.num_prompt_tokens[:num_reqs]).all()),\n",
    )(text)


AFTER_THEY_ARE_PREPARED = r"(^ {16}self\._prepare_decode_tensors\(\n(?: {20}.*\n)+ {16}\)\n {12}\)\n)"
CLEARED = r"^( *)(self\._current_workspaces\[ubatch_id\] = None\n)"
UNPACKED = r"^( {8})(self\.input_batch\.prev_sampled_token_ids = None\n)(?=\n {8}def propose_draft_token_ids)"
_READ = r"^( *logits,\n *)hidden_states(,\n *scheduler_output\.total_num_scheduled_tokens,\n)"
COPIED_ALWAYS = swap(UNPACKED, r"\1\2\1hidden_states = hidden_states.clone()\n")


def COPIED_IF_SCORED(text: str) -> str:  # noqa: N802 - as the others, which are functions too
    made = r"\1\2\1scored = hidden_states\n\1if self.num_prompt_logprobs:\n\1    scored = torch.clone(hidden_states)\n"
    return swap(_READ, r"\1scored\2")(swap(UNPACKED, made)(text))


def COPIED_BEFORE_THE_DRAFT(text: str) -> str:  # noqa: N802
    """Where it is decided that the drafter comes first."""
    made = r"\1if input_fits_in_drafter:\n\1    if self.num_prompt_logprobs:\n\1        hidden_states = hidden_states[:].clone()\n"
    draft = r"^( {16})if input_fits_in_drafter:\n(?= *propose_draft_token_ids\(sampled_token_ids\)\n {16}else:)"
    return swap(draft, made)(text)


COPIED_BY_THE_TARGET = swap(
    r"^( {8})(self\.execute_model_state = ExecuteModelState\()",
    r"\1hidden_states = hidden_states.clone() if self.num_prompt_logprobs else hidden_states\n\1\2",
)


def SCORED_FIRST(text: str) -> str:  # noqa: N802
    """The log-probabilities are computed in `sample_tokens`, and handed to the bookkeeping."""
    made = r"\1\2\1scored = self._get_prompt_logprobs_dict(hidden_states, scheduler_output.num_scheduled_tokens)\n"
    handed = swap(
        r"prompt_logprobs_dict = self\._get_prompt_logprobs_dict\((\n.*){3}\)", "prompt_logprobs_dict = scored"
    )
    return swap(UNPACKED, made)(handed(text))


def SCORED_FIRST_NOW_AND_THEN(text: str) -> str:  # noqa: N802
    made = r"\1if self.odd:\n\1    scored = self._get_prompt_logprobs_dict("
    return swap(r"^( {8})scored = self\._get_prompt_logprobs_dict\(", made)(SCORED_FIRST(text))


def WITHOUT_ITS_ARGUMENT(text: str) -> str:  # noqa: N802
    """The bookkeeping takes the hidden states from elsewhere."""
    return swap(r"hidden_states\[:num_scheduled_tokens\],(?=\n *scheduler_output\.num_scheduled_tokens)", "self.kept,")(
        text
    )


WITH_THE_FIX = [
    (
        "capture-state",
        "0.21.0",
        {
            CUDAGRAPHS: swap(
                r"^( {24})(graph = torch\.cuda\.CUDAGraph\(\)\n)",
                r"\1forward_fn, attn_state = create_forward_fn(desc)\n\1\2",
            )
        },
    ),
    (
        "draft-decode-mode",
        "0.19.1",
        {EAGLE: swap(r"^( *)(cudagraph_mode = CUDAGraphMode\.FULL_DECODE_ONLY)\n", r"\1\2  # noted\n")},
    ),
    (
        "mamba-padding",
        "0.21.0",
        {RUNNER: swap(r"^( *)(is_prefilling = .*)\n", r"\1\2\n\1is_prefilling[num_reqs:] = False\n")},
    ),
    ("flashmla-padding", "0.19.1", {RUNNER: swap(r"(num_reqs:num_reqs_padded\]\.fill_)\(-1\)", r"\1(NULL_BLOCK_ID)")}),
    ("prefill-dispatch", "0.20.0", {RUNNER: PHASE_IN_THE_PREDICATE}),
    ("prefill-dispatch", "0.33.0", {RUNNER: PHASE_IN_THE_PREDICATE}),
    (
        "prefill-dispatch",
        "0.29.0",
        {
            RUNNER: swap(
                r"^( *)num_encoder_reqs=len\(",
                r"\1force_uniform_decode=False if (self.input_batch.num_computed_tokens_cpu[:num_reqs] "
                r"< self.input_batch.num_prompt_tokens[:num_reqs]).any() else None,\n\1num_encoder_reqs=len(",
            )
        },
    ),
    (
        "indexer-padding",
        "0.20.0",
        {
            INDEXER: lambda text: swap(r"= (seq_len - max_decode_len \+ local_idx \+ 1)$", r"= tl.maximum(0, \1)")(
                swap(r"(self\.offsets_buffer\[:max_decode_len\]\n {16}\))$", r"\1.clamp(min=0)")(text)
            )
        },
    ),
    *(
        ("indexer-padding", release, {INDEXER: swap(AFTER_THEY_ARE_PREPARED, rf"\1            {clamped}\n")})
        for release, clamped in (
            ("0.21.0", "seq_lens.clamp_(min=0)"),
            ("0.27.1", "seq_lens = torch.clamp(seq_lens, min=0)"),
        )
    ),
    *[
        ("triton-mla-padding", release, {path: change})
        for release, path, change in (
            ("0.22.0", TRITON_DECODE, swap(DIVIDES, r"\1result = tl.where(e_sum > 0.0, acc / e_sum, 0.0)\n")),
            ("0.33.0", TRITON_DECODE, swap(DIVIDES, r"\1result = tl.where(e_sum == 0, 0, acc / e_sum)\n")),
            (
                "0.33.0",
                TRITON_DECODE,
                swap(DIVIDES, r"\1safe = tl.where(e_sum == 0.0, 1.0, e_sum)\n\1result = acc / safe\n"),
            ),
            ("0.25.1", TRITON_DECODE, swap(DIVIDES, r"\1result = acc / tl.maximum(e_sum, 1e-20)\n")),
            (
                "0.27.1",
                TRITON_DECODE,
                swap(DIVIDES, r"\1result = acc\n\1if cur_batch_seq_len > 0:\n\1    result = acc / e_sum\n"),
            ),
            (
                "0.22.1",
                TRITON_MLA,
                swap(r"^( *)return o, lse\n", r"\1o.masked_fill_(padded[:, None, None], 0.0)\n\1return o, lse\n"),
            ),
            (
                "0.31.0",
                TRITON_MLA,
                swap(r"^( *)return o, lse\n", r"\1o = torch.where(filled[:, None, None], o, 0)\n\1return o, lse\n"),
            ),
            ("0.24.0", TRITON_MLA, swap(r"AttentionCGSupport\.UNIFORM_BATCH", "AttentionCGSupport.NEVER")),
        )
    ],
    (
        "workspace-growth",
        "0.21.0",
        {RUNNER_V2: swap(r"^( {8})(end_time = .*\n {8}end_free)", r"\1lock_workspace()\n\1\2")},
    ),
    (
        "workspace-growth",
        "0.25.1",
        {WORKER: swap(r"^( {12})(.* = self\.model_runner\.capture_model\(\)\n)", r"\1\2\1lock_workspace()\n")},
    ),
    (
        "workspace-growth",
        "0.20.0",
        {WORKSPACE: swap(CLEARED, r"\1self._outgrown[ubatch_id].append(current_workspace)\n\1\2")},
    ),
    ("workspace-growth", "0.19.1", {WORKSPACE: swap(CLEARED, r"\1self._outgrown.append(current_workspace)\n\1\2")}),
    (
        "idle-rank",
        "0.33.0",
        {
            RUNNER: swap(
                r"^( *)self\.input_batch\.block_table\.commit_block_table\(num_reqs_padded\)\n",
                r"\1for table in self.input_batch.block_table.block_tables:\n\1    table.get_device_tensor(num_reqs_padded).zero_()\n",
            ),
            PROPOSER: swap(
                r"^( *)(slot_mapping_dict = self\._get_slot_mapping\(num_input_tokens\)\n)",
                r"\1self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)\n\1\2",
            ),
        },
    ),
    ("prompt-logprobs", "0.14.1", {RUNNER: COPIED_ALWAYS}),
    ("prompt-logprobs", "0.33.0", {RUNNER: COPIED_ALWAYS}),
    ("prompt-logprobs", "0.21.0", {RUNNER: COPIED_IF_SCORED}),
    ("prompt-logprobs", "0.25.1", {RUNNER: COPIED_BEFORE_THE_DRAFT}),
    ("prompt-logprobs", "0.18.1", {RUNNER: COPIED_BY_THE_TARGET}),
    ("prompt-logprobs", "0.20.0", {RUNNER: SCORED_FIRST}),
]
