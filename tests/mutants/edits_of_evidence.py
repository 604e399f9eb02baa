"""Edits of what a verdict rests on besides the functions that are patched.

These are factories, dispatch, builders, callers and names; and remedies in other words.

Each with the verdicts that are right, where vLLM's own classes decide (`mutants_judged`): a remedy is `fixed`, or
`unrecognised`; what is neither cured by the fix nor right by itself is `unrecognised`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import vllm_files
from edited import Change, after, before, both, cut, swap
from fix_rows.capture_state import GRAPH
from fix_rows.flashmla_fp8 import COPIED, POINTED_AT
from fix_rows.mamba_padding import CLEARED, MARKED
from mutants_bases import base_of
from mutants_made import Base, Mutant
from stock import release_root
from vllm_files import CUDAGRAPHS, FLASHMLA, RUNNER
from vllm_files import EAGLE as SPECULATOR
from vllm_graphfix.fix import Verdict

OPERATORS = "vllm/v1/attention/ops/flashmla.py"
ATTN_UTILS = "vllm/v1/worker/gpu/attn_utils.py"
MODEL_STATE = "vllm/v1/worker/gpu/model_states/default.py"
PATHS = {
    "ATTN_UTILS": ATTN_UTILS,
    "INPUT_BATCH": "vllm/v1/worker/gpu_input_batch.py",
    "MLA": "vllm/model_executor/layers/attention/mla_attention.py",
    "MODEL_STATE": MODEL_STATE,
    "OPERATORS": OPERATORS,
    "SPECULATOR": SPECULATOR,
    "SPLIT": "vllm/v1/attention/backends/utils.py",
}
LAZY_PLANS = (
    FLASHMLA,
    OPERATORS,
    "vllm/third_party/flashmla/flash_mla_interface.py",
    "vllm/v1/attention/backends/mla/flashmla_sparse.py",
    "vllm/v1/attention/backends/mla/sparse_swa.py",
)

V17, V18, V21, V22 = (base_of("capture-state", release) for release in ("0.17.1", "0.18.1", "0.21.0", "0.22.1"))
DRAFT_21, DRAFT_22, DRAFT_23 = (base_of("draft-prefill-state", release) for release in ("0.21.0", "0.22.1", "0.23.0"))
DECODE_17, DECODE_20 = (base_of("draft-decode-mode", release) for release in ("0.17.1", "0.20.0"))
NIGHTLY = base_of("draft-decode-mode", "0.20.0", "nightly without both")
MAMBA_21, MAMBA_22 = (base_of("mamba-padding", release) for release in ("0.21.0", "0.22.1"))
FP8_18, FP8_19 = (base_of("flashmla-fp8", release) for release in ("0.18.1", "0.19.1"))
PADDING_17, PADDING_18, PADDING_20 = (
    base_of("flashmla-padding", release) for release in ("0.17.1", "0.18.1", "0.20.0")
)

AFFECTED, FIXED, UNRECOGNISED = Verdict.AFFECTED, Verdict.FIXED, Verdict.UNRECOGNISED
UNTOUCHED = {UNRECOGNISED}
REMEDIED = {FIXED}
NOT_NEEDED = {FIXED, UNRECOGNISED}
CURED = {AFFECTED}

WITH_KEYWORD = swap(r"create_forward_fn\(desc\)", "create_forward_fn(desc, warmup=True)")
WARMUP_AND_NOT = both(
    swap(r"create_forward_fn\(desc\)(?=\n\n)", "create_forward_fn(desc, warmup=True)"),
    swap(r"create_forward_fn\(desc\)(?=\n +captured)", "create_forward_fn(desc, warmup=False)"),
)
TAKES_IT = swap(
    r"(def create_forward_fn\(\n +desc: BatchExecutionDescriptor,\n)", r"\1            warmup: bool = False,\n"
)
BUILT_ONCE = both(
    before(
        r"input_batch = InputBatch\.make_dummy\(num_reqs",
        "built = _BUILT.get((num_reqs, num_tokens))",
        "if built is not None:",
        "    return built",
    ),
    swap(
        r"return CapturedAttentionState\(attn_metadata, slot_mappings_by_layer\)\n",
        (
            "built = _BUILT[num_reqs, num_tokens] = CapturedAttentionState(attn_metadata, "
            "slot_mappings_by_layer)\n    return built\n\n\n_BUILT = {}\n"
        ),
    ),
)
CACHED_BY_A_DECORATOR = both(
    swap(r"^def prepare_inputs_to_capture\(", "@once_for_each_size\ndef prepare_inputs_to_capture("),
    swap(
        r"\A(#.*\n)+",
        lambda match: (
            match[0] + "def once_for_each_size(build):\n    built = {}\n\n    def once(*args, **kwargs):\n"
            "        if args[:2] not in built:\n            built[args[:2]] = build(*args, **kwargs)\n"
            "        return built[args[:2]]\n\n    return once\n\n\n"
        ),
    ),
)
CACHED_BY_ITS_NAME = swap(
    r"\Z",
    "\n\n_build, _built = prepare_inputs_to_capture, {}\n\n\n"
    "prepare_inputs_to_capture = lambda *args, **kwargs: (\n"
    "    _built[args[:2]] if args[:2] in _built else _built.setdefault(args[:2], _build(*args, **kwargs))\n)\n",
)


@cache
def of(release: str, path: str) -> str:
    return (release_root(release) / path).read_text()


def from_release(release: str, path: str, pattern: str) -> Change:
    """The part that matches *pattern* as *release* has it."""

    def change(text: str) -> str:
        (part,) = re.findall(pattern, of(release, path), re.MULTILINE)
        return swap(pattern, lambda _: part)(text)

    return change


class Case(NamedTuple):
    """An edited vLLM and the verdicts that are right."""

    mutant: Mutant
    right: set[Verdict]

    @property
    def release(self) -> str:
        return self.mutant.base.release


def edit(fix: str, base: Base, right: set[Verdict], name: str, **changes: Change) -> Case:
    """*changes* by the name of the file, here or in `vllm_files`."""
    files = {path: PATHS.get(path) or getattr(vllm_files, path) for path in changes}
    return _case(fix, base, right, name, {files[path]: change for path, change in changes.items()})


def edits(fix: str, base: Base, right: set[Verdict], by_name: Mapping[str, Mapping[str, Change]]) -> Iterator[Case]:
    """The edits of one vLLM that have the same right verdicts, by name: changes as those of `edit`."""
    return (edit(fix, base, right, name, **changes) for name, changes in by_name.items())


def _case(fix: str, base: Base, right: set[Verdict], name: str, changes: dict[str, Change]) -> Case:
    paths = tuple(dict.fromkeys([*changes, *(path for path, _ in base.remedy)]))
    return Case(Mutant(fix, base, paths, (), tuple(changes.items()), name=name, kind="evidence"), right)


def capture_state() -> Iterator[Case]:
    fix = "capture-state"
    yield from edits(
        fix,
        V22,
        UNTOUCHED,
        {
            "one state for each size": {"CUDAGRAPHS": BUILT_ONCE},
            "one state for each size, by a decorator": {"CUDAGRAPHS": CACHED_BY_A_DECORATOR},
            "one state for each size, by its name": {"CUDAGRAPHS": CACHED_BY_ITS_NAME},
            "one state for each descriptor, in the factory": {
                "CUDAGRAPHS": both(
                    swap(
                        r"attn_metadata, slot_mappings = prepare_inputs_to_capture\(((?:\n {16}.*)+)\n {12}\)",
                        (
                            r"if desc not in built:\n                built[desc] = prepare_inputs_to_capture(\1\n"
                            r"                )\n            attn_metadata, slot_mappings = built[desc]"
                        ),
                    ),
                    before(r"def create_forward_fn\(\n", "built = {}", ""),
                )
            },
            "one state for each size, by the model's state": {
                "MODEL_STATE": both(
                    before(
                        r"if cudagraph_mode == CUDAGraphMode\.FULL:\n +# Use padded",
                        "built = vars(self).setdefault('built', {})",
                        "if for_capture and input_batch.num_tokens in built:",
                        "    return built[input_batch.num_tokens]",
                    ),
                    swap(
                        r"( +)return attn_metadata\n",
                        r"\1if for_capture:\n\1    built[num_tokens] = attn_metadata\n\1return attn_metadata\n",
                    ),
                )
            },
            "one plan for all, in the builder": {
                "FLASHMLA": swap(
                    r"scheduler_metadata, _ = get_mla_metadata\(((?:\n {12}.*)+)\n {8}\)",
                    (
                        r"if getattr(self, 'plan', None) is None:\n            self.plan, _ = get_mla_metadata(\1\n"
                        r"            )\n        scheduler_metadata = self.plan"
                    ),
                )
            },
        },
    )
    renamed = swap(r"\bFlashMLASchedMeta\b", "FlashMLASchedulerMetadata")
    yield _case(fix, V21, UNTOUCHED, "the lazy plan's class renamed", dict.fromkeys(LAZY_PLANS, renamed))
    for how, lines in {
        "by a method": ("self._reset_plans(attn_state)",),
        "of the state": ("reset_plans(attn_state.attn_metadata)",),
        "of what is returned": ("captured_attn_states[desc].attn_metadata.clear()",),
        "of all": ("reset_all_plans()",),
        "by a loop": (
            "for metadata in attn_state.attn_metadata.values():",
            "    metadata.decode.scheduler_metadata.have_initialized = False",
        ),
    }.items():
        yield edit(fix, V21, NOT_NEEDED, f"plans reset between the passes, {how}", CUDAGRAPHS=before(GRAPH, *lines))
    yield from edits(
        fix,
        V18,
        NOT_NEEDED,
        {
            "plans reset between the passes": {"CUDAGRAPHS": before(GRAPH, "forward_fn.reset_plans()")},
            "a warm-up without attention": {
                "CUDAGRAPHS": both(
                    swap(
                        r"attn_metadata if cg_mode != CUDAGraphMode\.PIECEWISE else None,",
                        "attn_metadata if torch.cuda.is_current_stream_capturing() else None,",
                    )
                )
            },
            "a state of its own for each call of the forward function": {
                "CUDAGRAPHS": before(
                    r"with set_forward_context\(\n +attn_metadata if",
                    "attn_metadata, slot_mappings = self._state(num_reqs, num_tokens)",
                )
            },
        },
    )
    yield from edits(
        fix,
        V17,
        NOT_NEEDED,
        {
            "own metadata for the graph": {
                "CUDAGRAPHS": after(
                    r"assert attn_metadata is not None$",
                    "attn_metadata, slot_mappings = self._state_for_the_graph(num_reqs)",
                )
            },
            "own metadata for the graph, handed on": {
                "CUDAGRAPHS": swap(
                    r"( +)attn_metadata=attn_metadata,\n( +)slot_mappings=slot_mappings,\n( +)has_lora",
                    r"\1attn_metadata=self._metadata_for_the_graph(num_reqs),\n"
                    r"\2slot_mappings=slot_mappings,\n\3has_lora",
                )
            },
            "no attention in the warm-up": {
                "CUDAGRAPHS": swap(
                    (
                        r"(with set_forward_context\(\n +)attn_metadata(,\n +self\.vllm_config,\n"
                        r" +num_tokens=num_tokens,\n +cudagraph_runtime_mode=CUDAGraphMode\.NONE)"
                    ),
                    r"\1None\2",
                )
            },
            "own metadata for the graph of a draft": {
                "EAGLE_CUDAGRAPHS": swap(
                    r"( +)generate_fn=generate_fn,\n( +)attn_metadata=attn_metadata",
                    r"\1generate_fn=generate_fn,\n\2attn_metadata=self._metadata_for_the_graph(num_reqs)",
                )
            },
        },
    )
    yield edit(
        fix, V21, CURED, "asked with a keyword",
        CUDAGRAPHS=both(WITH_KEYWORD, TAKES_IT), EAGLE_CUDAGRAPHS=TAKES_IT,
    )  # fmt: skip
    yield edit(
        fix, V22, REMEDIED, "asked with keywords, as upstream will",
        CUDAGRAPHS=both(WARMUP_AND_NOT, TAKES_IT), EAGLE_CUDAGRAPHS=TAKES_IT,
    )  # fmt: skip
    yield edit(
        fix,
        V22,
        UNTOUCHED,
        "a factory that goes by the keyword",
        CUDAGRAPHS=both(
            WARMUP_AND_NOT,
            TAKES_IT,
            swap(
                r"return forward_fn, CapturedAttentionState\(attn_metadata, slot_mappings\)",
                (
                    "self.made = self.made if not warmup else (forward_fn, CapturedAttentionState(attn_metadata, "
                    "slot_mappings))\n            return self.made"
                ),
            ),
        ),
        EAGLE_CUDAGRAPHS=TAKES_IT,
    )
    by_keyword = swap(
        (
            r"( +)generate_fn\(\n( +)num_reqs,\n +num_tokens,\n +attn_metadata,\n +slot_mappings,\n"
            r" +num_tokens_across_dp,\n( +)CUDAGraphMode\.NONE,"
        ),
        r"\1generate_fn(\n\2num_reqs=num_reqs,\n\2num_tokens_padded=num_tokens,\n\2attn_metadata=attn_metadata,\n\2slot_mappings=slot_mappings,\n"
        r"\2num_tokens_across_dp=num_tokens_across_dp,\n\3cudagraph_runtime_mode=CUDAGraphMode.NONE,",
    )
    yield edit(fix, V17, CURED, "a draft generated by keywords", EAGLE_CUDAGRAPHS=by_keyword)
    for base, state in ((V18, ""), (V21, ", attn_state")):
        yield edit(
            fix,
            base,
            REMEDIED,
            "upstream's remedy with a name of its own for the second pass",
            CUDAGRAPHS=both(
                before(GRAPH, f"record_fn{state} = create_forward_fn(desc)"),
                swap(r"(with torch\.cuda\.graph\(graph, self\.pool\):\n +)forward_fn", r"\1record_fn"),
            ),
        )
    yield edit(
        fix,
        V21,
        UNTOUCHED,
        "states kept by the caller's factory",
        CUDAGRAPHS=swap(
            r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
            "return super().capture(remembering(create_forward_fn), progress_bar_desc)",
        ),
    )

    yield edit(
        fix,
        V22,
        UNTOUCHED,
        "one state for each size of a draft",
        EAGLE_CUDAGRAPHS=both(
            swap(
                r"attn_state = prepare_inputs_to_capture\(((?:\n {16}.*)+)\n {12}\)",
                (
                    r"if num_tokens not in built:\n"
                    r"                built[num_tokens] = prepare_inputs_to_capture(\1\n                )\n"
                    r"            attn_state = built[num_tokens]"
                ),
            ),
            swap(r"( +)(def create_forward_fn\((?:.*\n)+?.*prepare_inputs)", r"\1built = {}\n\n\1\2"),
        ),
    )
    yield _case(
        fix,
        V22,
        UNTOUCHED,
        "one sparse plan for all",
        {
            LAZY_PLANS[4]: swap(
                r"out\[layer_type\] = get_mla_metadata\(\)\[0\]",
                "out[layer_type] = _PLANS.setdefault(layer_type, get_mla_metadata()[0])",
            )
        },
    )


def draft_prefill_state() -> Iterator[Case]:
    fix = "draft-prefill-state"
    yield from edits(
        fix,
        DRAFT_23,
        UNTOUCHED,
        {
            "two warm-up states": {"CUDAGRAPHS": swap(r"(create_forward_fn\(\s*desc, warmup=)False", r"\1True")},
            "two recorded states": {"CUDAGRAPHS": swap(r"(create_forward_fn\(\s*desc, warmup=)True", r"\1False")},
            "a pair of one state by its name": {
                "CUDAGRAPHS": swap(
                    r"^( +)(attn_states\[desc\] = AttentionStatePair\(\n +warmup_attn_state, capture_attn_state)",
                    r"\1warmup_attn_state = capture_attn_state\n\1\2",
                )
            },
            "one state for each size": {
                "CUDAGRAPHS": both(
                    before(
                        r"input_batch = InputBatch\.make_dummy\(num_reqs",
                        "if (num_reqs, num_tokens) in _BUILT:",
                        "    return _BUILT[num_reqs, num_tokens]",
                    ),
                    swap(
                        r"return AttentionState\(attn_metadata, slot_mappings_by_layer\)\n",
                        (
                            "return _BUILT.setdefault((num_reqs, num_tokens), AttentionState(attn_metadata, "
                            "slot_mappings_by_layer))\n\n\n_BUILT = {}\n"
                        ),
                    ),
                )
            },
        },
    )
    yield edit(
        fix,
        DRAFT_22,
        CURED,
        "asked with keywords",
        CUDAGRAPHS=both(WARMUP_AND_NOT, TAKES_IT),
        EAGLE_CUDAGRAPHS=TAKES_IT,
    )
    yield edit(
        fix, DRAFT_21, CURED, "asked with a keyword", CUDAGRAPHS=both(WITH_KEYWORD, TAKES_IT), EAGLE_CUDAGRAPHS=TAKES_IT
    )
    yield edit(fix, DRAFT_22, UNTOUCHED, "one state for each size, and the target's", CUDAGRAPHS=BUILT_ONCE)
    yield from edits(
        fix,
        DRAFT_22,
        NOT_NEEDED,
        {
            "the speculator is given states of its own": {
                "SPECULATOR": swap(r"( +)self\.prefill,\n +attn_states,", r"\1self.prefill,\n\1self._own_states(),")
            },
            "the runner hands on states of the draft's own": {
                "RUNNER_V2": swap(
                    r"self\.speculator\.capture\(captured_attn_states\)",
                    "self.speculator.capture(self.speculator.states_for(captured_attn_states))",
                )
            },
            "the states are replaced in the factory": {
                "EAGLE_CUDAGRAPHS": swap(
                    (
                        r"attn_metadata, slot_mappings = attn_state\n( +)fwd = lambda cg_mode: forward_fn\("
                        r"(?=(?:.*\n)*?class Decode)"
                    ),
                    r"attn_metadata, slot_mappings = self._fresh(attn_state)\n\1fwd = lambda cg_mode: forward_fn(",
                )
            },
        },
    )


def draft_decode_mode() -> Iterator[Case]:
    fix = "draft-decode-mode"
    manager_call = (
        r"(self\.decode_cudagraph_manager = EagleCudaGraphManager\(\n +self\.vllm_config,\n +self\.device,\n"
        r" +)cudagraph_mode,"
    )
    configured = r"\1self.vllm_config.compilation_config.cudagraph_mode,"
    yield edit(
        fix, DECODE_20, CURED, "a mode chosen, and the configured one given", SPECULATOR=swap(manager_call, configured)
    )
    yield from edits(
        fix,
        DECODE_20,
        UNTOUCHED,
        {
            "a mode chosen, and another one given": {
                "SPECULATOR": swap(manager_call, r"\1self._decode_mode(cudagraph_mode),")
            },
            "a mode chosen, and another one set behind it": {
                "SPECULATOR": after(
                    r"self\.decode_cudagraph_manager\.pool =",
                    "self.decode_cudagraph_manager.cudagraph_mode = self.mode",
                )
            },
            "a mode chosen, and the manager made again": {
                "SPECULATOR": swap(
                    r"( +)def load_model",
                    (
                        r"\1def _again(self):\n"
                        r"\1    self.decode_cudagraph_manager = EagleCudaGraphManager(self.vllm_config, self.device, "
                        r"self.mode, 1)\n\n\1def load_model"
                    ),
                )
            },
        },
    )
    yield from edits(
        fix,
        DECODE_17,
        NOT_NEEDED,
        {
            "piecewise refused at dispatch": {
                "SPECULATOR": before(
                    r"if cudagraph_mode == CUDAGraphMode\.FULL:\n +# Run full",
                    "if cudagraph_mode == CUDAGraphMode.PIECEWISE:",
                    "    cudagraph_mode, num_tokens_padded = CUDAGraphMode.NONE, num_reqs",
                )
            },
            "decodes are generated without a graph": {
                "SPECULATOR": swap(
                    r"cudagraph_runtime_mode=cudagraph_mode,\n( +\)\n +return)",
                    r"cudagraph_runtime_mode=CUDAGraphMode.NONE,\n\1",
                )
            },
        },
    )
    yield from edits(
        fix,
        NIGHTLY,
        NOT_NEEDED,
        {
            "piecewise refused at dispatch": {
                "SPECULATOR": before(
                    r"attn_metadata_updated = None\n",
                    "if decode_batch_desc.cg_mode == CUDAGraphMode.PIECEWISE:",
                    "    decode_batch_desc = decode_batch_desc._replace("
                    "cg_mode=CUDAGraphMode.NONE, num_tokens=num_reqs)",
                )
            },
            "indices are zeroed before each prefill": {
                "SPECULATOR": before(r"prepare_eagle_inputs\(\n", "self.last_token_indices.zero_()")
            },
        },
    )
    yield edit(
        fix,
        DECODE_20,
        UNTOUCHED,
        "indices are zeroed in a launch that covers none",
        SPECULATOR=swap(r"(?s)(prepare_eagle_inputs\(.*?)self\.max_num_reqs,", r"\1num_reqs,"),
    )


def mamba_padding() -> Iterator[Case]:
    fix = "mamba-padding"
    for cleared in (
        "is_prefilling[num_reqs:].fill_(False)",
        "is_prefilling[num_reqs:num_reqs_padded] = False",
        "is_prefilling[num_reqs:].fill_(0)",
        "is_prefilling[num_reqs:num_reqs_padded].fill_(0)",
        "is_prefilling[num_reqs:].zero_()",
        "is_prefilling[num_reqs:] = 0",
    ):
        yield edit(fix, MAMBA_21, REMEDIED, cleared, RUNNER=after(MARKED, cleared))
    yield edit(
        fix,
        MAMBA_21,
        CURED,
        "num_reqs is padded before the clearing",
        RUNNER=both(after(MARKED, CLEARED), before(MARKED, "num_reqs = num_reqs_padded")),
    )
    for how, line in {
        "by another value": "num_reqs = self.max_num_reqs",
        "in a tuple": "num_reqs, _ = num_reqs_padded, None",
        "in an expression": "assert (num_reqs := num_reqs_padded)",
        "and more": "num_reqs += 1",
    }.items():
        yield edit(fix, MAMBA_22, CURED, f"num_reqs is set before the clearing, {how}", RUNNER=before(MARKED, line))
    yield from edits(
        fix,
        MAMBA_21,
        NOT_NEEDED,
        {
            "prompt tokens of padded rows zeroed": {"RUNNER": before(MARKED, "num_prompt_tokens_cpu[num_reqs:] = 0")},
            "prompt tokens zeroed with the request": {
                "INPUT_BATCH": after(r"self\._req_ids\[req_index\] = None", "self.num_prompt_tokens[req_index] = 0")
            },
            "prompt tokens zeroed where a request is moved away": {
                "INPUT_BATCH": after(
                    r"self\.num_prompt_tokens\[empty_index\] = self\.num_prompt_tokens\[last_req_index\]",
                    "self.num_prompt_tokens[last_req_index] = 0",
                )
            },
            "the split leaves out rows without tokens": {
                "SPLIT": swap(
                    r"is_prefill \|= common_attn_metadata\.is_prefilling",
                    "is_prefill |= common_attn_metadata.is_prefilling & (query_lens > 0)",
                )
            },
        },
    )
    yield edit(
        fix,
        MAMBA_22,
        UNTOUCHED,
        "marks replaced on the metadata",
        RUNNER=before(
            r"if self\.dcp_world_size > 1:\n +self\.dcp_local_seq_lens\.cpu\[:num_reqs\]",
            "cm_base.is_prefilling = num_computed_tokens_cpu < num_prompt_tokens_cpu",
        ),
    )
    yield edit(
        fix,
        MAMBA_21,
        NOT_NEEDED,
        "the builder's caller clears the marks",
        MAMBA=swap(
            r"return self\._compute_common_metadata\(\n( +)common_attn_metadata, num_acc",
            r"return self._compute_common_metadata(\n\1self._without_padding(common_attn_metadata), num_acc",
        ),
    )


def flashmla_fp8() -> Iterator[Case]:
    fix = "flashmla-fp8"
    anew = "self.cg_buf_{0} = torch.zeros_like(self.cg_buf_{0})"
    copied = r"n = tile_scheduler_metadata\.size\(0\)"
    both_anew = [anew.format(name) for name in ("tile_scheduler_metadata", "num_splits")]
    yield from edits(
        fix,
        FP8_19,
        UNTOUCHED,
        {
            "buffers made anew for each batch": {"FLASHMLA": before(copied, *both_anew)},
            "one buffer made anew for each batch": {"FLASHMLA": before(copied, both_anew[1])},
            "buffers made by a method": {"FLASHMLA": before(copied, "self._make_buffers()")},
        },
    )
    yield from edits(
        fix,
        FP8_18,
        NOT_NEEDED,
        {
            "a helper keeps the plan": {
                "FLASHMLA": before(r"return FlashMLADecodeMetadata\(", "self._keep(scheduler_metadata)", "")
            },
            "a helper keeps the plan before it is pointed at": {
                "FLASHMLA": before(
                    POINTED_AT, "tile_scheduler_metadata, num_splits = self._kept(tile_scheduler_metadata, num_splits)"
                )
            },
            "the metadata are those that a helper keeps": {
                "FLASHMLA": swap(
                    r"scheduler_metadata=scheduler_metadata,\n( +dcp)",
                    r"scheduler_metadata=self._in_buffers(scheduler_metadata),\n\1",
                )
            },
            "the caller keeps the plan": {
                "MLA": swap(r"decode_metadata = self\._build_decode\(", "decode_metadata = self._kept_build_decode(")
            },
            "the planner writes into buffers": {
                "OPERATORS": swap(
                    r"return torch\.ops\._flashmla_extension_C\.get_mla_decoding_metadata_dense_fp8"
                    r"\(((?:\n {8}.*)+)\n {4}\)",
                    r"return _kept(torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(\1\n    ))",
                )
            },
        },
    )
    yield edit(fix, FP8_18, REMEDIED, "upstream's remedy without its assertions", FLASHMLA=before(POINTED_AT, *COPIED))


def flashmla_padding() -> Iterator[Case]:
    fix = "flashmla-padding"
    clamped = {
        "where the metadata are made": swap(
            r"block_table=block_table_tensor,", "block_table=block_table_tensor.clamp(min=0),"
        ),
        "before that": before(
            r"query_lens_cpu = query_start_loc_cpu", "block_table_tensor = block_table_tensor.clamp(min=0)"
        ),
        "in place": before(r"query_lens_cpu = query_start_loc_cpu", "block_table_tensor.clamp_(min=0)"),
        "where the kernel is called": swap(
            r"block_table=attn_metadata\.decode\.block_table,",
            "block_table=attn_metadata.decode.block_table.clamp(min=0),",
        ),
    }
    for base in (PADDING_17, PADDING_18):
        for where, change in clamped.items():
            yield edit(fix, base, NOT_NEEDED, f"block ids clamped {where}", FLASHMLA=change)
    yield from edits(
        fix,
        PADDING_17,
        NOT_NEEDED,
        {
            "block ids clamped by the caller": {
                "RUNNER": swap(
                    r"block_table_gid_0 = _get_block_table\(0\)", "block_table_gid_0 = _get_block_table(0).clamp(min=0)"
                )
            },
            "block ids clamped by the operator": {
                "OPERATORS": before(
                    r"out, softmax_lse = torch\.ops\._flashmla_extension_C\.fwd_kvcache_mla_fp8\(",
                    "block_table = block_table.clamp(min=0)",
                )
            },
        },
    )
    yield edit(
        fix,
        PADDING_20,
        UNTOUCHED,
        "num_reqs is padded before the padding",
        RUNNER=before(r"blk_table_tensor\[num_reqs:num_reqs_padded\]\.fill_", "num_reqs = num_reqs_padded"),
    )


CAPTURE = (
    r"^    @torch\.inference_mode\(\)\n    def capture\(\n        self,\n        create_forward_fn"
    r"(?:.*\n)+?(?=    def dispatch)"
)
PLANNED_FP8 = r"^        if self\.is_fp8_kvcache:\n(?:(?: {12}.*)?\n)+(?=        return FlashMLADecodeMetadata)"
PAIR_CHOSEN = both(
    swap(r"\bCapturedAttentionState\b", "AttentionState"),
    swap(r"^    AttentionState,\n", "    AttentionState,\n    AttentionStatePair,\n"),
    swap(
        r"full_cg_attn_states: dict\[BatchExecutionDescriptor, AttentionState\]",
        "attn_states: dict[BatchExecutionDescriptor, AttentionStatePair]",
    ),
    swap(
        r"attn_state = full_cg_attn_states\[desc\]\n",
        (
            "attn_state_pair = attn_states[desc]\n"
            "            attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured\n"
        ),
    ),
    swap(r"(def create_forward_fn\(\n +desc: BatchExecutionDescriptor,\n)", r"\1            warmup: bool,\n"),
)
"""What PR 44253 did to `eagle/cudagraph.py`, as it is described."""
PAIRS_HANDED_ON = swap(r"\bCapturedAttentionState\b", "AttentionStatePair")


def nightlies() -> Iterator[Case]:
    """Upstream's main just before and just after each of the five merges, from the releases next to it."""

    def nightly(fix: str, base: Base, right: set[Verdict], name: str, **changes: Change) -> Case:
        return edit(fix, base, right, f"main {name}", **changes)

    before_42444 = Base("0.22.0", "stock", remedy=((CUDAGRAPHS, from_release("0.22.0", CUDAGRAPHS, CAPTURE)),))
    older = from_release("0.21.0", CUDAGRAPHS, CAPTURE)
    yield nightly("capture-state", before_42444, CURED, "before PR 42444", CUDAGRAPHS=older)
    newer = from_release("0.22.0", CUDAGRAPHS, CAPTURE)
    yield nightly("capture-state", V21, REMEDIED, "after PR 42444", CUDAGRAPHS=newer)
    yield nightly("draft-prefill-state", DRAFT_21, CURED, "after PR 42444", CUDAGRAPHS=newer)

    builders = {"ATTN_UTILS": lambda _: of("0.23.0", ATTN_UTILS), "MODEL_STATE": lambda _: of("0.23.0", MODEL_STATE)}
    yield nightly("draft-prefill-state", DRAFT_22, CURED, "before PR 44253", **builders)
    for fix in ("capture-state", "draft-prefill-state"):
        yield nightly(
            fix,
            DRAFT_22,
            # Its speculator, which capture-state does not read, names the states as no release does.
            REMEDIED | (UNTOUCHED if fix == "capture-state" else set()),
            "after PR 44253",
            CUDAGRAPHS=lambda _: of("0.23.0", CUDAGRAPHS),
            EAGLE_CUDAGRAPHS=PAIR_CHOSEN,
            SPECULATOR=PAIRS_HANDED_ON,
            RUNNER_V2=swap(r"\bcaptured_attn_states\b", "attn_states"),
        )

    yield edit("draft-decode-mode", NIGHTLY, CURED, "main before PR 39773", SPECULATOR=lambda text: text)
    yield edit(
        "draft-decode-mode", NIGHTLY, REMEDIED, "main after PR 39773", SPECULATOR=lambda _: of("0.20.0", SPECULATOR)
    )

    before_41873 = Base("0.22.0", "stock", remedy=((RUNNER, after(MARKED, CLEARED)),))
    yield nightly(
        "mamba-padding", before_41873, CURED, "before PR 41873", RUNNER=cut(r"^ *is_prefilling\[num_reqs:\] = False\n")
    )
    yield nightly("mamba-padding", MAMBA_21, REMEDIED, "after PR 41873", RUNNER=after(MARKED, CLEARED))

    before_35175 = Base("0.19.0", "stock", remedy=((FLASHMLA, from_release("0.19.0", FLASHMLA, PLANNED_FP8)),))
    yield nightly(
        "flashmla-fp8", before_35175, CURED, "before PR 35175", FLASHMLA=from_release("0.18.1", FLASHMLA, PLANNED_FP8)
    )
    yield nightly(
        "flashmla-fp8", FP8_18, REMEDIED, "after PR 35175", FLASHMLA=from_release("0.19.0", FLASHMLA, PLANNED_FP8)
    )


EDITED = (capture_state, draft_prefill_state, draft_decode_mode, mamba_padding, flashmla_fp8, flashmla_padding)
