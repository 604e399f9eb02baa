"""`draft-prefill-state`: the draft's prefill is captured on attention states of its own (PR 44253)."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About
from vllm_graphfix.fixes._capture_passes import (
    FactoryPerPass,
    RebuildableStates,
    UntouchedStates,
    asks_per_pass,
    has_consumed_plan,
    is_full,
)
from vllm_graphfix.fixes._capture_source import (
    BUILDS_STATES,
    DRAFT_MANAGERS,
    MANAGER,
    builds_each_state,
    forward_functions,
    prepares_own_states,
    state_of_a_pair,
)

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_EAGLE = f"{_SPEC_DECODE}/eagle/cudagraph.py"
_PACKAGE = f"{_SPEC_DECODE}/__init__.py"
_MANAGER_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_EAGLE_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"

_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_SPECULATOR = f"{_SPEC_DECODE}/eagle/speculator.py"
_RUN = "forward_fn(num_reqs, num_tokens, attn_metadata, slot_mappings, *...)"
_PAIR = "the draft's warm-up has an attention state of its own"

CAPTURED_STATE_REUSED = Event(
    "captured-state-reused",
    "A full graph of the draft's prefill was captured: stock captures it on the target's attention state, whose plan "
    "belongs to the target's graph.",
)


def diagnose(source: Source) -> Diagnosis:
    in_a_way = "the draft's prefill gets its attention states in a way"
    capture = source.function(_EAGLE, "PrefillEagleCudaGraphManager.capture")
    if capture is not None:
        if chosen := state_of_a_pair(source, capture):
            return Diagnosis(Verdict.FIXED, _PAIR, capture.at(chosen))
        shared = capture.only("attn_state = full_cg_attn_states[desc]")
        taken = capture.takes.startswith("self, forward_fn, full_cg_attn_states, ")
        if shared and taken and _used_as_known(capture) and _states_as_known(source) and _handed_on_as_known(source):
            return Diagnosis(
                Verdict.AFFECTED,
                "the draft's prefill is warmed up and captured on the target's captured attention states",
                capture.at(shared),
                "target-states",
            )
        return Diagnosis.unrecognised(in_a_way, capture)
    for path in DRAFT_MANAGERS:
        pair = source.function(path, "PrefillSpeculatorCudaGraphManager.capture")
        if pair is not None:
            if chosen := state_of_a_pair(source, pair):
                return Diagnosis(Verdict.FIXED, _PAIR, pair.at(chosen))
            return Diagnosis.unrecognised(in_a_way, pair)
        own = source.function(path, "SpeculatorCudaGraphManager.capture")
        if own is not None:
            if prepares_own_states(source, own):
                return Diagnosis(Verdict.FIXED, "the draft's passes build attention states of their own", own.where)
            return Diagnosis.unrecognised(in_a_way, own)
    eagle = source.function(_EAGLE, "EagleCudaGraphManager.capture")
    if eagle is not None or source.function(_PACKAGE, "init_speculator") is None or _older_layout(source):
        return Diagnosis(Verdict.ABSENT, "no capture of a draft's prefill on the target's attention states")
    return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)


def _used_as_known(capture: Function) -> bool:
    """Whether the draft's passes are given what the state says, and nothing else is done with it."""
    factory = capture.inner("create_forward_fn")
    unpacked = "attn_metadata, slot_mappings = attn_state"
    return (
        factory is not None
        and capture.confines("full_cg_attn_states", "attn_state = full_cg_attn_states[desc]")
        and capture.confines("attn_state", "attn_state = full_cg_attn_states[desc]", unpacked, "return fwd, attn_state")
        and all(map(factory.always, ("attn_state = full_cg_attn_states[desc]", unpacked, "return fwd, attn_state")))
        and capture.confines("attn_metadata", unpacked, _RUN)
        and not any(map(factory.names, factory.parameters[1:]))
        and capture.only("super().capture(create_forward_fn, progress_bar_desc)") is not None
        and capture.confines("create_forward_fn", "super().capture(create_forward_fn, progress_bar_desc)")
    )


def _states_as_known(source: Source) -> bool:
    """Whether the target's passes and states are as known.

    The passes must be a warm-up and a graph; the states must be built whenever they are asked for, and returned as they
    are.
    """
    manager = source.function(MANAGER, "CudaGraphManager.capture")
    target = source.function(MANAGER, "ModelCudaGraphManager.capture")
    if manager is None or target is None or not manager.takes.startswith("self, create_forward_fn, "):
        return False
    parts = (
        forward_functions(manager),
        manager.only("return ..."),
        manager.only("return captured_attn_states"),
        target.only("return super().capture(create_forward_fn, ...)"),
        builds_each_state(source),
    )
    return all(parts)


def _handed_on_as_known(source: Source) -> bool:
    """Whether the target's states go as they are through the model runner and the speculator."""
    runner = source.function(_RUNNER, "GPUModelRunner.capture_model")
    speculator = source.function(_SPECULATOR, "EagleSpeculator.capture")
    returned, taken = (
        "captured_attn_states = self.cudagraph_manager.capture(*...)",
        "self.speculator.capture(captured_attn_states)",
    )
    given = "self.prefill_cudagraph_manager.capture(self.prefill, attn_states, *...)"
    return (
        runner is not None
        and speculator is not None
        and None not in map(runner.only, (returned, taken))
        and runner.confines("captured_attn_states", returned, taken)
        and speculator.only(given) is not None
        and speculator.confines("attn_states", given)
    )


def _older_layout(source: Source) -> bool:
    return source.read(f"{_SPEC_DECODE}/eagle_cudagraph.py") is not None


def _capture_and_remember_the_factory(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `CudaGraphManager.capture`: the states it returns can be built again."""

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
    """Wraps `PrefillEagleCudaGraphManager.capture`: each pass of the draft gets a state built for it.

    Counted are full graphs whose state had a consumed plan before the draft's own passes; where this only counts, also
    those on states that nobody can build again.
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
    """None for states of somebody who did not go through `CudaGraphManager.capture`: there is no target to stand on."""
    try:
        return UntouchedStates(states, activity) if isinstance(states, RebuildableStates) else None
    except Exception as error:
        activity.failed(error)
        return None


def _descriptors_with_consumed_plans(states: Any, activity: Activity) -> list[Any]:
    """FULL descriptors whose captured state has a plan already: to be asked before the draft's own passes make one."""
    if not isinstance(states, dict):
        return []
    try:
        return [descriptor for descriptor, state in states.items() if is_full(descriptor) and has_consumed_plan(state)]
    except Exception as error:
        activity.failed(error)
        return []


def _count_captured(reused_states: Counter, consumed: list[Any], manager: Any) -> None:
    """Counts those of *consumed* that *manager* has captured. Never raises."""
    with suppress(Exception):
        reused_states.count += sum(descriptor in manager.graphs for descriptor in consumed)


def patches(shape: str) -> tuple[Patch, ...]:
    return (
        Patch(_MANAGER_MODULE, "CudaGraphManager.capture", _capture_and_remember_the_factory, observes=False),
        Patch(_EAGLE_MODULE, "PrefillEagleCudaGraphManager.capture", _capture_on_untouched_states),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        needs.RUNNER_V2,
        Need("eagle, eagle3 or mtp", lambda deployment, _: deployment.speculator("eagle", "eagle3", "mtp")),
        needs.FULL_GRAPHS,
        needs.FLASHMLA,
    )


FIX = Fix(
    number=2,
    name="draft-prefill-state",
    runner="V2",
    reads=(*BUILDS_STATES, _PACKAGE, _RUNNER, _SPECULATOR, f"{_SPEC_DECODE}/eagle_cudagraph.py"),
    modules=(_MANAGER_MODULE, _EAGLE_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(CAPTURED_STATE_REUSED,),
    needs=needs,
    ground="upstream",
)

ABOUT = About(
    pr=44253,
    references=("PR 48261",),
    summary="the draft's prefill is captured on attention states of its own",
    releases="0.21.0 - 0.22.1",
    absent="0.14.1 - 0.20.2",
    seen="launch failures while capturing, or drafts that are hardly ever accepted",
    first_test="the acceptance rate with `--enforce-eager`",
    symptom="With MTP or Eagle on model runner V2: CUDA launch failures while capturing, or drafts that are hardly "
    "ever accepted.",
    cause="The draft's prefill is warmed up and captured on the target's captured attention states. Such a state says "
    "that it is initialised, but its buffers belong to a graph that was recorded and has never run: the warm-up reads "
    "memory that nothing has written, and the capture skips the planner.",
    remedy="Every pass of the draft's capture gets an attention state that no forward pass has touched, built by the "
    "target's own factory just before that pass.",
    detect="The engine dies while 'Capturing eagle prefill CUDA graphs', or the acceptance rate with graphs is lower "
    "than with --enforce-eager.",
    workaround='--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or serving without speculative decoding.',
    removable="with vLLM 0.23.0",
    in_caches="wrong entries of the drafter's own layers, if the connector stores those. The target's entries are "
    "right: it verifies every draft",
    how_sure="not known for each connector. The cost is acceptance, not wrong answers",
)
