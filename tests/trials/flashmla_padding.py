"""Trials of flashmla-padding: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.flashmla_padding import _RUNNER

filled = r"(num_reqs:num_reqs_padded\]\.fill_)"
affects, does_not = Concern.CONCERNS, Concern.DOES_NOT
hopper = "NVIDIA H100 80GB HBM3"

EDITS = (
    Edit(
        "padded with -1",
        "0.23.0",
        _RUNNER,
        rf"{filled}\(NULL_BLOCK_ID\)",
        r"\1(-1)",
        Verdict.AFFECTED,
        runs=True,
    ),
    Edit(
        "padded with the null block",
        "0.19.1",
        _RUNNER,
        rf"{filled}\(-1\)",
        r"\1(NULL_BLOCK_ID)",
        Verdict.FIXED,
    ),
    Edit("padded with another", "0.18.1", _RUNNER, rf"{filled}\(-1\)", r"\1(self.pad)", Verdict.UNRECOGNISED),
    Edit(
        "padded with either",
        "0.19.1",
        _RUNNER,
        r"^( *)(blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_)\(-1\)\n",
        r"\1if self.odd:\n\1    \2(NULL_BLOCK_ID)\n\1else:\n\1    \2(-1)\n",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.18.1", "/usr/bin/vllm serve ./v3 --kv-cache-dtype fp8", affects, "fp8", hopper),
    Served("0.18.1", "./v3 --kv-cache-dtype fp8 --enforce-eager", does_not, "--enforce-eager", hopper),
)
