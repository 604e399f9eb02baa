"""The families of the six fixes: what is mutated in which releases, and what upstream might write, by hand.

Among what is by hand are upstream's corrections in several wordings, and what looks like one and is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from edited import cut, swap
from mutants_around import around, escaped, imported_otherwise
from mutants_families import Base, Change, Mutant, Plan, Target, family
from remedies import PADDED_WITH_MINUS_ONE, WITHOUT_PLAN_IN_BUFFERS
from stock import release_root
from vllm_files import CUDAGRAPHS, FLASHMLA, MAMBA, RUNNER

SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
FIRST_EAGLE = f"{SPEC_DECODE}/eagle_cudagraph.py"
EAGLE = f"{SPEC_DECODE}/eagle/cudagraph.py"
SPECULATOR = f"{SPEC_DECODE}/eagle/speculator.py"
PREFILL = f"{SPEC_DECODE}/autoregressive/cudagraph_utils.py"
SIZE = 260
"""Mutants a fix; those that are broken in themselves do not count, and 200 have to be left."""


def _and_then(*changes: Change) -> Change:
    def change(text: str) -> str:
        for one in changes:
            text = one(text)
        return text

    return change


def before(pattern: str, *lines: str) -> Change:
    """*lines* in front of each line that matches *pattern*, which takes no indentation, as deep as that."""
    inserted = "".join(rf"\1{line}\n" for line in lines)
    return swap(rf"^( *)(?={pattern})", inserted + r"\1")


def after(pattern: str, *lines: str) -> Change:
    """The same behind it."""
    return swap(rf"^( *)({pattern}.*)\n", r"\1\2\n" + "".join(rf"\1{line}\n" for line in lines))


def hand(
    fix: str, base: Base, paths: tuple[str, ...], kind: str, path: str, **changes: Change | dict[str, Change]
) -> Iterator[Mutant]:
    """Each of *changes* to *path*, or to several files."""
    for name, change in changes.items():
        by_hand = change if isinstance(change, dict) else {path: change}
        yield Mutant(fix, base, paths, (), tuple(by_hand.items()), name=name.replace("_", " "), kind=kind)


FIX_IN_WORDS = "upstream's correction in other words"
NEAR = "looks like a correction"
SHAPE = "another shape"


# -- capture-state -----------------------------------------------------------------------------------------------------

GRAPH = r"graph = torch\.cuda\.CUDAGraph\(\)\n"
ASKED = r"forward_fn(?:, attn_state)? = create_forward_fn\(desc\)\n"
BUILT = r"attn_metadata, slot_mappings = prepare_inputs_to_capture\(\n(?:.*\n)*?        \)\n"


def _built_again(pattern: str) -> Change:
    """What builds the attention state once more, in front of *pattern*."""

    def change(text: str) -> str:
        found = re.search(rf"^        {BUILT}", text, re.MULTILINE)
        if found is None:
            raise LookupError(BUILT)
        return swap(rf"^(?=        {pattern})", escaped(found.group()))(text)

    return change


V21 = Base(
    "0.21.0",
    "stock",
    remedy=(
        (
            CUDAGRAPHS,
            before(
                GRAPH, "forward_fn, attn_state = create_forward_fn(desc)", "captured_attn_states[desc] = attn_state"
            ),
        ),
    ),
)
V18 = Base("0.18.1", "stock", remedy=((CUDAGRAPHS, before(GRAPH, "forward_fn = create_forward_fn(desc)")),))
V17 = Base(
    "0.17.1",
    "stock",
    remedy=((CUDAGRAPHS, _built_again(r"capture_fn\(")), (EAGLE, _built_again(r"# Capture the graph"))),
)
V15 = Base(
    "0.15.0",
    "stock",
    remedy=((CUDAGRAPHS, _built_again(r"# Capture the graph")), (FIRST_EAGLE, _built_again(r"# Capture the graph"))),
)
V22 = Base("0.22.1", "stock")
CUT_22 = Base(
    "0.22.1",
    "less the fix",
    ((CUDAGRAPHS, cut(r"^ {24}forward_fn, attn_state = create_forward_fn\(desc\)\n")),),
    remedy=V21.remedy,
)


@cache
def capture_state() -> tuple[Mutant, ...]:
    name, paths = "capture-state", (CUDAGRAPHS, EAGLE, FLASHMLA)
    focus = r"forward_fn|graph|prepare_inputs|model\(|attn_"
    older = (CUDAGRAPHS, FIRST_EAGLE, FLASHMLA)
    capture: Target = (CUDAGRAPHS, "CudaGraphManager.capture")
    plans = (
        Plan(V21, ((capture, 2), ((CUDAGRAPHS, "ModelCudaGraphManager.capture"), 1)), focus, paths),
        Plan(V18, ((capture, 1),), focus, paths),
        Plan(
            V17,
            (
                ((CUDAGRAPHS, "CudaGraphManager.capture_graph"), 1),
                ((CUDAGRAPHS, "CudaGraphManager._capture_full_graph"), 1),
                ((EAGLE, "EagleCudaGraphManager.capture_graph"), 1),
            ),
            focus,
            paths,
        ),
        Plan(
            V15,
            (
                ((CUDAGRAPHS, "CudaGraphManager.capture_graph"), 1),
                ((FIRST_EAGLE, "EagleCudaGraphManager.capture_graph"), 1),
            ),
            focus,
            older,
        ),
        Plan(V22, ((capture, 1),), focus, paths),
    )
    by_hand = [
        *around(name, V21, CUDAGRAPHS, "CudaGraphManager", paths, ("capture",)),
        *around(name, V17, CUDAGRAPHS, "CudaGraphManager", paths, ("capture_graph", "_capture_full_graph")),
        *around(name, V17, EAGLE, "EagleCudaGraphManager", paths, ("capture_graph",)),
        *imported_otherwise(name, V21, FLASHMLA, "FlashMLASchedMeta", paths),
        *hand(
            name,
            V21,
            paths,
            FIX_IN_WORDS,
            CUDAGRAPHS,
            as_upstream=V21.remedy[0][1],
            before_the_branch=before(
                r"if desc\.cg_mode == CUDAGraphMode\.PIECEWISE",
                "if desc.cg_mode == CUDAGraphMode.FULL:",
                "    forward_fn, attn_state = create_forward_fn(desc)",
            ),
            under_the_assertion=before(
                r"assert desc not in self\.graphs", "forward_fn, attn_state = create_forward_fn(desc)"
            ),
            after_the_offloader=before(
                r"with torch\.cuda\.graph\(graph", "forward_fn, attn_state = create_forward_fn(desc)"
            ),
            by_index=before(GRAPH, "forward_fn = create_forward_fn(desc)[0]"),
            another_name=_and_then(
                before(GRAPH, "recorded_fn, attn_state = create_forward_fn(desc)"),
                swap(r"(with torch\.cuda\.graph\(graph, self\.pool\):\n +)forward_fn", r"\1recorded_fn"),
            ),
            the_warm_up_on_its_own=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\n\2",
            ),
            the_warm_up_first=swap(
                r"^( +)forward_fn, attn_state = create_forward_fn\(desc\)\n",
                r"\1warm_up, _ = create_forward_fn(desc)\n\1warm_up(CUDAGraphMode.NONE)\n\1forward_fn, attn_state = create_forward_fn(desc)\n",
            ),
            through_a_method=_and_then(
                before(GRAPH, "forward_fn, attn_state = self._asked_again(create_forward_fn, desc)"),
                before(
                    r"def needs_capture",
                    "def _asked_again(self, create_forward_fn, desc):",
                    "    return create_forward_fn(desc)",
                    "",
                ),
            ),
        ),
        *hand(
            name,
            V21,
            paths,
            NEAR,
            CUDAGRAPHS,
            the_new_pass_is_not_used=before(GRAPH, "_, attn_state = create_forward_fn(desc)"),
            the_new_pass_has_another_name=before(GRAPH, "recorded_fn, attn_state = create_forward_fn(desc)"),
            asked_before_the_warm_up=swap(r"^( +)(forward_fn, attn_state = create_forward_fn\(desc\)\n)", r"\1\2\1\2"),
            asked_for_no_full_graph=before(
                r"if desc\.cg_mode == CUDAGraphMode\.PIECEWISE",
                "if desc.cg_mode == CUDAGraphMode.PIECEWISE:",
                "    forward_fn, attn_state = create_forward_fn(desc)",
            ),
            asked_if_debugging=before(
                GRAPH, "if not __debug__:", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            asked_for_large_ones=before(
                GRAPH, "if desc.num_tokens > 2:", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            asked_after_the_graph=before(
                r"self\.graphs\[desc\] = graph", "forward_fn, attn_state = create_forward_fn(desc)"
            ),
            asked_inside_the_graph=after(
                r"with torch\.cuda\.graph\(graph", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            asked_for_another=before(
                GRAPH, "_first = next(iter(descs))", "forward_fn, attn_state = create_forward_fn(_first)"
            ),
            the_old_pass_comes_back=before(
                GRAPH,
                "kept_fn = forward_fn",
                "forward_fn, attn_state = create_forward_fn(desc)",
                "forward_fn = kept_fn",
            ),
            asked_and_warmed_up_again=before(
                GRAPH, "forward_fn, attn_state = create_forward_fn(desc)", "forward_fn(cg_mode=CUDAGraphMode.NONE)"
            ),
            asked_and_warmed_up_again_by_a_helper=before(
                GRAPH, "forward_fn, attn_state = create_forward_fn(desc)", "self._run(forward_fn)"
            ),
            the_same_made_by_a_cache=_and_then(
                before(GRAPH, "forward_fn, attn_state = create_forward_fn(desc)"),
                before(
                    r"with graph_capture\(device",
                    "import functools",
                    "create_forward_fn = functools.cache(create_forward_fn)",
                ),
            ),
        ),
        *hand(
            name,
            V21,
            paths,
            SHAPE,
            CUDAGRAPHS,
            two_warm_ups_in_a_loop=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1for _ in range(2):\n\1    forward_fn(CUDAGraphMode.NONE)\n\n\2",
            ),
            warm_up_by_keyword=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1forward_fn(cg_mode=CUDAGraphMode.NONE)\n\n\2",
            ),
            no_warm_up=swap(r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)", r"\2"),
            the_mode_through_a_local=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1none = CUDAGraphMode.NONE\n\1forward_fn(none)\n\n\2",
            ),
            passes_by_partial=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1import functools\n\1once = functools.partial(forward_fn, CUDAGraphMode.NONE)\n\1once()\n\n\2",
            ),
            the_factory_asked_for_all_first=_and_then(
                swap(
                    r"^( +)for desc in descs:\n",
                    r"\1made = {desc: create_forward_fn(desc) for desc in self._capture_descs[mode]}\n\1for desc in descs:\n",
                ),
                swap(ASKED, "forward_fn, attn_state = made[desc]\n"),
            ),
            the_warm_up_of_all_first=swap(
                r"^( +)for desc in descs:\n",
                r"\1for desc in self._capture_descs[mode]:\n\1    create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\1for desc in descs:\n",
            ),
            in_an_exit_stack=swap(
                r"with torch\.cuda\.graph\(graph, self\.pool\):",
                "import contextlib\n                        with contextlib.ExitStack() as stack:\n                            stack.enter_context(torch.cuda.graph(graph, self.pool))",
            ),
            pool_by_keyword=swap(r"torch\.cuda\.graph\(graph, self\.pool\)", "torch.cuda.graph(graph, pool=self.pool)"),
            graph_by_keyword=swap(
                r"torch\.cuda\.graph\(graph, self\.pool\)", "torch.cuda.graph(cuda_graph=graph, pool=self.pool)"
            ),
            tried_twice=swap(
                r"^( +)(for desc in descs:\n)((?:\1 .*\n|\n)+)",
                lambda found: (
                    f"{found[1]}{found[2]}{found[1]}    for attempt in range(1):\n"
                    + "".join(f"    {line}\n" if line else "\n" for line in found[3].splitlines())
                ),
            ),
            modes_one_after_the_other=swap(
                r"for mode in \[CUDAGraphMode\.PIECEWISE, CUDAGraphMode\.FULL\]:",
                "for mode in (CUDAGraphMode.FULL,):",
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))


# -- draft-prefill-state -----------------------------------------------------------------------------------------------

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
                r"attn_state = full_cg_attn_states[desc]\n\1attn_state = type(attn_state)(*attn_state)\n\1attn_metadata, slot_mappings = attn_state",
            ),
            one_new_state={
                CUDAGRAPHS: before(
                    r"self\._graphs_captured = True\n",
                    "captured_attn_states = {d: create_forward_fn(d)[1] for d in captured_attn_states}",
                )
            },
            replaced_behind=before(
                r"attn_metadata, slot_mappings = attn_state\n            fwd = lambda cg_mode: forward_fn\(\n(?=(?:.*\n)*?class Decode)",
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
            the_manager_returns_more=_and_then(
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


# -- draft-decode-mode -------------------------------------------------------------------------------------------------

CHOSEN = (
    r"        # PIECEWISE cudagraphs are not supported(?:.*\n)*?            cudagraph_mode = CUDAGraphMode\.NONE\n\n"
)
ZERO_FILLED = r"        # Pad last_token_indices for CUDA graphs\.\n(?:.*\n)*?            tl\.store\(last_token_indices_ptr \+ block, 0, mask=mask\)\n"
DECODE_MODE = r"self\.cudagraph_mode = self\.compilation_config\.cudagraph_mode\.decode_mode\(\)\n"
FULL_OR_NONE = ("if self.cudagraph_mode != CUDAGraphMode.FULL:", "    self.cudagraph_mode = CUDAGraphMode.NONE")
DECODE_17 = Base("0.17.1", "stock", remedy=((EAGLE, after(DECODE_MODE.removesuffix(r"\n"), *FULL_OR_NONE)),))
DECODE_18 = Base(
    "0.18.1",
    "stock, as the scenario can drive it",
    (
        (SPECULATOR, swap(r"^(        draft_logits_out: torch\.Tensor \| None),$", r"\1 = None,")),
        (SPECULATOR, swap(r"input_batch\.num_reqs_after_padding", "input_batch.num_reqs")),
    ),
)
DECODE_20 = Base("0.20.0", "stock")


def _nightly(kind: str, *cuts: str) -> Base:
    whole = release_root("0.20.0") / SPECULATOR
    return Base("0.20.0", kind, ((SPECULATOR, cut(*cuts)),), remedy=((SPECULATOR, lambda _: whole.read_text()),))


NIGHTLY = _nightly("less mode and zero-fill", CHOSEN, ZERO_FILLED)
WITHOUT_MODE = _nightly("less mode", CHOSEN)
WITHOUT_ZERO_FILL = _nightly("less zero-fill", ZERO_FILLED)


@cache
def draft_decode_mode() -> tuple[Mutant, ...]:
    name, paths = "draft-decode-mode", (EAGLE, SPECULATOR)
    focus = r"cudagraph_mode|cudagraph_manager|cudagraph_size|last_token|attn_metadata|num_tokens_padded"
    init: Target = (SPECULATOR, "EagleSpeculator.init_cudagraph_manager")
    kernel: Target = (SPECULATOR, "_prepare_eagle_inputs_kernel")
    inputs: Target = (SPECULATOR, "prepare_eagle_inputs")
    draft: Target = (SPECULATOR, "EagleSpeculator.generate_draft")
    manager = "EagleCudaGraphManager"
    plans = (
        Plan(
            DECODE_17,
            (((EAGLE, f"{manager}.__init__"), 2), (draft, 1), ((EAGLE, f"{manager}.get_cudagraph_runtime_mode"), 1)),
            focus,
            paths,
        ),
        Plan(NIGHTLY, ((init, 1), (kernel, 1), (inputs, 1), (draft, 1)), focus, paths),
        Plan(WITHOUT_MODE, ((init, 1),), focus, paths),
        Plan(DECODE_20, ((init, 1), (kernel, 1)), focus, paths),
        Plan(DECODE_18, (((SPECULATOR, "EagleSpeculator.__init__"), 1),), focus, paths),
    )
    mode = r"self\.cudagraph_mode = self\.compilation_config\.cudagraph_mode\.decode_mode\(\)"
    by_hand = [
        *around(name, DECODE_17, EAGLE, manager, paths, ("__init__",)),
        *around(name, DECODE_17, SPECULATOR, "EagleSpeculator", paths, ("generate_draft",)),
        *around(name, NIGHTLY, SPECULATOR, "EagleSpeculator", paths, ("init_cudagraph_manager", "generate_draft")),
        *around(name, DECODE_20, SPECULATOR, "EagleSpeculator", paths, ("init_cudagraph_manager",)),
        *hand(
            name,
            DECODE_17,
            paths,
            FIX_IN_WORDS,
            EAGLE,
            as_a_check=after(mode, *FULL_OR_NONE),
            in_one_expression=swap(
                mode,
                "self.cudagraph_mode = CUDAGraphMode.FULL if self.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL else CUDAGraphMode.NONE",
            ),
            by_a_local=swap(
                rf"^( +){mode}",
                r"\1mode = self.compilation_config.cudagraph_mode.decode_mode()\n\1self.cudagraph_mode = mode if mode == CUDAGraphMode.FULL else CUDAGraphMode.NONE",
            ),
            at_the_end=before(r"self\.graphs: dict", *FULL_OR_NONE, "    self.cudagraph_sizes = {}"),
            at_run_time=swap(
                r"cudagraph_mode = self\.cudagraph_mode\n",
                "cudagraph_mode = self.cudagraph_mode\n            if cudagraph_mode == CUDAGraphMode.PIECEWISE:\n                return CUDAGraphMode.NONE, None\n",
            ),
        ),
        *hand(
            name,
            DECODE_17,
            paths,
            NEAR,
            EAGLE,
            full_decode_only_noted={
                SPECULATOR: after(
                    r"self\.method = self\.speculative_config\.method",
                    "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
                )
            },
            asserted=after(mode, "assert self.cudagraph_mode is not None"),
            taken_twice=after(mode, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()"),
            taken_again_later=before(
                r"self\.graphs: dict", "self.cudagraph_mode = self.compilation_config.cudagraph_mode.decode_mode()"
            ),
            taken_by_another_name=swap(r"self\.cudagraph_mode\b", "self.draft_cudagraph_mode"),
            sizes_by_another_name=swap(r"self\.cudagraph_sizes\b", "self.draft_cudagraph_sizes"),
            mode_kept_elsewhere_too={
                EAGLE: after(mode, "self.decode_mode = self.cudagraph_mode"),
                SPECULATOR: swap(
                    r"cudagraph_manager\.get_cudagraph_runtime_mode\(", "cudagraph_manager.get_cudagraph_runtime_mode("
                ),
            },
            run_time_mode_from_elsewhere=_and_then(
                after(mode, "self.decode_mode = self.cudagraph_mode"),
                swap(r"cudagraph_mode = self\.cudagraph_mode\n", "cudagraph_mode = self.decode_mode\n"),
            ),
            sizes_from_elsewhere=_and_then(
                before(r"self\.graphs: dict", "self.sizes = dict(self.cudagraph_sizes)"),
                swap(r"return self\.cudagraph_sizes\.get\(num_tokens\)", "return self.sizes.get(num_tokens)"),
            ),
            mixed_mode=swap(mode, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.mixed_mode()"),
            slots=after(
                rf"class {manager}:",
                "    __slots__ = ('vllm_config', 'scheduler_config', 'device', 'max_model_len', 'max_num_reqs', 'max_num_tokens', 'dp_size', 'compilation_config', 'cudagraph_mode', 'cudagraph_sizes', 'graphs', 'pool')",
                "",
            ),
        ),
        *hand(
            name,
            NIGHTLY,
            paths,
            FIX_IN_WORDS,
            SPECULATOR,
            mode_in_one_expression=before(
                r"# Initialize cudagraph manager for draft decodes",
                "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL else CUDAGraphMode.NONE",
            ),
            indices_zeroed_before=before(
                r"_prepare_eagle_inputs_kernel\[\(num_reqs,\)\]", "last_token_indices.zero_()"
            ),
            indices_zeroed_behind=before(r"return last_token_indices\n", "last_token_indices[num_reqs:] = 0"),
        ),
        *hand(
            name,
            WITHOUT_MODE,
            paths,
            NEAR,
            SPECULATOR,
            chosen_and_not_used=before(
                r"# Initialize cudagraph manager for draft decodes",
                "unused = cudagraph_mode",
                "if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:",
                "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
                "cudagraph_mode = unused",
            ),
            chosen_in_a_branch=before(
                r"# Initialize cudagraph manager for draft decodes",
                "if not __debug__:",
                "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
            ),
            chosen_where_it_is_full=before(
                r"# Initialize cudagraph manager for draft decodes",
                "if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:",
                "    cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY",
            ),
            chosen_behind=after(
                r"self\.decode_cudagraph_manager\.pool = .*", "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY"
            ),
            pool_shared_by_hand=swap(
                r"self\.decode_cudagraph_manager\.pool = self\.prefill_cudagraph_manager\.pool",
                "pool = self.prefill_cudagraph_manager.pool; self.decode_cudagraph_manager.pool = pool",
            ),
            decode_length_by_another_name={
                EAGLE: lambda text: text + "\n",
                SPECULATOR: swap(r"decode_query_len=1,", "1,"),
            },
        ),
        *hand(
            name,
            WITHOUT_ZERO_FILL,
            paths,
            NEAR,
            SPECULATOR,
            filled_with_one=after(
                r"tl\.store\(eagle_seq_lens_ptr \+ block, 0, mask=mask\)",
                "tl.store(last_token_indices_ptr + block, 1, mask=mask)",
            ),
            filled_too_little=after(
                r"tl\.store\(last_token_indices_ptr \+ req_idx, last_token_index\)",
                "for i in range(0, 0, BLOCK_SIZE):",
                "    block = i + tl.arange(0, BLOCK_SIZE)",
                "    mask = block < max_num_reqs",
                "    tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
            filled_for_nobody=after(
                r"tl\.store\(last_token_indices_ptr \+ req_idx, last_token_index\)",
                "if num_reqs > max_num_reqs:",
                "    block = tl.arange(0, BLOCK_SIZE)",
                "    mask = block < max_num_reqs",
                "    tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
            filled_with_the_seq_lens=after(
                r"tl\.store\(eagle_seq_lens_ptr \+ block, 0, mask=mask\)",
                "tl.store(last_token_indices_ptr + block, 0, mask=mask)",
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))


# -- mamba-padding -----------------------------------------------------------------------------------------------------

MARKED = r"is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
CLEARED = "is_prefilling[num_reqs:] = False"
MAMBA_REMEDY = ((RUNNER, after(MARKED, CLEARED)),)
MAMBA_19 = Base("0.19.1", "stock", remedy=MAMBA_REMEDY)
MAMBA_21 = Base("0.21.0", "stock", remedy=MAMBA_REMEDY)
MAMBA_22 = Base("0.22.1", "stock")
MAMBA_23 = Base(
    "0.23.0", "less the fix", ((RUNNER, cut(r"^ *is_prefilling\[num_reqs:\] = False\n")),), remedy=MAMBA_REMEDY
)


@cache
def mamba_padding() -> tuple[Mutant, ...]:
    name, paths = "mamba-padding", (RUNNER, MAMBA)
    focus = r"is_prefilling|num_computed_tokens_cpu|num_prompt|split_decodes|common_attn_metadata|num_reqs_padded"
    build: Target = (RUNNER, "GPUModelRunner._build_attention_metadata")
    compute: Target = (MAMBA, "BaseMambaAttentionMetadataBuilder._compute_common_metadata")
    update: Target = (MAMBA, "BaseMambaAttentionMetadataBuilder._update_metadata_for_cudagraph_capture")
    plans = (
        Plan(MAMBA_21, ((build, 2), (compute, 3), (update, 1)), focus, paths),
        Plan(MAMBA_19, ((compute, 2),), focus, paths),
        Plan(MAMBA_22, ((build, 1),), focus, paths),
        Plan(MAMBA_23, ((compute, 1),), focus, paths),
    )
    by_hand = [
        *around(name, MAMBA_21, MAMBA, "BaseMambaAttentionMetadataBuilder", paths, ("_compute_common_metadata",)),
        *around(name, MAMBA_21, RUNNER, "GPUModelRunner", paths, ("_build_attention_metadata",)),
        *imported_otherwise(name, MAMBA_21, MAMBA, "split_decodes_and_prefills", paths),
        *hand(
            name,
            MAMBA_21,
            paths,
            FIX_IN_WORDS,
            RUNNER,
            as_upstream=after(MARKED, CLEARED),
            by_fill=after(MARKED, "is_prefilling[num_reqs:].fill_(False)"),
            by_and=swap(
                MARKED,
                "is_prefilling = (num_computed_tokens_cpu < num_prompt_tokens_cpu) & (torch.arange(num_reqs_padded) < num_reqs)",
            ),
            by_and_behind=after(MARKED, "is_prefilling &= torch.arange(num_reqs_padded) < num_reqs"),
            by_a_slice_to_the_end=after(MARKED, "is_prefilling[num_reqs:num_reqs_padded] = False"),
            by_zeros=swap(
                MARKED,
                "is_prefilling = torch.zeros(num_reqs_padded, dtype=torch.bool)\n        is_prefilling[:num_reqs] = (num_computed_tokens_cpu < num_prompt_tokens_cpu)[:num_reqs]",
            ),
            by_cat=swap(
                MARKED,
                "is_prefilling = torch.cat([(num_computed_tokens_cpu < num_prompt_tokens_cpu)[:num_reqs], torch.zeros(num_reqs_padded - num_reqs, dtype=torch.bool)])",
            ),
            where_there_is_padding=after(MARKED, "if num_reqs_padded > num_reqs:", f"    {CLEARED}"),
            in_the_builder={
                MAMBA: before(
                    r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                    "starts = common_attn_metadata.query_start_loc_cpu",
                    "common_attn_metadata = replace(common_attn_metadata, is_prefilling=common_attn_metadata.is_prefilling & (starts[1:] != starts[:-1]))",
                )
            },
            on_the_metadata=before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                "cm_base.is_prefilling[num_reqs:] = False",
            ),
        ),
        *hand(
            name,
            MAMBA_21,
            paths,
            NEAR,
            RUNNER,
            cleared_on_a_copy=after(MARKED, "is_prefilling.clone()[num_reqs:] = False"),
            cleared_if_debugging=after(MARKED, "if not __debug__:", f"    {CLEARED}"),
            cleared_for_captures=after(MARKED, "if for_cudagraph_capture:", f"    {CLEARED}"),
            cleared_and_made_again=after(
                MARKED, CLEARED, "is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            cleared_and_made_again_by_or=after(
                MARKED, CLEARED, "is_prefilling |= num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            cleared_and_another_handed_on=_and_then(
                after(MARKED, CLEARED),
                swap(
                    r"is_prefilling=is_prefilling,",
                    "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,",
                ),
            ),
            cleared_too_late=before(r"return attn_metadata, spec_decode_common_attn_metadata\n", CLEARED),
            cleared_after_the_metadata=before(
                r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]", CLEARED
            ),
            cleared_after_a_return=after(MARKED, "if num_reqs == 0:", "    return {}, None", CLEARED),
            cleared_behind_the_padding=after(MARKED, "is_prefilling[num_reqs_padded:] = False"),
            num_reqs_set_first=after(MARKED, "num_reqs, real = num_reqs_padded, num_reqs", CLEARED, "num_reqs = real"),
            marked_without_name=_and_then(
                cut(rf"^ +{MARKED}\n"),
                swap(
                    r"is_prefilling=is_prefilling,",
                    "is_prefilling=num_computed_tokens_cpu < num_prompt_tokens_cpu,",
                ),
            ),
            marked_with_a_type=swap(
                MARKED, "is_prefilling: torch.Tensor = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            marked_by_another_name=_and_then(
                swap(MARKED, "in_prefill = num_computed_tokens_cpu < num_prompt_tokens_cpu"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=in_prefill,"),
            ),
            marked_in_a_helper=_and_then(
                swap(MARKED, "marks = self._marks(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
                swap(r"is_prefilling=is_prefilling,", "is_prefilling=marks,"),
                before(
                    r"def _build_attention_metadata",
                    "def _marks(self, computed, prompt):",
                    "    return computed < prompt",
                    "",
                ),
            ),
            marked_with_another=swap(
                MARKED, "is_prefilling = causal_rows = num_computed_tokens_cpu < num_prompt_tokens_cpu"
            ),
            marked_in_a_tuple=swap(MARKED, "is_prefilling, _ = num_computed_tokens_cpu < num_prompt_tokens_cpu, None"),
            marked_the_other_way=swap(MARKED, "is_prefilling = num_prompt_tokens_cpu > num_computed_tokens_cpu"),
            marked_by_lt=swap(MARKED, "is_prefilling = torch.lt(num_computed_tokens_cpu, num_prompt_tokens_cpu)"),
            marked_on_the_metadata=_and_then(
                cut(rf"^ +{MARKED}\n", r"^ +is_prefilling=is_prefilling,\n"),
                before(
                    r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
                    "cm_base.is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu",
                ),
            ),
        ),
        *hand(
            name,
            MAMBA_21,
            paths,
            SHAPE,
            MAMBA,
            split_by_phase_is_default=swap(r"^ +treat_short_extends_as_decodes=False,\n", ""),
            split_by_phase_from_an_attribute=swap(
                r"treat_short_extends_as_decodes=False", "treat_short_extends_as_decodes=bool(self.num_spec_tokens)"
            ),
            split_twice=before(
                r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(",
                "split_decodes_and_prefills(common_attn_metadata, decode_threshold=decode_threshold)",
            ),
            split_by_position=swap(
                r"decode_threshold=decode_threshold,\n( +)treat",
                r"decode_threshold,\n\1treat_short_extends_as_decodes=False,\n\1require_uniform=False if treat_is_gone else False,\n\1# treat",
            ),
            split_on_a_copy=swap(
                r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                "split_decodes_and_prefills(\n                replace(common_attn_metadata),",
            ),
            split_on_a_local=_and_then(
                swap(
                    r"split_decodes_and_prefills\(\n +common_attn_metadata,",
                    "split_decodes_and_prefills(\n                m,",
                ),
                before(
                    r"num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = \(",
                    "m = common_attn_metadata",
                ),
            ),
            kept_from_before=before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "common_attn_metadata = getattr(self, 'latest', None) or common_attn_metadata",
            ),
            metadata_is_looked_up=before(
                r"num_reqs = common_attn_metadata\.num_reqs\n(?=\n +# Treat multi)",
                "self.seen = {id(common_attn_metadata): common_attn_metadata}",
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))


# -- flashmla-fp8 ------------------------------------------------------------------------------------------------------

POINTED_AT = r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata"
COPIED = (
    "if self.compilation_config.cudagraph_mode.has_full_cudagraphs():",
    "    n = tile_scheduler_metadata.size(0)",
    "    self.cg_buf_tile_scheduler_metadata[:n].copy_(tile_scheduler_metadata)",
    "    tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[:n]",
    "    n = num_splits.size(0)",
    "    self.cg_buf_num_splits[:n].copy_(num_splits)",
    "    num_splits = self.cg_buf_num_splits[:n]",
)
FP8_REMEDY = ((FLASHMLA, before(POINTED_AT, *COPIED)),)
FP8_18 = Base("0.18.1", "stock", remedy=FP8_REMEDY)
FP8_17 = Base("0.17.1", "stock", remedy=FP8_REMEDY)
FP8_15 = Base("0.15.0", "stock", remedy=FP8_REMEDY)
FP8_19 = Base("0.19.1", "stock")
FP8_23 = Base("0.23.0", "less the fix", ((FLASHMLA, WITHOUT_PLAN_IN_BUFFERS),), remedy=FP8_REMEDY)


def _copied(*lines: str) -> Change:
    return before(POINTED_AT, *lines)


@cache
def flashmla_fp8() -> tuple[Mutant, ...]:
    name, paths = "flashmla-fp8", (FLASHMLA,)
    focus = r"scheduler_metadata|num_splits|cg_buf|is_fp8"
    build: Target = (FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    init: Target = (FLASHMLA, "FlashMLAMetadataBuilder.__init__")
    plans = (
        Plan(FP8_18, ((build, 4), (init, 2)), focus, paths),
        Plan(FP8_17, ((build, 1), (init, 1)), focus, paths),
        Plan(FP8_19, ((build, 2),), focus, paths),
        Plan(FP8_23, ((build, 1), (init, 1)), focus, paths),
        Plan(FP8_15, ((build, 1),), focus, paths),
    )
    planned = r"tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8\("
    by_hand = [
        *around(name, FP8_18, FLASHMLA, "FlashMLAMetadataBuilder", paths, ("_build_decode",)),
        *imported_otherwise(name, FP8_18, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *imported_otherwise(name, FP8_23, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *hand(
            name,
            FP8_18,
            paths,
            FIX_IN_WORDS,
            FLASHMLA,
            as_upstream=_copied(*COPIED),
            where_there_are_buffers=_copied("if self.cg_buf_num_splits is not None:", *COPIED[1:]),
            by_assignment=_copied(*(re.sub(r"\.copy_\((\w+)\)", r" = \1", line) for line in COPIED)),
            by_shape=_copied(*(line.replace(".size(0)", ".shape[0]") for line in COPIED)),
            by_len=_copied(*(re.sub(r"(\w+)\.size\(0\)", r"len(\1)", line) for line in COPIED)),
            in_one_line=_copied(
                "if self.cg_buf_num_splits is not None:",
                "    tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata[: len(tile_scheduler_metadata)].copy_(tile_scheduler_metadata)",
                "    num_splits = self.cg_buf_num_splits[: len(num_splits)].copy_(num_splits)",
            ),
            by_a_method=_and_then(
                before(
                    POINTED_AT,
                    "tile_scheduler_metadata = self._kept(self.cg_buf_tile_scheduler_metadata, tile_scheduler_metadata)",
                    "num_splits = self._kept(self.cg_buf_num_splits, num_splits)",
                ),
                before(
                    r"def _build_decode",
                    "def _kept(self, buffer, values):",
                    "    return values if buffer is None else buffer[: len(values)].copy_(values)",
                    "",
                ),
            ),
            behind=after(
                r"scheduler_metadata\.num_splits = num_splits",
                *(
                    re.sub(r"^(\s+)(tile_scheduler_metadata|num_splits) =", r"\1scheduler_metadata.\2 =", line)
                    for line in COPIED
                ),
            ),
            new_buffers=_and_then(
                swap(r"cg_buf_", "graph_buf_"),
                before(POINTED_AT, *(line.replace("cg_buf_", "graph_buf_") for line in COPIED)),
            ),
        ),
        *hand(
            name,
            FP8_18,
            paths,
            NEAR,
            FLASHMLA,
            copied_and_not_pointed_at=_copied(*(line for line in COPIED if "= self.cg_buf" not in line)),
            only_the_tiles=_copied(*COPIED[:4]),
            only_the_splits=_copied(COPIED[0], *COPIED[4:]),
            the_tiles_and_not_the_splits_pointed_at=_copied(*COPIED[:-1]),
            the_splits_and_not_the_tiles_pointed_at=_copied(
                *(line for number, line in enumerate(COPIED) if number != 3)
            ),
            copied_if_debugging=_copied("if not __debug__:", *COPIED[1:]),
            copied_for_large_batches=_copied("if num_decode_tokens > 128:", *COPIED[1:]),
            copied_before_the_plan=before(
                planned, "n = 0", "self.cg_buf_tile_scheduler_metadata = self.cg_buf_tile_scheduler_metadata"
            ),
            a_clone_pointed_at=_copied(
                *COPIED, "tile_scheduler_metadata = tile_scheduler_metadata.clone()", "num_splits = num_splits.clone()"
            ),
            copied_into_nothing=_copied(*(line.replace("[:n].copy_", "[:n].clone().copy_") for line in COPIED)),
            copied_and_planned_again=_copied(
                *COPIED,
                "tile_scheduler_metadata, num_splits = get_mla_metadata_dense_fp8(seq_lens_device, num_q_tokens_per_head_k, 1)",
            ),
            planned_again_behind=_and_then(
                before(POINTED_AT, *COPIED),
                after(
                    r"scheduler_metadata\.num_splits = num_splits",
                    "scheduler_metadata.num_splits = num_splits.clone()",
                ),
            ),
        ),
        *hand(
            name,
            FP8_18,
            paths,
            SHAPE,
            FLASHMLA,
            pointed_at_together=swap(
                r"scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata\n( +)scheduler_metadata\.num_splits = num_splits",
                r"(scheduler_metadata.tile_scheduler_metadata, scheduler_metadata.num_splits) = tile_scheduler_metadata, num_splits",
            ),
            pointed_at_by_setattr=swap(
                POINTED_AT, "setattr(scheduler_metadata, 'tile_scheduler_metadata', tile_scheduler_metadata)"
            ),
            splits_on_the_metadata_itself=after(
                r"scheduler_metadata\.num_splits = num_splits", "self.latest = scheduler_metadata"
            ),
            splits_pointed_at_first=swap(
                r"(scheduler_metadata\.tile_scheduler_metadata = tile_scheduler_metadata)\n( +)(scheduler_metadata\.num_splits = num_splits)",
                r"\3\n\2\1",
            ),
            plan_replaced=after(
                r"scheduler_metadata\.num_splits = num_splits",
                "import copy",
                "scheduler_metadata = copy.copy(scheduler_metadata)",
            ),
            plan_under_another_name=swap(
                r"^( +)scheduler_metadata=scheduler_metadata,\n",
                r"\1scheduler_metadata=type(scheduler_metadata)(**vars(scheduler_metadata)) if False else scheduler_metadata,\n",
            ),
            metadata_class_through_a_local=swap(
                r"return FlashMLADecodeMetadata\(", "made = FlashMLADecodeMetadata; return made("
            ),
            metadata_attribute_renamed=swap(r"\bscheduler_metadata\b", "plan_metadata"),
            buffers_made_by_new_zeros=swap(
                r"self\.cg_buf_num_splits = torch\.empty\(", "self.cg_buf_num_splits = torch.zeros("
            ),
            buffers_made_lazily=swap(
                r"self\.cg_buf_num_splits = None\n",
                "self.cg_buf_num_splits = None\n        self.made_buffers = False\n",
            ),
            buffers_too_small=swap(
                r"\(vllm_config\.scheduler_config\.max_num_seqs \+ 1\)",
                "(vllm_config.scheduler_config.max_num_seqs - 2)",
            ),
            buffers_of_int64=swap(r"dtype=torch\.int32", "dtype=torch.int64"),
            buffers_for_decodes_only=swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):",
                "if self.compilation_config.cudagraph_mode.decode_mode().name == 'FULL':",
            ),
            buffers_made_for_others=swap(
                r"if self\.compilation_config\.cudagraph_mode\.has_full_cudagraphs\(\):",
                "if not self.is_fp8_kvcache:",
            ),
            the_flag_renamed=swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            the_flag_turned_round=_and_then(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))


# -- flashmla-padding --------------------------------------------------------------------------------------------------

FILLED = r"blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_\(-1\)"
PADDING_REMEDY = ((RUNNER, swap(FILLED, "blk_table_tensor[num_reqs:num_reqs_padded].fill_(0)")),)
PADDING_19 = Base("0.19.1", "stock", remedy=PADDING_REMEDY)
PADDING_17 = Base("0.17.1", "stock", remedy=PADDING_REMEDY)
PADDING_20 = Base("0.20.0", "stock")
PADDING_23 = Base("0.23.0", "less the fix", ((RUNNER, PADDED_WITH_MINUS_ONE),), remedy=PADDING_REMEDY)


def _filled(*lines: str) -> Change:
    return swap(rf"^( +){FILLED}", "\n".join(rf"\1{line}" for line in lines))


@cache
def flashmla_padding() -> tuple[Mutant, ...]:
    name, paths = "flashmla-padding", (RUNNER, FLASHMLA)
    focus = r"blk_table|num_reqs_padded|seq_lens_device|block_table_tensor|query_start_loc_cpu"
    build: Target = (RUNNER, "GPUModelRunner._build_attention_metadata")
    decode: Target = (FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    plans = (
        Plan(PADDING_19, ((build, 2), (decode, 3)), focus, paths),
        Plan(PADDING_17, ((build, 1), (decode, 2)), focus, paths),
        Plan(PADDING_20, ((build, 1),), focus, paths),
        Plan(PADDING_23, ((decode, 1),), focus, paths),
    )
    part = "blk_table_tensor[num_reqs:num_reqs_padded]"
    by_hand = [
        *around(name, PADDING_17, FLASHMLA, "FlashMLAMetadataBuilder", paths, ("_build_decode",)),
        *around(name, PADDING_19, RUNNER, "GPUModelRunner", paths, ("_build_attention_metadata",)),
        *imported_otherwise(name, PADDING_19, FLASHMLA, "get_mla_metadata_dense_fp8", paths),
        *imported_otherwise(name, PADDING_20, RUNNER, "NULL_BLOCK_ID", paths),
        *hand(
            name,
            PADDING_17,
            paths,
            FIX_IN_WORDS,
            RUNNER,
            as_upstream=_filled("NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)"),
            by_number=_filled(f"{part}.fill_(0)"),
            by_zero=_filled(f"{part}.zero_()"),
            by_assignment=_filled(f"{part} = 0"),
            by_masked_fill=_filled(f"{part}.fill_(-1)", f"{part}.clamp_(min=0)"),
            in_the_builder={
                FLASHMLA: before(
                    r"query_lens_cpu = query_start_loc_cpu\[1:\]",
                    "block_table_tensor = block_table_tensor.clamp(min=0)",
                )
            },
            in_the_builder_in_place={
                FLASHMLA: before(r"query_lens_cpu = query_start_loc_cpu\[1:\]", "block_table_tensor.clamp_(min=0)")
            },
        ),
        *hand(
            name,
            PADDING_17,
            paths,
            NEAR,
            RUNNER,
            null_is_minus_one=_filled("NULL_BLOCK_ID = -1", f"{part}.fill_(NULL_BLOCK_ID)"),
            null_is_minus_one_for_the_module=_and_then(
                _filled(f"{part}.fill_(NULL_BLOCK_ID)"),
                before(r"class GPUModelRunner", "NULL_BLOCK_ID = -1", ""),
            ),
            filled_and_filled_again=_filled("NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)", f"{part} = -1"),
            filled_and_filled_all=_filled(
                "NULL_BLOCK_ID = 0", f"{part}.fill_(NULL_BLOCK_ID)", "blk_table_tensor[num_reqs:].fill_(-1)"
            ),
            filled_under_a_condition=_filled(
                "NULL_BLOCK_ID = 0",
                "if not __debug__:",
                f"    {part}.fill_(NULL_BLOCK_ID)",
                "else:",
                "    blk_table_tensor[num_reqs:].fill_(-1)",
            ),
            a_copy_filled=_filled(
                "NULL_BLOCK_ID = 0",
                "filled = blk_table_tensor",
                "blk_table_tensor[num_reqs:] = -1",
                "blk_table_tensor = blk_table_tensor.clone()",
                f"{part}.fill_(NULL_BLOCK_ID)",
                "return filled",
            ),
            the_wrong_rows=_filled("blk_table_tensor[num_reqs_padded:].fill_(-1)"),
            minus_two=_filled(f"{part}.fill_(-2)"),
            minus_one_by_name=_filled("PAD_BLOCK_ID = -1", f"{part}.fill_(PAD_BLOCK_ID)"),
            minus_one_by_keyword=_filled(f"{part}.fill_(value=-1)"),
            minus_one_by_assignment=_filled(f"{part} = -1"),
            minus_one_in_a_helper=_and_then(
                _filled("self._pad(blk_table_tensor, num_reqs, num_reqs_padded)"),
                before(
                    r"def _build_attention_metadata",
                    "def _pad(self, table, first, last):",
                    "    table[first:last].fill_(-1)",
                    "",
                ),
            ),
            not_padded=_filled("pass"),
        ),
        *hand(
            name,
            PADDING_17,
            paths,
            SHAPE,
            FLASHMLA,
            keyword_only=swap(
                r"def _build_decode\(\n        self,\n", "def _build_decode(\n        self,\n        *,\n"
            ),
            keyword_only_from_the_middle=swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        *,\n"),
            positional_only=swap(r"(def _build_decode\((?:\n.*){4}\n)", r"\1        /,\n"),
            more_by_keyword=swap(r"(def _build_decode\((?:\n.*){8}\n)", r"\1        **more,\n"),
            the_flag_renamed=swap(r"self\.is_fp8_kvcache", "self.kvcache_is_fp8"),
            the_flag_turned_round=_and_then(
                swap(r"self\.is_fp8_kvcache = (.*)", r"self.is_fp8_kvcache = not \1"),
                swap(r"if self\.is_fp8_kvcache", "if not self.is_fp8_kvcache"),
                swap(r"is_fp8_kvcache=self\.is_fp8_kvcache", "is_fp8_kvcache=not self.is_fp8_kvcache"),
            ),
            lengths_copied_first=before(
                r"query_lens_cpu = query_start_loc_cpu\[1:\]", "seq_lens_device = seq_lens_device.clone()"
            ),
            tables_copied_first=before(
                r"query_lens_cpu = query_start_loc_cpu\[1:\]",
                "block_table_tensor = block_table_tensor.contiguous()",
            ),
            lengths_by_another_name=swap(r"\bseq_lens_device\b", "seq_lens"),
        ),
    ]
    return tuple(family(name, plans, by_hand, SIZE))


FAMILIES = {
    "capture-state": capture_state,
    "draft-prefill-state": draft_prefill_state,
    "draft-decode-mode": draft_decode_mode,
    "mamba-padding": mamba_padding,
    "flashmla-fp8": flashmla_fp8,
    "flashmla-padding": flashmla_padding,
}
