"""`image-embeddings`: model runner V2 compiles models of images with the embeddings that images need (PR 35917)."""

from __future__ import annotations

import ast
import functools
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Activity, Diagnosis, Event, Patch, Slice, StockFunction, Verdict
from vllm_graphfix.source.functions import walk
from vllm_graphfix.source.part import module_name

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_FOLDER = "vllm/v1/worker/gpu"
_RUNNER, _BATCH, _ENCODER = f"{_FOLDER}/model_runner.py", f"{_FOLDER}/input_batch.py", f"{_FOLDER}/mm/encoder_runner.py"
_STATES = f"{_FOLDER}/model_states"
_DEFAULT_STATE = f"{_STATES}/default.py"
_STATES_OF = {
    "default": "DefaultModelState",
    "mamba_hybrid": "MambaHybridModelState",
    "encoder_only": "EncoderOnlyModelState",
}
"""States of models that take embeddings, by file."""
_DUMMY = "input_batch = InputBatch.make_dummy(...)"
_EMBEDDED = "input_batch.inputs_embeds = inputs_embeds[:input_batch.num_tokens_after_padding]"
_DUMMY_EMBEDDED = """
if self.supports_mm_inputs:
    input_batch.inputs_embeds = self.encoder_runner.inputs_embeds[:num_tokens_after_padding]
"""
_REAL_OR_DUMMY = "if not dummy_run: ...\nelse: ..."
_RUNS_DUMMY = "self.execute_model(dummy_scheduler_output, *..., dummy_run=True)"
_IF_IMAGES = tuple(
    f"if self.{takes} and self.is_first_pp_rank: ..." for takes in ("supports_mm_inputs", "uses_inputs_embeds")
)
"""Every batch passes here, a dummy one too. `uses_inputs_embeds` is true for models of images, from 0.29.0 on."""
_OF_ANY_BATCH = "inputs_embeds = self.model_state.get_mm_embeddings(...)"
_OF_DUMMY_BATCH = """
if dummy_run:
    inputs_embeds = self.model_state.dummy_inputs_embeds(input_batch.num_tokens_after_padding)
else: ...
"""
_BUFFER = "return self.encoder_runner.inputs_embeds[:num_tokens]"

COMPILED_WITHOUT = Event(
    "compiled-without-embeddings",
    "The first dummy batch of a model that takes images had no embeddings: on stock the model is compiled without "
    "them, and computes each image as its placeholder tokens.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the embeddings of a dummy batch, in which model runner V2 has a model compiled."""
    if not source.contains_word(_RUNNER, "supports_mm_inputs"):
        return Diagnosis.absent("model runner V2 serves no images")
    execute = source.function(_RUNNER, "GPUModelRunner.execute_model")
    if execute is not None:
        dummy = _dummy_branch(execute)
        if dummy and _compiles_in_dummy_batch(source):
            if _uses(*execute.node.body) == 4 and not _uses(*dummy):  # assigned, cut, set and passed on
                return Diagnosis.affected(
                    "a dummy batch has no embeddings, and the first one is what is compiled",
                    execute.at(execute.find(_DUMMY)[0]),
                    "no-embeddings",
                )
            if _uses(*execute.node.body) == 6 and execute.find_unique(_DUMMY_EMBEDDED) in dummy:
                return Diagnosis.fixed("a dummy batch has embeddings, too", execute.at(execute.find(_DUMMY)[0]))
        if _embeds_any_batch(source, execute):
            return Diagnosis.fixed("a dummy batch has embeddings, too", execute.where)
    return Diagnosis.unrecognised("a dummy batch gets its embeddings in a way", execute or _RUNNER)


def _dummy_branch(execute: Function) -> list[ast.stmt]:
    """Return the statements that make a dummy batch, where the model gets its embeddings; none if that is unclear."""
    embedded, dummy = execute.find_unique(_EMBEDDED), execute.find_unique(_DUMMY)
    if not execute.call_has_keyword("self.model(...)", "inputs_embeds=input_batch.inputs_embeds"):
        return []
    branches = (branch for branch in execute.find(_REAL_OR_DUMMY) if isinstance(branch, ast.If))
    return next((each.orelse for each in branches if dummy in each.orelse and embedded in walk(each)), [])


def _compiles_in_dummy_batch(source: Source) -> bool:
    """Tell if a run of a dummy batch, such as the profiling run, is one without embeddings of its own."""
    make_dummy = source.function(_BATCH, "InputBatch.make_dummy")
    dummy_run = source.function(_RUNNER, "GPUModelRunner._dummy_run")
    return bool(
        make_dummy
        and dummy_run
        and make_dummy.call_has_keyword("cls(...)", "inputs_embeds=None")
        and dummy_run.find_unique(_RUNS_DUMMY)
    )


def _uses(*statements: ast.stmt) -> int:
    """Count the variables and attributes `inputs_embeds`."""
    nodes = (node for statement in statements for node in walk(statement))
    return sum("inputs_embeds" in (getattr(node, "id", None), getattr(node, "attr", None)) for node in nodes)


def _embeds_any_batch(source: Source, execute: Function) -> bool:
    """Tell if each batch of a model that takes images gets embeddings, a dummy one perhaps those of the buffer."""
    guards = [part for part in execute.find(*_IF_IMAGES) if isinstance(part, ast.If) and part in execute.node.body]
    if len(guards) != 1:
        return False
    (guard,) = guards
    buffer = source.function(_DEFAULT_STATE, "DefaultModelState.dummy_inputs_embeds")
    return execute.find_unique(_OF_ANY_BATCH) in guard.body or (
        execute.find_unique(_OF_DUMMY_BATCH) in guard.body
        and buffer is not None
        and buffer.find_unique(_BUFFER) is not None
    )


def _with_embeddings(stock: StockFunction, activity: Activity) -> StockFunction:
    """Wrap `_dummy_run`, the run of a dummy batch: to profile, when the model is compiled, to warm up, to idle.

    Meanwhile the runner has an `_EmbeddingModel` in place of its model: the batch is made out of a wrapper's reach.
    """
    counter, corrects = activity.counter(COMPILED_WITHOUT), activity.corrects
    compiled: WeakSet[Any] = WeakSet()

    def embed(model: Any, buffer: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of *model* with the first rows of *buffer*, (tokens, width), if *kwargs* have None."""
        try:
            if kwargs.get("inputs_embeds", buffer) is not None:
                return kwargs
            if model not in compiled:
                compiled.add(model)
                counter.count += any(getattr(part, "do_not_compile", True) is False for part in model.modules())
            if corrects:
                tokens = kwargs["input_ids"]
                return {
                    **kwargs,
                    "inputs_embeds": buffer[: len(tokens)],
                    "input_ids": None if _takes_either(model) else tokens,
                }
        except Exception as error:
            activity.failed(error)
        return kwargs

    @functools.wraps(stock)
    def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = None
        try:
            if self.supports_mm_inputs:
                buffer, model = self.encoder_runner.inputs_embeds, self.model
                self.model = _EmbeddingModel(model, functools.partial(embed, model, buffer))
        except Exception as error:
            activity.failed(error)
        try:
            return stock(self, *args, **kwargs)
        finally:
            if model is not None:
                self.model = model

    return _dummy_run


class _EmbeddingModel:
    """Calls *model* with the arguments that *embed* returns, and is it in all else."""

    def __init__(self, model: Any, embed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._model, self._embed = model, embed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **self._embed(kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _takes_either(model: Any) -> bool:
    """Tell if *model*, one of Transformers, raises an error where it gets both tokens and embeddings.

    Its compiled code then takes embeddings alone, and leaves the tokens of a real step out, as in V1.
    """
    base = sys.modules.get("vllm.model_executor.models.transformers.base")
    return base is not None and isinstance(model, base.Base)


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs

    return (
        needs.RUNNER_V2,
        needs.MULTIMODAL,
        needs.TORCH_COMPILE,
        needs.unseen("images, videos or audio"),
    )


FIX = fix(
    "image-embeddings",
    runner="V2",
    diagnose=diagnose,
    surroundings=(
        # Who sets the embeddings of a batch, and calls the model with them
        Slice(_RUNNER, "GPUModelRunner.execute_model", "inputs_embeds"),
        Slice(_RUNNER, "GPUModelRunner._dummy_run", "execute_model"),
        Slice(_BATCH, "InputBatch", "inputs_embeds"),
        # The buffer, and graphs that are captured of the compiled model
        Slice(_ENCODER, "EncoderRunner", "inputs_embeds", Verdict.AFFECTED),
        Slice(_RUNNER, "GPUModelRunner.capture_model", "inputs_embeds", Verdict.AFFECTED),
        Slice(f"{_FOLDER}/cudagraph_utils.py", "CudaGraphManager.capture_graph", "inputs_embeds", Verdict.AFFECTED),
        # Upstream's remedy: the states that make embeddings of a batch
        *(
            Slice(f"{_STATES}/{file}.py", f"{state}.{method}", "inputs_embeds get_mm_embeddings", Verdict.FIXED)
            for file, state in _STATES_OF.items()
            for method in ("get_mm_embeddings", "prepare_inputs_embeds", "dummy_inputs_embeds")
        ),
        Slice(_RUNNER, "GPUModelRunner", "uses_inputs_embeds", Verdict.FIXED),
    ),
    recognised=(_DUMMY, _EMBEDDED, _DUMMY_EMBEDDED, _RUNS_DUMMY, _OF_ANY_BATCH, _OF_DUMMY_BATCH, _BUFFER),
    corrections=(Patch(module_name(_RUNNER), "GPUModelRunner._dummy_run", _with_embeddings),),
    events=(COMPILED_WITHOUT,),
    needs=needs,
    changes_compiled_code=True,
)
