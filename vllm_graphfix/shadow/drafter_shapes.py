"""The known shapes of vLLM's code in which model runner V2 replays full graphs of a drafter (0.19.0 - 0.33.0).

Eagle and MTP draft token by token; DFlash and DSpark (0.24.0 and later) draft all tokens of a step in one pass.

A shape names the speculator that has the graphs, the method that replays them, and the method that runs the same step
without one. Code that uses other attributes than those in `KNOWN` has no known shape: a second run might spoil them.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from vllm_graphfix.fix import Diagnosis, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_FOLDER = "vllm/v1/worker/gpu/spec_decode"
_MANAGER = "vllm/v1/worker/gpu/cudagraph_utils.py"
_BASE = f"{_FOLDER}/speculator.py"


class DrafterGraphs(NamedTuple):
    """The full graphs of one manager, and the method that runs the same step without one."""

    name: str
    """The name of these graphs in messages and reports."""
    manager: str
    """Attribute of the speculator."""
    caller: str
    """The speculator's method that replays them."""
    eager: str
    """The method that runs such a step without a graph, called by *caller* with its variables: requests, tokens,
    *metadata*, *slots*."""
    metadata: str
    slots: str
    columns: str
    """The columns of draft tokens and logits that a replay writes: ``first``, ``step`` (the caller's variable),
    ``rest``, all but the first, or ``all``."""
    builds: bool = True
    """True if *caller* has metadata where it replays; otherwise the graph makes its own from those of its capture."""


class Speculator(NamedTuple):
    path: str
    name: str
    hook: str
    """The method that makes the managers."""
    graphs: tuple[DrafterGraphs, ...]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


def _prefill(eager: str) -> DrafterGraphs:
    return DrafterGraphs(
        "draft prefill", "prefill_cudagraph_manager", "propose", eager, "attn_metadata", "slot_mappings", "first"
    )


def _decode(manager: str, caller: str, eager: str, metadata: str, slots: str, columns: str) -> DrafterGraphs:
    return DrafterGraphs("draft decode", manager, caller, eager, metadata, slots, columns)


_EAGLE = f"{_FOLDER}/eagle/speculator.py", "EagleSpeculator"
_AUTOREGRESSIVE = f"{_FOLDER}/autoregressive/speculator.py", "AutoRegressiveSpeculator"
_DEPENDENT = f"{_FOLDER}/target_dependent_ar/speculator.py", "TargetDependentARSpeculator"
_HOOK = "init_cudagraph_manager"
_IN_PROPOSE = ("propose", "generate_draft", "attn_metadata_updated", "slot_mappings_updated", "rest")
_BY_STEP = _decode(
    "decode_cudagraph_manager",
    "_multi_step_decode",
    "_generate_draft",
    "attn_metadata",
    "slot_mappings_by_layer",
    "step",
)
_FUSED = _BY_STEP._replace(caller="_fused_multi_step_decode", eager="_generate_fused_drafts", columns="rest")
SHAPES = {
    "loop": Speculator(*_EAGLE, "__init__", (_decode("cudagraph_manager", *_IN_PROPOSE),)),
    "prefill-and-loop": Speculator(
        *_EAGLE, _HOOK, (_prefill("prefill"), _decode("decode_cudagraph_manager", *_IN_PROPOSE))
    ),
    "prefill-and-steps": Speculator(
        *_EAGLE, _HOOK, (_prefill("prefill"), _BY_STEP._replace(caller="multi_step_decode", eager="generate_draft"))
    ),
    "autoregressive": Speculator(*_AUTOREGRESSIVE, _HOOK, (_prefill("_prefill"), _BY_STEP)),
    "autoregressive-fused": Speculator(*_AUTOREGRESSIVE, _HOOK, (_prefill("_prefill"), _BY_STEP, _FUSED)),
    "target-dependent": Speculator(*_DEPENDENT, _HOOK, (_prefill("_prefill"), _BY_STEP, _FUSED._replace(builds=False))),
}
READS = (_MANAGER, _BASE, *dict.fromkeys(speculator.path for speculator in SHAPES.values()))
MODULES = tuple(dict.fromkeys(speculator.module for speculator in SHAPES.values()))

_DFLASH = f"{_FOLDER}/dflash/speculator.py", "DFlashSpeculator"
_DSPARK = f"{_FOLDER}/dspark/speculator.py", "DSparkSpeculator"
PARALLEL = Speculator(
    *_DFLASH,
    _HOOK,
    (_decode("query_cudagraph_manager", "propose", "_generate_draft", "draft_attn_metadata", "", "all"),),
)
"""A speculator that drafts all tokens in one pass; its graphs have metadata where they replay, or build them."""
PARALLEL_READS = (_MANAGER, _BASE, _DFLASH[0], _DSPARK[0])
_CONTEXT = (
    "precompute_context_kv=lambda num_reqs: self._precompute_context_kv(0, self._num_graph_context_tokens(num_reqs))",
    "prepare_forward=self._prepare_graph_forward",
)
"""The step before a draft that its graph has, too, from 0.31.0 and 0.32.0 on: it stores the target's states."""
_CAPTURED = "self.query_cudagraph_manager.capture(self._generate_draft, *...)"

_HELPERS = ("run_model", "_run_model", "_sample_draft", "sample_draft", "_generate_draft")
KNOWN = frozenset(
    """
    hidden_states inputs_embeds input_buffers idx_mapping temperature seeds draft_tokens draft_logits current_draft_step
    last_token_indices sample_src_positions block_tables attn_groups pcp_manager
    model method vllm_config max_model_len num_speculative_steps use_fp64_gumbel supports_mm_inputs model_returns_tuple
    advance_draft_positions use_local_argmax_reduction draft_watermarker prefill_cudagraph_manager
    run_model _run_model _sample_draft sample_draft _greedy_sample_draft compute_draft_logits get_draft_top_tokens
    _maybe_predict_acceptance _prepare_eplb_forward _generate_draft _update_draft_decode_metadata
    """.split()
)
"""Attributes of a speculator that drafting uses in the releases that were examined: tensors, which are copied and
restored, numbers and methods. Another attribute may be state that a second run spoils."""
_KNOWN_PARALLEL = KNOWN | frozenset(
    """
    max_num_tokens sample_indices sample_pos sample_idx_mapping sample_col sample_draft num_query_per_req
    draft_token_confidence_probs
    _num_graph_context_tokens _precompute_context_kv _context_slot_mappings _layer_group_idx context_positions
    prepare_context_anchor target_input_buffers supports_decode_metadata_update _aux_staging _num_rejected
    _sample_sequential _sample_sequential_topk _sample_logits _anchor_idx _step_cols _draft_topk _d2t_scatter_index
    _draft_scatter_buf use_confidence_head enable_adaptive_verification acceptance_estimator
    """.split()
)
BUILT_OF = ("num_reqs", "batch_desc", "num_query_per_req", "seq_lens_cpu_upper_bound", "step")
"""Arguments of `_build_uniform_attn_metadata`."""
_ARGUMENTS = ("attn_metadata", "slot_mappings", "num_tokens_across_dp", "cudagraph_runtime_mode")
_MORE = {"mm_inputs", "skip_sample", "num_speculative_steps"}


def diagnose(source: Source) -> Diagnosis:
    """Return `AFFECTED` if there are graphs that can be checked."""
    if source.function(_MANAGER, "ModelCudaGraphManager.run_fullgraph") is None:
        return Diagnosis(Verdict.ABSENT, "no full graphs of model runner V2")
    run = source.function(_MANAGER, "CudaGraphManager.run_fullgraph")
    for shape, speculator in SHAPES.items():
        hook = source.function(speculator.path, f"{speculator.name}.{speculator.hook}")
        if hook and run and run.signature == "self, desc" and _has_shape(source, speculator, hook):
            return Diagnosis(Verdict.AFFECTED, f"full graphs of drafts replay in {speculator.name}", hook.where, shape)
    path, name = _EAGLE
    propose = source.function(path, f"{name}.propose")
    if propose and propose.find_unique("return self.cudagraph_manager.run_fullgraph(batch_desc)[:num_reqs]"):
        return Diagnosis(
            Verdict.ABSENT, "when drafts replay a graph, nothing is built that a step without it needs", propose.where
        )
    return Diagnosis(
        Verdict.UNRECOGNISED, "drafts replay full graphs in a way that is not recognised", defect_seen=True
    )


def _has_shape(source: Source, speculator: Speculator, hook: Function) -> bool:
    def method(name: str) -> Function | None:
        return source.function(speculator.path, f"{speculator.name}.{name}") or source.function(
            _BASE, f"DraftModelSpeculator.{name}"
        )

    # A further method that replays makes another shape.
    whole = source.function(speculator.path, speculator.name)
    if whole is None:
        return False
    helpers = [helper for helper in map(method, _HELPERS) if helper]
    replays = sum(
        len(whole.find(f"self.{manager}.run_fullgraph(...)")) for manager in {g.manager for g in speculator.graphs}
    )
    if replays != len(speculator.graphs) or any(not _attributes_used(each) <= KNOWN for each in helpers):
        return False
    for graphs in speculator.graphs:
        caller, eager = method(graphs.caller), method(graphs.eager)
        if not (
            hook.find(f"self.{graphs.manager} = ...")
            and caller
            and eager
            and caller.find_unique(f"self.{graphs.manager}.run_fullgraph(...)")
            and _is_called_as_known(caller, graphs)
            and eager.parameters[:2] == ("self", "num_reqs")
            and eager.parameters[3:7] == _ARGUMENTS
            and set(eager.parameters[7:]) <= _MORE
            and _attributes_used(eager) <= KNOWN
        ):
            return False
    if all(graphs.builds for graphs in speculator.graphs):
        return True
    build = method("_build_uniform_attn_metadata")
    return build is not None and set(BUILT_OF) <= set(build.parameters)


def _attributes_used(function: Function) -> set[str]:
    """Return the attributes of ``self`` in *function*."""
    return {
        node.attr
        for node in ast.walk(function.node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _is_called_as_known(caller: Function, graphs: DrafterGraphs) -> bool:
    call = caller.find_unique(f"self.{graphs.eager}(...)")
    if not isinstance(call, ast.Call):
        return False
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = [*call.args, *(named[name] for name in _ARGUMENTS[2:] if name in named)]
    names = [each.id if isinstance(each, ast.Name) else None for each in arguments]
    return names[:5] == ["num_reqs", None, graphs.metadata, graphs.slots, _ARGUMENTS[2]] and set(named) <= _MORE | set(
        _ARGUMENTS
    )


def diagnose_parallel(source: Source) -> Diagnosis:
    """Return `AFFECTED` if DFlash's graphs can be checked; the shape names the classes of speculators."""
    path, name = _DFLASH
    propose, capture = (source.function(path, f"{name}.{each}") for each in ("propose", "capture"))
    if propose is None or capture is None:
        return Diagnosis(Verdict.ABSENT, "there is no DFlash on model runner V2")
    run = source.function(_MANAGER, "CudaGraphManager.run_fullgraph")
    known = (
        run
        and run.signature == "self, desc"
        and source.function(path, f"{name}.{_HOOK}")
        and propose.find_unique("self.query_cudagraph_manager.run_fullgraph(batch_desc)")
        and {"input_batch", "dummy_run"} <= set(propose.parameters)
        and propose.assigned("num_reqs")
        and _captures_as_known(capture)
        and _generates_as_known(source, path, name)
    )
    if not known:
        reason = "drafts of DFlash replay full graphs in a way that is not recognised"
        return Diagnosis(Verdict.UNRECOGNISED, reason, propose.where, defect_seen=True)
    classes = [name, *([_DSPARK[1]] if _generates_as_known(source, *_DSPARK) else [])]
    return Diagnosis(Verdict.AFFECTED, f"full graphs of drafts replay in {name}", propose.where, " ".join(classes))


def _captures_as_known(capture: Function) -> bool:
    call = capture.find_unique(_CAPTURED)
    if not isinstance(call, ast.Call):
        return False
    further = {keyword.arg for keyword in call.keywords} - {"causal", "progress_bar_desc"}
    return not further or any(capture.call_has_keyword(_CAPTURED, context) for context in _CONTEXT)


def _generates_as_known(source: Source, path: str, name: str) -> bool:
    """Tell whether a draft of the speculator *name* uses nothing but attributes that a check restores."""
    generate = source.function(path, f"{name}._generate_draft")
    if generate is None or generate.parameters[:2] != ("self", "num_reqs") or generate.parameters[3:] != _ARGUMENTS:
        return False
    helpers = [
        source.function(each, f"{owner}.{helper}")
        for each, owner in (_DFLASH, _DSPARK, (_BASE, "DraftModelSpeculator"))
        for helper in (*_HELPERS, *_PARALLEL_HELPERS)
        if (each, owner) != _DSPARK or (path, name) == _DSPARK
    ]
    return all(_attributes_used(helper) <= _KNOWN_PARALLEL for helper in (generate, *helpers) if helper is not None)


_PARALLEL_HELPERS = (
    "_prepare_graph_forward",
    "_precompute_context_kv",
    "_num_graph_context_tokens",
    "prepare_context_anchor",
    "_sample_sequential",
    "_sample_sequential_topk",
    "_sample_logits",
    "_maybe_predict_acceptance",
)
