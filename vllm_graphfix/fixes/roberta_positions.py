"""`roberta-positions`: a RoBERTa model does not change the positions that it gets (PR 37884)."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict, Wrap
from vllm_graphfix.fixes._stock_path import find_override

if TYPE_CHECKING:
    import ast
    from types import FrameType

    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MODELS = "vllm/model_executor/models/roberta.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_MODELS_MODULE = "vllm.model_executor.models.roberta"
_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_ADDS = "replace_roberta_positions"
_OWNERS = ("RobertaEmbeddingModel", "RobertaForSequenceClassification")
"""Classes whose `forward` calls the function that adds."""
_IN_PLACE = "position_ids += padding_idx + 1"
_OUT_OF_PLACE = "self.position_embeddings(position_ids + self.padding_idx + 1)"
_SELECTED = "positions = self.positions.gpu[:num_input_tokens]"
_PADDED_ROWS = tuple(
    f"{buffer}[num_scheduled_tokens:num_input_tokens]" for buffer in ("self.positions", "self.positions.gpu")
)
_ZEROED = tuple(f"{rows}{zeroed}" for rows in _PADDED_ROWS for zeroed in (".zero_()", ".fill_(0)", " = 0"))
_ALL_REFRESHED = "self.positions.copy_to_gpu()"
_IF_PADDED = "if num_input_tokens > num_scheduled_tokens: ..."
_ARCHITECTURES = frozenset(
    """BgeM3EmbeddingModel RobertaForMaskedLM RobertaForSequenceClassification RobertaModel XLMRobertaModel
    XLMRobertaForSequenceClassification""".split()
)
"""Architectures that vLLM serves with these models."""

PADDED_POSITIONS_SHIFTED = Event(
    "padded-positions-shifted",
    "A padded batch reached a RoBERTa model: on stock the positions of its padded rows are larger afterwards, and so "
    "at every step until they are beyond the model's table.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the addition of the offset to positions, and code that stops it from accumulating in padded rows."""
    if source.read(_MODELS) is None:
        return Diagnosis.absent("no RoBERTa models")
    select = source.function(_RUNNER, "GPUModelRunner._preprocess")
    embed = source.function(_MODELS, "RobertaEmbedding.forward")
    zeroed = select and _zeroing_statement(select)
    if select is not None and zeroed:
        return Diagnosis.fixed("the positions of padded rows are 0 at every step", select.at(zeroed))
    looked_up = embed and embed.find_unique(_OUT_OF_PLACE)
    if embed is not None and looked_up and not source.contains_word(_MODELS, _ADDS):
        return Diagnosis.fixed("the offset of positions is added to a copy, in the embedding", embed.at(looked_up))
    add = source.function(_MODELS, _ADDS)
    added = add and add.find_unique(_IN_PLACE)
    prepare = source.function(_RUNNER, "GPUModelRunner._prepare_inputs")
    remedies = (*_ZEROED, _ALL_REFRESHED)
    remedied = [part for each in (select, prepare) if each for part in each.find(*remedies)]
    if add is not None and added and not looked_up and not remedied:
        return Diagnosis.affected(
            "the offset is added to positions where they are, and nothing refreshes those of padded rows",
            add.at(added),
            "added-in-place",
        )
    return Diagnosis.unrecognised("positions of RoBERTa models are computed in a way", add or embed or _MODELS)


def _zeroing_statement(select: Function) -> ast.stmt | ast.expr | None:
    """Return the statement that zeroes the positions of padded rows, if any, right after their selection."""
    zeroed = select.find_first_unique(_ZEROED)
    selected = select.find_unique("positions = self.positions[:num_input_tokens]") or select.find_unique(_SELECTED)
    if zeroed is None or selected is None:
        return None
    padded = select.find_unique(_IF_PADDED)
    rows = padded if padded is not None and select.in_one_block(zeroed) and _is_all_of(padded, zeroed) else zeroed
    return zeroed if select.in_one_block(selected, rows, at_once=True) else None


def _is_all_of(condition: Any, part: ast.stmt | ast.expr) -> bool:
    """Tell if the ``if`` statement *condition* has *part* for its body, and no other branch."""
    (only, *further) = condition.body
    return not further and not condition.orelse and part in (only, getattr(only, "value", None))


def _restore_positions_of(owner: str) -> Wrap:
    """Make a wrapper of `forward(input_ids, positions, …)` of *owner*, which adds the offset in place: undo that.

    The original positions are copied back in the order of the device's stream. Other memory for them would be no
    remedy: piecewise graphs have recorded this address. All rows are restored, also in batches without padding, dummy
    runs and captures, so that they are right in every later batch.
    """

    def wrap(stock: StockFunction, activity: Activity) -> StockFunction:
        from weakref import WeakKeyDictionary

        from torch.compiler import is_compiling  # the target is imported by now, and torch with it

        shifted, corrects = activity.counter(PADDED_POSITIONS_SHIFTED), activity.corrects
        foreign_of = WeakKeyDictionary[Any, str | None]()

        @functools.wraps(stock)
        def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            corrected, before = corrects, None
            try:
                if is_compiling():  # the model is traced whole: no graphs, no padding
                    corrected = False
                else:
                    if self not in foreign_of:
                        foreign_of[self] = _find_foreign(self, owner, sys._getframe(1))
                    foreign = foreign_of[self]
                    if foreign is not None:
                        # Positions that are restored twice would shrink at every step.
                        corrected = False
                        activity.step_aside("roberta-positions", foreign)
                    elif _is_padded(positions):
                        shifted.count += 1
                if corrected:
                    before = positions.clone()
            except Exception as error:
                activity.failed(error)
            if before is None:
                return stock(self, input_ids, positions, *args, **kwargs)
            try:
                return stock(self, input_ids, positions, *args, **kwargs)
            finally:
                try:
                    positions.copy_(before)
                except Exception as error:
                    activity.failed(error)

        return forward

    return wrap


def _find_foreign(model: Any, owner: str, caller: FrameType | None) -> str | None:
    """Name foreign code among the function that adds, the *model*'s `forward` and its runner's `_model_forward`."""
    add = getattr(sys.modules[_MODELS_MODULE], _ADDS, None)
    if getattr(add, "__globals__", {}).get("__name__") != _MODELS_MODULE:
        return f"{_ADDS} of {getattr(add, '__module__', None)}"
    runner = _find_runner(caller)
    return find_override(model, _MODELS_MODULE, owner, ("forward",)) or (
        None if runner is None else find_override(runner, _RUNNER_MODULE, "GPUModelRunner", ("_model_forward",))
    )


def _find_runner(frame: FrameType | None) -> Any | None:
    """Return the calling model runner, on the stack from *frame* on; dummy runs call without a helper."""
    kind = getattr(sys.modules.get(_RUNNER_MODULE), "GPUModelRunner", None)
    while frame is not None and isinstance(kind, type):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, kind):
            return candidate
        frame = frame.f_back
    return None


def _is_padded(positions: Any) -> bool:
    """Tell if this step has more *positions* than tokens; not for dummy runs and captures, which have no metadata."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    of_layers = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not of_layers or not isinstance(of_layers, dict):
        return False
    metadata = next(iter(of_layers.values()))  # all layers have the same batch
    return bool(positions.shape[-1] > metadata.num_actual_tokens)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    models = "XLM-RoBERTa, BGE-M3 and rerankers among them; not with --model-impl transformers"
    return (
        needs.RUNNER_V1,
        Need("a RoBERTa model", _serves_roberta, models, ("--model-impl=",), clause="the model is a RoBERTa"),
        needs.GRAPHS,
    )


def _serves_roberta(deployment: Deployment, _: str) -> Fact:
    """Tell if the model is one of vLLM's own RoBERTa models."""
    from vllm_graphfix.deployment import Fact

    served_by, unsure = deployment.value("--model-impl")
    if served_by == "transformers" and unsure is None:
        return Fact(False, "--model-impl transformers: its addition is in compiled code, which this fix leaves alone")
    serves = deployment.has_architecture(_ARCHITECTURES, "a RoBERTa model", "no RoBERTa model")
    return serves if serves.holds is None or unsure is None else Fact(None, unsure)


FIX = fix(
    "roberta-positions",
    runner="V1",
    diagnose=diagnose,
    surroundings=(
        # The positions that models get, and those of padded rows
        Slice(_RUNNER, "GPUModelRunner._preprocess", "positions"),
        Slice(_RUNNER, "GPUModelRunner._prepare_inputs", "positions", Verdict.AFFECTED),
        # The addition of the offset, once in each forward pass, and every other use between runner and model
        *(Slice(_RUNNER, f"GPUModelRunner.{name}", "positions") for name in ("execute_model", "_model_forward")),
        Slice(_MODELS, "", _ADDS),
        Slice(_MODELS, _ADDS, "position_ids padding_idx"),
        Slice(_MODELS, "RobertaEmbedding.forward", "position_ids"),
        *(Slice(_MODELS, f"{owner}.forward", f"positions {_ADDS}") for owner in _OWNERS),
        *(Slice(_MODELS, f"{owner}.__init__", "padding_idx", Verdict.AFFECTED) for owner in _OWNERS),
    ),
    recognised=(*_ZEROED, _IN_PLACE, f"position_embeddings = {_OUT_OF_PLACE}"),
    corrections=tuple(Patch(_MODELS_MODULE, f"{owner}.forward", _restore_positions_of(owner)) for owner in _OWNERS),
    events=(PADDED_POSITIONS_SHIFTED,),
    needs=needs,
    default_rationale="upstream",
)
