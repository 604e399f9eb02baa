"""The passes of a capture in vLLM's source: a warm-up outside the graph, then the pass that the graph records.

Several fixes depend on two facts: each pass requests a forward function, and each request builds a state down to the
plan. `RECOGNISED` are the patterns of the statements that do so; the slices contain every other use of a state, and so
show code that retains one. `_capture_passes` relies on both facts at run time.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from vllm_graphfix.fix import Slice, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_WORKER = "vllm/v1/worker/gpu"
_MLA = "vllm/v1/attention/backends/mla"
MANAGER = f"{_WORKER}/cudagraph_utils.py"
_ATTENTION = f"{_WORKER}/attn_utils.py"
MODEL_STATES = f"{_WORKER}/model_states/__init__.py"
MLA_BUILDERS = "vllm/model_executor/layers/attention/mla_attention.py"
_SPEC_DECODE = f"{_WORKER}/spec_decode"
EAGLE = f"{_SPEC_DECODE}/eagle/cudagraph.py"
DRAFT_MANAGERS = (
    f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py",
    f"{_SPEC_DECODE}/target_dependent_ar/cudagraph_utils.py",
)
"""The file with vLLM's managers of a draft model's graphs from 0.23.0 on, at its old and its new place."""

BUILT = "attn_metadata, slot_mappings = prepare_inputs_to_capture(...)"
ENTERED = (
    "set_forward_context(attn_metadata, *..., slot_mapping=slot_mappings)",
    (
        "set_forward_context(attn_metadata if cg_mode != CUDAGraphMode.PIECEWISE else None, *..., "
        "slot_mapping=slot_mappings)"
    ),
    "set_forward_context(*..., attn_metadata=attn_metadata, slot_mapping=slot_mappings)",
)
"""A pass runs on its state."""
_OWN_BUILT = "attn_state = prepare_inputs_to_capture(...)"
UNPACKED = "attn_metadata, slot_mappings = attn_state"
_DRAFTED = tuple(
    f"{to} lambda cg_mode: forward_fn(num_reqs, num_tokens, attn_metadata, slot_mappings, *...)"
    for to in ("fwd =", "return")
)
"""A draft's pass runs on its state."""
_HANDED_ON = ("return forward_fn", "return forward_fn, ...(attn_metadata, slot_mappings)")
_MICRO_BATCHES = "if desc.num_ubatches > 1: ..."
"""They have a factory of their own (0.30.0+)."""
_ASSERTED = ("assert attn_metadata is None", "assert (attn_metadata is not None) == self.use_breakable_cg")
_CAPTURED = ("super().capture(create_forward_fn, ...)", "return super().capture(create_forward_fn, ...)")
_PREPARED = ("attn_metadata = model_state.prepare_attn(...)", "attn_metadata = build_attn_metadata(...)")
_BY_SUPER = (
    "attn_metadata = super().prepare_attn(...)",
    "return super().prepare_attn(...)",
    "return attn_metadata",
)
"""A model's own states extend those of its base class, and retain none."""
_RETURNED = (
    "return ...(attn_metadata, slot_mappings_by_layer)",
    "return attn_metadata, slot_mappings_by_layer",
)
_METADATA = (
    "metadata = attn_metadata_builder.build(...)",
    "metadata = attn_metadata_builder.build_for_cudagraph_capture(...)",
    "metadata = attn_group.build_metadata(...)",
    "metadata = attn_group.build_metadata_for_cudagraph_capture(...)",
)
_SHARED = (
    "cached_metadata: ... = {}",
    "cached_metadata[reuse_key] = metadata",
    "metadata = attn_metadata_builder.update_block_table(cached_metadata[reuse_key], ..., ...)",
)
"""Groups of one call share metadata (0.31.0 on); by the first line, calls do not."""
_PLANNED = "scheduler_metadata, _ = get_mla_metadata(...)"
_PLAN_HANDED_ON = tuple(
    f"{to} FlashMLASparseMetadata.FP8KernelMetadata(*..., scheduler_metadata=scheduler_metadata)"
    for to in ("fp8_metadata =", "kernel_meta =", "return")
)
_PASSES = tuple(
    f"{forward_fn}(CUDAGraphMode.{mode})"
    for forward_fn in ("forward_fn", "record_fn")
    for mode in ("NONE", "PIECEWISE")
)
_REQUESTED = tuple(
    f"{forward_fn}{state} = create_forward_fn(desc, *...)"
    for forward_fn in ("forward_fn", "record_fn", "recorded_fn")
    for state in ("", ", attn_state", ", warmup_attn_state", ", capture_attn_state")
)
_PAIR = "attn_states[desc] = AttentionStatePair(warmup_attn_state, capture_attn_state)"
_STORED = (
    _PAIR,
    "attn_states[desc] = AttentionStatePair(warmup_attn_state, warmup_attn_state)",
    *(
        line
        for states in ("attn_states", "captured_attn_states")
        for line in (f"{states}: ... = {{}}", *(2 * (f"{states}[desc] = attn_state",)), f"return {states}")
    ),
)
_STATE_OF_MODELS = (
    "from vllm.v1.worker.gpu.model_states.default import DefaultModelState",
    "return DefaultModelState(vllm_config, model, encoder_cache, device)",
    "return DefaultModelState",
)
"""The states of models with neither an encoder nor recurrent layers: constructed, or named (0.29.0 on)."""
RECOGNISED = (
    BUILT,
    _OWN_BUILT,
    UNPACKED,
    *_DRAFTED,
    "return fwd, attn_state",
    *_HANDED_ON,
    *_ASSERTED,
    *_CAPTURED,
    *_PREPARED,
    *_BY_SUPER,
    *_RETURNED,
    *_METADATA,
    *_SHARED,
    "attn_metadata = None",
    _PLANNED,
    *_PLAN_HANDED_ON,
    *(2 * _PASSES),  # one outside and one inside the graph, as `forward_functions` counts
    *(2 * _REQUESTED),
    *_STORED,
    *_STATE_OF_MODELS,
)

BUILDING = (
    Slice(MANAGER, "prepare_inputs_to_capture", "attn_metadata"),
    Slice(f"{_WORKER}/model_states/default.py", "DefaultModelState.prepare_attn", "attn_metadata prepare_attn"),
    Slice(MODEL_STATES, "", "DefaultModelState use_mla"),
    Slice(_ATTENTION, "build_attn_metadata", "metadata"),
    Slice(MLA_BUILDERS, "MLACommonMetadataBuilder.build_for_cudagraph_capture"),
    Slice(MLA_BUILDERS, "MLACommonMetadataBuilder.build", "_build_decode decode_metadata"),
    # The lazy plans
    Slice(f"{_MLA}/flashmla.py", "FlashMLAMetadataBuilder._build_decode", "scheduler_metadata get_mla_metadata"),
    *(
        Slice(
            f"{_MLA}/flashmla_sparse.py",
            f"FlashMLASparseMetadataBuilder.{build}",
            "scheduler_metadata get_mla_metadata",
        )
        for build in ("_build_fp8_mixed_decode_prefill", "_build_fp8_separate_prefill_decode")
    ),
    Slice(f"{_MLA}/sparse_swa.py", "DeepseekSparseSWAMetadataBuilder.build_tile_scheduler", "get_mla_metadata"),
)
"""The code by which each call builds a state down to the plan."""
TARGET = (
    Slice(MANAGER, "ModelCudaGraphManager.capture", "create_forward_fn attn_metadata"),
    Slice(
        MANAGER,
        "CudaGraphManager.capture",
        "create_forward_fn forward_fn attn_state attn_states captured_attn_states warmup_attn_state capture_attn_state",
    ),
)
"""The target's factory, and the passes that request its states."""
DRAFTS = tuple(
    Slice(path, f"{manager}.capture", "create_forward_fn attn_metadata attn_state")
    for path, managers in (
        (EAGLE, ("EagleCudaGraphManager", "DecodeEagleCudaGraphManager")),
        (DRAFT_MANAGERS[0], ("DecodeSpeculatorCudaGraphManager", "SpeculatorCudaGraphManager")),
        (DRAFT_MANAGERS[1], ("SpeculatorCudaGraphManager",)),
    )
    for manager in managers
)
"""Managers of drafts that build states of their own."""
OWN_STATES = tuple(
    Slice(
        path,
        "SpeculatorCudaGraphManager.capture",
        "attn_state attn_metadata create_forward_fn prepare_inputs_to_capture",
        Verdict.FIXED,
    )
    for path in DRAFT_MANAGERS
)
"""The one manager of a draft's graphs, prefills too (0.26.0 on)."""


def forward_functions(capture: Function) -> list[ast.Assign]:
    """Return the assignments in which `CudaGraphManager.capture(create_forward_fn, …)` requests a forward function.

    There is one for both passes, or one for each. Empty unless a FULL descriptor's passes are known to be a warm-up,
    and then the pass in the graph.
    """
    from vllm_graphfix.source.functions import first_target

    asks = capture.assignments(None, "create_forward_fn(desc, *...)")
    graphs = capture.entering("torch.cuda.graph(...)")
    names = [first_target(ask) or "" for ask in asks]
    if not 1 <= len(asks) <= 2 or len(graphs) != 1 or "" in names or not all(map(_has_constant_keywords, asks)):
        return []
    passes = [part for name in dict.fromkeys(names) for part in capture.find(f"{name}(CUDAGraphMode.NONE)")]
    in_graph = [getattr(statement, "value", None) for statement in graphs[0].body]
    recorded = [part for part in capture.find(f"{names[-1]}(CUDAGraphMode.NONE)") if part in in_graph]
    # A pass behind the branches of the graph would run after it.
    if len(passes) != 2 or len(recorded) != 1:
        return []
    (warm_up,) = (part for part in passes if part is not recorded[0])
    if warm_up not in capture.find(f"{names[0]}(CUDAGraphMode.NONE)") or not capture.in_one_block(asks[0], warm_up):
        return []
    own = len(asks) == 1 or (capture.in_one_block(asks[1], graphs[0]) and warm_up.lineno < asks[1].lineno)
    return asks if own and warm_up.lineno < graphs[0].lineno else []


def _has_constant_keywords(ask: ast.Assign) -> bool:
    call = ask.value
    return (
        isinstance(call, ast.Call)
        and len(call.args) == 1
        and all(each.arg is not None and isinstance(each.value, ast.Constant) for each in call.keywords)
    )


def builds_each_state(source: Source) -> bool:
    """Tell if the target's factory builds a state at each call (0.18.0+)."""
    target = source.function(MANAGER, "ModelCudaGraphManager.capture")
    factory = target and target.inner("create_forward_fn")
    return bool(
        target
        and factory
        and any(map(target.find_unique, _CAPTURED))
        and factory.always(BUILT, _MICRO_BATCHES)
        and not any(map(factory.contains_name, factory.parameters[1:]))
        and sum(len(factory.find(entered)) for entered in ENTERED) == 1
        and any(factory.always(each, _MICRO_BATCHES) for each in _HANDED_ON)
        and prepares_each_state(source)
    )


def state_of_a_pair(source: Source, capture: Function) -> ast.stmt | ast.expr | None:
    """Return the statement by which the draft takes one of two states of the target, that of the warm-up or the graph.

    The draft uses the first for its own warm-up and the second for its graph. None unless that is known.
    """
    factory = capture.inner("create_forward_fn")
    manager = source.function(MANAGER, "CudaGraphManager.capture")
    chosen = "attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured"
    asks = (
        "forward_fn, warmup_attn_state = create_forward_fn(desc, warmup=True)",
        "forward_fn, capture_attn_state = create_forward_fn(desc, warmup=False)",
    )
    if factory is None or manager is None or not factory.always(chosen):
        return None
    # Neither the pass nor the state is changed after the choice.
    if factory.reassigns("warmup") or factory.assigned("attn_state") != 1:
        return None
    known = len(forward_functions(manager)) == 2 and all(map(manager.find_unique, (*asks, _PAIR)))
    return factory.find_unique(chosen) if known and builds_each_state(source) else None


def prepares_own_states(source: Source, capture: Function) -> bool:
    """Tell if *capture*, of the draft's graphs, builds a state of its own for each pass (0.26.0 on)."""
    factory = capture.inner("create_forward_fn")
    manager = source.function(MANAGER, "CudaGraphManager.capture")
    return bool(
        factory
        and manager
        and (factory.always(BUILT) or all(map(factory.always, (_OWN_BUILT, UNPACKED))))
        and any(map(factory.always, _DRAFTED))
        and not any(map(factory.contains_name, factory.parameters[1:]))
        and "attn_states" not in capture.parameters
        and len(forward_functions(manager)) == 2
        and prepares_each_state(source)
    )


def prepares_each_state(source: Source) -> bool:
    """Tell if `prepare_inputs_to_capture` builds a state at each call, and returns it."""
    prepare = source.function(MANAGER, "prepare_inputs_to_capture")
    attention = source.function(_ATTENTION, "build_attn_metadata")
    return bool(
        prepare
        and attention
        and _has_stock_states(source)
        and any(map(prepare.find_unique, _PREPARED))
        and prepare.find_unique("return ...")
        and any(map(prepare.always, _RETURNED))
        and attention.find(*_METADATA)
        and (attention.always(_SHARED[0]) or not attention.contains_name("cached_metadata"))
        and attention.find_unique("return ...")
        and attention.always("return attn_metadata")
    )


def _has_stock_states(source: Source) -> bool:
    """Tell if models have vLLM's own states for them, where they have any."""
    chosen = source.module(MODEL_STATES)
    imported, *returned = _STATE_OF_MODELS
    return chosen is None or bool(chosen.find_unique(imported) and any(map(chosen.find_unique, returned)))
