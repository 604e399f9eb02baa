"""active-lora-count on vLLM's own dispatch, dummy adapters and metadata of the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu

from activities import activity_of
from vllm_graphfix.fix import STEPPED_ASIDE
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import active_lora_count as scenario

ACTIVITY = activity_of("active-lora-count")
STOCK = punica_gpu.PunicaWrapperGPU.update_metadata.__wrapped__
COUNTED = "base-rows-uncounted"


def _programs(layer: Any) -> int:
    """Return the number of adapters that a launch of the kernels takes."""
    number = layer.punica.token_mapping_meta.meta_args(1, layer.config.specialize_active_lora)[-1]
    return int(number if isinstance(number, int) else number.item())


def _listed(layer: Any, adapters: list[int]) -> list[int]:
    """The part of the kernels' list that is of a batch."""
    result: list[int] = layer.punica.token_mapping_meta.active_lora_ids[: len(set(adapters))].tolist()
    return result


def _batches(most: int) -> list[list[int]]:
    """Batches of each number of adapters, with and without rows of none."""
    return [[*range(1, number + 1), *base] for number in range(1, most + 1) for base in ([], [0])]


Programs = dict[tuple[int, int], int]


@contextlib.contextmanager
def _captured(monkeypatch: pytest.MonkeyPatch, kind: Any, most: int) -> Iterator[tuple[Any, Any, Programs, Programs]]:
    """A layer with room for *most* adapters, a runner of this *kind*, and each graph's programs, stock and patched."""
    monkeypatch.setattr(scenario, "ADAPTERS", most)
    monkeypatch.setattr(scenario, "SIZES", list(range(1, most + 2)))
    with scenario.lora_on_the_cpu(), cpu_cuda_graphs():
        layer = scenario.LayerWithAdapters(torch.Generator())
        runner = kind(layer, CUDAGraphMode.FULL_DECODE_ONLY)
        with monkeypatch.context() as without:
            without.setattr(punica_gpu.PunicaWrapperGPU, "update_metadata", STOCK)
            stocks = {key: _programs(layer) for key in runner.captures()}
        yield layer, runner, stocks, {key: _programs(layer) for key in runner.captures()}


@pytest.mark.parametrize("kind", scenario._runners())
@pytest.mark.parametrize("most", range(1, 10))
def test_a_graph_has_a_program_for_each_entry_of_the_list_of_any_batch(
    monkeypatch: pytest.MonkeyPatch, kind: Any, most: int
) -> None:
    with _captured(monkeypatch, kind, most) as (layer, runner, stocks, programs):
        assert max(programs.values()) == most + 1
        for batch in _batches(most):
            before = ACTIVITY.counts[COUNTED]
            dispatched = runner.step(batch)
            assert _listed(layer, batch) == [adapter - 1 for adapter in sorted(set(batch))]
            assert programs[dispatched] >= len(set(batch))
            assert _programs(layer) >= len(set(batch))
            assert ACTIVITY.counts[COUNTED] - before == (stocks[dispatched] < len(set(batch)))
    assert ACTIVITY.error is None


@pytest.mark.parametrize("kind", scenario._runners())
@pytest.mark.parametrize("most", range(1, 6))
def test_one_graph_for_any_number_of_adapters_has_room_and_wrong_batches_are_counted(
    monkeypatch: pytest.MonkeyPatch, kind: Any, most: int
) -> None:
    """With `cudagraph_specialize_lora` off. Stock lacks a program if there are 1, 2, 4, … adapters, all at once."""
    config = scenario._config

    def one_graph(layer: Any, mode: CUDAGraphMode) -> Any:
        made = config(layer, mode)
        made.compilation_config.cudagraph_specialize_lora = False
        return made

    monkeypatch.setattr(scenario, "_config", one_graph)
    with _captured(monkeypatch, kind, most) as (layer, runner, stocks, programs):
        wrong = []
        for batch in _batches(most):
            before = ACTIVITY.counts[COUNTED]
            dispatched = runner.step(batch)
            assert programs[dispatched] >= len(set(batch))
            if stocks[dispatched] < len(set(batch)):
                wrong.append(batch)
                assert ACTIVITY.counts[COUNTED] == before + 1
    rounded_up = hasattr(layer.punica.token_mapping_meta, "num_active_loras_cpu") and most not in (1, 2, 4)
    assert wrong == ([] if rounded_up else [[*range(1, most + 1), 0]])
    assert ACTIVITY.error is None


def test_a_batch_of_no_adapter_runs_no_kernel_and_counts_nothing() -> None:
    before = ACTIVITY.counts
    with scenario.lora_on_the_cpu():
        layer = scenario.LayerWithAdapters(torch.Generator())
        scenario.RunnerV1(layer, CUDAGraphMode.NONE).step([0, 0])
        assert layer.punica.token_mapping_meta.no_lora_flag_cpu.item()
        assert _programs(layer) == 0
    assert ACTIVITY.counts == before
    assert ACTIVITY.error is None


@pytest.mark.parametrize("kind", LoRAMappingType)
def test_of_an_encoder_nothing_is_counted(kind: LoRAMappingType) -> None:
    """Graphs by number of adapters are the language model's."""
    before, rows = ACTIVITY.counts[COUNTED], (0, 1)
    mapping = LoRAMapping(index_mapping=rows, prompt_mapping=rows, is_prefill=True, type=kind)
    with scenario.lora_on_the_cpu():
        layer = scenario.LayerWithAdapters(torch.Generator())
        layer.punica.update_metadata(mapping, [1, None, None, None], scenario.ADAPTERS + 1, 8)
        assert _programs(layer) == 3
    assert ACTIVITY.counts[COUNTED] - before == (kind is LoRAMappingType.LANGUAGE)
    assert ACTIVITY.error is None


def test_where_nobody_asks_for_it_nothing_is_another_than_stocks() -> None:
    before = ACTIVITY.counts
    with scenario.lora_on_the_cpu():
        layer = scenario.LayerWithAdapters(torch.Generator())
        layer.config.specialize_active_lora = False
        scenario.RunnerV1(layer, CUDAGraphMode.NONE).step([0, 1])
        meta = layer.punica.token_mapping_meta
        stocks = meta.num_active_loras_cpu.item() if hasattr(meta, "num_active_loras_cpu") else meta.num_active_loras
        assert (stocks, _programs(layer)) == (2, scenario.ADAPTERS + 1)
    assert ACTIVITY.counts == before
    assert ACTIVITY.error is None


class CountsRows(punica_gpu.PunicaWrapperGPU):  # type: ignore[misc]  # vLLM is no dependency of mypy's
    """A wrapper that counts rows without an adapter itself."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        meta = self.token_mapping_meta
        if hasattr(meta, "num_active_loras_cpu"):
            meta.num_active_loras_cpu[0] = int(meta.num_active_loras_cpu[0]) + 1
        else:
            meta.num_active_loras += 1


def test_a_wrapper_that_counts_them_itself_is_not_touched() -> None:
    before = ACTIVITY.counts.get(STEPPED_ASIDE, 0)
    with scenario.lora_on_the_cpu():
        layer = scenario.LayerWithAdapters(torch.Generator())
        layer.punica.__class__ = CountsRows
        scenario.RunnerV1(layer, CUDAGraphMode.NONE).step([0, 1])
        assert _programs(layer) == 3
    assert ACTIVITY.counts[STEPPED_ASIDE] == before + 1
    assert ACTIVITY.error is None


def test_a_list_that_another_plugin_counts_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    before, prepare = ACTIVITY.counts.get(STEPPED_ASIDE, 0), LoRAKernelMeta.prepare_tensors

    def counted(self: Any, mapping: Any) -> None:
        prepare(self, mapping)

    monkeypatch.setattr(LoRAKernelMeta, "prepare_tensors", counted)
    with scenario.lora_on_the_cpu():
        layer = scenario.LayerWithAdapters(torch.Generator())
        scenario.RunnerV1(layer, CUDAGraphMode.NONE).step([0, 1])
        assert _programs(layer) == 2
    assert ACTIVITY.counts[STEPPED_ASIDE] == before + 1
    assert ACTIVITY.error is None
