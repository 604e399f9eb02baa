"""The shadow check beside a KV connector: vLLM's own `ExampleConnector`, asked by its own attention decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1 import kv_cache_interface
from wrapped_model import BLOCK, BLOCKS, WIDTH, Served, SlotsStandIn

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import connectors, process
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

HEADS_SECOND = hasattr(kv_cache_interface, "compute_layer_kv_cache_shape_bytes")
"""From 0.29 on a cache is (blocks, heads, tokens, width); before, keys and values come first."""

ONE_AN_ENGINE = "virtual_engine" in ForwardContext.__annotations__
"""Up to 0.19.1 a layer has a list of caches."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with wrappers_on_the_double():
        yield
    process.start(Rate(), Action.REPORT)


@maybe_transfer_kv_layer  # type: ignore[untyped-decorator]
def attend(run: Callable[[], torch.Tensor], layer_name: str) -> torch.Tensor:
    return run()


class TransferredStandIn(SlotsStandIn):
    """An attention layer that asks the connector as vLLM's do; what is stored is `kv_cache`, in vLLM's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: torch.Tensor = self.kv_cache[0]
        shape = (BLOCKS, 1, BLOCK, WIDTH) if HEADS_SECOND else (2, BLOCKS, BLOCK, WIDTH)
        cache = torch.zeros(shape)
        self.kv_cache: Any = [cache] if ONE_AN_ENGINE else cache

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        def run() -> torch.Tensor:
            flat, slots = self.memory.view(-1, WIDTH), get_forward_context().slot_mapping["layer.0"].clamp(min=0)
            flat.index_copy_(0, slots, hidden)
            mixed: torch.Tensor = hidden + flat.index_select(0, slots) * self.metadata.scale
            return mixed

        output: torch.Tensor = attend(run, "layer.0")
        return output

    @property
    def metadata(self) -> Any:
        return get_forward_context().attn_metadata["layer.0"]


class Connected:
    """An engine's model with a connector that has a request of this step to store."""

    def __init__(self, folder: Path, *, action: Action = Action.REPORT, stale: bool = False) -> None:
        self.folder = folder
        transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(folder)},
        )
        self.served = Served(action=action, stale=stale, kv_transfer_config=transfer)
        layer = TransferredStandIn()
        self.served.model.layers["layer.0"] = layer
        self.served.config.compilation_config.static_forward_context["layer.0"] = layer
        config: Any = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK), kv_transfer_config=transfer)
        self.connector: Any = ExampleConnector(config, KVConnectorRole.WORKER, None)
        metadata = ExampleConnectorMetadata()
        metadata.add_request([1, 2], [1], BLOCK, is_store=True, mm_hashes=[])
        self.connector.bind_connector_metadata(metadata)
        self.calls: list[str] = []
        self.connector.wait_for_layer_load = self.calls.append  # the connector's own has nothing to do

    def step(self, mode: CUDAGraphMode = CUDAGraphMode.FULL) -> torch.Tensor:
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
            return self.served.step(mode=mode)

    def stored(self) -> int:
        return len(list(self.folder.rglob("*.safetensors")))


def test_a_step_without_a_graph_loads_and_stores(tmp_path: Path) -> None:
    engine = Connected(tmp_path)
    engine.step(CUDAGraphMode.NONE)
    assert (engine.calls, engine.stored()) == (["layer.0"], 1)


@pytest.mark.parametrize("stale", [False, True])
def test_a_check_neither_loads_nor_stores_through_the_connector(tmp_path: Path, stale: bool) -> None:
    engine = Connected(tmp_path, stale=stale)
    for _ in range(2):
        engine.step()
    results = engine.served.shadow.results
    assert (results.checks, results.mismatches, engine.served.shadow.stopped) == (2, 2 * stale, None)
    assert engine.served.model.eager_runs >= 2
    assert (engine.calls, engine.stored()) == ([], 0)


def test_a_step_in_quarantine_neither_loads_nor_stores_as_its_graph_would(tmp_path: Path) -> None:
    engine = Connected(tmp_path, action=Action.QUARANTINE, stale=True)
    for _ in range(2):
        engine.step()
    assert engine.served.shadow.quarantined
    runs = engine.served.model.eager_runs
    engine.step()
    assert engine.served.model.eager_runs == runs + 1
    assert (engine.calls, engine.stored()) == ([], 0)


def test_the_connector_is_back_after_a_run_that_failed(tmp_path: Path) -> None:
    engine = Connected(tmp_path)
    engine.served.model.breaks_at = 1
    engine.step()
    assert engine.served.shadow.stopped == "RuntimeError: planted"
    engine.step(CUDAGraphMode.NONE)
    assert engine.stored() == 1


def test_not_silenced_a_check_would_load_and_store(tmp_path: Path) -> None:
    engine = Connected(tmp_path)
    with mock.patch.object(connectors, "_hooks", return_value=None):
        engine.step()
    assert (engine.served.shadow.results.checks, engine.stored()) == (1, 1)
    assert engine.calls


def test_an_engine_whose_operators_ask_elsewhere_is_refused(tmp_path: Path) -> None:
    with mock.patch.object(connectors, "_hooks", return_value=None):
        assert not connectors.can_be_silenced()
        served = Served(kv_transfer_config=SimpleNamespace())
    assert "KV connector" in (process.REFUSED or "")
    assert type(served.run).__mro__[1] is object
