"""`compare --exact` on vLLM's own `BreakableCUDAGraphWrapper`, of mixed batches; graphs are the CPU double's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper, eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, override_forward_context
from wrapped_model import CAPTURED, WIDTH, ModelStandIn, Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double
from vllm_graphfix.verify.engine.exact import ExactReplays


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double(), breakable_graphs():
        yield
    process.start(Rate(), Action.REPORT)


def _broken_at_layers(model: ModelStandIn, config: Any) -> Any:
    """Wrap *model* in breakable graphs that end before its first layer and begin again behind it."""
    layer = model.layers["layer.0"]
    written = torch.zeros(CAPTURED, WIDTH)
    run = eager_break_during_capture(lambda hidden: written.copy_(layer(hidden)))

    class Broken:
        def __call__(self, hidden: torch.Tensor) -> Any:
            run(hidden * 1.0)
            return model.layers["layer.1"](written)

    return BreakableCUDAGraphWrapper(Broken(), config)


@pytest.mark.parametrize("stale", [False, True])
def test_each_replay_of_a_breakable_graph_is_compared(stale: bool) -> None:
    served = Served(Rate(every=10**9), wrapped=_broken_at_layers)
    served.descriptor = BatchDescriptor(CAPTURED, num_reqs=2)
    served.forward(CUDAGraphMode.PIECEWISE)  # the capture
    capture, replays = served.run.entries[served.descriptor].capture, ExactReplays()
    if stale:
        served.rows = served.rows.clone()  # another buffer, of which the graph does not know
    replays.begin()
    for requests in (3, 1, 2):
        served.step(requests, mode=CUDAGraphMode.PIECEWISE)
    with override_forward_context(served.context):
        capture.replay()  # by another caller than the wrapper
    rank = replays.end()
    assert (capture.num_graphs, capture.num_eager_breaks) == (2, 1)
    assert (rank.compared, rank.skipped, rank.unseen, rank.reason) == (3, 0, 2, None)
    assert (rank.wrong > 0) == stale, rank.findings
    assert BreakableCUDAGraphWrapper._replay.__qualname__ == "BreakableCUDAGraphWrapper._replay"
