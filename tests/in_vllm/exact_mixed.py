"""`compare --exact` on mixed batches, in vLLM's own wrappers and runners' functions; graphs are the CPU double's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper, eager_break_during_capture
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, override_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from wrapped_model import CAPTURED, WIDTH, ModelStandIn, Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double
from vllm_graphfix.verify.engine.exact import ExactReplays

MIXED = CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double(), breakable_graphs():
        yield
    process.start(Rate(), Action.REPORT)


class InPieces:
    """The stand-in's first layer outside of graphs, as attention is, and its second one in a piece."""

    def __init__(self, model: ModelStandIn, config: Any) -> None:
        self.layer, memory = model.layers["layer.0"], torch.zeros(CAPTURED, WIDTH)
        self.attention = eager_break_during_capture(lambda hidden: memory.copy_(self.layer(hidden)))
        self.piece = lambda: model.layers["layer.1"](memory)
        if config is not None:
            self.piece = CUDAGraphWrapper(self.piece, config, MIXED)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.attention(input_ids * 1.0)
        piece: Any = self.piece
        output: torch.Tensor = piece()
        return output


def _call(kind: str, served: Served) -> Any:
    """Return the function of a model runner through which a step with hidden states goes."""
    model: Any = InPieces(served.model, None if "breakable" in kind else served.config)
    breakable = BreakableCUDAGraphWrapper(model, served.config) if "breakable" in kind else None
    if kind.startswith("V2"):
        manager: Any = object.__new__(ModelCudaGraphManager)
        manager.vllm_config, manager.use_breakable_cg = served.config, breakable is not None
        manager.breakable_cg_runner = breakable
        return lambda hidden: CudaGraphManager.run_pw_graph(manager, model, {"input_ids": hidden})
    runner = SimpleNamespace(vllm_config=served.config, model=breakable or model, get_model=lambda: model)
    return lambda hidden: GPUModelRunner._model_forward(runner, input_ids=hidden)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("kind", ["V1", "V1 breakable", "V2", "V2 breakable"])
def test_each_step_of_a_mixed_batch_is_compared_as_a_whole(kind: str, stale: bool) -> None:
    served = Served(Rate(every=10**9))
    served.descriptor = BatchDescriptor(CAPTURED, num_reqs=2)
    served.run = _call(kind, served)
    served.forward(MIXED)  # the capture
    if stale:
        served.rows = served.rows.clone()  # another buffer, of which the graph does not know
    replays = ExactReplays()
    replays.begin()
    for requests in (3, 1, 2):
        served.step(requests, mode=MIXED)
    rank = replays.end()
    assert (rank.compared, rank.skipped, rank.unseen, rank.reason) == (3, 0, 0, None)
    assert (rank.wrong > 0) == stale, rank.findings
    assert sum(rank.graphs.values()) == 3
    assert GPUModelRunner._model_forward.__qualname__ == "GPUModelRunner._model_forward"


def test_a_breakable_graph_of_another_caller_is_counted() -> None:
    served = Served(Rate(every=10**9))
    graph = BreakableCUDAGraphWrapper(InPieces(served.model, None), served.config)
    served.descriptor, served.run = BatchDescriptor(CAPTURED, num_reqs=2), graph
    served.forward(MIXED)
    capture, replays = graph.entries[served.descriptor].capture, ExactReplays()
    assert (capture.num_graphs, capture.num_eager_breaks) == (2, 1)
    replays.begin()
    with override_forward_context(served.context):
        capture.replay()
    rank = replays.end()
    assert (rank.compared, rank.unseen) == (0, 2)
