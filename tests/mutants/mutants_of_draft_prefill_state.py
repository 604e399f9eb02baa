"""What `draft-prefill-state` patches, mutated in several releases."""

from __future__ import annotations

from functools import cache

from edited import after, before, both, swap
from mutants_around import around
from mutants_by_hand import EAGLE, FIX_IN_WORDS, NEAR, PREFILL, SHAPE, SIZE, SPEC_DECODE, SPECULATOR, hand
from mutants_families import Base, Mutant, Plan, Target, family
from mutants_of_capture_state import V21
from vllm_files import CUDAGRAPHS

PAIRS = (
    (
        CUDAGRAPHS,
        swap(
            r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
            "states = super().capture(create_forward_fn, progress_bar_desc)\n"
            "        return {desc: [create_forward_fn(desc)[1] for _ in range(2)] for desc in states}",
        ),
    ),
    (EAGLE, swap(r"full_cg_attn_states\[desc\]", "full_cg_attn_states[desc].pop()")),
)
"""Two states for the draft: one for its warm-up, one for its graph."""
DRAFT_21 = Base("0.21.0", "stock", remedy=(*V21.remedy, *PAIRS))
DRAFT_22 = Base("0.22.1", "stock", remedy=PAIRS)
DRAFT_23 = Base(
    "0.23.0",
    "stock, with what the scenario leaves out",
    ((f"{SPEC_DECODE}/mtp/speculator.py", after(r"class MTPSpeculator", "    temperature = seeds = None")),),
    words=(
        ("run_model", "_run_model"),
        ("prefill", "_prefill"),
        ("eagle", "mtp"),
        ("EagleSpeculator", "MTPSpeculator"),
    ),
)


@cache
def draft_prefill_state() -> tuple[Mutant, ...]:
    name, paths = "draft-prefill-state", (EAGLE, CUDAGRAPHS, SPECULATOR)
    focus = r"attn_state|create_forward_fn|capture|forward_fn"
    capture: Target = (EAGLE, "PrefillEagleCudaGraphManager.capture")
    targets = (
        (capture, 3),
        ((CUDAGRAPHS, "CudaGraphManager.capture"), 1),
        ((CUDAGRAPHS, "ModelCudaGraphManager.capture"), 1),
    )
    taken = r"attn_state = full_cg_attn_states\[desc\]"
    plans = (
        Plan(DRAFT_21, (*targets, ((SPECULATOR, "EagleSpeculator.capture"), 1)), focus, paths),
        Plan(DRAFT_22, targets[1:], focus, paths),
        Plan(DRAFT_23, (((PREFILL, "PrefillSpeculatorCudaGraphManager.capture"), 1),), focus, (PREFILL, CUDAGRAPHS)),
    )
    own = r"attn_state = full_cg_attn_states\[desc\]\n( +)attn_metadata, slot_mappings = attn_state"
    by_hand = [
        *around(name, DRAFT_22, EAGLE, "PrefillEagleCudaGraphManager", paths, ("capture",)),
        *around(name, DRAFT_21, CUDAGRAPHS, "CudaGraphManager", paths, ("capture",)),
        *around(name, DRAFT_23, PREFILL, "PrefillSpeculatorCudaGraphManager", (PREFILL, CUDAGRAPHS), ("capture",)),
        *hand(
            name,
            DRAFT_22,
            paths,
            FIX_IN_WORDS,
            EAGLE,
            two_states_handed_on=dict(PAIRS),
            two_states_by_index={
                CUDAGRAPHS: PAIRS[0][1],
                EAGLE: swap(taken, r"attn_state = full_cg_attn_states[desc].pop(0)"),
            },
            the_factory_handed_on={
                CUDAGRAPHS: before(
                    r"self\._graphs_captured = True\n",
                    "captured_attn_states = dict.fromkeys(captured_attn_states, create_forward_fn)",
                ),
                EAGLE: swap(taken, "attn_state = full_cg_attn_states[desc](desc)[1]"),
            },
        ),
        *hand(
            name,
            DRAFT_22,
            paths,
            NEAR,
            EAGLE,
            copied=swap(taken, "import copy; attn_state = copy.copy(full_cg_attn_states[desc])"),
            copied_deep=swap(taken, "import copy; attn_state = copy.deepcopy(full_cg_attn_states[desc])"),
            copied_behind=swap(
                own,
                (
                    r"attn_state = full_cg_attn_states[desc]\n\1attn_state = type(attn_state)(*attn_state)\n"
                    r"\1attn_metadata, slot_mappings = attn_state"
                ),
            ),
            one_new_state={
                CUDAGRAPHS: before(
                    r"self\._graphs_captured = True\n",
                    "captured_attn_states = {d: create_forward_fn(d)[1] for d in captured_attn_states}",
                )
            },
            replaced_behind=before(
                (
                    r"attn_metadata, slot_mappings = attn_state\n            fwd = lambda cg_mode: forward_fn\(\n"
                    r"(?=(?:.*\n)*?class Decode)"
                ),
                "attn_state = self.fresh.get(desc, attn_state) if hasattr(self, 'fresh') else attn_state",
            ),
        ),
        *hand(
            name,
            DRAFT_22,
            paths,
            SHAPE,
            CUDAGRAPHS,
            by_get={EAGLE: swap(taken, "attn_state = full_cg_attn_states.get(desc)")},
            by_get_and_again={
                EAGLE: swap(
                    taken, "attn_state = full_cg_attn_states[desc]; attn_state = dict.get(full_cg_attn_states, desc)"
                )
            },
            by_keys={EAGLE: swap(taken, "attn_state = next(s for d, s in full_cg_attn_states.items() if d == desc)")},
            states_kept_first={
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "kept_states = dict(full_cg_attn_states)",
                    "full_cg_attn_states = kept_states",
                )
            },
            states_as_a_list={
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "self.states = list(full_cg_attn_states.values())",
                )
            },
            states_are_required_to_be_a_dict={
                EAGLE: before(
                    r"super\(\)\.capture\(create_forward_fn, progress_bar_desc\)\n\n\nclass Decode",
                    "assert type(full_cg_attn_states) is dict",
                )
            },
            the_manager_returns_no_dict=swap(
                r"return captured_attn_states\n",
                "import types; return types.MappingProxyType(captured_attn_states)\n",
            ),
            the_manager_returns_a_copy=swap(
                r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
                "return dict(super().capture(create_forward_fn, progress_bar_desc))",
            ),
            the_manager_returns_more=both(
                swap(r"return captured_attn_states\n", "return captured_attn_states, len(captured_attn_states)\n"),
                swap(
                    r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
                    "return super().capture(create_forward_fn, progress_bar_desc)[0]",
                ),
            ),
            states_on_the_manager=before(
                r"return captured_attn_states\n", "self.captured_attn_states = captured_attn_states"
            ),
            the_target_states_by_attribute=swap(
                r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
                "self.states = super().capture(create_forward_fn, progress_bar_desc)\n        return self.states",
            ),
            two_warm_ups=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1forward_fn(CUDAGraphMode.NONE)\n\1forward_fn(CUDAGraphMode.NONE)\n\n\2",
            ),
            no_warm_up=swap(r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)", r"\2"),
        ),
        *hand(
            name,
            DRAFT_23,
            (PREFILL, CUDAGRAPHS),
            NEAR,
            PREFILL,
            the_pair_the_wrong_way_round=swap(
                r"attn_state_pair\.warmup if warmup else attn_state_pair\.captured",
                "attn_state_pair.captured if warmup else attn_state_pair.warmup",
            ),
            the_pair_of_one=swap(
                r"attn_state_pair\.warmup if warmup else attn_state_pair\.captured", "attn_state_pair.captured"
            ),
            chosen_and_lost=after(r"attn_state = attn_state_pair\.warmup", "attn_state = attn_state_pair.captured"),
            chosen_for_nothing=before(r"attn_state = attn_state_pair\.warmup", "warmup = False"),
            both_the_same={
                CUDAGRAPHS: swap(
                    r"AttentionStatePair\(\n +warmup_attn_state, capture_attn_state\n +\)",
                    "AttentionStatePair(capture_attn_state, capture_attn_state)",
                )
            },
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))
