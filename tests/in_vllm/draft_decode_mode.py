"""draft-decode-mode on vLLM's own Eagle speculator, configured for every CUDA-graph mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.eagle import speculator as eagle

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_decode_mode as scenario
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels

MODES = tuple(CUDAGraphMode)
CAPTURED = 4
"""Requests of the one graph of draft decodes that fits the batch."""

one_manager = pytest.mark.skipif(hasattr(eagle.EagleSpeculator, "init_cudagraph_manager"), reason="two managers")
two_managers = pytest.mark.skipif(not hasattr(eagle.EagleSpeculator, "init_cudagraph_manager"), reason="one manager")
every_mode = pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs(), cpu_triton_kernels(eagle, gumbel):
        yield


def has_full_decodes(mode: CUDAGraphMode) -> bool:
    return bool(mode.decode_mode() == CUDAGraphMode.FULL)


def unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def test_every_mode_of_vllm_is_looked_at() -> None:
    assert {mode.name for mode in MODES} == {"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}


@every_mode
def test_the_draft_is_that_of_eager(mode: CUDAGraphMode) -> None:
    assert scenario._draft(mode) == scenario._draft(CUDAGraphMode.NONE)


@one_manager
@every_mode
def test_the_one_manager_runs_full_graphs_or_none(mode: CUDAGraphMode) -> None:
    manager = scenario._speculator(mode).cudagraph_manager
    if has_full_decodes(mode):
        assert manager.cudagraph_mode == CUDAGraphMode.FULL
        assert list(manager.graphs) == [CAPTURED]
        assert manager.get_cudagraph_runtime_mode(3) == (CUDAGraphMode.FULL, CAPTURED)
        assert manager.pool is not None
    else:
        assert manager.cudagraph_mode == CUDAGraphMode.NONE
        assert not manager.graphs
        assert manager.get_cudagraph_size(3) is None
        assert manager.get_cudagraph_runtime_mode(3) == (CUDAGraphMode.NONE, None)
        assert manager.pool is None


@two_managers
@every_mode
def test_draft_decodes_run_full_graphs_or_none(mode: CUDAGraphMode) -> None:
    manager = scenario._speculator(mode).decode_cudagraph_manager
    dispatched = manager.dispatch(3, 3, 1)
    if has_full_decodes(mode):
        assert manager.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        assert {(d.cg_mode.name, d.num_reqs, d.uniform_token_count) for d in manager.graphs} == {("FULL", CAPTURED, 1)}
        assert (dispatched.cg_mode, dispatched.num_reqs) == (CUDAGraphMode.FULL, CAPTURED)
    else:
        assert manager.cudagraph_mode == CUDAGraphMode.NONE
        assert not manager.needs_capture()
        assert not manager.graphs
        assert (dispatched.cg_mode, dispatched.num_tokens) == (CUDAGraphMode.NONE, 3)


@two_managers
@every_mode
def test_draft_prefill_keeps_the_configured_mode(mode: CUDAGraphMode) -> None:
    speculator = scenario._speculator(mode)
    prefill, decode = speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager
    assert prefill.cudagraph_mode == mode
    assert prefill.decode_query_len == scenario.DRAFT_TOKENS + 1
    assert bool(prefill.graphs) == mode.has_full_cudagraphs()
    assert type(decode) is type(prefill)
    assert decode.decode_query_len == 1


@two_managers
@every_mode
def test_both_managers_share_one_graph_pool(mode: CUDAGraphMode) -> None:
    speculator = scenario._speculator(mode)
    pool = speculator.prefill_cudagraph_manager.pool
    assert (pool is None) == (mode == CUDAGraphMode.NONE)
    assert speculator.decode_cudagraph_manager.pool is pool


@two_managers
@pytest.mark.parametrize("keyword", [False, True])
def test_init_cudagraph_manager_is_called_by_position_or_by_name(keyword: bool) -> None:
    speculator = scenario._speculator(CUDAGraphMode.PIECEWISE)
    mode = CUDAGraphMode.PIECEWISE
    done = (
        speculator.init_cudagraph_manager(cudagraph_mode=mode) if keyword else speculator.init_cudagraph_manager(mode)
    )
    assert done is None
    assert speculator.decode_cudagraph_manager.cudagraph_mode == CUDAGraphMode.NONE


@two_managers
@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL], ids=["eager", "replayed"])
def test_no_draft_prefill_sees_an_old_index_beyond_the_batch(mode: CUDAGraphMode) -> None:
    speculator = scenario._speculator(mode)
    indices, manager = speculator.last_token_indices, speculator.prefill_cudagraph_manager
    seen: list[list[int]] = []

    def watch(stock: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(indices.tolist())
            return stock(*args, **kwargs)

        return watched

    speculator.prefill, manager.run_fullgraph = watch(speculator.prefill), watch(manager.run_fullgraph)
    computed, expected = np.zeros(scenario.MAX_REQUESTS, dtype=np.int32), []
    for requests in (4, 3, 1, 2):
        indices.fill_(scenario.MAX_TOKENS - 1)
        rejected = list(range(requests))
        scheduled = np.full(requests, 1 + scenario.DRAFT_TOKENS)
        scenario._propose(speculator, computed[:requests], scheduled, torch.Generator().manual_seed(0), rejected)
        expected.append([*(scheduled.cumsum() - 1 - rejected).tolist(), *[0] * (scenario.MAX_REQUESTS - requests)])
    assert seen == expected


@two_managers
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 4])
def test_prepare_eagle_inputs_differs_from_stock_beyond_the_batch_only(requests: int, keyword: bool) -> None:
    speculator = scenario._speculator(CUDAGraphMode.NONE)
    inputs: list[tuple[list[int], list[int]]] = []
    patched = eagle.prepare_eagle_inputs

    def both(input_buffers: Any, input_batch: Any, last_token_indices: Any, *rest: Any) -> Any:
        last_token_indices.fill_(17)
        stock_buffers, stock_indices = copy.deepcopy(input_buffers), last_token_indices.clone()
        unwrapped(patched)(stock_buffers, input_batch, stock_indices, *rest)
        if keyword:
            names = ("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "max_num_reqs")
            named = dict(zip(names, rest, strict=True))
            returned = patched(
                input_buffers=input_buffers, input_batch=input_batch, last_token_indices=last_token_indices, **named
            )
        else:
            returned = patched(input_buffers, input_batch, last_token_indices, *rest)
        for name, buffer in vars(stock_buffers).items():
            if isinstance(buffer, torch.Tensor):
                assert torch.equal(buffer, getattr(input_buffers, name)), name
        inputs.append((last_token_indices.tolist(), stock_indices.tolist()))
        assert returned is last_token_indices is speculator.last_token_indices
        return returned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle, "prepare_eagle_inputs", both)
        computed, scheduled = np.zeros(requests, dtype=np.int32), np.full(requests, 1 + scenario.DRAFT_TOKENS)
        scenario._propose(speculator, computed, scheduled, torch.Generator().manual_seed(0), [1] * requests)
    ((indices, stock_indices),) = inputs
    assert indices[:requests] == stock_indices[:requests]
    assert indices[requests:] == [0] * (scenario.MAX_REQUESTS - requests)


@two_managers
def test_decodes_after_the_fix_share_the_speculators_buffers() -> None:
    """The decode manager that was made anew records the same memory as the one in its place did."""
    speculator = scenario._speculator(CUDAGraphMode.FULL)
    (graph,) = speculator.decode_cudagraph_manager.graphs.values()
    memory = {t.untyped_storage().data_ptr() for o in graph.operations for t in tensors(o.arguments)}
    assert speculator.draft_tokens.untyped_storage().data_ptr() in memory
    assert speculator.hidden_states.untyped_storage().data_ptr() in memory


def tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors(argument)
