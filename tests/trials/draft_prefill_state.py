"""Trials of draft-prefill-state: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.draft_prefill_state import _EAGLE, _LATER

affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
v2, hopper, served = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "./v3 --attention-backend FLASHMLA"
mtp = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
n_gram = """--speculative-config '{"method": "ngram"}'"""
deepseek = "--speculative-config.method deepseek_mtp"

EDITS = (
    Edit(
        "states of its own, in a new file",
        "0.22.1",
        _LATER[1],
        r"\A",
        "class SpeculatorCudaGraphManager:\n"
        "    def capture(self, forward_fn):\n"
        "        def create_forward_fn(desc):\n"
        "            attn_metadata, slot_mappings = prepare_inputs_to_capture(self.input_buffers)\n"
        "            return lambda mode: forward_fn(attn_metadata, slot_mappings, mode)\n",
        Verdict.FIXED,
        also=((_EAGLE, r"^class PrefillEagleCudaGraphManager", "class PrefillsOfEagle"),),
    ),
    Edit(
        "states asked for in another way",
        "0.22.1",
        _EAGLE,
        r"full_cg_attn_states\[desc\]",
        "full_cg_attn_states.get(desc)",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "a captured state for each pass",
        "0.23.0",
        _LATER[0],
        r"if warmup else attn_state_pair\.captured",
        "or attn_state_pair.captured",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.21.0", f"{v2}{served} {mtp}", affects, "mtp", hopper),
    Served("0.21.0", f"{v2}{served} {deepseek}", affects, "deepseek_mtp", hopper),
    Served("0.22.1", f"{served} {mtp}", unknown, "VLLM_USE_V2_MODEL_RUNNER", hopper),
    Served("0.22.1", served, does_not, "V1 for this model", hopper),
    Served("0.22.1", f"{v2}./qwen3", does_not, "no speculator", hopper),
    Served("0.21.0", f"{v2}{served}", does_not, "no speculator", hopper),
    Served("0.21.0", f"{v2}{served} {n_gram}", does_not, "ngram", hopper),
)
