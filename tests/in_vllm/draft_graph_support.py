"""draft-graph-support on vLLM's own managers of graphs: which are captured, by mode and by what backends support."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport

import vllm_graphfix
from vllm_graphfix.fixes.draft_graph_support import _all_support_drafts
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.decoding import RunnerStandIn, configuration
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import draft_graph_support as scenario

every_mode = pytest.mark.parametrize("mode", tuple(CUDAGraphMode), ids=[mode.name for mode in CUDAGraphMode])
FULL = (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)
SIZES = 3


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs(), scenario._unpinned(), torch.inference_mode():
        yield


def captured(mode: CUDAGraphMode, tokens: int, **of_builder: Any) -> Any:
    """vLLM's manager after its capture, for decodes of so many *tokens*; builders differ from Triton MLA's as given."""
    config = configuration(mode, [tokens, 2 * tokens, 4 * tokens], tokens - 1)
    config.mamba_config = None
    made = scenario._builder

    def builder(config: Any) -> Any:
        one = made(config)
        vars(one).update(of_builder)
        return one

    with mock.patch.object(scenario, "_builder", builder):
        runner, model = RunnerStandIn(config, [scenario.LAYER]), scenario._model()
        manager, runner.attn_groups = scenario._initialized(config, tokens)
    if manager.needs_capture():
        inputs = runner.capture_inputs() | {"model": model, "intermediate_tensors": None}
        manager.capture(**supported_kwargs(manager.capture, inputs))
    return manager


def counted() -> int:
    return vllm_graphfix.events()["draft-graph-support"]["unsupported-graph"]


def of_step(manager: Any, tokens: int) -> str:
    """The mode in which a step of decodes is run that fits a graph."""
    if hasattr(manager, "dispatch"):
        return str(manager.dispatch(2, 2 * tokens, tokens).cg_mode.name)
    return str(manager.get_cudagraph_runtime_mode(2, 2 * tokens, tokens)[0].name)


@every_mode
def test_with_drafts_no_full_graph_remains_and_piecewise_ones_do(mode: CUDAGraphMode) -> None:
    before = counted()
    manager = captured(mode, 2)
    remaining = "PIECEWISE" if mode.mixed_mode() == CUDAGraphMode.PIECEWISE else "NONE"
    assert not manager.graphs
    assert manager.cudagraph_mode.name == remaining
    assert of_step(manager, 2) == remaining
    assert counted() - before == (SIZES if mode in FULL else 0)


@every_mode
def test_without_drafts_everything_is_stocks(mode: CUDAGraphMode) -> None:
    before = counted()
    manager = captured(mode, 1)
    assert manager.cudagraph_mode == mode
    assert len(manager.graphs) == (SIZES if mode in FULL else 0)
    assert of_step(manager, 1) == mode.decode_mode().name
    assert counted() == before


@pytest.mark.parametrize("threshold", [2, 3])
@pytest.mark.parametrize("support", [AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS])
def test_a_backend_that_supports_drafts_keeps_its_graphs(threshold: int, support: AttentionCGSupport) -> None:
    before = counted()
    manager = captured(
        CUDAGraphMode.FULL_DECODE_ONLY,
        2,
        reorder_batch_threshold=threshold,
        get_cudagraph_support=lambda config, spec: support,
    )
    assert len(manager.graphs) == SIZES
    assert of_step(manager, 2) == "FULL"
    assert counted() == before


@pytest.mark.parametrize(
    ("threshold", "support"),
    [(1, AttentionCGSupport.UNIFORM_BATCH), (2, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)],
    ids=["as with context parallelism", "as its class says"],
)
def test_either_says_that_it_does_not(threshold: int, support: AttentionCGSupport) -> None:
    manager = captured(
        CUDAGraphMode.FULL_DECODE_ONLY,
        2,
        reorder_batch_threshold=threshold,
        get_cudagraph_support=lambda config, spec: support,
    )
    assert not manager.graphs


def test_a_backends_support_is_queried_within_vllms_configuration() -> None:
    requested = []

    def support(config: Any, spec: Any) -> AttentionCGSupport:
        requested.append(get_current_vllm_config() is config)  # as FlashInfer's does
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    manager = captured(CUDAGraphMode.FULL_DECODE_ONLY, 2, reorder_batch_threshold=2, get_cudagraph_support=support)
    assert requested == [True]
    assert not manager.graphs


@pytest.mark.parametrize(
    ("support", "graphs"), [(AttentionCGSupport.UNIFORM_BATCH, 0), (AttentionCGSupport.ALWAYS, SIZES)]
)
def test_graphs_of_prompts_and_decodes_together_stay_where_they_are_supported(
    support: AttentionCGSupport, graphs: int
) -> None:
    manager = captured(
        CUDAGraphMode.FULL, 2, reorder_batch_threshold=2, get_cudagraph_support=lambda config, spec: support
    )
    assert len(manager.graphs) == graphs


@pytest.mark.parametrize("at", [(0, 0), (0, 1), (1, 0)], ids=["the first", "of the same cache", "of another cache"])
def test_one_backend_of_several_is_enough(at: tuple[int, int]) -> None:
    right, wrong = (
        SimpleNamespace(
            kv_cache_spec=None,
            get_metadata_builder=lambda ubatch, tokens=tokens: SimpleNamespace(
                reorder_batch_threshold=tokens, get_cudagraph_support=lambda *_: AttentionCGSupport.UNIFORM_BATCH
            ),
        )
        for tokens in (2, 1)
    )
    groups = [[wrong if (cache, group) == at else right for group in range(2)] for cache in range(2)]
    manager = SimpleNamespace(vllm_config=None, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    assert not _all_support_drafts(manager, groups, 2)
    assert _all_support_drafts(manager, [[right, right], [right]], 2)


def test_piecewise_graphs_are_captured_and_replayed_as_those_of_that_mode_are() -> None:
    remaining, wanted = (captured(mode, 2) for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE))
    if hasattr(remaining, "dispatch"):
        assert remaining._capture_descs == wanted._capture_descs != {}
        assert remaining._candidates == wanted._candidates
        assert remaining.dispatch(2, 3, None) == wanted.dispatch(2, 3, None)
    else:
        assert remaining.cudagraph_sizes == wanted.cudagraph_sizes != {}
        assert remaining.get_cudagraph_runtime_mode(2, 3, 2) == wanted.get_cudagraph_runtime_mode(2, 3, 2)
