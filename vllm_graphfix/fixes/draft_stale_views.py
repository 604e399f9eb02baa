"""`draft-stale-views`: the draft's prefill is warmed up and captured on metadata of its own batch (PR 48261)."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Counter, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._capture_passes import RebuildableStates, is_full
from vllm_graphfix.fixes._capture_source import (
    BUILDING,
    DRAFT_MANAGERS,
    EAGLE,
    MANAGER,
    OWN_STATES,
    RECOGNISED,
    TARGET,
    UNPACKED,
    prepares_own_states,
    state_of_a_pair,
)

if TYPE_CHECKING:
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_SPEC_DECODE = "vllm/v1/worker/gpu/spec_decode"
_SPECULATOR = f"{_SPEC_DECODE}/autoregressive/speculator.py"
_SPECULATORS = (
    (_SPECULATOR, "AutoRegressiveSpeculator"),
    (f"{_SPEC_DECODE}/target_dependent_ar/speculator.py", "TargetDependentARSpeculator"),
)
"""The speculator at its old and its new place."""
_PACKAGE = f"{_SPEC_DECODE}/__init__.py"
_OLDER = f"{_SPEC_DECODE}/eagle_cudagraph.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_BATCH = "vllm/v1/worker/gpu/input_batch.py"
_MANAGER_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_DRAFT_MODULE = "vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils"
_DRAFT = "PrefillSpeculatorCudaGraphManager.capture"

_PREPARED_WITH = ("model_state", "input_buffers", "block_tables", "attn_groups", "kv_cache_config")
_PREPARED = f"prepare_inputs_to_capture(num_reqs, num_tokens, {', '.join(_PREPARED_WITH)}, *...)"
_LOOKED_UP = "attn_state_pair = attn_states[desc]"
_CONSTRUCTED = "self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(...)"
_CHOSEN = "attn_state = attn_state_pair.warmup if warmup else attn_state_pair.captured"

VIEWS_OF_ANOTHER_BATCH = Event(
    "views-of-another-batch",
    "A full graph of the draft's prefill was captured: stock warms it up on metadata of the target's capture, whose "
    "views show another batch, the last that was prepared.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the states for the capture of the draft's prefill: a pair of the target's, or its own."""
    in_a_way = "the draft's prefill gets its attention states in a way"
    capture = source.function(DRAFT_MANAGERS[0], _DRAFT)
    if capture is not None:
        factory, target = capture.inner("create_forward_fn"), source.function(MANAGER, "ModelCudaGraphManager.capture")
        chosen = state_of_a_pair(source, capture)
        if (
            chosen is not None
            and factory is not None
            and all(map(factory.always, (_LOOKED_UP, UNPACKED)))
            and target is not None
            and target.find_unique(_PREPARED)
            and {*_PREPARED_WITH} <= {*target.parameters}
        ):
            return Diagnosis.affected(
                "the draft's prefill is warmed up on attention states that were built for the target's capture",
                capture.at(chosen),
                "pairs-of-the-target",
            )
        return Diagnosis.unrecognised(in_a_way, capture, defect_seen=chosen is not None)
    for path, (speculator, owner) in zip(DRAFT_MANAGERS, _SPECULATORS, strict=True):
        own = source.function(path, "SpeculatorCudaGraphManager.capture")
        if own is not None:
            init = source.function(speculator, f"{owner}.init_cudagraph_manager")
            if prepares_own_states(source, own) and init is not None and init.find_unique(_CONSTRUCTED):
                return Diagnosis.fixed("the draft's passes build attention states of their own", own.where)
            return Diagnosis.unrecognised(in_a_way, own)
    older = source.read(_OLDER) is not None or source.read(EAGLE) is not None
    if older or source.function(_PACKAGE, "init_speculator") is None:
        return Diagnosis.absent("no pairs of the target's attention states for the draft's prefill")
    return Diagnosis.unrecognised("speculators are in a place", _PACKAGE)


class _PairsOfOwnStates(dict[Any, Any]):
    """Pairs of attention states by descriptor, of which each look-up of a FULL descriptor builds a new one.

    The draft looks up its pair before each pass and uses one of it, so both are the same new state.
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
    """Wrap `ModelCudaGraphManager.capture`: the returned pairs can be built again.

    That does not use its factory, which would also select adapters for the target's next pass.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = stock(self, *args, **kwargs)
        try:
            if not isinstance(returned, dict):
                return returned
            from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

            arguments = signature.bind(self, *args, **kwargs).arguments
            parts = [arguments[name] for name in _PREPARED_WITH]
            return RebuildableStates(
                returned, lambda requests, tokens: prepare_inputs_to_capture(requests, tokens, *parts)
            )
        except Exception as error:
            activity.failed(error)
            return returned

    return capture


def _capture_on_states_of_its_own(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `PrefillSpeculatorCudaGraphManager.capture`: each pass of the draft gets a state of its own.

    The full graphs of the draft count, except for the batch that the target has prepared last.
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
    """Wrap *pairs*; return them as they are unless `ModelCudaGraphManager.capture` returned them."""
    try:
        return _PairsOfOwnStates(pairs, manager, activity) if isinstance(pairs, RebuildableStates) else pairs
    except Exception as error:
        activity.failed(error)
        return pairs


def _count_captured(stale_views: Counter, pairs: Any, manager: Any) -> None:
    """Count the captured FULL descriptors whose batch is not that of the last of *pairs*. Never raises."""
    with suppress(Exception):
        *_, last = pairs
        stale_views.count += sum(
            is_full(descriptor)
            and descriptor in manager.graphs
            and (descriptor.num_tokens, descriptor.num_reqs) != (last.num_tokens, last.num_reqs)
            for descriptor in pairs
        )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need, unseen

    return (
        needs.RUNNER_V2,
        Need(
            "eagle, eagle3 or mtp",
            lambda deployment, _: deployment.speculator("eagle", "eagle3", "mtp"),
            clause="drafts come from eagle, eagle3 or mtp",
        ),
        needs.FULL_GRAPHS,
        unseen("attention that keeps a schedule of its batch", "FlashAttention 3 on Hopper, for latent attention, too"),
    )


FIX = fix(
    "draft-stale-views",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        *BUILDING,
        *TARGET,
        Slice(_PACKAGE, "init_speculator", "cudagraph_manager", Verdict.ABSENT),
        Slice(_OLDER, "EagleCudaGraphManager", "attn_states", Verdict.ABSENT),
        Slice(EAGLE, "EagleCudaGraphManager", "attn_states", Verdict.ABSENT),
        # The draft's passes, on pairs of the target or on states of their own
        Slice(
            DRAFT_MANAGERS[0],
            _DRAFT,
            "attn_states attn_state_pair attn_state attn_metadata create_forward_fn warmup",
            Verdict.AFFECTED,
        ),
        *OWN_STATES,
        # The manager that the speculator constructs
        *(Slice(path, f"{owner}.init_cudagraph_manager", "prefill_cudagraph_manager") for path, owner in _SPECULATORS),
        # The way of the pairs to the draft's manager, and of the metadata to its kernels
        Slice(_RUNNER, "GPUModelRunner.capture_model", "attn_states cudagraph_manager", Verdict.AFFECTED),
        Slice(_SPECULATOR, "AutoRegressiveSpeculator.capture", "attn_states", Verdict.AFFECTED),
        Slice(_SPECULATOR, "AutoRegressiveSpeculator._prefill", "attn_metadata", Verdict.AFFECTED),
        # The buffers behind the metadata's views
        Slice(_BATCH, "InputBatch.make_dummy", "query_start_loc seq_lens", Verdict.AFFECTED),
    ),
    recognised=RECOGNISED,
    corrections=(
        Patch(
            _MANAGER_MODULE,
            "ModelCudaGraphManager.capture",
            _capture_and_remember_what_prepares,
            observes=False,
            leading=1,  # `diagnose` finds the others by name
        ),
        Patch(_DRAFT_MODULE, _DRAFT, _capture_on_states_of_its_own),
    ),
    events=(VIEWS_OF_ANOTHER_BATCH,),
    needs=needs,
    default_rationale="upstream",
)
