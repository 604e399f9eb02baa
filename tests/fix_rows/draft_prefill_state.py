"""Trials of draft-prefill-state: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._capture_source import DRAFT_MANAGERS, EAGLE, MANAGER, MODEL_STATES
from vllm_graphfix.fixes.draft_prefill_state import _RUNNER, _SPECULATOR

v2, hopper, served = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "./v3 --attention-backend FLASHMLA"
mtp = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
n_gram = """--speculative-config '{"method": "ngram"}'"""
deepseek = "--speculative-config.method deepseek_mtp"

CAPTURED = r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)"
TWO_STATES = (
    "states = super().capture(create_forward_fn, progress_bar_desc)\n"
    "        return {desc: [create_forward_fn(desc)[1] for _ in range(2)] for desc in states}"
)
"""For the draft: one for its warm-up, one for its graph."""
one_for_each_pass = (EAGLE, r"full_cg_attn_states\[desc\]", "full_cg_attn_states[desc].pop()")
created_again = r"\1forward_fn, attn_state = create_forward_fn(desc)\n\1captured_attn_states[desc] = attn_state\n\1\2"
TAKEN = r"attn_state = full_cg_attn_states\[desc\]"
WARM_UP = r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)"

EDITS = (
    Edit("two states handed on", "0.22.1", MANAGER, CAPTURED, TWO_STATES, also=(one_for_each_pass,), remedy=True),
    Edit(
        "two states handed on, and one for the target's recorded pass",
        "0.21.0",
        MANAGER,
        CAPTURED,
        TWO_STATES,
        also=(one_for_each_pass, (MANAGER, r"^( *)(graph = torch\.cuda\.CUDAGraph\(\)\n)", created_again)),
        remedy=True,
    ),
    Edit(
        "states of its own, in a new file",
        "0.22.1",
        DRAFT_MANAGERS[1],
        r"\A",
        "class SpeculatorCudaGraphManager:\n"
        "    def capture(self, forward_fn):\n"
        "        def create_forward_fn(desc):\n"
        "            attn_metadata, slot_mappings = prepare_inputs_to_capture(self.input_buffers)\n"
        "            return lambda cg_mode: forward_fn(num_reqs, num_tokens, attn_metadata, slot_mappings, cg_mode)\n",
        Verdict.FIXED,
        also=((EAGLE, r"^class PrefillEagleCudaGraphManager(?:.|\n)*?(?=^class |\Z)", ""),),
    ),
    Edit(
        "states asked for in another way",
        "0.22.1",
        EAGLE,
        r"full_cg_attn_states\[desc\]",
        "full_cg_attn_states.get(desc)",
    ),
    Edit(
        "a captured state for each pass",
        "0.23.0",
        DRAFT_MANAGERS[0],
        r"if warmup else attn_state_pair\.captured",
        "or attn_state_pair.captured",
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
    Served("0.21.0", f"{v2}{served} {mtp}", affects, "mtp", hopper),
    Served("0.21.0", f"{v2}{served} {deepseek}", affects, "deepseek_mtp", hopper),
    Served("0.22.1", f"{served} {mtp}", unknown, "VLLM_USE_V2_MODEL_RUNNER", hopper),
    Served("0.22.1", served, does_not, "V1 for this model", hopper),
    Served("0.22.1", f"{v2}./qwen3", does_not, "no speculator", hopper),
    Served("0.21.0", f"{v2}{served}", does_not, "no speculator", hopper),
    Served("0.21.0", f"{v2}{served} {n_gram}", does_not, "ngram", hopper),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.22.1",
        EAGLE,
        {
            "built in the draft's factory": swap(TAKEN, "attn_state = self.build_state(desc)"),
            "the runner hands on states of the draft's own": {
                _RUNNER: swap(
                    r"self\.speculator\.capture\(captured_attn_states\)",
                    "self.speculator.capture(self.speculator.states_for(captured_attn_states))",
                )
            },
            "the speculator hands on states of its own": {
                _SPECULATOR: swap(
                    r"self\.prefill,\n( +)attn_states,", r"self.prefill,\n\1self._untouched(attn_states),"
                )
            },
            "no full graphs of the prefill": {
                _SPECULATOR: swap(
                    r"(PrefillEagleCudaGraphManager\(\n +self\.vllm_config,\n +self\.device,\n +)cudagraph_mode",
                    r"\1CUDAGraphMode.NONE",
                )
            },
            "the target returns what builds": {
                MANAGER: swap(
                    CAPTURED,
                    "return StatesAnew(super().capture(create_forward_fn, progress_bar_desc), create_forward_fn)",
                )
            },
            "two states by index": {
                MANAGER: swap(CAPTURED, TWO_STATES),
                EAGLE: swap(TAKEN, r"attn_state = full_cg_attn_states[desc].pop(0)"),
            },
            "the factory handed on": {
                MANAGER: before(
                    r"self\._graphs_captured = True\n",
                    "captured_attn_states = dict.fromkeys(captured_attn_states, create_forward_fn)",
                ),
                EAGLE: swap(TAKEN, "attn_state = full_cg_attn_states[desc](desc)[1]"),
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.22.1",
        EAGLE,
        {
            "built and not used": after(TAKEN, "own_state = getattr(self, 'build_state', dict)()"),
            "built if debugging": after(TAKEN, "if not __debug__:", "    attn_state = self.build_state(desc)"),
            "built for piecewise graphs": after(
                TAKEN, "if desc.cg_mode == CUDAGraphMode.PIECEWISE:", "    attn_state = self.build_state(desc)"
            ),
            "built by a helper that nobody calls": before(
                r"def capture\(\n +self,\n +forward_fn: Callable,\n +full_cg_attn_states",
                "def own_state(self, *inputs):",
                "    return prepare_inputs_to_capture(*inputs)",
                "",
            ),
            "copied": swap(TAKEN, "import copy; attn_state = copy.copy(full_cg_attn_states[desc])"),
            "copied deep": swap(TAKEN, "import copy; attn_state = copy.deepcopy(full_cg_attn_states[desc])"),
            "copied behind": swap(
                rf"{TAKEN}\n( +)attn_metadata, slot_mappings = attn_state",
                (
                    r"attn_state = full_cg_attn_states[desc]\n\1attn_state = type(attn_state)(*attn_state)\n"
                    r"\1attn_metadata, slot_mappings = attn_state"
                ),
            ),
            "one new state": {
                MANAGER: before(
                    r"self\._graphs_captured = True\n",
                    "captured_attn_states = {d: create_forward_fn(d)[1] for d in captured_attn_states}",
                )
            },
            "replaced behind": before(
                (
                    r"attn_metadata, slot_mappings = attn_state\n            fwd = lambda cg_mode: forward_fn\(\n"
                    r"(?=(?:.*\n)*?class Decode)"
                ),
                "attn_state = self.fresh.get(desc, attn_state) if hasattr(self, 'fresh') else attn_state",
            ),
        },
    ),
    Wording(
        SHAPE,
        "0.22.1",
        MANAGER,
        {
            "by get": {EAGLE: swap(TAKEN, "attn_state = full_cg_attn_states.get(desc)")},
            "by get and again": {
                EAGLE: swap(
                    TAKEN, "attn_state = full_cg_attn_states[desc]; attn_state = dict.get(full_cg_attn_states, desc)"
                )
            },
            "by keys": {
                EAGLE: swap(TAKEN, "attn_state = next(s for d, s in full_cg_attn_states.items() if d == desc)")
            },
            "states kept first": {
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "kept_states = dict(full_cg_attn_states)",
                    "full_cg_attn_states = kept_states",
                )
            },
            "states as a list": {
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "self.states = list(full_cg_attn_states.values())",
                )
            },
            "states are required to be a dict": {
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "assert type(full_cg_attn_states) is dict",
                )
            },
            "the manager returns no dict": swap(
                r"return captured_attn_states\n", "import types; return types.MappingProxyType(captured_attn_states)\n"
            ),
            "the manager returns a copy": swap(
                CAPTURED, "return dict(super().capture(create_forward_fn, progress_bar_desc))"
            ),
            "the manager returns more": both(
                swap(r"return captured_attn_states\n", "return captured_attn_states, len(captured_attn_states)\n"),
                swap(CAPTURED, "return super().capture(create_forward_fn, progress_bar_desc)[0]"),
            ),
            "states on the manager": before(
                r"return captured_attn_states\n", "self.captured_attn_states = captured_attn_states"
            ),
            "the target states by attribute": swap(
                CAPTURED,
                "self.states = super().capture(create_forward_fn, progress_bar_desc)\n        return self.states",
            ),
            "two warm ups": swap(WARM_UP, r"\1forward_fn(CUDAGraphMode.NONE)\n\1forward_fn(CUDAGraphMode.NONE)\n\n\2"),
            "no warm up": swap(WARM_UP, r"\2"),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.23.0",
        DRAFT_MANAGERS[0],
        {
            "the pair the wrong way round": swap(
                r"attn_state_pair\.warmup if warmup else attn_state_pair\.captured",
                "attn_state_pair.captured if warmup else attn_state_pair.warmup",
            ),
            "the pair of one": swap(
                r"attn_state_pair\.warmup if warmup else attn_state_pair\.captured", "attn_state_pair.captured"
            ),
            "chosen and lost": after(r"attn_state = attn_state_pair\.warmup", "attn_state = attn_state_pair.captured"),
            "chosen for nothing": before(r"attn_state = attn_state_pair\.warmup", "warmup = False"),
            "both the same": {
                MANAGER: swap(
                    r"AttentionStatePair\(\n +warmup_attn_state, capture_attn_state\n +\)",
                    "AttentionStatePair(capture_attn_state, capture_attn_state)",
                )
            },
        },
    ),
)

OBSERVED = ([0.0, 4.0], [4.0, 4.0])
"""The values of its probe on stock, and with the fix."""
