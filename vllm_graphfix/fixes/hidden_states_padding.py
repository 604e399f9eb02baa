"""`hidden-states-padding`: hidden states of padded rows are written for the null block (issue 43810, PR 46301)."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MODEL = "vllm/model_executor/models/extract_hidden_states.py"
_PROPOSER = "vllm/v1/spec_decode/extract_hidden_states.py"
_DISPATCHER = "vllm/v1/cudagraph_dispatcher.py"
_PROPOSER_MODULE = "vllm.v1.spec_decode.extract_hidden_states"
_CLASS = "ExtractHiddenStatesProposer"
_PADDED = "self._slot_mapping_buffer[num_actual:num_tokens].fill_(PADDING_SLOT_ID)"
_COPIED = "self._slot_mapping_buffer[:num_actual].copy_(slot_mapping)"
_VIEWED = "view = self._slot_mapping_buffer[:num_tokens]"
_GIVEN = "{name: view for name in self.attn_layer_names}"
_SIZED = "self._determine_batch_execution_and_padding(num_tokens)"
_ASKED = "self._get_slot_mapping(num_input_tokens, common_attn_metadata.slot_mapping)"
_UNKEYED = "self._get_slot_mapping(num_input_tokens)"
_WRITTEN = (
    "token_kv_cache[slot_mapping] = to_cache",
    "kv_cache[slot_mapping // block_size, slot_mapping % block_size] = to_cache",
    "kv_cache[slot_mapping // block_size, :, slot_mapping % block_size] = to_cache",
)
"""How a release may write rows to their slots: -1 is the last slot of the last block for each of them."""
_RAISED = tuple(
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
)
PADDING_WRITTEN = Event(
    "padding-written",
    "A step that hands on hidden states was padded: on stock the hidden states of its padded rows are written to the "
    "last slot of the cache's last block, which another request may hold.",
)


def diagnose(source: Source) -> Diagnosis:
    if source.read(_PROPOSER) is None or source.read(_MODEL) is None:
        return Diagnosis(Verdict.ABSENT, "no extract_hidden_states")
    give = source.function(_PROPOSER, f"{_CLASS}._get_slot_mapping")
    propose = source.function(_PROPOSER, f"{_CLASS}.propose")
    dummy = source.function(_PROPOSER, f"{_CLASS}.dummy_run")
    write = source.function(_MODEL, "basic_cache")
    update = source.function(_MODEL, "CacheOnlyAttentionImpl.do_kv_cache_update")
    look_up = source.function(_MODEL, "unified_kv_cache_update")
    if not (give and propose and dummy and write and update and look_up):
        return Diagnosis.unrecognised("hidden states are handed on in a way", give or write or _PROPOSER)
    raised = _only_statement(write, *_RAISED)
    if raised and write.confines("slot_mapping", *_RAISED, *_WRITTEN) and _writes_after(write, raised):
        return Diagnosis(Verdict.FIXED, "no slot below 0 is written to", write.at(raised))
    padded = give.only(_PADDED)
    written = _only_statement(write, *_WRITTEN)
    if (
        padded
        and written
        and re.search(rb"^PADDING_SLOT_ID = -1$", source.read(_PROPOSER) or b"", re.MULTILINE)
        and give.takes == "self, num_tokens, slot_mapping"
        and give.confines("_slot_mapping_buffer", _PADDED, _COPIED, _VIEWED)
        and give.confines("view", _VIEWED, _GIVEN)
        and give.only(f"return {_GIVEN}")
        and write.takes == "to_cache, kv_cache, slot_mapping"
        and write.confines("slot_mapping", *_WRITTEN)
        and len(update.find("basic_cache(to_cache, kv_cache, slot_mapping)")) == 1
        and update.mentions(slot_mapping=1)
        and look_up.find("layer_slot_mapping = slot_mapping.get(layer_name)")
        and len(propose.find("self._get_slot_mapping")) == len(propose.find(_ASKED)) == 1
        and propose.only(_SIZED)
        and len(dummy.find("self._get_slot_mapping")) == len(dummy.find(_UNKEYED)) == 1
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "padded rows have slot -1, which is taken for the last slot of the last block",
            give.at(padded),
            "last-slot",
        )
    return Diagnosis.unrecognised("hidden states are handed on in a way", give)


def _only_statement(write: Function, *patterns: str) -> ast.stmt | ast.expr | None:
    """The one part that equals one of *patterns*, carried out whenever *write* is; None if there is another, too."""
    found = [part for pattern in patterns for part in write.find(pattern)]
    return found[0] if len(found) == 1 and found[0] in write.node.body else None


def _writes_after(write: Function, raised: ast.stmt | ast.expr) -> bool:
    written = _only_statement(write, *_WRITTEN)
    return written is not None and write.in_one_block(raised, written)


def _gives_no_slot_below_zero(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_get_slot_mapping(self, num_tokens, slot_mapping=None)`, which gives the layers a view of one buffer.

    The buffer, (tokens,) int64 on the device, is the drafter's own and filled anew for each step. Slots below 0 become
    0 there, the null block's first, as upstream does it where they are written: the shape stays, nothing waits, and a
    graph would find them at the same address. Also slots that the step has as -1 itself, as a rank that shares the
    context with others.

    An engine's model runner has padded the slots by then, with -1 too, so that their number does not say how many
    tokens are padding: what the drafter asked just before does.
    """
    written, corrects = activity.counter(PADDING_WRITTEN), activity.corrects

    @functools.wraps(stock)
    def _get_slot_mapping(self: Any, num_tokens: Any, slot_mapping: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = stock(self, num_tokens, slot_mapping, *args, **kwargs)
        try:
            if slot_mapping is not None:  # else a dummy run, which is given what is left of the step before
                if num_tokens > getattr(self, "graphfix_tokens", num_tokens):
                    written.count += 1
                if corrects:
                    for slots in given.values():
                        slots.clamp_(min=0)
        except Exception as error:
            activity.failed(error)
        return given

    return _get_slot_mapping


def _notes_the_tokens(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `_determine_batch_execution_and_padding(self, num_tokens, …)`, which is told how many tokens a step has."""

    @functools.wraps(stock)
    def _determine_batch_execution_and_padding(self: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self.graphfix_tokens = num_tokens
        except Exception as error:
            activity.failed(error)
        return stock(self, num_tokens, *args, **kwargs)

    return _determine_batch_execution_and_padding


def patches(shape: str) -> tuple[Patch, ...]:
    return (
        Patch(_PROPOSER_MODULE, f"{_CLASS}._determine_batch_execution_and_padding", _notes_the_tokens),
        Patch(_PROPOSER_MODULE, f"{_CLASS}._get_slot_mapping", _gives_no_slot_below_zero),
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    method = "extract_hidden_states"
    return (
        needs.RUNNER_V1,
        Need(method, lambda deployment, _: deployment.speculator(method), 'the "method" of --speculative-config'),
        needs.PROMPTS_IN_GRAPHS,
    )


FIX = Fix(
    number=20,
    name="hidden-states-padding",
    runner="V1",
    reads=(_MODEL, _PROPOSER, _DISPATCHER),
    modules=(_PROPOSER_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDING_WRITTEN,),
    needs=needs,
    ground="upstream",
    evidence=(
        f"{_PROPOSER}::{_CLASS}._determine_batch_execution_and_padding",
        f"{_PROPOSER}::{_CLASS}.initialize_cudagraph_keys",
        f"{_MODEL}::CacheOnlyAttentionLayer.forward",
        f"{_MODEL}::ExtractHiddenStatesModel.forward",
        *(
            f"{_DISPATCHER}::CudagraphDispatcher.{name}"
            for name in ("initialize_cudagraph_keys", "dispatch", "_create_padded_batch_descriptor")
        ),
    ),
)

ABOUT = About(
    pr=46301,
    references=("issue 43810", "PR 43869"),
    summary="hidden states of padded rows are written for the null block",
    releases="0.17.0 - 0.24.0",
    absent="0.14.1 - 0.16.0",
    seen="one hidden state of a request is another one's or all zeros, with extract_hidden_states",
    first_test='`"enforce_eager": true` in `--speculative-config`: gone?',
    symptom='With "method": "extract_hidden_states" one hidden state of a request is that of a row of another batch, '
    "or all zeros, while its other rows are right. Nothing ends in an error.",
    cause="The drafter pads its steps to the sizes of graphs, with slot -1. The function that writes hidden states to "
    "the cache indexes with it, so that -1 is the last slot of the last block: whatever is left in the padded rows of "
    "the drafter's buffer overwrites the hidden state of the request that holds that block.",
    remedy="Slots below 0 become 0 in the drafter's own buffer, the null block's first slot, which belongs to nobody: "
    "the same that upstream does where they are written.",
    detect="Hidden states of the same prompts differ between graphs and --enforce-eager in one row, position "
    "block size - 1 of a block, of a request at a time; most easily with few blocks (--num-gpu-blocks-override).",
    workaround='"enforce_eager": true in --speculative-config: without graphs of the drafter nothing is padded, but '
    "under data parallelism; or --enforce-eager.",
    removable="with vLLM 0.25.0",
    in_caches="hidden states that a connector has stored may have one wrong row; keys and values are right",
    how_sure="that follows from the code: the cache that is written to holds hidden states alone",
)
