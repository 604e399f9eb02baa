"""Calls of a model that vLLM runs by piecewise or breakable graphs, where no wrapper of full graphs sees them.

On model runner V1 these are the steps of engines without full graphs, as of models that pool; on V2, from 0.23.0 on,
each of the target model's and of a drafter's. They are wrapped only if such graphs are to be checked.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Patch, StockFunction, Verdict
from vllm_graphfix.shadow import process, runner_v1, runner_v2
from vllm_graphfix.shadow.runner_v1 import check_pieces, counts_calls, is_breakable
from vllm_graphfix.shadow.verdict import TARGET

if TYPE_CHECKING:
    from types import FrameType

    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

V1_MODULE = "vllm.v1.worker.gpu_model_runner"
_FORWARD, _RUN = "GPUModelRunner._model_forward", "CudaGraphManager.run_pw_graph"
_DRAFT = "draft model"
_MAX_FRAMES = 8
"""Frames between a call of the model and `execute_model` or `propose`."""


def diagnose_v1(source: Source) -> Diagnosis:
    """Return `AFFECTED` if steps go through a function of model runner V1's own."""
    forward = source.function(runner_v1.RUNNER, _FORWARD)
    execute = source.function(runner_v1.RUNNER, "GPUModelRunner.execute_model")
    known = (
        forward
        and execute
        and forward.find("return self.model(...)")
        and execute.find_unique("model_output = self._model_forward(...)")
    )
    return _diagnosis(f"model runner V1 has no {_FORWARD}", forward, known, runner_v1.diagnose(source))


def diagnose_v2(source: Source) -> Diagnosis:
    """Return `AFFECTED` if pieces are run by a function of model runner V2's own."""
    run = source.function(runner_v2.GRAPHS, _RUN)
    execute = source.function(runner_v2.RUNNER, "GPUModelRunner.execute_model")
    known = (
        run
        and execute
        and run.signature == "self, model, model_inputs"
        and run.find_unique("return model(**model_inputs)")
        and run.find_unique("return self.breakable_cg_runner(**model_inputs)")
        and run.find_unique("not self.use_breakable_cg")
        and execute.find_unique("model_output = self.cudagraph_manager.run_pw_graph(self.model, model_inputs)")
    )
    return _diagnosis(f"model runner V2 has no {_RUN}", run, known, runner_v2.diagnose(source))


def _diagnosis(absent: str, function: Function | None, known: object, of_full: Diagnosis) -> Diagnosis:
    """Return the diagnosis of *function*; *of_full* is that of full graphs, with the same surroundings."""
    if function is None:
        return Diagnosis(Verdict.ABSENT, absent)
    if known and of_full.verdict is Verdict.AFFECTED:
        return Diagnosis(Verdict.AFFECTED, "steps in pieces are run by one function", function.where, "one-function")
    reason = "steps in pieces are run in a way that is not recognised"
    return Diagnosis(Verdict.UNRECOGNISED, reason, function.where, defect_seen=True)


def patches_v1(shape: str) -> tuple[Patch, ...]:
    return (Patch(V1_MODULE, _FORWARD, _check_steps),)


def patches_v2(shape: str) -> tuple[Patch, ...]:
    return (Patch(runner_v2.GRAPHS_MODULE, _RUN, _check_calls),)


def _check_steps(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `GPUModelRunner._model_forward`, which dummy batches do not go through."""

    @functools.wraps(stock)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shadow = process.SHADOW
        if shadow is None or counts_calls(self.model) or not shadow.is_due_in_pieces():
            return stock(self, *args, **kwargs)
        run = functools.partial(stock, self)
        return check_pieces(shadow, self, run, args, kwargs, breakable=is_breakable(self.model))

    return model_forward


def _check_calls(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `CudaGraphManager.run_pw_graph(model, model_inputs)`, of the target model's and a drafter's managers."""

    @functools.wraps(stock)
    def run_pw_graph(self: Any, model: Any, model_inputs: Any) -> Any:
        shadow = process.SHADOW
        target = type(self).__name__ == runner_v2.MANAGER
        if shadow is None or not shadow.is_due_in_pieces(target=target):
            return stock(self, model, model_inputs)
        caller = sys._getframe(1)
        return check_pieces(
            shadow,
            self,
            functools.partial(stock, self, model),  # the model is no input that is copied
            (model_inputs,),
            {},
            breakable=self.use_breakable_cg,
            model=TARGET if target else _DRAFT,
            is_step=lambda: _is_step(caller),
        )

    return run_pw_graph


def _is_step(frame: FrameType | None) -> bool:
    """Tell a step of requests from a dummy batch and from a capture, by the function that was called from *frame*."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if "dummy_run" in frame.f_code.co_varnames:
            return not frame.f_locals["dummy_run"]
        frame = frame.f_back
    return False
