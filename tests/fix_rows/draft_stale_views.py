"""Trials of draft-stale-views: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._capture_source import DRAFT_MANAGERS, MANAGER, MODEL_STATES
from vllm_graphfix.fixes.draft_stale_views import _RUNNER, _SPECULATOR

v2, hopper, served = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "./qwen3 --attention-backend FLASH_ATTN"
mtp = """--speculative-config '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 2}'"""
LOOKED_UP = r"attn_state_pair = attn_states\[desc\]"
CHOSEN = r"attn_state = attn_state_pair\.warmup if warmup else attn_state_pair\.captured"

TARGET_CAPTURED = r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)"
PAIRS_BUILT = (
    "class PairsOfOwnBatches(dict):",
    "    def __init__(self, pairs, build):",
    "        super().__init__(pairs)",
    "        self.build = build",
    "",
    "    def __getitem__(self, desc):",
    "        return AttentionStatePair(*(self.build(desc, warmup)[1] for warmup in (True, False)))",
    "",
    "",
)
"""Pairs that are built whenever the draft looks one up."""
PREFILL_UNPACKED = r"attn_metadata, slot_mappings = attn_state\n(?=(?:.*\n)*?class Decode)"
BUILT = r"attn_metadata, slot_mappings = prepare_inputs_to_capture\(((?:\n {16}.*)+)\n {12}\)"

EDITS = (
    *(
        Edit(
            "states of its own, as the manager of its decodes has them",
            release,
            DRAFT_MANAGERS[0],
            r"^class DecodeSpeculatorCudaGraphManager",
            "class SpeculatorCudaGraphManager",
            Verdict.FIXED,
            also=(
                (DRAFT_MANAGERS[0], r"^class PrefillSpeculatorCudaGraphManager(?:.|\n)*?(?=^class |\Z)", ""),
                (_SPECULATOR, r"(Prefill|Decode)SpeculatorCudaGraphManager", "SpeculatorCudaGraphManager"),
            ),
            remedy=True,
        )
        for release in ("0.23.0", "0.24.0", "0.25.1")
    ),
    Edit(
        "pairs asked for in another way", "0.24.0", DRAFT_MANAGERS[0], r"attn_states\[desc\]", "attn_states.get(desc)"
    ),
    Edit(
        "inputs prepared by another function",
        "0.25.1",
        MANAGER,
        r"attn_metadata, slot_mappings = prepare_inputs_to_capture\(\n +num_reqs,",
        "attn_metadata, slot_mappings = prepare_inputs_to_capture(\n                num_reqs + 0,",
    ),
    Edit(
        "pairs that somebody else hands on",
        "0.23.0",
        _SPECULATOR,
        r"^( +)assert self\.prefill_cudagraph_manager is not None\n",
        r"\g<0>\1attn_states = dict(attn_states)\n",
    ),
    Edit(
        "a model state that keeps metadata",
        "0.26.0",
        MODEL_STATES,
        r"return DefaultModelState\(",
        "return CachedModelState(",
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
        REMEDY,
        "0.25.1",
        DRAFT_MANAGERS[0],
        {
            "the target hands on what builds": {
                MANAGER: both(
                    swap(
                        TARGET_CAPTURED,
                        "return PairsOfOwnBatches(super().capture(create_forward_fn, progress_bar_desc), "
                        "create_forward_fn)",
                    ),
                    before(r"class ModelCudaGraphManager", *PAIRS_BUILT),
                )
            },
            "built in the draft's factory": swap(
                PREFILL_UNPACKED, "attn_metadata, slot_mappings = self.build_state(desc)\n"
            ),
            "the runner hands on pairs of the draft's own": {
                _RUNNER: swap(
                    r"self\.speculator\.capture\(attn_states\)",
                    "self.speculator.capture(self.speculator.pairs_for(attn_states))",
                )
            },
            "the speculator hands on pairs of its own": {
                _SPECULATOR: swap(
                    r"self\._prefill,\n( +)attn_states,", r"self._prefill,\n\1self._own_pairs(attn_states),"
                )
            },
            "no full graphs of the prefill": {
                _SPECULATOR: swap(
                    r"(PrefillSpeculatorCudaGraphManager\(\n +self\.vllm_config,\n +self\.device,\n +)cudagraph_mode",
                    r"\1CUDAGraphMode.NONE",
                )
            },
            "the prefill builds its metadata": {
                _SPECULATOR: before(
                    r"last_hidden_states, hidden_states = self\._run_model\(\n +num_tokens,\n +attn_metadata,",
                    "attn_metadata = self._prefill_metadata(attn_metadata)",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.25.1",
        DRAFT_MANAGERS[0],
        {
            "copied": swap(LOOKED_UP, "import copy; attn_state_pair = copy.copy(attn_states[desc])"),
            "the captured one for both": swap(CHOSEN, "attn_state = attn_state_pair.captured"),
            "the warm-up's for both": swap(CHOSEN, "attn_state = attn_state_pair.warmup"),
            "built if debugging": before(
                PREFILL_UNPACKED, "if not __debug__:", "    attn_state = self.build_state(desc)"
            ),
            "built for piecewise graphs": before(
                PREFILL_UNPACKED,
                "if desc.cg_mode == CUDAGraphMode.PIECEWISE:",
                "    attn_state = self.build_state(desc)",
            ),
            "built and not used": after(CHOSEN, "own_state = getattr(self, 'build_state', dict)()"),
            "built by a helper that nobody calls": before(
                r"def capture\(\n +self,\n +forward_fn: Callable,\n +attn_states",
                "def own_state(self, *inputs):",
                "    return prepare_inputs_to_capture(*inputs)",
                "",
            ),
            "the buffers are prepared once, before": {
                _SPECULATOR: before(
                    r"self\.prefill_cudagraph_manager\.capture\(", "self.input_buffers.query_start_loc.zero_()"
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.26.0",
        DRAFT_MANAGERS[0],
        {
            "built for the first of a number of requests": both(
                swap(
                    BUILT,
                    (
                        r"if num_reqs not in built:\n                built[num_reqs] = prepare_inputs_to_capture(\1\n"
                        r"                )\n            attn_metadata, slot_mappings = built[num_reqs]"
                    ),
                ),
                before(r"def create_forward_fn\(", "built = {}", ""),
            ),
            "built for all first": {
                MANAGER: both(
                    swap(
                        r"^( +)for desc in descs:\n",
                        (
                            r"\1made = {(desc, warmup): create_forward_fn(desc, warmup=warmup)\n"
                            r"\1        for desc in self._capture_descs[mode] for warmup in (True, False)}\n"
                            r"\1for desc in descs:\n"
                        ),
                    ),
                    swap(r"forward_fn = create_forward_fn\(desc, warmup=(\w+)\)\n", r"forward_fn = made[desc, \1]\n"),
                )
            },
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
