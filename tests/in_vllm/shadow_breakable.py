"""The shadow check on vLLM's own `BreakableCUDAGraphWrapper` of model runner V1; graphs are the CPU double's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode
from wrapped_model import Served

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double(), breakable_graphs():
        yield
    process.start(Rate(), Action.REPORT)


def _served(*args: Any, **kwargs: Any) -> Served:
    return Served(*args, wrapped=BreakableCUDAGraphWrapper, **kwargs)


def test_a_right_graph_serves_what_it_serves_without_the_check() -> None:
    unwatched, served = _served(Rate()), _served()
    assert type(unwatched.run) is BreakableCUDAGraphWrapper
    assert isinstance(served.run, BreakableCUDAGraphWrapper)
    for requests in (3, 4, 1, 3, 2):
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.checks, results.mismatches, served.shadow.stopped) == (5, 0, None)


def test_a_wrong_graph_is_a_mismatch_and_goes_into_quarantine() -> None:
    right, served = _served(Rate()), _served(action=Action.QUARANTINE, stale=True)
    for number in range(4):
        for name, layer in right.model.layers.items():  # what a wrong step has left is not what is asked here
            served.model.layers[name].kv_cache[0].copy_(layer.kv_cache[0])
        alike = torch.equal(served.step(), right.step())
        assert alike == (number >= 2), number
    results = served.shadow.results
    assert (results.mismatches, len(served.shadow.quarantined), served.shadow.stopped) == (2, 1, None)


def test_what_is_no_full_graph_is_not_checked() -> None:
    served = _served()
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        served.step(mode=mode)
    assert served.shadow.results.checks == 0
    served.step()
    assert served.shadow.results.checks == 1


def test_a_wrapper_without_full_graphs_is_stock_after_the_captures() -> None:
    """A drafter's, which not every data-parallel rank calls as often, and of a pipeline the last stage alone; and V2's.

    It has the model and the buffers of another one, as a drafter may.
    """
    served = _served()
    pieces: Any = BreakableCUDAGraphWrapper(served.model, served.config)
    target, served.run = served.run, pieces
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        served.forward(mode)  # a warm-up, and the capture
    counted = served.shadow.schedule.count
    served.step(mode=CUDAGraphMode.PIECEWISE)
    served.run = target
    served.step()
    assert (served.shadow.results.checks, served.shadow.schedule.count) == (1, counted + 1)
    served.run = pieces
    served.step(mode=CUDAGraphMode.PIECEWISE)
    assert type(pieces) is BreakableCUDAGraphWrapper
    assert type(target) is not BreakableCUDAGraphWrapper
    assert (served.shadow.results.checks, served.shadow.schedule.count) == (1, counted + 1)
