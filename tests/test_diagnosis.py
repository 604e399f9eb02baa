"""What the source of a vLLM says: all stock releases against the table, and shapes rather than versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from edited import edited
from nightly import make_nightly
from stock import ALL_RELEASES, release_root
from table import affected_by, verdict

from vllm_graphfix import manifest
from vllm_graphfix.fix import Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.source import Source, open_source
from vllm_graphfix.trial import Edit

CUDAGRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
EAGLE_CUDAGRAPHS = "vllm/v1/worker/gpu/spec_decode/eagle/cudagraph.py"
EAGLE_FIRST = "vllm/v1/worker/gpu/spec_decode/eagle_cudagraph.py"
EAGLE = "vllm/v1/worker/gpu/spec_decode/eagle/speculator.py"
PREFILL = "vllm/v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MAMBA = "vllm/v1/attention/backends/mamba_attn.py"
FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
UTILS = "vllm/v1/worker/utils.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
TRITON_MLA = "vllm/v1/attention/backends/mla/triton_mla.py"
TRITON_DECODE = "vllm/v1/attention/ops/triton_decode_attention.py"
DIVIDES = r"^( *)result = acc / e_sum\n"
WORKSPACE = "vllm/v1/worker/workspace.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
BLOCK_TABLE = "vllm/v1/worker/block_table.py"
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
BLOCK_TABLE_V2 = "vllm/v1/worker/gpu/block_table.py"
IDLE_SPECULATOR = "vllm/v1/worker/gpu/spec_decode/speculator.py"


def test_every_stock_release_is_judged_as_the_table_says(release: str) -> None:
    source = open_source(release_root(release))
    for fix in FIXES:
        found = manifest.diagnose(fix, source)
        assert (fix.name, found.verdict.value) == (fix.name, verdict(fix.name, release))
        assert found.known
        assert source.version == release


def test_structure_alone_comes_to_what_the_manifest_says(release: str) -> None:
    source = open_source(release_root(release))
    for fix in FIXES:
        found, _ = manifest.examine(fix, source)
        assert found == manifest.diagnose(fix, source)._replace(known=False)


def test_the_shipped_manifest_is_what_the_releases_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import make_manifest

    shipped = manifest.PATH.read_text()
    monkeypatch.setattr(manifest, "PATH", tmp_path / "manifest.json")
    make_manifest.make(list(ALL_RELEASES))
    assert manifest.PATH.read_text() == shipped
    make_manifest.make(["0.21.0"])
    assert manifest.PATH.read_text() == shipped, "looking at one release again changes nothing"


def test_a_diagnosis_reads_only_the_files_that_it_declares(release: str) -> None:
    root = release_root(release)
    stock = open_source(root)
    for fix in FIXES:
        asked: set[str] = set()

        def read(path: str, asked: set[str] = asked) -> bytes | None:
            asked.add(path)
            return stock.read(path)

        fix.diagnose(Source("recorded", read, lambda: None))
        assert asked <= set(fix.reads)


def test_the_place_is_in_the_source(release: str) -> None:
    root = release_root(release)
    for fix in FIXES:
        found = manifest.diagnose(fix, open_source(root))
        if found.verdict is Verdict.AFFECTED:
            assert found.where is not None
            path, line = found.where.rsplit(":", 1)
            assert (root / path).read_text().splitlines()[int(line) - 1].strip()


def cut(*patterns: str) -> Callable[[str], str]:
    """Cuts each match of *patterns*, which must occur."""

    def change(text: str) -> str:
        for pattern in patterns:
            text, count = re.subn(pattern, "", text, flags=re.MULTILINE)
            if not count:
                raise LookupError(pattern)
        return text

    return change


def swap(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    def change(text: str) -> str:
        changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not count:
            raise LookupError(pattern)
        return changed

    return change


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
WITHOUT_THE_FIX: list[tuple[str, str, dict[str, Callable[[str], str]]]] = [
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


@pytest.mark.parametrize(
    ("name", "release", "changes"), WITHOUT_THE_FIX, ids=[f"{row[0]}-{row[1]}" for row in WITHOUT_THE_FIX]
)
def test_a_fixed_release_with_the_fix_cut_out_is_affected(
    tmp_path: Path, name: str, release: str, changes: dict[str, Callable[[str], str]]
) -> None:
    root = release_root(release)
    assert manifest.diagnose(BY_NAME[name], open_source(root)).verdict is Verdict.FIXED
    found = manifest.diagnose(BY_NAME[name], open_source(edited(root, tmp_path / "vllm", changes)))
    assert found.verdict is Verdict.AFFECTED
    assert not found.known, "no release has this very code"


@pytest.mark.parametrize("without_mode", [True, False])
@pytest.mark.parametrize("without_zero_fill", [True, False])
def test_nightlies_before_pr_39773_are_affected(tmp_path: Path, without_mode: bool, without_zero_fill: bool) -> None:
    root = make_nightly(
        release_root("0.20.0"), tmp_path, without_mode=without_mode, without_zero_fill=without_zero_fill
    )
    found = manifest.diagnose(BY_NAME["draft-decode-mode"], open_source(root))
    assert found.verdict is (Verdict.AFFECTED if without_mode or without_zero_fill else Verdict.FIXED)
    assert ("-mode" in found.shape, "-indices" in found.shape) == (without_mode, without_zero_fill)


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
_UNPACKED = r"^( {8})(self\.input_batch\.prev_sampled_token_ids = None\n)(?=\n {8}def propose_draft_token_ids)"
_READ = r"^( *logits,\n *)hidden_states(,\n *scheduler_output\.total_num_scheduled_tokens,\n)"
COPIED_ALWAYS = swap(_UNPACKED, r"\1\2\1hidden_states = hidden_states.clone()\n")


def COPIED_IF_SCORED(text: str) -> str:  # noqa: N802 - as the others, which are functions too
    made = r"\1\2\1scored = hidden_states\n\1if self.num_prompt_logprobs:\n\1    scored = torch.clone(hidden_states)\n"
    return swap(_READ, r"\1scored\2")(swap(_UNPACKED, made)(text))


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
    return swap(_UNPACKED, made)(handed(text))


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


@pytest.mark.parametrize(("name", "release", "changes"), WITH_THE_FIX, ids=[row[0] for row in WITH_THE_FIX])
def test_a_release_with_the_fix_written_in_is_fixed(
    tmp_path: Path, name: str, release: str, changes: dict[str, Callable[[str], str]]
) -> None:
    found = manifest.diagnose(BY_NAME[name], open_source(edited(release_root(release), tmp_path / "vllm", changes)))
    assert found.verdict is Verdict.FIXED


def test_one_model_runner_may_have_the_remedy_and_the_other_not(tmp_path: Path) -> None:
    change: dict[str, Callable[[str], str]] = {RUNNER: PHASE_IN_THE_PREDICATE}
    found = manifest.diagnose(
        BY_NAME["prefill-dispatch"], open_source(edited(release_root("0.27.1"), tmp_path / "vllm", change))
    )
    assert (found.verdict, found.shape) == (Verdict.AFFECTED, "shape-only-v2")


UNSEEN: list[tuple[str, str, dict[str, Callable[[str], str]]]] = [
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
        {RUNNER: swap(_UNPACKED, r"\1\2\1if self.odd:\n\1    hidden_states = hidden_states.clone()\n")},
    ),
    ("prompt-logprobs", "0.20.0", {RUNNER: SCORED_FIRST_NOW_AND_THEN}),
    ("prompt-logprobs", "0.18.1", {RUNNER: WITHOUT_ITS_ARGUMENT}),
    ("prompt-logprobs", "0.17.1", {RUNNER: swap(_UNPACKED, r"\1\2\1hidden_states = self.keep(hidden_states)\n")}),
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


@pytest.mark.parametrize(
    ("name", "release", "changes"), UNSEEN, ids=[f"{row[0]}-{row[1]}-{number}" for number, row in enumerate(UNSEEN)]
)
def test_a_shape_that_nobody_has_looked_at_is_unrecognised(
    tmp_path: Path, name: str, release: str, changes: dict[str, Callable[[str], str]]
) -> None:
    found = manifest.diagnose(BY_NAME[name], open_source(edited(release_root(release), tmp_path / "vllm", changes)))
    assert found.verdict is Verdict.UNRECOGNISED
    assert not found.known


@pytest.mark.parametrize(
    ("release", "changes", "shape"),
    [
        (
            "0.33.0",
            {
                RUNNER: cut(
                    r"^ *if slot_mappings_by_group is not None:\n *for sm in slot_mappings_by_group\.values\(\):\n *sm\.fill_\(-1\)\n"
                )
            },
            "slots",
        ),
        ("0.31.0", {IDLE_SPECULATOR: swap(r"self\.idx_mapping\.fill_\(-1\)", "pass")}, "rows-and-drafts"),
        (
            "0.28.0",
            {BLOCK_TABLE_V2: swap(r"block_table\[:num_reqs\]\.zero_\(\)", "block_table[:num_reqs]")},
            "rows-and-tables",
        ),
        ("0.26.0", {RUNNER_V2: swap(r"skip_attn: bool = False", "skip_attn: bool = True")}, "rows-and-inputs"),
        (
            "0.15.0",
            {
                RUNNER: swap(
                    r"^( *)(# If force_attention is True.*)\n",
                    r"\1for sm in slot_mappings_by_group.values():\n\1    sm.fill_(-1)\n\1\2\n",
                )
            },
            "rows-and-inputs",
        ),
    ],
    ids=["slots", "drafts", "tables", "inputs", "padded"],
)
def test_what_an_idle_step_leaves_is_told_by_its_remedies(
    tmp_path: Path, release: str, changes: dict[str, Callable[[str], str]], shape: str
) -> None:
    root = release_root(release)
    found = manifest.diagnose(BY_NAME["idle-rank"], open_source(edited(root, tmp_path / "vllm", changes)))
    assert (found.verdict, found.shape) == (Verdict.AFFECTED, shape)


def test_a_vllm_whose_ranks_never_idle_has_no_such_step(tmp_path: Path) -> None:
    changes = {WORKER: swap(r"execute_dummy_batch", "nothing_to_do")}
    found = manifest.diagnose(
        BY_NAME["idle-rank"], open_source(edited(release_root("0.21.0"), tmp_path / "vllm", changes))
    )
    assert found.verdict is Verdict.ABSENT


def test_comments_and_formatting_do_not_make_a_shape_unknown(tmp_path: Path) -> None:
    root = edited(
        release_root("0.18.1"),
        tmp_path / "vllm",
        {FLASHMLA: lambda text: "# a fork's header\n\n" + text.replace("# MQA for the decode path", "")},
    )
    assert manifest.diagnose(BY_NAME["flashmla-fp8"], open_source(root)).known


def test_an_anonymous_release_is_judged_as_the_named_one(tmp_path: Path) -> None:
    root = edited(release_root("0.21.0"), tmp_path / "vllm", {RUNNER: lambda text: text + "\n# local change\n"})
    source = open_source(root)
    assert source.version is None
    assert affected_by("0.21.0") == tuple(
        fix.name for fix in FIXES if manifest.diagnose(fix, source).verdict is Verdict.AFFECTED
    )


def test_an_import_that_stands_deeper_is_still_seen(tmp_path: Path) -> None:
    change = {
        FLASHMLA: swap(
            r"^from vllm\.v1\.attention\.ops\.flashmla import \(\n((?: .*\n)+)\)",
            r"if True:\n    from vllm.v1.attention.ops.flashmla import (\n\1    )",
        )
    }
    source = open_source(edited(release_root("0.18.1"), tmp_path / "vllm", change))
    assert {name: manifest.diagnose(BY_NAME[name], source).verdict for name in affected_by("0.18.1")} == dict.fromkeys(
        affected_by("0.18.1"), Verdict.AFFECTED
    )


EDITS = [
    pytest.param(fix, edit, id=f"{fix.name}-{edit.release}-{edit.what}")
    for fix in FIXES
    if fix.trial is not None
    for edit in fix.trial().edits
]


@pytest.mark.parametrize(("fix", "edit"), EDITS)
def test_edits_of_a_trial_are_judged_as_it_says(tmp_path: Path, fix: Fix, edit: Edit) -> None:
    parts = ((edit.path, edit.pattern, edit.replacement), *edit.also)
    changes: dict[str, Callable[[str], str]] = {path: swap(pattern, text) for path, pattern, text in parts}
    found = manifest.diagnose(fix, open_source(edited(release_root(edit.release), tmp_path / "vllm", changes)))
    assert found.verdict is edit.verdict
    assert not found.known


@pytest.mark.parametrize("fix", [fix for fix in FIXES if fix.trial is not None], ids=lambda fix: fix.name)
def test_a_trial_edits_the_remedy_in_and_makes_a_shape_that_nobody_knows(fix: Fix) -> None:
    assert fix.trial is not None
    stock = {edit: verdict(fix.name, edit.release) for edit in fix.trial().edits}
    assert any(edit.verdict is Verdict.FIXED and was == "affected" for edit, was in stock.items())
    assert any(edit.verdict is Verdict.UNRECOGNISED for edit in stock)
