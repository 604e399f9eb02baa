"""`capture-state`: full graphs of model runner V2 are captured on attention states that no pass has used (PR 42444)."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Companion, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._capture_passes import CaptureSession, FactoryPerPass, WatchedFactory, current_session
from vllm_graphfix.fixes._capture_source import (
    BUILDING,
    BUILT,
    DRAFTS,
    EAGLE,
    ENTERED,
    MANAGER,
    RECOGNISED,
    TARGET,
    builds_each_state,
    forward_functions,
    prepares_each_state,
)
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"
_OPERATORS = "vllm/v1/attention/ops/flashmla.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_MANAGER_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_EAGLE = {
    "capture-graph-inline": "vllm/v1/worker/gpu/spec_decode/eagle_cudagraph.py",
    "capture-graph-split": "vllm/v1/worker/gpu/spec_decode/eagle/cudagraph.py",
}
_GENERATED = (
    "generate_fn(num_tokens, attn_metadata, slot_mappings, *...)",
    "generate_fn(num_reqs, num_tokens, attn_metadata, slot_mappings, *...)",
    "generate_fn(*..., attn_metadata=attn_metadata, slot_mappings=slot_mappings)",
)
_PLANS_AT_ONCE = "return torch.ops._flashmla_C.get_mla_decoding_metadata(...)"
_CALLS_BETWEEN_PASSES = frozenset(
    "CUDAGraph capture_fn cdiv copy_ create_forward_fn debug empty empty_like forward_fn generate_fn get_offloader "
    "getattr make_num_tokens_across_dp min model nullcontext prepare_dummy_inputs prepare_inputs_to_capture "
    "set_forward_context sync_prev_onload".split()
)
"""Any other call between the warm-up and the graph may be a remedy that renews the plan without mentioning a state."""
_EAGLE_MODULES = {shape: module_name(path) for shape, path in _EAGLE.items()}

STATE_CONSUMED = Event(
    "state-consumed",
    "A full graph was captured after its warm-up had consumed the attention plan: on stock every replay uses the plan "
    "of a dummy batch.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find if the warm-up and the recorded pass share an attention state whose plan is lazy."""
    if not any(map(source.read, (MANAGER, _RUNNER))):
        return Diagnosis.absent("no CudaGraphManager: this vLLM has no model runner V2 that captures graphs")
    if not any(source.contains_word(path, "FlashMLASchedMeta") for path in (_FLASHMLA, _OPERATORS)):
        planner = source.function(_OPERATORS, "get_mla_metadata")
        if planner and planner.find(_PLANS_AT_ONCE):
            return Diagnosis.fixed("no attention metadata is lazy", planner.where)
        return Diagnosis.unrecognised("FlashMLA plans in a way", planner or _OPERATORS)
    in_a_way = "CudaGraphManager captures graphs in a way"
    capture = source.function(MANAGER, "CudaGraphManager.capture")
    capture_graph = source.function(MANAGER, "CudaGraphManager.capture_graph")
    if capture is not None and "create_forward_fn" in capture.parameters:
        asks = forward_functions(capture)
        if asks and not builds_each_state(source):
            return Diagnosis.unrecognised("attention states are built in a way", capture)
        if len(asks) > 1:
            return Diagnosis.fixed("the recorded pass has an attention state of its own", capture.at(asks[1]))
        if asks:
            (once,) = asks
            (graph,) = capture.entering("torch.cuda.graph(...)")
            if not capture.calls(once, graph) <= _CALLS_BETWEEN_PASSES:
                return Diagnosis.unrecognised(in_a_way, capture, defect_seen=True)
            shape = "factory-with-state" if isinstance(once.targets[0], ast.Tuple) else "factory"
            return _affected_diagnosis(shape, capture.at(once))
    elif capture_graph is not None:
        split = source.function(MANAGER, "CudaGraphManager._capture_full_graph")
        shape = "capture-graph-split" if split else "capture-graph-inline"
        built = capture_graph.find_unique("prepare_inputs_to_capture(...)")
        if (
            built is not None
            and _share_one_state("model", ENTERED, capture_graph, split)
            and _share_one_state_in_draft(source, _EAGLE[shape])
            and prepares_each_state(source)
        ):
            return _affected_diagnosis(shape, capture_graph.at(built))
    return Diagnosis.unrecognised(in_a_way, capture or capture_graph or MANAGER)


def _share_one_state_in_draft(source: Source, path: str) -> bool:
    """Tell if the draft's own manager, where there is one, builds one state and runs it twice for a full graph."""
    capture_graph = source.function(path, "EagleCudaGraphManager.capture_graph")
    split = source.function(path, "EagleCudaGraphManager._capture_full_graph")
    if capture_graph is None:
        return source.read(path) is None
    return _share_one_state("generate_fn", _GENERATED, capture_graph, split)


def _share_one_state(called: str, on_it: tuple[str, ...], capture_graph: Function, split: Function | None) -> bool:
    """Tell if they build one state and call *called* exactly twice, both times on it (to 0.17.1).

    *split* records for *capture_graph*; *on_it* are the patterns of such calls.
    """
    parts = [part for part in (capture_graph, split) if part is not None]
    runs = sum(len(part.find(f"{called}(...)")) for part in parts)
    ran_on_it = sum(len(part.find(pattern)) for part in parts for pattern in on_it)
    graphs = [graph for part in parts for graph in part.entering("torch.cuda.graph(...)")]
    built = capture_graph.find_unique(BUILT)
    return (
        capture_graph.always(BUILT)
        and runs == ran_on_it == 2
        and len(graphs) == 1
        and not any(part.repeats(f"{called}(...)") for part in parts)
        and capture_graph.calls(built, None if split else graphs[0]) <= _CALLS_BETWEEN_PASSES
        and (split is None or split.calls(None, graphs[0]) <= _CALLS_BETWEEN_PASSES)
    )


def _affected_diagnosis(shape: str, where: str) -> Diagnosis:
    return Diagnosis.affected(
        "the warm-up and the recorded pass share one attention state, whose lazy plan the warm-up consumes",
        where,
        shape,
    )


def _capture_with_a_state_per_pass(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `CudaGraphManager.capture(create_forward_fn, …)`, 0.18.0-0.21.0: each pass gets a state of its own.

    Where it only counts, the factory is wrapped and its results are stock's.
    """
    consumed_states, corrects = activity.counter(STATE_CONSUMED), activity.corrects

    @functools.wraps(stock)
    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if corrects:
            factory = FactoryPerPass.around(create_forward_fn, activity)
        elif isinstance(create_forward_fn, FactoryPerPass):  # another fix gives each of these passes a state
            return stock(self, create_forward_fn, *args, **kwargs)
        else:
            factory = WatchedFactory(create_forward_fn)
        returned = stock(self, factory, *args, **kwargs)
        try:
            if isinstance(factory, WatchedFactory):
                factory.inspect_last()
                consumed_states.count += factory.consumed
            elif isinstance(factory, FactoryPerPass):
                consumed_states.count += factory.consumed
                if isinstance(returned, dict):
                    returned.update(factory.recorded_states)
        except Exception as error:
            activity.failed(error)
        return returned

    return capture


def _remember_how_states_are_built(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap the name `prepare_inputs_to_capture`, 0.15.0-0.17.1: record the state and the way to build another one."""

    @functools.wraps(stock)
    def prepare_inputs_to_capture(*args: Any, **kwargs: Any) -> Any:
        state = stock(*args, **kwargs)
        session = current_session()
        if session is not None:
            session.built(lambda: stock(*args, **kwargs), state)
        return state

    return prepare_inputs_to_capture


def _hand_each_pass_its_state(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap the name `set_forward_context`: the recorded pass gets a state that the warm-up has not used.

    `capture_graph` enters that context before the graph, so the state is built outside of it.
    """

    @functools.wraps(stock)
    def set_forward_context(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is not None:
            args, kwargs = session.for_next_pass(args, kwargs)
        return stock(*args, **kwargs)

    return set_forward_context


def _capture_graph_in_a_session(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `capture_graph` of `CudaGraphManager` and `EagleCudaGraphManager`, 0.15.0-0.17.1.

    The capture of a full graph has a session with the first state. Passes of `generate_fn` get their states here, those
    of a model in `set_forward_context`.
    """
    signature = inspect.signature(stock)
    consumed_states, corrects = activity.counter(STATE_CONSUMED), activity.corrects

    @functools.wraps(stock)
    def capture_graph(*args: Any, **kwargs: Any) -> Any:
        session = None
        try:
            arguments = _arguments_for_full_graph(signature, args, kwargs)
            if arguments is not None:
                generate_fn = arguments.arguments.get("generate_fn")
                if corrects and generate_fn is not None:
                    arguments.arguments["generate_fn"] = _generate_with_a_state_per_pass(generate_fn, activity)
                    args, kwargs = arguments.args, arguments.kwargs
                session = CaptureSession(activity)
                session.begin()
        except Exception as error:
            activity.failed(error)
        try:
            return stock(*args, **kwargs)
        finally:
            if session is not None:
                session.end()
                consumed_states.count += session.consumed()

    return capture_graph


def _arguments_for_full_graph(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    """Bind the arguments of a `capture_graph` that captures a full graph; None for a PIECEWISE one."""
    try:
        arguments = signature.bind(*args, **kwargs)
    except TypeError:  # stock raises for wrong arguments
        return None
    mode = arguments.arguments.get("capture_cg_mode")
    return arguments if mode is None or mode.name == "FULL" else None


def _generate_with_a_state_per_pass(generate_fn: Any, activity: Activity) -> Any:
    """Wrap `generate_fn` of an Eagle manager: each pass gets a state of its own.

    The recorded pass runs inside the graph, so its state is built before, after the warm-up.
    """
    recorded_state: tuple[Any, Any] | None = None
    failed = False

    def generate(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed, recorded_state
        session = None
        try:
            running = None if failed else current_session()
            if running is not None and running.concerns(*args, *kwargs.values()):
                session = running
        except Exception as error:
            # Later passes run as on stock, too: a state prepared after the next pass would be built inside the graph.
            failed = True
            activity.failed(error)
        if session is None:
            return generate_fn(*args, **kwargs)
        # First call: the warm-up. Second: the recorded pass, inside the graph.
        state, recorded_state = recorded_state, None
        args, kwargs = session.for_next_pass(args, kwargs, state)
        result = generate_fn(*args, **kwargs)
        if state is None:
            recorded_state = session.state_for_next_pass()
        return result

    return generate


def patches(shape: str) -> tuple[Patch, ...]:
    if shape.startswith("factory"):
        return (Patch(_MANAGER_MODULE, "CudaGraphManager.capture", _capture_with_a_state_per_pass),)
    eagle = _EAGLE_MODULES[shape]
    return (
        Patch(_MANAGER_MODULE, "prepare_inputs_to_capture", _remember_how_states_are_built),
        Patch(_MANAGER_MODULE, "set_forward_context", _hand_each_pass_its_state, observes=False),
        Patch(_MANAGER_MODULE, "CudaGraphManager.capture_graph", _capture_graph_in_a_session),
        Patch(eagle, "prepare_inputs_to_capture", _remember_how_states_are_built),
        Patch(eagle, "EagleCudaGraphManager.capture_graph", _capture_graph_in_a_session),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (needs.RUNNER_V2, needs.FULL_GRAPHS, needs.FLASHMLA)


FIX = fix(
    "capture-state",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        Slice(_RUNNER, "GPUModelRunner.capture_model", "cudagraph_manager", Verdict.ABSENT),
        Slice(_OPERATORS, "get_mla_metadata"),
        *BUILDING,
        *TARGET,
        *DRAFTS,
        # A draft's prefills, which take the target's states
        Slice(
            EAGLE, "PrefillEagleCudaGraphManager.capture", "create_forward_fn attn_metadata attn_state", Verdict.FIXED
        ),
        # The modes that are captured
        *(
            Slice(_RUNNER, f"GPUModelRunner.{name}", "cudagraph_manager cudagraph_mode", Verdict.AFFECTED)
            for name in ("__init__", "initialize_kv_cache")
        ),
        # The two passes on one state, before there were factories
        *(
            Slice(MANAGER, f"CudaGraphManager.{name}", "", Verdict.AFFECTED)
            for name in ("capture_graph", "_capture_full_graph")
        ),
        *(
            Slice(path, f"EagleCudaGraphManager.{name}", "attn_metadata slot_mappings generate_fn", Verdict.AFFECTED)
            for path in _EAGLE.values()
            for name in ("capture_graph", "_capture_full_graph")
        ),
    ),
    recognised=(*RECOGNISED, *_GENERATED, _PLANS_AT_ONCE),
    corrections=patches,
    modules=(_MANAGER_MODULE, *_EAGLE_MODULES.values()),
    events=(STATE_CONSUMED,),
    needs=needs,
    requires=(
        Companion(
            name="draft-prefill-state",
            module="vllm.v1.worker.gpu.spec_decode.eagle.cudagraph",
            because="a speculator would warm up on states that were recorded and never run",
            may_be_off=False,
        ),
    ),
    default_rationale="answers",
)
