"""`compare --exact` on mixed batches, in vLLM's own wrappers and runners' functions; graphs are the CPU double's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from in_pieces import KINDS, MIXED, InPieces, run_in_pieces
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.forward_context import BatchDescriptor, override_forward_context
from wrapped_model import CAPTURED, Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double
from vllm_graphfix.verify.engine.exact import ExactReplays


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double(), breakable_graphs():
        yield
    process.start(Rate(), Action.REPORT)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_of_a_mixed_batch_is_compared_as_a_whole(kind: str, wrong: bool) -> None:
    served = Served(Rate(every=10**9), pieces=True)
    model = run_in_pieces(served, kind)
    if wrong:
        model.weight = torch.full((1,), 2.0)  # a new tensor, of which the graph does not know
    replays = ExactReplays()
    replays.begin()
    for requests in (3, 1, 2):
        served.step(requests, mode=MIXED)
    rank = replays.end()
    assert (rank.compared, rank.skipped, rank.unseen, rank.reason) == (3, 0, 0, None)
    assert (rank.wrong > 0) == wrong, rank.findings
    assert sum(rank.graphs.values()) == 3


def test_a_breakable_graph_of_another_caller_is_counted() -> None:
    served = Served(Rate(every=10**9), pieces=True)
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
