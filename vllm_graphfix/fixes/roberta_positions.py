"""`roberta-positions`: a RoBERTa model leaves the positions that it was given as they were (PR 37884)."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Event, Fix, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._about import About

if TYPE_CHECKING:
    import ast

    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_MODELS = "vllm/model_executor/models/roberta.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_MODELS_MODULE = "vllm.model_executor.models.roberta"
_ADDS = "replace_roberta_positions"
_TARGETS = ("RobertaEmbeddingModel.forward", "RobertaForSequenceClassification.forward")
"""Those that call what adds."""
_ADDED = f"{_ADDS}(input_ids=input_ids, position_ids=positions, padding_idx=self.padding_idx)"
_IN_PLACE = "position_ids += padding_idx + 1"
_OUT_OF_PLACE = "self.position_embeddings(position_ids + self.padding_idx + 1)"
_HANDED_ON = tuple(f"self.{model}(*..., positions=positions)" for model in ("model", "roberta"))
_GIVEN = "positions = self.positions.gpu[:num_input_tokens]"
_REFRESHED = "self.positions.copy_to_gpu(total_num_scheduled_tokens)"
_PADDED_ROWS = tuple(
    f"{buffer}[num_scheduled_tokens:num_input_tokens]" for buffer in ("self.positions", "self.positions.gpu")
)
_ZEROED = tuple(f"{rows}{zeroed}" for rows in _PADDED_ROWS for zeroed in (".zero_()", ".fill_(0)", " = 0"))
_IF_PADDED = "if num_input_tokens > num_scheduled_tokens: ..."
_ARCHITECTURES = frozenset(
    """BgeM3EmbeddingModel RobertaForMaskedLM RobertaForSequenceClassification RobertaModel XLMRobertaModel
    XLMRobertaForSequenceClassification""".split()
)
"""Those that vLLM serves with these models."""

PADDED_POSITIONS_SHIFTED = Event(
    "padded-positions-shifted",
    "A padded batch reached a RoBERTa model: on stock the positions of its padded rows are larger afterwards, and so "
    "at every step until they are beyond the model's table.",
)


def diagnose(source: Source) -> Diagnosis:
    if source.read(_MODELS) is None:
        return Diagnosis(Verdict.ABSENT, "no RoBERTa models")
    give = source.function(_RUNNER, "GPUModelRunner._preprocess")
    embed = source.function(_MODELS, "RobertaEmbedding.forward")
    forwards = [source.function(_MODELS, name) for name in _TARGETS]
    zeroed = give and _zeroing_statement(give)
    if give is not None and zeroed:
        return Diagnosis(Verdict.FIXED, "the positions of padded rows are 0 at every step", give.at(zeroed))
    looked_up = embed and embed.only(_OUT_OF_PLACE)
    if (
        embed is not None
        and looked_up
        and embed.confines("position_ids", _OUT_OF_PLACE)
        and not source.says(_MODELS, _ADDS)
        and all(each and _hands_on(each) for each in forwards)
    ):
        return Diagnosis(
            Verdict.FIXED, "the offset of positions is added to a copy, in the embedding", embed.at(looked_up)
        )
    add = source.function(_MODELS, _ADDS)
    added = add and add.only(_IN_PLACE)
    if (
        add is not None
        and added
        and add.takes == "input_ids, position_ids, padding_idx"
        and add.confines("position_ids", _IN_PLACE)
        and not add.sets("padding_idx")
        and all(each and _adds_first(each) for each in forwards)
        # One definition and these two calls: no other model adds.
        and len(re.findall(rb"\b%b\b" % _ADDS.encode(), source.read(_MODELS) or b"")) == 1 + len(_TARGETS)
        and _only_tokens_are_refreshed(source, give)
    ):
        return Diagnosis(
            Verdict.AFFECTED,
            "the offset is added to positions where they are, and nothing refreshes those of padded rows",
            add.at(added),
            "added-in-place",
        )
    return Diagnosis.unrecognised("positions of RoBERTa models are computed in a way", add or embed or _MODELS)


def _zeroing_statement(give: Function) -> ast.stmt | ast.expr | None:
    """Where the positions of padded rows become 0: whenever there are any."""
    zeroed = next((found for found in map(give.only, _ZEROED) if found is not None), None)
    given = give.only("positions = self.positions[:num_input_tokens]") or give.only(_GIVEN)
    if zeroed is None or given is None:
        return None
    padded = give.only(_IF_PADDED)
    rows = padded if padded is not None and give.in_one_block(zeroed) and _is_all_of(padded, zeroed) else zeroed
    return zeroed if give.in_one_block(given, rows, at_once=True) else None


def _is_all_of(condition: Any, part: ast.stmt | ast.expr) -> bool:
    """Whether the ``if`` statement *condition* has *part* for its body, and no other branch."""
    (only, *further) = condition.body
    return not further and not condition.orelse and part in (only, getattr(only, "value", None))


def _hands_on(forward: Function) -> bool:
    """Whether positions go to the model behind, and nothing else is done to them."""
    return forward.takes.startswith("self, input_ids, positions,") and forward.confines("positions", *_HANDED_ON)


def _adds_first(forward: Function) -> bool:
    """Whether positions are added to, before all else and whatever the batch, and then go to the model behind."""
    added = forward.only(_ADDED)
    return (
        added is not None
        and forward.takes.startswith("self, input_ids, positions,")
        and added in [getattr(statement, "value", None) for statement in forward.node.body[:1]]
        and forward.confines("positions", _ADDED, *_HANDED_ON)
    )


def _only_tokens_are_refreshed(source: Source, give: Function | None) -> bool:
    """Whether models are given a view of the persistent positions, of which a step writes those of its tokens."""
    prepare = source.function(_RUNNER, "GPUModelRunner._prepare_inputs")
    return (
        give is not None
        and give.only(_GIVEN) is not None
        and len(give.find("self.positions")) == 1
        and prepare is not None
        and len(prepare.find("self.positions.copy_to_gpu(...)")) == len(prepare.find(_REFRESHED)) == 1
    )


def _leaves_positions_as_they_were(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wraps `forward(input_ids, positions, …)`, which adds the offset to positions where they are.

    It is taken off again there, in the order of the device's stream. Positions at another address would not do:
    piecewise graphs have recorded this one. So that the rows of every later batch are right, all rows are put back,
    also those of a batch without padding, of a dummy run and of a capture.
    """
    from torch.compiler import is_compiling  # the target is imported by now, and torch with it

    shifted, corrects = activity.counter(PADDED_POSITIONS_SHIFTED), activity.corrects

    @functools.wraps(stock)
    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        corrected = corrects
        try:
            if is_compiling():  # the whole model is traced, for an engine without graphs and padding
                corrected = False
            elif _is_padded(positions):
                shifted.count += 1
        except Exception as error:
            activity.failed(error)
        if not corrected:
            return stock(self, input_ids, positions, *args, **kwargs)
        try:
            return stock(self, input_ids, positions, *args, **kwargs)
        finally:
            try:
                positions.sub_(self.padding_idx + 1)
            except Exception as error:
                activity.failed(error)

    return forward


def _is_padded(positions: Any) -> bool:
    """Whether this step has more *positions* than tokens; dummy runs and captures have no metadata, and no tokens."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    of_layers = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not of_layers or not isinstance(of_layers, dict):
        return False
    metadata = next(iter(of_layers.values()))  # all layers have the same batch
    return bool(positions.shape[-1] > metadata.num_actual_tokens)


def patches(shape: str) -> tuple[Patch, ...]:
    return tuple(Patch(_MODELS_MODULE, target, _leaves_positions_as_they_were) for target in _TARGETS)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    models = "XLM-RoBERTa, BGE-M3 and rerankers among them; not with --model-impl transformers"
    return (needs.RUNNER_V1, Need("a RoBERTa model", _serves_roberta, models, ("--model-impl=",)), needs.GRAPHS)


def _serves_roberta(deployment: Deployment, _: str) -> Fact:
    """The model is one of vLLM's own RoBERTa models."""
    from vllm_graphfix.deployment import Fact

    served_by, unsure = deployment.value("--model-impl")
    if served_by == "transformers" and unsure is None:
        return Fact(False, "--model-impl transformers: its addition is in compiled code, which this fix leaves alone")
    found, missing = deployment.configured("architectures")
    missing = missing or unsure
    if missing is not None:
        return Fact(None, missing)
    if any(name in _ARCHITECTURES for names in found if isinstance(names, list) for name in names):
        return Fact(True, f"{deployment.model} is a RoBERTa model")
    return Fact(False, f"{deployment.model} is no RoBERTa model")


FIX = Fix(
    number=19,
    name="roberta-positions",
    runner="V1",
    reads=(_MODELS, _RUNNER),
    modules=(_MODELS_MODULE,),
    diagnose=diagnose,
    patches=patches,
    events=(PADDED_POSITIONS_SHIFTED,),
    needs=needs,
    ground="upstream",
    evidence=(
        *(f"{_MODELS}::{name.partition('.')[0]}.__init__" for name in _TARGETS),
        f"{_RUNNER}::GPUModelRunner.execute_model",
    ),
)

ABOUT = About(
    pr=37884,
    references=("issue 37648", "issue 37868", "PR 37873"),
    summary="RoBERTa models leave the positions that they are given as they were",
    releases="0.14.1 - 0.18.1",
    seen="an embedding or reranker server dies after some thousand requests",
    first_test="`--enforce-eager`: does it live on?",
    symptom="With CUDA graphs, a server of a RoBERTa model dies after some thousand requests, of an index that is out "
    "of bounds in the embedding of positions.",
    cause="The model adds an offset, padding_idx + 1, to the positions in place, and these are the model runner's "
    "persistent buffer. A step refreshes the rows of its own tokens. The rows with which a batch is padded to the size "
    "of a graph keep what they had, and grow by the offset at every step until they exceed max_position_embeddings. "
    "The rows of requests are right up to then.",
    remedy="When the model has run, or has failed, the offset is taken off again in place. Piecewise graphs read the "
    "positions where they have recorded them. The Transformers backend has the same addition in code that "
    "torch.compile compiles; it is left as it is.",
    detect="The log ends in 'index out of bounds: 0 <= tmp < N', N being max_position_embeddings (8194 for BGE-M3, 514 "
    "for RoBERTa), sooner the smaller N is; short requests, one at a time, bring it about most reliably.",
    workaround="--enforce-eager, or a restart in time.",
    removable="with vLLM 0.19.0",
    in_caches="nothing: these models have no KV cache",
    how_sure="that follows from the code: their layers are encoders, without keys and values of earlier steps",
)
