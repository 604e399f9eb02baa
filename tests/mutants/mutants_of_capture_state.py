"""What `capture-state` patches, mutated in several releases."""

from __future__ import annotations

import re
from functools import cache

from edited import Change, after, before, both, swap
from mutants_around import around, escaped, imported_otherwise
from mutants_by_hand import EAGLE, FIRST_EAGLE, FIX_IN_WORDS, NEAR, SHAPE, SIZE, hand
from mutants_families import Base, Mutant, Plan, Target, family
from vllm_files import CUDAGRAPHS, FLASHMLA

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
            another_name=both(
                before(GRAPH, "recorded_fn, attn_state = create_forward_fn(desc)"),
                swap(r"(with torch\.cuda\.graph\(graph, self\.pool\):\n +)forward_fn", r"\1recorded_fn"),
            ),
            the_warm_up_on_its_own=swap(
                r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)",
                r"\1create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\n\2",
            ),
            the_warm_up_first=swap(
                r"^( +)forward_fn, attn_state = create_forward_fn\(desc\)\n",
                (
                    r"\1warm_up, _ = create_forward_fn(desc)\n\1warm_up(CUDAGraphMode.NONE)\n"
                    r"\1forward_fn, attn_state = create_forward_fn(desc)\n"
                ),
            ),
            through_a_method=both(
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
            the_same_made_by_a_cache=both(
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
            the_factory_asked_for_all_first=both(
                swap(
                    r"^( +)for desc in descs:\n",
                    (
                        r"\1made = {desc: create_forward_fn(desc) for desc in self._capture_descs[mode]}\n"
                        r"\1for desc in descs:\n"
                    ),
                ),
                swap(ASKED, "forward_fn, attn_state = made[desc]\n"),
            ),
            the_warm_up_of_all_first=swap(
                r"^( +)for desc in descs:\n",
                (
                    r"\1for desc in self._capture_descs[mode]:\n"
                    r"\1    create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\1for desc in descs:\n"
                ),
            ),
            in_an_exit_stack=swap(
                r"with torch\.cuda\.graph\(graph, self\.pool\):",
                (
                    "import contextlib\n                        with contextlib.ExitStack() as stack:\n"
                    "                            stack.enter_context(torch.cuda.graph(graph, self.pool))"
                ),
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
