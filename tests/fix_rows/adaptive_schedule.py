"""Trials of adaptive-schedule: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.adaptive_schedule import _BACKEND, _BATCH, _GRAPHS, _RUNNER, _STATES

fixed = Verdict.FIXED
v2, hopper = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3"
longest = (
    r"max_query_len=\(\n +int\(num_scheduled_tokens_upper_bound\.max\(\)\)\n"
    r" +if adaptive_verification is not None\n +else None\n +\),"
)
made = r"^( +)if self\.pcp_manager is not None:\n +input_batch = self\.pcp_manager\.partition_batch"
taken = r"max_query_len = input_batch\.max_query_len\n"
step = "int(num_scheduled_tokens_upper_bound.max()) if adaptive_verification is not None else None"


def dspark(adaptive: str = ', "enable_adaptive_verification": true', method: str = "dspark") -> str:
    return f'--speculative-config \'{{"method": "{method}", "model": "draft", "num_speculative_tokens": 7{adaptive}}}\''


EDITS = (
    Edit("the graph's longest", "0.33.0", _RUNNER, longest, "max_query_len=batch_desc.max_query_len,", fixed),
    Edit(
        "the graph's longest, or the step's",
        "0.28.0",
        _RUNNER,
        longest,
        f"max_query_len=batch_desc.max_query_len or ({step}),",
        fixed,
    ),
    Edit(
        "the graph's longest in some steps",
        "0.31.0",
        _RUNNER,
        longest,
        "max_query_len=batch_desc.max_query_len if draft_tokens else None,",
    ),
    Edit(
        "the longest after drafts are cut",
        "0.30.0",
        _RUNNER,
        r"int\(num_scheduled_tokens_upper_bound\.max\(\)\)",
        "int(num_scheduled_tokens_np.max())",
    ),
    Edit(
        "told otherwise afterwards",
        "0.33.0",
        _RUNNER,
        made,
        r"\1input_batch.max_query_len = self.decode_query_len\n\g<0>",
    ),
    Edit(
        "only graphs for just as many",
        "0.32.0",
        _GRAPHS,
        r"desc\.max_query_len >= max_query_len",
        "desc.max_query_len == max_query_len",
    ),
    Edit(
        "graphs of another longest",
        "0.29.0",
        _GRAPHS,
        r"max_query_len=self\.decode_query_len",
        "max_query_len=num_tokens",
    ),
    Edit("captured without it", "0.28.0", _BATCH, r"max_query_len=max_query_len,", "max_query_len=None,"),
    Edit("builders told of another", "0.33.0", _STATES, taken, "max_query_len = input_batch.longest_of_its_graph\n"),
    Edit(
        "prepared for another graph",
        "0.31.0",
        _RUNNER,
        r"scheduler_output, batch_req_state, batch_desc, num_active_loras\n",
        "scheduler_output, batch_req_state, self.largest, num_active_loras\n",
    ),
    Edit("dispatched without it", "0.30.0", _RUNNER, r"^ +max_query_len=max_query_len,\n", ""),
    Edit(
        "no adaptive verification",
        "0.28.0",
        _RUNNER,
        r"adaptive_verification",
        "verification",
        also=((_GRAPHS, r"varlen_decode", "uniform_decode"),),
    ),
    Edit(
        "no schedule is made ahead with adaptive verification",
        "0.33.0",
        _BACKEND,
        r"^( +)self\.aot_schedule = get_flash_attn_version\(\) == 3\n",
        r"\g<0>\1if vllm_config.speculative_config is not None:\n\1    self.aot_schedule = False\n",
    ),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _RUNNER,
        {
            "the runner's longest": swap(
                longest, "max_query_len=self.decode_query_len if self.adaptive_verification is not None else None,"
            ),
            "the longer one": swap(longest, f"max_query_len=max(batch_desc.max_query_len or 0, {step} or 0) or None,"),
            "set afterwards": swap(
                made, r"\1input_batch.max_query_len = batch_desc.max_query_len or input_batch.max_query_len\n\g<0>"
            ),
            "set by who runs the step": before(
                r"block_tables, slot_mappings = self\.prepare_attn\(input_batch\)",
                "if batch_desc.max_query_len is not None:",
                "    input_batch.max_query_len = batch_desc.max_query_len",
            ),
            "the builder's longest": {
                _BACKEND: after(
                    r"max_query_len = common_attn_metadata\.max_query_len",
                    "if common_attn_metadata.max_query_len <= self.decode_query_len and self.use_full_cuda_graph:",
                    "    max_query_len = self.decode_query_len",
                )
            },
            "the model state's longest": {
                _STATES: after(
                    r"max_query_len = input_batch\.max_query_len",
                    "if max_query_len is not None:",
                    "    max_query_len = max(max_query_len, self.decode_query_len)",
                )
            },
            "a batch made anew": swap(
                made,
                r"\1import dataclasses; input_batch = dataclasses.replace(input_batch, "
                r"max_query_len=batch_desc.max_query_len or input_batch.max_query_len)\n\g<0>",
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _RUNNER,
        {
            "the runner's longest, in steps with drafts": swap(
                longest, "max_query_len=self.decode_query_len if adaptive_verification is not None else None,"
            ),
            "the graph's number for all requests": swap(longest, "max_query_len=batch_desc.uniform_token_count,"),
            "set on a copy": swap(
                made, r"\1import copy; copy.copy(input_batch).max_query_len = batch_desc.max_query_len\n\g<0>"
            ),
            "set, and undone": both(
                swap(longest, "max_query_len=batch_desc.max_query_len,"),
                swap(made, rf"\1input_batch.max_query_len = {step}\n\g<0>"),
            ),
            "set, and taken away": both(
                swap(longest, "max_query_len=batch_desc.max_query_len,"),
                swap(made, r"\1self.longest = input_batch.max_query_len; input_batch.max_query_len = None\n\g<0>"),
            ),
            "set, and not read": {
                _RUNNER: swap(longest, "max_query_len=batch_desc.max_query_len,"),
                _STATES: swap(taken, "max_query_len = None\n"),
            },
            "the shorter one": swap(longest, f"max_query_len=min(batch_desc.max_query_len or 1, {step} or 1),"),
        },
    ),
    Wording(
        SHAPE,
        "0.28.0",
        _STATES,
        {"asked of the batch at once": swap(taken, "max_query_len = int(input_batch.longest_query())\n")},
    ),
)

SERVED = (
    Served("0.33.0", f"{v2}./llama {dspark()}", affects, "enable_adaptive_verification is on", hopper),
    Served("0.28.0", f"{v2}./llama {dspark()} -cc.cudagraph_mode=FULL_DECODE_ONLY", affects, "dspark", "NVIDIA H200"),
    Served("0.33.0", f"{v2}./llama {dspark(adaptive='')}", does_not, "enable_adaptive_verification is off", hopper),
    Served("0.33.0", f"{v2}./llama {dspark(method='dflash')}", does_not, "dflash", hopper),
    Served("0.33.0", f"{v2}./llama", does_not, "no speculator", hopper),
    Served("0.33.0", f"{v2}./llama {dspark()} --enforce-eager", does_not, "--enforce-eager", hopper),
    Served("0.33.0", f"{v2}./llama {dspark()} -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", hopper),
    Served("0.33.0", f"{v2.replace('=1', '=0')}./llama {dspark()}", does_not, "V1", hopper),
    Served("0.33.0", f"{v2}./llama {dspark()}", does_not, "NVIDIA A100", "NVIDIA A100"),
    Served("0.33.0", f"{v2}./llama {dspark()}", unknown, "GPU"),
    Served("0.33.0", f"{v2}./llama --config more.yaml {dspark()}", unknown, "--config", hopper),
)
