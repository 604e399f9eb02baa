"""What vLLM's source says of the passes of a capture: a warm-up outside the graph, then the pass that it records.

Several fixes rest on the same facts: that each pass asks for a forward function, that a state is built whenever it is
asked for, down to the plan, and that nobody keeps one. `_capture_passes` relies on them at run time.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

MANAGER = "vllm/v1/worker/gpu/cudagraph_utils.py"
_MODEL_STATE = "vllm/v1/worker/gpu/model_states/default.py"
_ATTENTION = "vllm/v1/worker/gpu/attn_utils.py"
_FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"
_SPARSE = (
    ("vllm/v1/attention/backends/mla/flashmla_sparse.py", "FlashMLASparseMetadataBuilder"),
    ("vllm/v1/attention/backends/mla/sparse_swa.py", "DeepseekSparseSWAMetadataBuilder"),
)
_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
DRAFT_MANAGERS = (
    f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py",
    f"{_SPEC_DECODE}/target_dependent_ar/cudagraph_utils.py",
)
"""The files that hold vLLM's managers of a draft model's graphs, from 0.23.0 on: one file, before and after it was
moved."""
_DRAFTS = (
    (f"{_SPEC_DECODE}/eagle/cudagraph.py", "EagleCudaGraphManager"),
    (f"{_SPEC_DECODE}/eagle/cudagraph.py", "DecodeEagleCudaGraphManager"),
    (f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py", "DecodeSpeculatorCudaGraphManager"),
    (f"{_SPEC_DECODE}/autoregressive/cudagraph_utils.py", "SpeculatorCudaGraphManager"),
    (f"{_SPEC_DECODE}/target_dependent_ar/cudagraph_utils.py", "SpeculatorCudaGraphManager"),
)
"""Managers of drafts that build states of their own."""
BUILDS_STATES = (MANAGER, _MODEL_STATE, _ATTENTION, _FLASHMLA, *dict(_SPARSE), *dict(_DRAFTS))
"""The files that `builds_each_state` reads."""

_BUILT = "attn_metadata, slot_mappings = prepare_inputs_to_capture(...)"
_GIVEN = (
    "set_forward_context(attn_metadata, *..., slot_mapping=slot_mappings)",
    (
        "set_forward_context(attn_metadata if cg_mode != CUDAGraphMode.PIECEWISE else None, *..., "
        "slot_mapping=slot_mappings)"
    ),
    "set_forward_context(*..., attn_metadata=attn_metadata, slot_mapping=slot_mappings)",
)
"""How a pass gets its state."""
_STATE_HANDED_ON = (
    "attn_metadata is None",
    "attn_metadata is not None",
    "return forward_fn, ...(attn_metadata, slot_mappings)",
    "capture_fn(*..., attn_metadata=attn_metadata, slot_mappings=slot_mappings)",
)
_METADATA = tuple(
    f"metadata = {made}(*...)"
    for made in (
        "attn_metadata_builder.build",
        "attn_metadata_builder.build_for_cudagraph_capture",
        "attn_metadata_builder.update_block_table",
        "attn_group.build_metadata",
        "attn_group.build_metadata_for_cudagraph_capture",
    )
)
_PLANNED = "scheduler_metadata, _ = get_mla_metadata(...)"
_PLANNED_SPARSE = (_PLANNED, "out[layer_type] = get_mla_metadata()[0]")
# A call that is none of these may do something about the state: such code is not taken for known.
_CALLS_BETWEEN_PASSES = frozenset(
    "CUDAGraph capture_fn cdiv copy_ create_forward_fn debug empty empty_like forward_fn generate_fn get_offloader "
    "getattr make_num_tokens_across_dp min model nullcontext prepare_dummy_inputs prepare_inputs_to_capture "
    "set_forward_context sync_prev_onload".split()
)


def forward_functions(capture: Function) -> list[ast.Assign]:
    """The assignments in which `CudaGraphManager.capture(create_forward_fn, …)` asks for a forward function.

    It asks once for the warm-up and the graph, or once for each. Empty for code of which it is not known that a FULL
    descriptor's passes are a warm-up and then the one in the graph.
    """
    from vllm_graphfix.source.functions import first_target

    asked = capture.assignments(None, "create_forward_fn(desc, *...)")
    graphs = capture.entering("torch.cuda.graph(...)")
    if len(asked) not in {1, 2} or (len(graphs), len(capture.find("torch.cuda.graph(...)")), capture.loops()) != (
        1,
        1,
        2,
    ):
        return []
    names = [first_target(ask) or "" for ask in asked]
    passes = {name: capture.find(f"{name}(CUDAGraphMode.NONE)") for name in names if name}
    others = {name: capture.find(f"{name}(CUDAGraphMode.PIECEWISE)") for name in passes}
    calls = [ask.value for ask in asked if isinstance(ask.value, ast.Call)]
    if "" in names or not all(len(call.args) == 1 and _has_constant_keywords(call) for call in calls):
        return []
    warm_up, recorded = passes[names[0]][0] if passes[names[0]] else None, passes[names[-1]][-1:]
    known = (
        warm_up is not None
        and recorded != []
        and sum(map(len, passes.values())) == 2
        and recorded[0] is not warm_up
        and (len(asked) == 2 or len(others[names[0]]) == 1)
        and capture.mentions(create_forward_fn=len(asked))
        and capture.mentions(**{name: names.count(name) + len(passes[name]) + len(others[name]) for name in passes})
        and capture.in_one_block(asked[0], warm_up)
        and recorded[0] in [getattr(statement, "value", None) for statement in graphs[0].body]
    )
    if known and warm_up is not None:
        known = (
            _is_only_stored(capture, asked[0])
            if len(asked) == 1
            else capture.in_one_block(asked[1], graphs[0]) and warm_up.lineno < asked[1].lineno
        )
    return asked if known else []


def _has_constant_keywords(call: ast.Call) -> bool:
    return all(given.arg is not None and isinstance(given.value, ast.Constant) for given in call.keywords)


def _is_only_stored(capture: Function, ask: ast.Assign) -> bool:
    """Whether nothing is done to the state between the passes: it is stored for whoever called, and that is all."""
    target = ask.targets[0]
    states = [getattr(part, "id", "") for part in target.elts[1:]] if isinstance(target, ast.Tuple) else []
    (graph,) = capture.entering("torch.cuda.graph(...)")
    return capture.calls(ask, graph) <= _CALLS_BETWEEN_PASSES and all(
        state and capture.confines(state, ast.unparse(ask), f"...[desc] = {state}") for state in states
    )


def builds_each_state(source: Source) -> bool:
    """Whether the target's factory builds a new state whenever it is asked, and nobody keeps one (0.18.0+).

    This is followed all the way down to the plan.
    """
    target = source.function(MANAGER, "ModelCudaGraphManager.capture")
    factory = target and target.inner("create_forward_fn")
    forward = factory and factory.inner("forward_fn")
    if not target or not factory or not forward:
        return False
    _, *further = factory.parameters
    return (
        target.confines("create_forward_fn", "super().capture(create_forward_fn, *...)")
        and len(target.find("super().capture(create_forward_fn, *...)")) == 1
        and factory.takes.startswith("desc")
        and not any(map(factory.names, further))
        and factory.always(_BUILT)
        and factory.confines("attn_metadata", _BUILT, *_GIVEN, *_STATE_HANDED_ON)
        and sum(len(forward.find(given)) for given in _GIVEN) == 1
        and (
            factory.always("return forward_fn")
            or factory.always("return forward_fn, ...(attn_metadata, slot_mappings)")
        )
        and drafts_build_each_state(source)
        and prepares_each_state(source)
    )


def drafts_build_each_state(source: Source) -> bool:
    """Whether the factories of drafts that have states of their own build a new one at each call."""
    for path, name in _DRAFTS:
        capture = source.function(path, f"{name}.capture")
        factory = capture and capture.inner("create_forward_fn")
        if capture is not None and not (
            factory
            and not any(map(factory.names, factory.parameters[1:]))
            and (factory.always(_BUILT) or factory.always("attn_state = prepare_inputs_to_capture(...)"))
            and len(factory.find("prepare_inputs_to_capture(...)")) == 1
            and factory.assigned("attn_metadata") == 1
        ):
            return False
    return True


def state_of_a_pair(source: Source, capture: Function) -> ast.stmt | ast.expr | None:
    """The statement by which the draft takes over two states of the target: its warm-up's and the captured one.

    It uses the former for its own warm-up, and the latter for its graph. None if that is not known.
    """
    chosen = capture.only("attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured")
    manager = source.function(MANAGER, "CudaGraphManager.capture")
    if manager is None or chosen is None or len(forward_functions(manager)) != 2:
        return None
    parts = (
        capture.mentions(attn_state=3, attn_state_pair=3, warmup=1),
        manager.only("forward_fn, warmup_attn_state = create_forward_fn(desc, warmup=True)"),
        manager.only("forward_fn, capture_attn_state = create_forward_fn(desc, warmup=False)"),
        manager.only("AttentionStatePair(warmup_attn_state, capture_attn_state)"),
        manager.mentions(warmup_attn_state=4, capture_attn_state=2),
        builds_each_state(source),
    )
    return chosen if all(parts) else None


def prepares_own_states(source: Source, capture: Function) -> bool:
    """Whether *capture*, of the draft's graphs, builds a state of its own at each pass (0.26.0 on)."""
    factory = capture.inner("create_forward_fn")
    built = factory and (factory.always(_BUILT) or factory.always("attn_state = prepare_inputs_to_capture(...)"))
    return bool(built) and "attn_states" not in capture.parameters and prepares_each_state(source)


def prepares_each_state(source: Source) -> bool:
    """Whether `prepare_inputs_to_capture` builds a state at each call, all the way down to the plan."""
    prepare = source.function(MANAGER, "prepare_inputs_to_capture")
    attention = source.function(_ATTENTION, "build_attn_metadata")
    builder = source.function(_FLASHMLA, "FlashMLAMetadataBuilder._build_decode")
    if prepare is None or attention is None:
        return False
    by_model = "attn_metadata = model_state.prepare_attn(*...)"
    directly = "attn_metadata = build_attn_metadata(*...)"
    built = by_model if prepare.only(by_model) else directly
    returned = prepare.only("return ...")
    if not prepare.only(built) or returned is not prepare.node.body[-1]:
        return False
    if not prepare.confines(
        "attn_metadata",
        built,
        "attn_metadata = None",
        "return ...(attn_metadata, slot_mappings_by_layer)",
        "return attn_metadata, slot_mappings_by_layer",
    ):
        return False
    if built == by_model:
        model = source.function(_MODEL_STATE, "DefaultModelState.prepare_attn")
        if not (
            model
            and model.always(directly)
            and model.confines("attn_metadata", directly, "return attn_metadata")
            and model.only("return ...") is model.node.body[-1]
        ):
            return False
    return (
        any(map(attention.find, _METADATA))
        and attention.confines(
            "metadata", *_METADATA, "attn_metadata[layer_name] = metadata", "cached_metadata[reuse_key] = metadata"
        )
        and attention.confines(
            "cached_metadata",
            "cached_metadata: ... = {}",
            "attn_metadata_builder.update_block_table(cached_metadata[reuse_key], *...)",
            "reuse_key in cached_metadata",
            "reuse_key not in cached_metadata",
            "cached_metadata[reuse_key] = metadata",
        )
        and attention.only("return ...") is attention.node.body[-1]
        and (builder is None or plans_each_batch(builder))
        and all(
            sparse is None or sparse.confines("get_mla_metadata", *_PLANNED_SPARSE)
            for sparse in (source.function(path, name) for path, name in _SPARSE)
        )
    )


def plans_each_batch(build: Function) -> bool:
    """Whether `FlashMLAMetadataBuilder._build_decode` only hands on a FlashMLA plan that this call made."""
    return build.always(_PLANNED) and build.confines(
        "scheduler_metadata",
        _PLANNED,
        "scheduler_metadata.tile_scheduler_metadata = tile_scheduler_metadata",
        "scheduler_metadata.num_splits = num_splits",
        "return FlashMLADecodeMetadata(*..., scheduler_metadata=scheduler_metadata)",
    )


_ONCE_AND_TWICE = {"prepare_inputs_to_capture": 1, "set_forward_context": 2}


def hands_both_passes_one_state(captures: list[Function], run: str, *given: str) -> bool:
    """Whether *captures* (0.15.0-0.17.1) build one state and *run* twice, *given* that state.

    *captures* are `capture_graph` and what it calls.
    """
    found = [part for each in captures for part in each.find(_BUILT)]
    if len(found) != 1:
        return False
    (built,) = found
    given_to = {name: sum(len(each.find(f"{name}(...)")) for each in captures) for name in _ONCE_AND_TWICE}
    return (
        built in captures[0].node.body
        and given_to == ({**_ONCE_AND_TWICE, "set_forward_context": 0} if given else _ONCE_AND_TWICE)
        and sum(len(each.find(f"{run}(...)")) for each in captures) == 2
        and sum(len(each.find(pattern)) for each in captures for pattern in given or _GIVEN) == 2
        and all(each.confines("attn_metadata", _BUILT, *(given or _GIVEN), *_STATE_HANDED_ON) for each in captures)
        and not any(each.loops() for each in captures if given or each is captures[0])
        and not any(each.repeats(f"{run}(...)") for each in captures)
        and all(
            each.calls(built if each is captures[0] else None, each.only("torch.cuda.graph(...)"))
            <= _CALLS_BETWEEN_PASSES
            for each in captures
        )
    )
