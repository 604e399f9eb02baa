"""Model runner V2: full graphs of the target model (from 0.18.0 on).

`ModelCudaGraphManager.run_fullgraph` replays them. It gets a descriptor alone: the graph has its inputs. The arguments
of the model for a step without a graph are variables of its caller, `GPUModelRunner.execute_model`, under the same
names in every release. They are read there, and only when a step is checked. Drafters' graphs have managers of other
classes: `drafter_v2`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Patch, StockFunction, Verdict
from vllm_graphfix.fixes._capture_source import forward_functions
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.failures import UnsafeError
from vllm_graphfix.shadow.forward import Pass, unsafe
from vllm_graphfix.shadow.lockstep import (
    AGREEMENT,
    AGREEMENT_MODULE,
    DataParallelCoordinator,
    is_in_lockstep,
    shape_of,
)
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.verdict import TARGET

if TYPE_CHECKING:
    from types import FrameType

    from vllm_graphfix.source.files import Source

GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
GRAPHS_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
DISPATCH = "vllm/v1/worker/gpu/dp_utils.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"
RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
CONTEXT = "vllm/forward_context.py"

_SHAPE = "run-fullgraph"
_UNMEASURED = "run-fullgraph-unmeasured"
"""A shape of code that may not ask for the function of each batch size before it warms up."""
_ALONE = "-alone"
"""The end of the shape of code in which data-parallel ranks may agree on a batch otherwise than known."""
_VARIABLES = ("attn_metadata", "slot_mappings_by_layer", "input_batch", "model_inputs", "dummy_run")
_MAX_FRAMES = 4
"""Frames between a replay and `execute_model`: a decorator or two."""
MANAGER = "ModelCudaGraphManager"


def diagnose(source: Source) -> Diagnosis:
    """Return `AFFECTED` if there are graphs that can be checked."""
    run = source.function(GRAPHS, "ModelCudaGraphManager.run_fullgraph")
    execute = source.function(RUNNER, "GPUModelRunner.execute_model")
    context = source.function(CONTEXT, "set_forward_context")
    if run is None:
        return Diagnosis(
            Verdict.ABSENT, "there is no ModelCudaGraphManager with which model runner V2 replays full graphs"
        )
    if (
        run.signature == "self, desc"
        and run.find_unique("super().run_fullgraph(desc)")
        and execute
        and execute.find_unique("model_output = self.cudagraph_manager.run_fullgraph(batch_desc)")
        and execute.find("model_output = self.model(**model_inputs)")
        and all(execute.assignments(name, "...") for name in ("attn_metadata", "slot_mappings_by_layer", "input_batch"))
        and execute.assignments("model_inputs", "...")
        and {"self", "dummy_run"} <= set(execute.parameters)
        and context
        and {"attn_metadata", "vllm_config", "num_tokens", "cudagraph_runtime_mode", "batch_descriptor", "slot_mapping"}
        <= set(context.parameters)
    ):
        capture = source.function(GRAPHS, "CudaGraphManager.capture")
        asks = (
            forward_functions(capture) if capture and capture.signature.startswith("self, create_forward_fn, ") else []
        )
        measured = asks and capture and capture.mentions(create_forward_fn=len(asks))
        shape = _SHAPE if measured else _UNMEASURED
        return Diagnosis(
            Verdict.AFFECTED,
            "full graphs of model runner V2 replay in run_fullgraph",
            run.where,
            shape if _agrees_with_the_others(source) else f"{shape}{_ALONE}",
        )
    return Diagnosis(
        Verdict.UNRECOGNISED,
        "full graphs of model runner V2 replay in a way that is not recognised",
        run.where,
        defect_seen=True,
    )


def _agrees_with_the_others(source: Source) -> bool:
    """Recognise the code by which data-parallel ranks agree on a batch (from 0.20.0 on)."""
    agree = source.function(DISPATCH, AGREEMENT)
    dispatch = source.function(DISPATCH, "dispatch_cg_and_sync_dp")
    return bool(
        agree
        and agree.signature.startswith(
            "cudagraph_manager, desired_batch_desc, num_tokens, num_reqs, uniform_token_count, "
        )
        and dispatch
        and dispatch.mentions(**{AGREEMENT: 1})
    )


def patches(shape: str) -> tuple[Patch, ...]:
    checked = Patch(GRAPHS_MODULE, "ModelCudaGraphManager.run_fullgraph", _check_replays)
    measured = Patch(GRAPHS_MODULE, "CudaGraphManager.capture", _measure_warm_ups)
    agreed = Patch(AGREEMENT_MODULE, AGREEMENT, _count_common_steps)
    return (
        checked,
        *(() if shape.startswith(_UNMEASURED) else (measured,)),
        *(() if shape.endswith(_ALONE) else (agreed,)),
    )


def _measure_warm_ups(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `CudaGraphManager.capture(create_forward_fn, …)`, of the target model's and a drafter's managers.

    It calls *create_forward_fn* before each warm-up of a batch size, and again after it, for the capture or for the
    next size: the allocations in between are measured. The functions that it returns stay unwrapped, since fixes
    inspect them.
    """

    @functools.wraps(stock)
    def capture(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        shadow = process.SHADOW
        if shadow is None or not shadow.memory.measuring:
            return stock(self, create_forward_fn, *args, **kwargs)
        memory, tokens, begun = shadow.memory, None, None
        over = False

        def create(desc: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal tokens, begun
            if not over:
                memory.finish(id(self), tokens, begun)
            made = create_forward_fn(desc, *args, **kwargs)
            if not over:
                tokens = getattr(desc, "num_tokens", None)
                begun = memory.begin()
            return made

        result = stock(self, create, *args, **kwargs)
        over = True  # later calls ask for an attention state alone
        memory.finish(id(self), tokens, begun)
        return result

    return capture


def _check_replays(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `ModelCudaGraphManager.run_fullgraph(desc)`."""

    @functools.wraps(stock)
    def run_fullgraph(self: Any, desc: Any) -> Any:
        shadow = process.SHADOW
        if shadow is None:
            return stock(self, desc)
        if shadow.lockstep is not None:  # `_count_common_step` has counted this step
            return _maybe_check_together(shadow, shadow.lockstep, stock, self, desc)
        due = False
        try:
            schedule = shadow.schedule
            before = schedule.count
            schedule.count = (before | schedule.within) + 1
            if schedule.timed:
                schedule.tick()
            # A graph that is not in quarantine pays for a lookup in a set, not for reading the caller's variables.
            if schedule.count >= schedule.due or (shadow.quarantined and (id(self), desc) in shadow.quarantined):
                schedule.drafts = before & schedule.within
                due = True
        except Exception as error:  # raised here it would leave the other ranks in a collective of the model
            shadow.stop_on_this_rank(error)
        if due:
            return _maybe_check(shadow, stock, self, desc)
        return stock(self, desc)

    return run_fullgraph


def _count_common_steps(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `sync_cudagraph_and_dp_padding(cudagraph_manager, …)`, which data-parallel ranks call together.

    Calls for a drafter, whose managers are of other classes, do not count.
    """

    @functools.wraps(stock)
    def agree(cudagraph_manager: Any, *args: Any, **kwargs: Any) -> Any:
        agreed = stock(cudagraph_manager, *args, **kwargs)
        shadow = process.SHADOW
        others = shadow.lockstep if shadow is not None else None
        if shadow is not None and others is not None and type(cudagraph_manager).__name__ == MANAGER:
            try:
                _count_common_step(shadow, others, agreed)
            except Exception as error:
                with suppress(Exception):
                    shadow.stop(error)
        return agreed

    return agree


def _count_common_step(shadow: Shadow, others: DataParallelCoordinator, agreed: Any) -> None:
    schedule = shadow.schedule
    schedule.count += 1
    if schedule.timed:
        schedule.tick()
    others.common_shape = None
    if schedule.count < schedule.due and not shadow.quarantined:
        return
    shape = None
    try:
        desc = agreed[0]
        if desc.cg_mode.name == "FULL":
            shape = shape_of(desc)
    except Exception as error:
        shadow.stop(error)  # the other ranks agree all the same, and wait for this one
    if shadow.all_ranks_replay(shape):
        others.common_shape = shape


def _maybe_check_together(
    shadow: Shadow, others: DataParallelCoordinator, stock: StockFunction, manager: Any, desc: Any
) -> Any:
    def replay() -> Any:
        return stock(manager, desc)

    shape = others.common_shape
    if shape is None:
        return replay()
    others.common_shape = None
    key, caller = (id(manager), shape), sys._getframe(2)

    def describe() -> Step:
        variables = _variables_of_caller(caller)
        if variables is None or shape_of(desc) != shape:
            raise UnsafeError("a step that its ranks have agreed on is replayed by somebody else")
        return _step(manager, desc, variables)

    return shadow.run(key, describe, replay)


def _maybe_check(shadow: Shadow, stock: StockFunction, manager: Any, desc: Any) -> Any:
    def replay() -> Any:
        return stock(manager, desc)

    def read() -> Mapping[str, Any] | None:
        if (reason := unsafe(manager.vllm_config)) is not None:
            process.refuse(reason)
            return None
        caller = _variables_of_caller(stock_caller(_maybe_check))
        if caller is None or caller["dummy_run"] or not caller["attn_metadata"]:
            return None
        return caller

    caller = None
    try:
        shadow.plan_next()
        caller = shadow.read(TARGET, read)
    except Exception as error:
        shadow.stop_on_this_rank(error)
    if caller is None:
        return replay()
    return shadow.run((id(manager), desc), lambda: _step(manager, desc, caller), replay)


def stock_caller(function: Callable[..., Any]) -> FrameType | None:
    """Return the frame of vLLM's function that called the wrapper that called *function*, which is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame and frame.f_back and frame.f_back.f_back


def _variables_of_caller(frame: FrameType | None) -> Mapping[str, Any] | None:
    """Return the variables of the `execute_model` that is replaying; None if another function is.

    Raises UnsafeError where they have other names.
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "execute_model" and frame.f_globals.get("__name__") == RUNNER_MODULE:
            variables = frame.f_locals
            if missing := [name for name in ("self", *_VARIABLES) if name not in variables]:
                raise UnsafeError(f"execute_model has no {', '.join(missing)}")
            # A copy: from Python 3.13 on `f_locals` follows what the frame does with its variables later.
            return {name: variables[name] for name in ("self", *_VARIABLES)}
        frame = frame.f_back
    return None


def _step(manager: Any, desc: Any, caller: Mapping[str, Any]) -> Step:
    batch = caller["input_batch"]
    forward = Pass(
        *(manager.vllm_config, caller["attn_metadata"], caller["slot_mappings_by_layer"], caller["model_inputs"]),
        dummy=bool(caller["dummy_run"]),  # only among data-parallel ranks
    )
    return forward.step(TARGET, desc, _without_graphs(manager, desc, caller), lambda: int(batch.num_tokens))


def _without_graphs(manager: Any, desc: Any, caller: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that does what `execute_model` does for a step without a graph."""
    import torch

    module = sys.modules["vllm.forward_context"]
    supported = inspect.signature(module.set_forward_context).parameters
    batch, parallel = caller["input_batch"], manager.vllm_config.parallel_config
    arguments = {
        "num_tokens": desc.num_tokens,
        "num_tokens_across_dp": (
            # All ranks replay graphs of one size. Without this vLLM would have them agree once more.
            torch.full((parallel.data_parallel_size,), desc.num_tokens, dtype=torch.int32, device="cpu")
            if is_in_lockstep(manager.vllm_config)
            else None
        ),
        "cudagraph_runtime_mode": type(desc.cg_mode)["NONE"],
        "batch_descriptor": module.BatchDescriptor(num_tokens=desc.num_tokens),
        "slot_mapping": caller["slot_mappings_by_layer"],
        "is_padding": getattr(batch, "is_padding", None),
    }
    context = {name: value for name, value in arguments.items() if name in supported}

    def run() -> Any:
        with module.set_forward_context(caller["attn_metadata"], manager.vllm_config, **context):
            return caller["self"].model(**caller["model_inputs"])

    return run
