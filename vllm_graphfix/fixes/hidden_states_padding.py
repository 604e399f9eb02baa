"""`hidden-states-padding`: hidden states of padded rows are written for the null block (issue 43810, PR 46301)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.fixes._premises import NULL_BLOCK, TAKEN_FIRST

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MODEL = "vllm/model_executor/models/extract_hidden_states.py"
_PROPOSER = "vllm/v1/spec_decode/extract_hidden_states.py"
_PROPOSER_MODULE = "vllm.v1.spec_decode.extract_hidden_states"
_CLASS = "ExtractHiddenStatesProposer"
_PADDED = "self._slot_mapping_buffer[num_actual:num_tokens].fill_(PADDING_SLOT_ID)"
_WRITTEN = (
    "token_kv_cache[slot_mapping] = to_cache",
    "kv_cache[slot_mapping // block_size, slot_mapping % block_size] = to_cache",
    "kv_cache[slot_mapping // block_size, :, slot_mapping % block_size] = to_cache",
)
"""Writes of rows to their slots, each of which takes -1 for the last slot of the last block."""
_HANDED_ON = ("basic_cache(to_cache, kv_cache, slot_mapping)",)
_RAISED = (
    *(
        f"slot_mapping = {raised}"
        for raised in (
            "slot_mapping.clamp_min(0)",
            "slot_mapping.clamp(min=0)",
            "slot_mapping.clamp(0)",
            "torch.clamp(slot_mapping, min=0)",
            "slot_mapping.relu()",
            "torch.where(slot_mapping < 0, 0, slot_mapping)",
            "torch.where(slot_mapping >= 0, slot_mapping, 0)",
        )
    ),
    "slot_mapping.clamp_(min=0)",
    "slot_mapping.clamp_min_(0)",
)
"""Upstream's correction, the first, and equivalents."""

PADDING_WRITTEN = Event(
    "padding-written",
    "A step that hands on hidden states was padded: on stock the hidden states of its padded rows are written to the "
    "last slot of the cache's last block, which another request may hold.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the slots of padded rows, the function that writes to slots, and code that raises slots before."""
    if source.read(_PROPOSER) is None or source.read(_MODEL) is None:
        return Diagnosis.absent("no extract_hidden_states")
    map_slots = source.function(_PROPOSER, f"{_CLASS}._get_slot_mapping")
    write = source.function(_MODEL, "basic_cache")
    update = source.function(_MODEL, "CacheOnlyAttentionImpl.do_kv_cache_update")
    if write is not None and update is not None:
        raised = [(each, part) for each in (write, update) for part in each.find(*_RAISED)]
        for each, uses in ((write, _WRITTEN), (update, _HANDED_ON)):
            if len(raised) == 1 and raised[0][0] is each and _raises_before(each, raised[0][1], uses):
                return Diagnosis.fixed("no slot below 0 is written to", each.at(raised[0][1]))
        padded = map_slots and map_slots.find_unique(_PADDED)
        if map_slots and padded and not raised and _find_statement(write, _WRITTEN):
            return Diagnosis.affected(
                "padded rows have slot -1, which is taken for the last slot of the last block",
                map_slots.at(padded),
                "last-slot",
            )
    return Diagnosis.unrecognised("hidden states are handed on in a way", map_slots or write or _PROPOSER)


def _find_statement(function: Function, patterns: tuple[str, ...]) -> ast.stmt | ast.expr | None:
    """Return the only part that equals one of *patterns*."""
    parts = function.find(*patterns)
    return parts[0] if len(parts) == 1 else None


def _raises_before(function: Function, raised: ast.stmt | ast.expr, uses: tuple[str, ...]) -> bool:
    """Tell if *raised* and then the only one of *uses* run on every path; the slice shows anything in between."""
    used = _find_statement(function, uses)
    statements = [getattr(each, "value", None) for each in function.node.body] + function.node.body
    return used is not None and used in statements and function.in_one_block(raised, used)


def _clamp_slots(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_get_slot_mapping(self, num_tokens, slot_mapping=None)`, which passes the layers a view of one buffer.

    The buffer, (tokens,) int64 on the device, belongs to the drafter and is refilled for each step. Slots below 0
    become 0 there, the first of the null block, as upstream does where they are written: shape and address stay, and
    nothing waits. That includes slots of -1 in the step itself, as on ranks that share the context.

    The model runner pads slots with -1, too, so the length of `slot_mapping` does not show the padding; the number of
    tokens that the drafter dispatched just before does.
    """
    written, corrects = activity.counter(PADDING_WRITTEN), activity.corrects

    @functools.wraps(stock)
    def _get_slot_mapping(self: Any, num_tokens: Any, slot_mapping: Any = None, *args: Any, **kwargs: Any) -> Any:
        slots_by_layer = stock(self, num_tokens, slot_mapping, *args, **kwargs)
        try:
            if slot_mapping is not None:  # a dummy run reads the buffer of the previous step
                if num_tokens > getattr(self, "graphfix_tokens", num_tokens):
                    written.count += 1
                if corrects:
                    for slots in slots_by_layer.values():
                        slots.clamp_(min=0)
        except Exception as error:
            activity.failed(error)
        return slots_by_layer

    return _get_slot_mapping


def _record_tokens(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_determine_batch_execution_and_padding(self, num_tokens, …)`: note the number of tokens of a step."""

    @functools.wraps(stock)
    def _determine_batch_execution_and_padding(self: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self.graphfix_tokens = num_tokens
        except Exception as error:
            activity.failed(error)
        return stock(self, num_tokens, *args, **kwargs)

    return _determine_batch_execution_and_padding


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    method = "extract_hidden_states"
    return (
        needs.RUNNER_V1,
        Need(
            method,
            lambda deployment, _: deployment.speculator(method),
            'the "method" of --speculative-config',
            clause="the speculative method is extract_hidden_states",
        ),
        needs.PROMPTS_IN_GRAPHS,
    )


FIX = fix(
    "hidden-states-padding",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The way from the layer to the write, and every other write
        Slice(_MODEL, "CacheOnlyAttentionLayer.forward", "unified_kv_cache_update to_cache kv_cache"),
        Slice(_MODEL, "unified_kv_cache_update", "slot_mapping layer_slot_mapping do_kv_cache_update"),
        Slice(_MODEL, "CacheOnlyAttentionImpl.do_kv_cache_update", "slot_mapping basic_cache"),
        Slice(_MODEL, "CacheOnlyAttentionBackend.get_impl_cls"),
        Slice(_MODEL, "basic_cache", "slot_mapping token_kv_cache"),
        # The slots of padded rows: later remedies raise -1, and no other number
        Slice(_PROPOSER, "", "PADDING_SLOT_ID"),
        Slice(_PROPOSER, f"{_CLASS}._get_slot_mapping", "_slot_mapping_buffer slot_mapping view"),
        # Padded steps, and their rows
        Slice(_PROPOSER, f"{_CLASS}.propose", "_get_slot_mapping slot_mapping num_input_tokens", Verdict.AFFECTED),
        Slice(
            _PROPOSER,
            f"{_CLASS}._determine_batch_execution_and_padding",
            "num_tokens_padded batch_desc",
            Verdict.AFFECTED,
        ),
        Slice(_PROPOSER, f"{_CLASS}.initialize_cudagraph_keys", "proposer_cudagraph_mode", Verdict.AFFECTED),
        Slice(_MODEL, "ExtractHiddenStatesModel.forward", "hidden_states", Verdict.AFFECTED),
        NULL_BLOCK,
    ),
    recognised=(_PADDED, *_WRITTEN, *_RAISED),
    distant_code=TAKEN_FIRST,
    corrections=(
        Patch(_PROPOSER_MODULE, f"{_CLASS}._determine_batch_execution_and_padding", _record_tokens),
        Patch(_PROPOSER_MODULE, f"{_CLASS}._get_slot_mapping", _clamp_slots),
    ),
    events=(PADDING_WRITTEN,),
    needs=needs,
    default_rationale="upstream",
)
