"""`draft-prefill-state`: the draft's prefill is captured on attention states of its own (PR 44253)."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._capture_passes import (
    FactoryPerPass,
    RebuildableStates,
    UntouchedStates,
    asks_per_pass,
    has_consumed_plan,
    is_full,
)
from vllm_graphfix.fixes._capture_source import (
    BUILDING,
    DRAFT_MANAGERS,
    EAGLE,
    MANAGER,
    OWN_STATES,
    RECOGNISED,
    TARGET,
    UNPACKED,
    builds_each_state,
    forward_functions,
    prepares_own_states,
    state_of_a_pair,
)

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_OLDER = f"{_SPEC_DECODE}/eagle_cudagraph.py"
_PACKAGE = f"{_SPEC_DECODE}/__init__.py"
_MANAGER_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_EAGLE_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"

_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_SPECULATOR = f"{_SPEC_DECODE}/eagle/speculator.py"
_DRAFT_SPECULATOR = f"{_SPEC_DECODE}/autoregressive/speculator.py"
_TAKEN = "attn_state = full_cg_attn_states[desc]"
_PAIR = "the draft's warm-up has an attention state of its own"

CAPTURED_STATE_REUSED = Event(
    "captured-state-reused",
    "A full graph of the draft's prefill was captured: stock captures it on the target's attention state, whose plan "
    "belongs to the target's graph.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the states for the capture of the draft's prefill: the target's captured ones, a pair, or its own."""
    in_a_way = "the draft's prefill gets its attention states in a way"
    capture = source.function(EAGLE, "PrefillEagleCudaGraphManager.capture")
    if capture is not None:
        if chosen := state_of_a_pair(source, capture):
            return Diagnosis.fixed(_PAIR, capture.at(chosen))
        factory, manager = capture.inner("create_forward_fn"), source.function(MANAGER, "CudaGraphManager.capture")
        shared = capture.find_unique(_TAKEN)
        if (
            shared is not None
            and factory is not None
            and capture.used_only_in("full_cg_attn_states", _TAKEN)  # a copy of them could not be built again
            and all(map(factory.always, (_TAKEN, UNPACKED)))
            and not any(map(factory.contains_name, factory.parameters[1:]))
            and manager is not None
            and forward_functions(manager)
            and manager.find("return ...") == manager.find("return captured_attn_states") != []
            and builds_each_state(source)
        ):
            return Diagnosis.affected(
                "the draft's prefill is warmed up and captured on the target's captured attention states",
                capture.at(shared),
                "target-states",
            )
        return Diagnosis.unrecognised(in_a_way, capture, defect_seen=shared is not None)
    for path in DRAFT_MANAGERS:
        pair = source.function(path, "PrefillSpeculatorCudaGraphManager.capture")
        if pair is not None:
            if chosen := state_of_a_pair(source, pair):
                return Diagnosis.fixed(_PAIR, pair.at(chosen))
            return Diagnosis.unrecognised(in_a_way, pair)
        own = source.function(path, "SpeculatorCudaGraphManager.capture")
        if own is not None:
            if prepares_own_states(source, own):
                return Diagnosis.fixed("the draft's passes build attention states of their own", own.where)
            return Diagnosis.unrecognised(in_a_way, own)
    eagle = source.function(EAGLE, "EagleCudaGraphManager.capture")
    older = source.read(_OLDER) is not None
    if eagle is not None or older or source.function(_PACKAGE, "init_speculator") is None:
        return Diagnosis.absent("no capture of a draft's prefill on the target's attention states")
    return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)


def _capture_and_remember_the_factory(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `CudaGraphManager.capture`: the returned states can be built again."""

    @functools.wraps(stock)
    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if asks_per_pass.get():
            return stock(self, FactoryPerPass.around(create_forward_fn, activity), *args, **kwargs)
        returned = stock(self, create_forward_fn, *args, **kwargs)
        try:
            return RebuildableStates(returned, create_forward_fn) if isinstance(returned, dict) else returned
        except Exception as error:
            activity.failed(error)
            return returned

    return capture


def _capture_on_untouched_states(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `PrefillEagleCudaGraphManager.capture`: each pass of the draft gets a state of its own.

    Full graphs count if the plan of their state was consumed before the draft's own passes; while observing, also on
    states that cannot be built again.
    """
    reused_states, corrects = activity.counter(CAPTURED_STATE_REUSED), activity.corrects

    @functools.wraps(stock)
    def capture(self: Any, forward_fn: Any, full_cg_attn_states: Any, *args: Any, **kwargs: Any) -> Any:
        states = _untouched_states(full_cg_attn_states, activity) if corrects else full_cg_attn_states
        if states is None:
            return stock(self, forward_fn, full_cg_attn_states, *args, **kwargs)
        consumed = _descriptors_with_consumed_plans(full_cg_attn_states, activity)
        token = asks_per_pass.set(corrects)
        try:
            returned = stock(self, forward_fn, states, *args, **kwargs)
        finally:
            asks_per_pass.reset(token)
        _count_captured(reused_states, consumed, self)
        return returned

    return capture


def _untouched_states(states: Any, activity: Activity) -> UntouchedStates | None:
    """Wrap *states*; None unless `CudaGraphManager.capture` returned them, since others cannot be built again."""
    try:
        return UntouchedStates(states, activity) if isinstance(states, RebuildableStates) else None
    except Exception as error:
        activity.failed(error)
        return None


def _descriptors_with_consumed_plans(states: Any, activity: Activity) -> list[Any]:
    """Return the FULL descriptors whose state has a plan. To be called before the draft's own passes make one."""
    if not isinstance(states, dict):
        return []
    try:
        return [descriptor for descriptor, state in states.items() if is_full(descriptor) and has_consumed_plan(state)]
    except Exception as error:
        activity.failed(error)
        return []


def _count_captured(reused_states: Counter, consumed: list[Any], manager: Any) -> None:
    """Count those of *consumed* that *manager* has captured. Never raises."""
    with suppress(Exception):
        reused_states.count += sum(descriptor in manager.graphs for descriptor in consumed)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need(
            "eagle, eagle3 or mtp",
            lambda deployment, _: deployment.speculator("eagle", "eagle3", "mtp"),
            clause="drafts come from eagle, eagle3 or mtp",
        ),
        needs.FULL_GRAPHS,
        needs.FLASHMLA,
    )


FIX = fix(
    "draft-prefill-state",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        *BUILDING,
        *TARGET,
        *OWN_STATES,
        Slice(_PACKAGE, "init_speculator", "cudagraph_manager", Verdict.ABSENT),
        Slice(_OLDER, "EagleCudaGraphManager", "attn_states", Verdict.ABSENT),
        Slice(EAGLE, "EagleCudaGraphManager.capture", "create_forward_fn attn_metadata", Verdict.ABSENT),
        # The draft's passes on states of the target
        *(
            Slice(EAGLE, f"{kind}EagleCudaGraphManager.capture", "attn_state attn_metadata create_forward_fn")
            for kind in ("Prefill", "Decode")
        ),
        Slice(
            DRAFT_MANAGERS[0],
            "PrefillSpeculatorCudaGraphManager.capture",
            "attn_states attn_state_pair attn_state attn_metadata create_forward_fn warmup",
            Verdict.FIXED,
        ),
        # The way of the states to the draft's manager, and of the metadata to its kernels
        Slice(_RUNNER, "GPUModelRunner.capture_model", "captured_attn_states cudagraph_manager", Verdict.AFFECTED),
        Slice(_SPECULATOR, "EagleSpeculator.capture", "attn_states", Verdict.AFFECTED),
        Slice(_SPECULATOR, "EagleSpeculator.prefill", "attn_metadata", Verdict.AFFECTED),
        Slice(_SPECULATOR, "EagleSpeculator.init_cudagraph_manager", "prefill_cudagraph_manager", Verdict.AFFECTED),
        Slice(_DRAFT_SPECULATOR, "AutoRegressiveSpeculator.capture", "attn_states", Verdict.FIXED),
    ),
    # The state of the target, or one of a pair
    recognised=(
        *RECOGNISED,
        "attn_state = full_cg_attn_states[desc]",
        "attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured",
    ),
    corrections=(
        Patch(_MANAGER_MODULE, "CudaGraphManager.capture", _capture_and_remember_the_factory, observes=False),
        Patch(_EAGLE_MODULE, "PrefillEagleCudaGraphManager.capture", _capture_on_untouched_states),
    ),
    events=(CAPTURED_STATE_REUSED,),
    needs=needs,
    default_rationale="upstream",
)
