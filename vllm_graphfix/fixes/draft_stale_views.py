"""`draft-stale-views`: the draft's prefill is warmed up and captured on metadata of its own batch (PR 48261)."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About
from vllm_graphfix.fixes._capture_passes import RebuildableStates, is_full
from vllm_graphfix.fixes._capture_source import (
    BUILDS_STATES,
    DRAFT_MANAGERS,
    MANAGER,
    prepares_own_states,
    state_of_a_pair,
)

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_SPECULATOR = f"{_SPEC_DECODE}/autoregressive/speculator.py"
_PACKAGE = f"{_SPEC_DECODE}/__init__.py"
_EAGLE = f"{_SPEC_DECODE}/eagle/cudagraph.py"
_OLDER = f"{_SPEC_DECODE}/eagle_cudagraph.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_MANAGER_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_DRAFT_MODULE = "vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils"
_DRAFT = "PrefillSpeculatorCudaGraphManager.capture"

_PREPARED_WITH = ("model_state", "input_buffers", "block_tables", "attn_groups", "kv_cache_config")

VIEWS_OF_ANOTHER_BATCH = Event(
    "views-of-another-batch",
    "A full graph of the draft's prefill was captured: stock warms it up on metadata of the target's capture, whose "
    "views show another batch, the last that was prepared.",
)


def diagnose(source: Source) -> Diagnosis:
    capture = source.function(DRAFT_MANAGERS[0], _DRAFT)
    if capture is not None:
        chosen = state_of_a_pair(source, capture)
        if chosen and _used_as_known(capture) and _returned_as_known(source) and _handed_on_as_known(source):
            return Diagnosis(
                Verdict.AFFECTED,
                "the draft's prefill is warmed up on attention states that were built for the target's capture",
                capture.at(chosen),
                "pairs-of-the-target",
            )
        return Diagnosis.unrecognised("the draft's prefill gets its attention states in a way", capture)
    for path in DRAFT_MANAGERS:
        own = source.function(path, "SpeculatorCudaGraphManager.capture")
        if own is not None:
            if prepares_own_states(source, own):
                return Diagnosis(Verdict.FIXED, "the draft's passes build attention states of their own", own.where)
            return Diagnosis.unrecognised("the draft's prefill gets its attention states in a way", own)
    older = source.read(_OLDER) is not None or source.read(_EAGLE) is not None
    if older or source.function(_PACKAGE, "init_speculator") is None:
        return Diagnosis(Verdict.ABSENT, "no pairs of the target's attention states for the draft's prefill")
    return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)


def _used_as_known(capture: Function) -> bool:
    """Whether each pass of the draft looks its pair up once, and is given what the state of that pass says."""
    factory = capture.inner("create_forward_fn")
    looked_up = "attn_state_pair = attn_states[desc]"
    chosen = "attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured"
    unpacked = "attn_metadata, slot_mappings = attn_state"
    return (
        factory is not None
        and capture.takes.startswith("self, forward_fn, attn_states, ")
        and capture.confines("attn_states", looked_up)
        and capture.confines("attn_state", chosen, unpacked, "return fwd, attn_state")
        and all(map(factory.always, (looked_up, chosen, unpacked, "return fwd, attn_state")))
        and capture.confines(
            "attn_metadata", unpacked, "forward_fn(num_reqs, num_tokens, attn_metadata, slot_mappings, *...)"
        )
        and capture.only("super().capture(create_forward_fn, progress_bar_desc)") is not None
        and capture.confines("create_forward_fn", "super().capture(create_forward_fn, progress_bar_desc)")
    )


def _returned_as_known(source: Source) -> bool:
    """Whether the target's capture returns the base manager's pairs by descriptor, in the order of their capture.

    It must prepare each of them by what is called again.
    """
    manager = source.function(MANAGER, "CudaGraphManager.capture")
    target = source.function(MANAGER, "ModelCudaGraphManager.capture")
    return (
        manager is not None
        and target is not None
        and manager.takes.startswith("self, create_forward_fn, ")
        and manager.only("return ...") is manager.only("return attn_states")
        and target.only("return super().capture(create_forward_fn, ...)") is not None
        and target.only(f"prepare_inputs_to_capture(num_reqs, num_tokens, {', '.join(_PREPARED_WITH)}, *...)")
        is not None
        and set(_PREPARED_WITH) <= set(target.parameters)
        and not any(target.sets(name) for name in _PREPARED_WITH)
    )


def _handed_on_as_known(source: Source) -> bool:
    """Whether the target's pairs go as they are through the model runner and the speculator."""
    runner = source.function(_RUNNER, "GPUModelRunner.capture_model")
    speculator = source.function(_SPECULATOR, "AutoRegressiveSpeculator.capture")
    returned, taken = "attn_states = self.cudagraph_manager.capture(*...)", "self.speculator.capture(attn_states)"
    given = "self.prefill_cudagraph_manager.capture(self._prefill, attn_states, *...)"
    return (
        runner is not None
        and speculator is not None
        and None not in map(runner.only, (returned, taken))
        and runner.confines("attn_states", returned, taken)
        and speculator.only(given) is not None
        and speculator.confines("attn_states", given)
    )


class _PairsOfOwnStates(dict[Any, Any]):
    """Pairs of attention states by descriptor, where every look-up of a FULL descriptor builds the states anew.

    The draft looks its pair up once before each of its passes. Both of the pair are the one state that was built: a
    pass takes one of them.
    """

    def __init__(self, pairs: RebuildableStates, manager: Any, activity: Activity) -> None:
        super().__init__(pairs)
        self._prepare = pairs.create
        self._manager = manager
        self._activity = activity

    def __getitem__(self, descriptor: Any) -> Any:
        pair = super().__getitem__(descriptor)
        try:
            if descriptor.cg_mode.name == "FULL":
                tokens = descriptor.num_tokens
                state = self._prepare(descriptor.num_reqs or min(tokens, self._manager.max_num_reqs), tokens)
                return type(pair)(state, state)
        except Exception as error:
            self._activity.failed(error)
        return pair


def _capture_and_remember_what_prepares(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `ModelCudaGraphManager.capture`: the pairs that it returns can be built again.

    Not by its factory, which also chooses the adapters for the target's next pass.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = stock(self, *args, **kwargs)
        try:
            if not isinstance(returned, dict):
                return returned
            from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

            asked = signature.bind(self, *args, **kwargs).arguments
            parts = [asked[name] for name in _PREPARED_WITH]
            return RebuildableStates(
                returned, lambda requests, tokens: prepare_inputs_to_capture(requests, tokens, *parts)
            )
        except Exception as error:
            activity.failed(error)
            return returned

    return capture


def _capture_on_states_of_its_own(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `PrefillSpeculatorCudaGraphManager.capture`: each pass of the draft gets a state built for it.

    Counted are the full graphs that the draft has captured, but for the batch that the target has prepared last.
    """
    stale_views, corrects = activity.counter(VIEWS_OF_ANOTHER_BATCH), activity.corrects

    @functools.wraps(stock)
    def capture(self: Any, forward_fn: Any, attn_states: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = _rebuilt(attn_states, self, activity) if corrects else attn_states
        returned = stock(self, forward_fn, pairs, *args, **kwargs)
        _count_captured(stale_views, attn_states, self)
        return returned

    return capture


def _rebuilt(pairs: Any, manager: Any, activity: Activity) -> Any:
    """*pairs* itself where somebody has made them who did not go through `ModelCudaGraphManager.capture`."""
    try:
        return _PairsOfOwnStates(pairs, manager, activity) if isinstance(pairs, RebuildableStates) else pairs
    except Exception as error:
        activity.failed(error)
        return pairs


def _count_captured(stale_views: Counter, pairs: Any, manager: Any) -> None:
    """Counts the FULL descriptors that *manager* has captured and whose batch is not that of the last of *pairs*.

    Never raises.
    """
    with suppress(Exception):
        *_, last = pairs
        stale_views.count += sum(
            is_full(descriptor)
            and descriptor in manager.graphs
            and (descriptor.num_tokens, descriptor.num_reqs) != (last.num_tokens, last.num_reqs)
            for descriptor in pairs
        )


def patches(shape: str) -> tuple[Patch, ...]:
    return (
        Patch(_MANAGER_MODULE, "ModelCudaGraphManager.capture", _capture_and_remember_what_prepares, observes=False),
        Patch(_DRAFT_MODULE, _DRAFT, _capture_on_states_of_its_own),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    return (
        needs.RUNNER_V2,
        Need("eagle, eagle3 or mtp", lambda deployment, _: deployment.speculator("eagle", "eagle3", "mtp")),
        needs.FULL_GRAPHS,
        unseen("attention that keeps a schedule of its batch", "FlashAttention 3 on Hopper, for latent attention, too"),
    )


FIX = Fix(
    number=25,
    name="draft-stale-views",
    runner="V2",
    reads=(*BUILDS_STATES, _PACKAGE, _RUNNER, _SPECULATOR, _EAGLE, _OLDER),
    modules=(_MANAGER_MODULE, _DRAFT_MODULE),
    diagnose=diagnose,
    patches=patches,
    events=(VIEWS_OF_ANOTHER_BATCH,),
    needs=needs,
    ground="upstream",
)

ABOUT = About(
    pr=48261,
    references=(),
    summary="the draft's prefill is warmed up and captured on metadata of its own batch",
    releases="0.23.0 - 0.25.1",
    absent="0.14.1 - 0.22.1",
    seen="the engine ends while it captures the graphs of a draft's prefill",
    first_test="`--enforce-eager`: does it start?",
    symptom="With MTP or Eagle on model runner V2 and FlashAttention 3, the engine ends while it captures: CUDA error: "
    "operation not supported on global/shared address space, or an illegal memory access.",
    cause="Before each graph of the draft's prefill is captured, its kernels run once to warm up. Their metadata are "
    "those of the target's capture: views of buffers that hold the batch which was prepared last, the smallest. "
    "Starts, lengths and FlashAttention's schedule then fit no batch of that size.",
    remedy="Every pass of the draft's capture gets metadata that were just built for its batch, as the target's are.",
    detect="The engine ends while 'Capturing prefill CUDA graphs', and starts with --enforce-eager.",
    workaround='VLLM_USE_V2_MODEL_RUNNER=0, --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or serving '
    "without speculative decoding.",
    removable="with vLLM 0.26.0",
    in_caches="nothing: what a warm-up computes is thrown away",
    how_sure="follows from the code",
)
