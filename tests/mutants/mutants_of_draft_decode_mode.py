"""What `draft-decode-mode` patches, mutated in several releases."""

from __future__ import annotations

from functools import cache

from edited import after, before, both, cut, swap
from mutants_around import around
from mutants_by_hand import EAGLE, FIX_IN_WORDS, NEAR, SIZE, SPECULATOR, hand
from mutants_families import Base, Mutant, Plan, Target, family
from stock import release_root

CHOSEN = (
    r"        # PIECEWISE cudagraphs are not supported(?:.*\n)*?            cudagraph_mode = CUDAGraphMode\.NONE\n\n"
)
ZERO_FILLED = (
    r"        # Pad last_token_indices for CUDA graphs\.\n"
    r"(?:.*\n)*?            tl\.store\(last_token_indices_ptr \+ block, 0, mask=mask\)\n"
)
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
                (
                    "self.cudagraph_mode = CUDAGraphMode.FULL if "
                    "self.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL else "
                    "CUDAGraphMode.NONE"
                ),
            ),
            by_a_local=swap(
                rf"^( +){mode}",
                (
                    r"\1mode = self.compilation_config.cudagraph_mode.decode_mode()\n"
                    r"\1self.cudagraph_mode = mode if mode == CUDAGraphMode.FULL else CUDAGraphMode.NONE"
                ),
            ),
            at_the_end=before(r"self\.graphs: dict", *FULL_OR_NONE, "    self.cudagraph_sizes = {}"),
            at_run_time=swap(
                r"cudagraph_mode = self\.cudagraph_mode\n",
                (
                    "cudagraph_mode = self.cudagraph_mode\n"
                    "            if cudagraph_mode == CUDAGraphMode.PIECEWISE:\n"
                    "                return CUDAGraphMode.NONE, None\n"
                ),
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
            run_time_mode_from_elsewhere=both(
                after(mode, "self.decode_mode = self.cudagraph_mode"),
                swap(r"cudagraph_mode = self\.cudagraph_mode\n", "cudagraph_mode = self.decode_mode\n"),
            ),
            sizes_from_elsewhere=both(
                before(r"self\.graphs: dict", "self.sizes = dict(self.cudagraph_sizes)"),
                swap(r"return self\.cudagraph_sizes\.get\(num_tokens\)", "return self.sizes.get(num_tokens)"),
            ),
            mixed_mode=swap(mode, "self.cudagraph_mode = self.compilation_config.cudagraph_mode.mixed_mode()"),
            slots=after(
                rf"class {manager}:",
                (
                    "    __slots__ = ('vllm_config', 'scheduler_config', 'device', 'max_model_len', "
                    "'max_num_reqs', 'max_num_tokens', 'dp_size', 'compilation_config', 'cudagraph_mode', "
                    "'cudagraph_sizes', 'graphs', 'pool')"
                ),
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
                (
                    "cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if cudagraph_mode.decode_mode() == "
                    "CUDAGraphMode.FULL else CUDAGraphMode.NONE"
                ),
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
