"""encoder-adapters: which images leave the graphs of an encoder, and that the caller encodes them all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from activities import activity_of
from vllm_graphfix.fix import STEPPED_ASIDE
from vllm_graphfix.verify.double.scenarios import encoder_adapters as scenario

ACTIVITY = activity_of("encoder-adapters")
IN_A_GRAPH = "what graphs return"


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    ACTIVITY.error = None
    with scenario.encoders_on_the_cpu():
        yield


def executed(model: Any, call: Callable[[Any], Any] | None = None) -> Any:
    """Return the output of a manager of *model* for the images of a step to vLLM's model runner, or to *call*."""
    manager: Any = object.__new__(EncoderCudaGraphManager)
    vars(manager).update(
        model=model,
        use_dp=False,
        graph_hits=0,
        graph_misses=0,
        get_cumulative_stats=dict,
        _execute_local=lambda _: IN_A_GRAPH,
    )
    return (call or AS_VLLM_CALLS_IT)(manager)


def _execute_mm_encoder(manager: Any) -> Any:
    return manager.execute({})


AS_VLLM_CALLS_IT = FunctionType(_execute_mm_encoder.__code__, {"__name__": "vllm.v1.worker.gpu_model_runner"})


def with_adapters(
    adapters: tuple[int, ...], kind: LoRAMappingType = LoRAMappingType.TOWER
) -> scenario.EncoderWithAdapters:
    """An encoder whose kernels were told of images of one token with *adapters*."""
    model = scenario.EncoderWithAdapters()
    for each in LoRAMappingType.TOWER, LoRAMappingType.CONNECTOR:
        rows = adapters if each is kind else (0,) * len(adapters)
        model.lora_manager.set_adapter_mapping(LoRAMapping(rows, rows, is_prefill=True, type=each))
    return model


@pytest.mark.parametrize("kind", [LoRAMappingType.TOWER, LoRAMappingType.CONNECTOR])
def test_one_image_with_an_adapter_takes_all_of_a_step_out_of_the_graphs(kind: LoRAMappingType) -> None:
    assert executed(with_adapters((0, 2, 0), kind)) is None
    assert executed(with_adapters((0, 0, 0), kind)) == IN_A_GRAPH
    assert ACTIVITY.error is None


def test_an_adapter_of_an_earlier_step_is_no_reason() -> None:
    model = with_adapters((1, 2))
    assert executed(model) is None
    for kind in LoRAMappingType.TOWER, LoRAMappingType.CONNECTOR:
        model.lora_manager.set_adapter_mapping(LoRAMapping((0,), (0,), is_prefill=True, type=kind))
    assert executed(model) == IN_A_GRAPH


def test_no_graph_is_taken_before_adapters_are_selected() -> None:
    assert executed(scenario.EncoderWithAdapters()) is None


def test_a_language_model_with_adapters_keeps_the_graphs_of_its_encoder() -> None:
    model = with_adapters((1,))
    model.lora_manager.supports_tower_connector_lora = False
    assert executed(model) == IN_A_GRAPH
    del model.lora_manager.supports_tower_connector_lora  # as of a model without an encoder
    assert executed(model) == IN_A_GRAPH


def test_an_engine_without_adapters_keeps_its_graphs() -> None:
    assert executed(SimpleNamespace()) == IN_A_GRAPH
    assert ACTIVITY.error is None


def test_adapters_of_kernels_of_another_platform_are_unknown() -> None:
    model = with_adapters((0,))
    model.lora_manager.punica_wrapper_mapping = {"tower": SimpleNamespace(no_lora=True)}
    assert executed(model) is None
    assert ACTIVITY.error is None


def test_an_encoder_without_adapters_in_its_connector_is_judged_by_its_tower() -> None:
    model = with_adapters((0, 0))
    model.lora_manager.mm_mapping = SimpleNamespace(tower_model=["tower"], connector=[])
    model.lora_manager.punica_wrapper_mapping = {"tower": model.lora_manager.punica_wrapper_mapping["tower"]}
    assert executed(model) == IN_A_GRAPH
    model.lora_manager.mm_mapping = SimpleNamespace(tower_model=["tower"], connector=["merger"])
    assert executed(model) == IN_A_GRAPH
    assert ACTIVITY.error is None


def test_unreadable_adapters_are_an_error_of_the_fix_and_encode_as_on_stock() -> None:
    model = with_adapters((1,))
    del model.lora_manager.mm_mapping
    assert executed(model) == IN_A_GRAPH
    assert "mm_mapping" in str(ACTIVITY.error)


@pytest.mark.parametrize("runner", scenario.runners())
def test_a_step_without_adapters_is_replayed(runner: Any) -> None:
    encoding = runner(scenario.EncoderWithAdapters(), graphs=True)
    random = torch.Generator().manual_seed(2)
    for adapters, hits in (((0, 0), 2), ((1, 0), 2), ((0, 0), 4)):
        images = [scenario.image(length, random) for length in (3, 2)]
        assert len(encoding.encode(list(zip(images, adapters, strict=True)))) == 2
        assert encoding.manager.graph_hits == hits
    assert ACTIVITY.error is None


def test_another_caller_which_may_not_take_none_gets_what_stock_returns() -> None:
    before, model = ACTIVITY.counts, with_adapters((1, 2))
    assert executed(model, _execute_mm_encoder) == IN_A_GRAPH
    assert ACTIVITY.counts == {**before, STEPPED_ASIDE: before.get(STEPPED_ASIDE, 0) + 1}
    assert ACTIVITY.error is None
