"""Trials of idle-rank: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.idle_rank import _PROPOSER, _RUNNER, _RUNNER_V2, _SPECULATOR_V2, _TABLE, _TABLE_V2, _WORKER

COMMIT = r"self\.input_batch\.block_table\.commit_block_table\(num_reqs_padded\)"
EMPTY_ROWS = (
    "for table in self.input_batch.block_table.block_tables:",
    "    table.get_device_tensor(num_reqs_padded).zero_()",
)
PADDED_DRAFTS = before(
    r"slot_mapping_dict = self\._get_slot_mapping", "self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)"
)
IDLE_RUN = r"self\.model_runner\._dummy_run\("
slots = r"self\._get_slot_mapping\(num_input_tokens\)"

EDITS = (
    Edit(
        "tables and drafts' slots emptied",
        "0.33.0",
        _RUNNER,
        r"^( *)self\.input_batch\.block_table\.commit_block_table\(num_reqs_padded\)\n",
        (
            r"\1for table in self.input_batch.block_table.block_tables:\n"
            r"\1    table.get_device_tensor(num_reqs_padded).zero_()\n"
        ),
        Verdict.FIXED,
        also=(
            (
                _PROPOSER,
                rf"^( *)(slot_mapping_dict = {slots}\n)",
                r"\1self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)\n\1\2",
            ),
        ),
    ),
    Edit(
        "emptied, and not for the mode of a full graph",
        "0.33.0",
        _RUNNER,
        r"^( *)self\.input_batch\.block_table\.commit_block_table\(num_reqs_padded\)\n",
        (
            r"\1for table in self.input_batch.block_table.block_tables:\n"
            r"\1    table.get_device_tensor(num_reqs_padded).zero_()\n"
        ),
        also=(
            (
                _PROPOSER,
                rf"^( *)(slot_mapping_dict = {slots}\n)",
                r"\1self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)\n\1\2",
            ),
            (_RUNNER, r"(if force_attention or cudagraph_runtime_mode == CUDAGraphMode\.FULL)", r"\1_DECODE_ONLY"),
        ),
    ),
    Edit(
        "slots not padded",
        "0.33.0",
        _RUNNER,
        (
            r"^ *if slot_mappings_by_group is not None:\n *for sm in slot_mappings_by_group\.values\(\):\n"
            r" *sm\.fill_\(-1\)\n"
        ),
        "",
    ),
    Edit("drafts' tables kept", "0.31.0", _SPECULATOR_V2, r"self\.idx_mapping\.fill_\(-1\)", "pass"),
    Edit("tables kept", "0.28.0", _TABLE_V2, r"block_table\[:num_reqs\]\.zero_\(\)", "block_table[:num_reqs]"),
    Edit("inputs kept", "0.26.0", _RUNNER_V2, r"skip_attn: bool = False", "skip_attn: bool = True"),
    Edit(
        "slots padded",
        "0.15.0",
        _RUNNER,
        r"^( *)(# If force_attention is True.*)\n",
        r"\1for sm in slot_mappings_by_group.values():\n\1    sm.fill_(-1)\n\1\2\n",
    ),
    Edit("ranks that never idle", "0.21.0", _WORKER, r"execute_dummy_batch", "nothing_to_do"),
    Edit(
        "another step without work",
        "0.14.1",
        _WORKER,
        r"self\.model_runner\._dummy_run\(1,",
        "self.model_runner.run_idle(1,",
    ),
    Edit(
        "something after it",
        "0.21.0",
        _WORKER,
        r"(self\.model_runner\._dummy_run\(num_tokens, uniform_decode=True\))",
        r"\1; self.model_runner.tidy()",
    ),
    Edit(
        "padded in two places",
        "0.20.0",
        _RUNNER,
        r"^( *)sm\.fill_\(-1\)\n",
        r"\1if self.odd:\n\1    sm.fill_(-1)\n\1else:\n\1    sm.fill_(-1)\n",
    ),
    Edit("slots from elsewhere", "0.20.0", _RUNNER, r"slot_mappings_by_group\.values\(\):", "self.mappings():"),
    Edit(
        "tables from elsewhere",
        "0.18.1",
        _RUNNER,
        r"blk_table = self\.input_batch\.block_table\[kv_cache_gid\]",
        "blk_table = self.tables[kv_cache_gid]",
    ),
    Edit(
        "tables committed in part",
        "0.25.1",
        _TABLE,
        r"self\.block_table\.copy_to_gpu\(num_reqs\)",
        "self.block_table.copy_dirty_rows()",
    ),
    Edit(
        "drafts' slots from elsewhere",
        "0.33.0",
        _PROPOSER,
        slots,
        "self._get_slot_mapping(num_input_tokens, self.slots)",
    ),
    Edit("V2: padded elsewhere", "0.25.1", _TABLE_V2, r"self\.slot_mappings\.fill_\(PAD_SLOT_ID\)", "self.pad()"),
)

SERVED = (
    Served("0.18.1", "./v3 -dp 8", affects, "--data-parallel-size 8"),
    Served("0.18.1", "./v3", does_not, "one data-parallel rank"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _RUNNER,
        {
            "emptied behind the copy": {_RUNNER: after(COMMIT, *EMPTY_ROWS), _PROPOSER: PADDED_DRAFTS},
            "each table emptied": {
                _RUNNER: swap(
                    COMMIT, "[table.block_table.gpu.zero_() for table in self.input_batch.block_table.block_tables]"
                ),
                _PROPOSER: PADDED_DRAFTS,
            },
            "by a method of the tables": {
                _RUNNER: swap(COMMIT, "self.input_batch.block_table.clear_device_rows()"),
                _TABLE: before(
                    r"def commit_block_table\(self, num_reqs: int\) -> None:\n +for",
                    "def clear_device_rows(self) -> None:",
                    "    for table in self.block_tables:",
                    "        table.block_table.gpu.zero_()",
                    "",
                ),
                _PROPOSER: PADDED_DRAFTS,
            },
            "drafts' slots in their view": {
                _RUNNER: after(COMMIT, *EMPTY_ROWS),
                _PROPOSER: after(
                    r"slot_mapping_dict = self\._get_slot_mapping\(num_input_tokens\)",
                    "[view.fill_(PADDING_SLOT_ID) for view in slot_mapping_dict.values()]",
                ),
            },
            "in the worker": {
                _WORKER: before(
                    r"num_tokens = getattr\(self\.model_runner, .*\n +self\.model_runner\._dummy_run",
                    "runner = self.model_runner",
                    "runner.input_batch.block_table.commit_block_table = lambda num_reqs: None",
                    "for table in runner.input_batch.block_table.block_tables:",
                    "    table.block_table.gpu.zero_()",
                    "if hasattr(getattr(runner, 'drafter', None), '_slot_mapping_buffer'):",
                    "    runner.drafter._slot_mapping_buffer.fill_(-1)",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _RUNNER,
        {
            "emptied before the copy": {_RUNNER: before(COMMIT, *EMPTY_ROWS), _PROPOSER: PADDED_DRAFTS},
            "emptied after the metadata": {
                _RUNNER: before(
                    r"with self\.maybe_dummy_run_with_lora\(",
                    *EMPTY_ROWS,
                    "self.input_batch.block_table.commit_block_table(1)",
                ),
                _PROPOSER: PADDED_DRAFTS,
            },
            "emptied for captures": {
                _RUNNER: after(COMMIT, "if is_graph_capturing:", *(f"    {line}" for line in EMPTY_ROWS)),
                _PROPOSER: PADDED_DRAFTS,
            },
            "emptied and copied again": {
                _RUNNER: after(COMMIT, *EMPTY_ROWS, "self.input_batch.block_table.commit_block_table(num_reqs)"),
                _PROPOSER: PADDED_DRAFTS,
            },
            "a copy emptied": {
                _RUNNER: after(COMMIT, EMPTY_ROWS[0], "    table.get_device_tensor(num_reqs_padded).clone().zero_()"),
                _PROPOSER: PADDED_DRAFTS,
            },
            "another request's rows emptied": {
                _RUNNER: after(
                    COMMIT, EMPTY_ROWS[0], "    table.get_device_tensor(num_reqs_padded)[num_reqs:].zero_()"
                ),
                _PROPOSER: PADDED_DRAFTS,
            },
            "drafts' slots padded while capturing": {
                _RUNNER: after(COMMIT, *EMPTY_ROWS),
                _PROPOSER: before(
                    r"slot_mapping_dict = self\._get_slot_mapping",
                    "if is_graph_capturing:",
                    "    self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)",
                ),
            },
            "drafts' slots of a copy padded": {
                _RUNNER: after(COMMIT, *EMPTY_ROWS),
                _PROPOSER: before(
                    r"slot_mapping_dict = self\._get_slot_mapping",
                    "self._slot_mapping_buffer.clone().fill_(PADDING_SLOT_ID)",
                ),
            },
            "emptied in the worker before a copy": {
                _WORKER: before(
                    IDLE_RUN + r"\n +num_tokens,\n +uniform_decode=True",
                    "for table in getattr(self.model_runner, 'input_batch').block_table.block_tables:",
                    "    table.block_table.gpu.zero_()",
                )
            },
        },
    ),
)

OBSERVED = ([4.0, 900.0], [0.0, 900.0])
"""The values of its probe on stock, and with the fix."""
