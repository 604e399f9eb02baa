"""Trials of draft-stale-views: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import before, swap
from trial_rows import LOOKALIKE, SHAPE, Edit, Served, Wording
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._capture_source import DRAFT_MANAGERS, MANAGER
from vllm_graphfix.fixes.draft_stale_views import _SPECULATOR

affects, does_not = Concern.CONCERNS, Concern.DOES_NOT
v2, hopper, served = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "./qwen3 --attention-backend FLASH_ATTN"
mtp = """--speculative-config '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 2}'"""
LOOKED_UP = r"attn_state_pair = attn_states\[desc\]"
CHOSEN = r"attn_state = attn_state_pair\.warmup if warmup else attn_state_pair\.captured"

EDITS = (
    Edit(
        "states of its own, as the manager of its decodes has them",
        "0.25.1",
        DRAFT_MANAGERS[0],
        r"^class DecodeSpeculatorCudaGraphManager",
        "class SpeculatorCudaGraphManager",
        Verdict.FIXED,
        also=((DRAFT_MANAGERS[0], r"^class PrefillSpeculatorCudaGraphManager", "class PrefillsOfSpeculators"),),
        remedy=True,
    ),
    Edit(
        "pairs asked for in another way",
        "0.24.0",
        DRAFT_MANAGERS[0],
        r"attn_states\[desc\]",
        "attn_states.get(desc)",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "inputs prepared by another function",
        "0.25.1",
        MANAGER,
        r"attn_metadata, slot_mappings = prepare_inputs_to_capture\(\n +num_reqs,",
        "attn_metadata, slot_mappings = prepare_inputs_to_capture(\n                num_reqs + 0,",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "pairs that somebody else hands on",
        "0.23.0",
        _SPECULATOR,
        r"^( +)assert self\.prefill_cudagraph_manager is not None\n",
        r"\g<0>\1attn_states = dict(attn_states)\n",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.25.1", f"{v2}{served} {mtp}", affects, "eagle3", hopper),
    Served("0.23.0", f"{v2}{served} {mtp}", affects, "eagle3", hopper),
    Served("0.25.1", f"{v2}{served}", does_not, "no speculator", hopper),
    Served("0.25.1", f"{v2}{served} {mtp} --enforce-eager", does_not, "--enforce-eager", hopper),
    Served("0.25.1", f"{v2.replace('=1', '=0')}{served} {mtp}", does_not, "V1", hopper),
    Served("0.25.1", f"{v2}./v3 --attention-backend FLASH_ATTN_MLA {mtp}", affects, "eagle3", hopper),
)

WORDINGS = (
    Wording(
        LOOKALIKE,
        "0.25.1",
        DRAFT_MANAGERS[0],
        {
            "copied": swap(LOOKED_UP, "import copy; attn_state_pair = copy.copy(attn_states[desc])"),
            "the captured one for both": swap(CHOSEN, "attn_state = attn_state_pair.captured"),
            "the warm-up's for both": swap(CHOSEN, "attn_state = attn_state_pair.warmup"),
        },
    ),
    Wording(
        SHAPE,
        "0.25.1",
        MANAGER,
        {
            "the manager returns a copy": swap(r"return attn_states\n", "return dict(attn_states)\n"),
            "pairs on the manager": before(r"return attn_states\n", "self.attn_states = attn_states"),
        },
    ),
)
