"""Graphs of an encoder of images, of both model runners (from 0.24.0 on).

`EncoderCudaGraphManager._run_budget_graph` copies a batch into the buffers of a graph and replays it. An encoder keeps
nothing: a check calls the function that was captured on the same buffers. So it sees a graph that computes with other
weights, adapters or memory than a call does, and not what the padding of the buffers does, which both runs share. What
FlashAttention leaves in padded rows is not shared: there the call has zeros, as a right graph does.

Such graphs are checked only if all kinds are to be, and only where each rank of the group encodes the same images.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Activity, Diagnosis, Patch, StockFunction, Verdict
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.lockstep import is_in_lockstep
from vllm_graphfix.shadow.runs import Step
from vllm_graphfix.shadow.verdict import Graph

if TYPE_CHECKING:
    from vllm_graphfix.shadow.check import Shadow
    from vllm_graphfix.source.files import Source

GRAPHS = "vllm/v1/worker/encoder_cudagraph.py"
_MODULE, _CLASS = "vllm.v1.worker.encoder_cudagraph", "EncoderCudaGraphManager"
_RUN = f"{_CLASS}._run_budget_graph"
_MODEL = "encoder"
_KERNELS, _KERNEL = "vllm.v1.attention.backends.fa_utils", "flash_attn_varlen_func"


def diagnose(source: Source) -> Diagnosis:
    """Return `AFFECTED` if there are graphs whose inputs are their buffers alone."""
    run, capture = (source.function(GRAPHS, name) for name in (_RUN, f"{_CLASS}._capture_budget_graph"))
    if run is None or not {"path"} <= set(run.parameters):
        return Diagnosis(Verdict.ABSENT, "there are no graphs of encoders, or they have inputs beside their buffers")
    known = (
        run.parameters[:4] == ("self", "mm_kwargs", "token_budget", "path")
        and set(run.parameters[4:]) <= {"axis_keys"}
        and run.find_unique("graph_meta.graph.replay()")
        and run.find_unique("return graph_meta.output_buffer")
        and capture
        and len(capture.find("output = self.model.encoder_cudagraph_forward({**values}, path=path)")) == 2
        and capture.find_unique("output_buffer.copy_(output)")
        and source.function(GRAPHS, f"{_CLASS}._get_per_item_out_tokens")
    )
    if known:
        return Diagnosis(Verdict.AFFECTED, "graphs of encoders replay in one function", run.where, "one-function")
    reason = "graphs of encoders replay in a way that is not recognised"
    return Diagnosis(Verdict.UNRECOGNISED, reason, run.where, defect_seen=True)


def patches(shape: str) -> tuple[Patch, ...]:
    return (Patch(_MODULE, _RUN, _check_replays),)


def _check_replays(stock: StockFunction, _: Activity) -> StockFunction:
    """Wrap `_run_budget_graph(mm_kwargs, token_budget, path, axis_keys)`."""

    @functools.wraps(stock)
    def run_budget_graph(
        self: Any, mm_kwargs: Any, token_budget: Any, path: Any = "default", axis_keys: Any = ()
    ) -> Any:
        shadow = process.SHADOW
        further = {"axis_keys": axis_keys} if axis_keys else {}  # from 0.29.0 on
        run = functools.partial(stock, self, mm_kwargs, token_budget, path, **further)
        held, graph = None, None
        try:
            if shadow is not None and _is_due(shadow, self) and path in self.budget_graphs:
                graph = self.budget_graphs[path].get((token_budget, axis_keys) if axis_keys else token_budget)
                held = graph and graph.graph
        except Exception as error:
            if shadow is not None:
                shadow.stop_on_this_rank(error)
        if shadow is None or graph is None or held is None:
            return run()
        # By then its buffers have the batch. The graph itself cannot be wrapped for good: others replay and count it.
        graph.graph = _Checked(lambda: _check(shadow, self, graph, held, mm_kwargs, path))
        try:
            return run()
        finally:
            graph.graph = held

    return run_budget_graph


class _Checked:
    """Stands for a graph in one replay."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


def _is_due(shadow: Shadow, manager: Any) -> bool:
    """Count a replay, which every rank of the group makes; tell whether it is to be checked or may be in quarantine."""
    if not shadow.checks_encoder:
        return False
    if (reason := _why_not(manager)) is not None:
        shadow.leave_out_encoder(reason)
        return False
    shadow.schedule.count += 1
    return shadow.schedule.count >= shadow.schedule.due or bool(shadow.quarantined)


def _why_not(manager: Any) -> str | None:
    """Return why a rank must not check graphs of *manager* by itself, or cannot; None if it can."""
    config = manager.vllm_config
    if getattr(manager, "use_dp", False):
        return "each rank encodes images of its own"
    if is_in_lockstep(config) or getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1:
        return "not all ranks that check the same steps encode images"
    if len(manager.budget_graphs) > 1:
        return "an encoder of several paths was not examined"
    return None


def _check(shadow: Shadow, manager: Any, graph: Any, held: Any, mm_kwargs: Any, path: Any) -> None:
    def replay() -> Any:
        held.replay()
        return graph.output_buffer

    def run_without_graph() -> Any:
        with _attention_on_zeros():
            return manager.model.encoder_cudagraph_forward({**graph.input_buffers}, path=path)

    def describe() -> Step:
        rows = sum(manager._get_per_item_out_tokens(mm_kwargs))
        name = f"{_MODEL}, a graph for {graph.token_budget} tokens"
        return Step(
            Graph(name, len(graph.output_buffer), (), _has_adapters(manager.vllm_config)),
            run_without_graph,
            lambda: rows,
            {key: value for key, value in graph.input_buffers.items() if hasattr(value, "clone")},
            (),
            (),
            list,
        )

    key = (id(manager), _MODEL), (path, graph.token_budget, getattr(graph, "axis_keys", ()))
    # Not measured: vLLM leaves room for the largest batch of images, which it encodes without a graph.
    shadow.memory.needs.setdefault((key[0], None), 0)
    if shadow.read(_MODEL, lambda: True) is None:
        replay()
        return
    output = shadow.run(key, describe, replay)
    if output is not graph.output_buffer:  # in quarantine
        graph.output_buffer.copy_(output)


@contextmanager
def _attention_on_zeros() -> Iterator[None]:
    """Have FlashAttention write to zeros, as it does in a right graph: in a capture from 0.31.0 on (PR 56922).

    Outside of one vLLM gives it memory as it was. It does not write the rows that pad a graph, and multiplies NaN
    there by 0 for the rows of images. The operator looks its kernel up at each call.
    """
    from vllm.platforms import current_platform

    kernels = sys.modules.get(_KERNELS)
    kernel = getattr(kernels, _KERNEL, None)
    if kernel is None or not current_platform.is_cuda():  # that of another platform takes no output
        yield
        return

    def on_zeros(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        kwargs["out"] = q.new_zeros((*q.shape[:-1], v.shape[-1])) if out is None else out.zero_()
        return kernel(q, k, v, *args, **kwargs)

    setattr(kernels, _KERNEL, on_zeros)
    try:
        yield
    finally:
        setattr(kernels, _KERNEL, kernel)


def _has_adapters(config: Any) -> bool:
    return bool(getattr(getattr(config, "lora_config", None), "enable_tower_connector_lora", False))
