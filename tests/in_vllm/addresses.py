"""Weights that move under graphs, in 0.16.0 and later: what is noticed, what is brought back, what becomes unused.

Real: the worker's and the model loader's functions, linear layers, latent attention's processing of its weights,
`replace_parameter`, the dispatcher. Stand-ins: a worker and a runner that have a model and nothing else; the CPU double
of CUDA graphs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm.v1.worker.gpu_model_runner  # noqa: F401 - its import hooks run
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.utils import replace_parameter
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_worker import Worker

from vllm_graphfix import _this_process
from vllm_graphfix.engine import rank_addresses
from vllm_graphfix.engine.inventory import Inventory
from vllm_graphfix.engine.rank_addresses import RankAddresses
from vllm_graphfix.log import logger
from vllm_graphfix.verify.double.graph import Capture, CPUGraph, cpu_cuda_graphs

VERSION = tuple(map(int, os.environ["RELEASE"].split(".")))
ACTION = os.environ.get("VLLM_GRAPHFIX_ADDRESSES", "report")
REPAIRS = ACTION == "repair"
HEADS, LATENT, NOPE, ROPE, VALUE = 2, 8, 4, 2, 4

in_mode = {name: pytest.mark.skipif(name != ACTION, reason=f"it is {ACTION}") for name in ("report", "repair", "off")}
watching = pytest.mark.skipif(ACTION == "off", reason="nothing is watched")


class Extension:
    """A worker extension of a framework."""

    def update(self: Any, weight: torch.Tensor) -> str:
        self.model_runner.model.load_weights([("kv_b_proj.weight", weight)])
        process(self.model_runner.model)
        return "updated"

    def update_by_rebinding(self: Any, name: str, weight: torch.Tensor) -> None:
        put(self.model_runner.model.attention, name, weight)


class WorkerDouble(Worker, Extension):  # type: ignore[misc]  # vLLM is not there where types are checked
    """A worker that has captured, on a CPU."""

    def __init__(self, runner: Any) -> None:
        self.model_runner, self.device, self.local_rank = runner, torch.device("cpu"), 0
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=False))
        self._sleep_saved_buffers: dict[str, Any] = {}


class AttentionDouble(MLAAttention):  # type: ignore[misc]
    """Latent attention's own processing of its weights; what it may have beside, it has not."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def __getattr__(self, name: str) -> Any:
        return False if name.startswith(("is_", "dcp_")) else super().__getattr__(name)


class ModelDouble(torch.nn.Module):
    """Latent attention of vLLM and the layer that its absorbed weights are derived from."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * (NOPE + VALUE)
        # Of another type than the one that is computed with, as quantised ones are: what is derived is a copy.
        self.kv_b_proj = ReplicatedLinear(LATENT, size, bias=False, params_dtype=torch.float32)
        self.kv_b_proj.weight.data.copy_(weights(1.0))
        attention = AttentionDouble()
        attention.kv_b_proj = self.kv_b_proj
        attention.num_heads, attention.kv_lora_rank = HEADS, LATENT
        attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim = NOPE, ROPE, VALUE
        attention.quant_config, attention.layer_name = None, "attention"
        attention.impl = SimpleNamespace(process_weights_after_loading=lambda act_dtype: None)
        for scale in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            attention.register_buffer(scale, torch.ones(1))
        self.attention = attention

    def load_weights(self, named_weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, weight in named_weights:
            parameters[name].data.copy_(weight)
        return set(parameters)


class RunnerDouble:
    """A model, graphs of one size, and a buffer."""

    def __init__(self) -> None:
        self.model, self.device = ModelDouble(), torch.device("cpu")
        process(self.model)
        self.input = torch.ones(HEADS, 1, LATENT, dtype=torch.bfloat16)
        self.made_in_each_step = torch.zeros(4)
        self.output = torch.zeros(HEADS, 1, VALUE, dtype=torch.bfloat16)
        compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=[1])
        compilation.max_cudagraph_capture_size = 1
        compilation.is_attention_compiled_piecewise = lambda: True
        config = SimpleNamespace(
            compilation_config=compilation, speculative_config=None, lora_config=None, num_speculative_tokens=0
        )
        config.scheduler_config = SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=1)
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL, 1)
        self.graph = CPUGraph()
        with torch.inference_mode(), Capture(self.graph):
            self.run()

    def get_model(self) -> Any:
        return self.model

    def run(self) -> None:
        self.output.copy_(torch.bmm(self.input, self.model.attention.W_UV))

    def graphs(self) -> int:
        return sum(map(len, self.cudagraph_dispatcher.cudagraph_keys.values()))

    def answers(self) -> tuple[float, float]:
        """With the graph, and without."""
        self.graph.replay()
        with_graph = float(self.output.sum())
        with torch.inference_mode():
            self.run()
        return with_graph, float(self.output.sum())

    def reload_weights(self) -> None:
        self.model.load_weights([("kv_b_proj.weight", weights(3.0))])


def put(module: Any, name: str, tensor: torch.Tensor) -> None:
    """Another tensor by that name, which is a parameter where that was one."""
    parameter = name in module._parameters
    setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor)


def weights(value: float) -> torch.Tensor:
    return torch.full((HEADS * (NOPE + VALUE), LATENT), value)


def process(model: Any) -> None:
    config = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)
    process_weights_after_loading(model, config, torch.device("cpu"))


@pytest.fixture
def worker() -> Iterator[Any]:
    with cpu_cuda_graphs(), set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        made = WorkerDouble(RunnerDouble())
        _this_process().on_captured(made, True)
        yield made


def of_this_rank() -> RankAddresses:
    addresses: RankAddresses | None = _this_process().component("addresses").watch.of_rank
    assert addresses is not None
    return addresses


def moved() -> dict[str, str]:
    """Without what lies on the host, which is a tensor of graphs only in the double."""
    addresses = _this_process().component("addresses").watch.moved()
    return {each.name: each.outcome for each in addresses if not each.name.endswith("_cpu")}


def counts() -> dict[str, int]:
    return _this_process().events().get("addresses", {})


COPIES = VERSION >= (0, 26)
"""Where vLLM derives in place."""


def test_absorbed_weights_that_an_extension_derives_anew_are_named_and_brought_back(worker: Any) -> None:
    assert worker.model_runner.answers() == (64.0, 64.0)
    assert worker.update(weights(2.0)) == "updated"
    right = COPIES or REPAIRS
    assert worker.model_runner.answers() == (128.0 if right else 64.0, 128.0)
    if COPIES or ACTION == "off":
        assert moved() == {}
    else:
        assert moved() == dict.fromkeys(("attention.W_UV", "attention.W_UK_T"), "repaired" if REPAIRS else "reported")
        assert (counts()["moved"], counts()["repaired"]) == (2, 2 if REPAIRS else 0)
        worker.update(weights(3.0))
        assert worker.model_runner.answers() == (192.0 if REPAIRS else 64.0, 192.0)
        assert counts()["moved"] == 4


def test_vllms_own_reload_that_copies_is_silent(worker: Any) -> None:
    worker.reload_weights()
    process(worker.model_runner.model) if COPIES else None
    assert moved() == {}
    assert ACTION == "off" or counts()["comparisons"] >= 1


@watching
def test_a_replaced_parameter_is_named_and_comes_back_with_the_new_values(worker: Any) -> None:
    layer = worker.model_runner.model.kv_b_proj
    before = layer.weight.data_ptr()

    class Replaces:
        def update_by_replacing(self: Any) -> None:
            replace_parameter(layer, "weight", weights(5.0))

    serve_with(worker, Replaces)
    worker.update_by_replacing()
    copied = VERSION >= (0, 33)  # where `replace_parameter` copies
    assert moved() == ({} if copied else {"kv_b_proj.weight": "repaired" if REPAIRS else "reported"})
    assert (layer.weight.data_ptr() == before) is (REPAIRS or copied)
    assert torch.equal(layer.weight, weights(5.0))
    assert layer.weight is dict(worker.model_runner.model.named_parameters())["kv_b_proj.weight"]


def serve_with(worker: Any, extension: type) -> None:
    """Gives the worker another extension, and lets it capture again."""
    worker.__class__ = type("Extended", (type(worker), extension), {})
    _this_process().on_captured(worker, True)


@watching
def test_an_engine_that_captures_again_knows_new_addresses_and_goes_on_counting(worker: Any) -> None:
    layer = worker.model_runner.model.kv_b_proj
    layer.weight.data = weights(7.0)
    worker.reload_weights()
    before = counts()
    assert set(moved()) == {"kv_b_proj.weight"}
    _this_process().on_captured(worker, True)
    worker.reload_weights()
    assert moved() == {}
    assert counts() == before | {"comparisons": before["comparisons"] + 1}
    with mock.patch.object(rank_addresses, "Inventory", side_effect=OSError("planted")):
        _this_process().on_captured(worker, True)
    _this_process().on_captured(worker, True)
    assert counts() == before | {"comparisons": before["comparisons"] + 1, "failures": 1}
    _this_process().on_captured(WorkerDouble(worker.model_runner), True)
    assert set(counts().values()) == {0}


@watching
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "a while later"])
def test_a_layer_that_a_program_processes_by_itself_is_compared_too(worker: Any, at_once: bool) -> None:
    watch = of_this_rank()
    worker.model_runner.model.load_weights([("kv_b_proj.weight", weights(2.0))])
    watch._not_before = float("inf") if at_once else 0.0  # until when loads of single tensors are not compared
    worker.model_runner.model.attention.process_weights_after_loading(torch.bfloat16)
    if at_once and not REPAIRS:  # which a heartbeat makes up for, having seen it twice
        assert moved() == {}
        watch.poll()
        watch.poll()
    assert set(moved().values()) == (set() if COPIES else {"repaired" if REPAIRS else "reported"})
    assert worker.model_runner.answers() == (128.0 if COPIES or REPAIRS else 64.0, 128.0)


@watching
def test_a_heartbeat_sees_data_that_was_assigned_and_changes_nothing(worker: Any) -> None:
    layer = worker.model_runner.model.kv_b_proj
    _this_process().poll()
    assert moved() == {}
    elsewhere = weights(7.0)
    layer.weight.data = elsewhere
    _this_process().poll()
    assert moved() == {}
    _this_process().poll()
    assert moved() == {"kv_b_proj.weight": "reported"}
    assert layer.weight.data_ptr() == elsewhere.data_ptr()
    _this_process().poll()
    assert counts()["moved"] == 1
    layer.weight.data, before = layer.weight.data.clone(), layer.weight.data
    _this_process().poll()
    layer.weight.data = before
    worker.reload_weights()
    assert moved() == {"kv_b_proj.weight": "repaired" if REPAIRS else "reported"}


@watching
def test_a_heartbeat_during_a_load_says_nothing(worker: Any) -> None:
    layer = worker.model_runner.model.kv_b_proj

    class Loads:
        def load(self: Any) -> None:
            before, layer.weight.data = layer.weight.data, torch.empty(0)
            _this_process().poll()
            layer.weight.data = before

    serve_with(worker, Loads)
    worker.load()
    assert moved() == {}


@watching
def test_what_steps_make_anew_is_no_tensor_of_a_graph(worker: Any) -> None:
    worker.model_runner.made_in_each_step = torch.ones(4)
    worker.reload_weights()
    assert moved() == {}


@watching
def test_an_input_that_a_reload_has_replaced_is_named(worker: Any) -> None:
    worker.model_runner.reload_weights = lambda: setattr(worker.model_runner, "input", torch.ones(HEADS, 1, LATENT))
    worker.reload_weights()
    (outcome,) = [moved()["runner.input"]]
    assert ("no graph is used" in outcome) is REPAIRS


@in_mode["repair"]
def test_graphs_are_not_used_any_more_where_the_new_tensor_has_another_shape(worker: Any) -> None:
    assert worker.model_runner.graphs() == 1
    worker.update_by_rebinding("W_UV", torch.zeros(HEADS, LATENT, VALUE, dtype=torch.float32))
    assert worker.model_runner.graphs() == 0
    assert counts()["graphs-taken-out"] == 1
    assert moved()["attention.W_UV"].startswith("its shape, stride or type is another")


@in_mode["repair"]
def test_nothing_is_copied_to_memory_that_sleeps_and_it_is_made_up_for_when_it_wakes(worker: Any) -> None:
    watch = of_this_rank()
    watch.around("sleep", True, lambda worker: None, worker)
    if not COPIES:
        worker.update(weights(2.0))
        assert worker.model_runner.answers() == (64.0, 128.0)
    watch.around("wake_up", True, lambda worker, tags: None, worker, ["kv_cache"])
    assert moved() == {}
    watch.around("wake_up", True, lambda worker, tags: None, worker, ["weights"])
    if not COPIES:
        assert worker.model_runner.answers() == (128.0, 128.0)


@in_mode["repair"]
def test_tensors_that_were_one_and_are_two_are_not_copied_over_each_other(worker: Any) -> None:
    attention = worker.model_runner.model.attention
    attention.alias = attention.W_UV
    _this_process().on_captured(worker, True)

    class Splits:
        def update_by_splitting(self: Any) -> None:
            put(attention, "alias", attention.W_UV + 1)
            put(attention, "W_UV", attention.W_UV + 2)

    serve_with(worker, Splits)
    worker.update_by_splitting()
    assert worker.model_runner.graphs() == 0


@in_mode["repair"]
def test_a_tensor_that_moves_out_of_one_that_stays_is_not_copied_into_it(worker: Any) -> None:
    attention = worker.model_runner.model.attention
    attention.whole = torch.zeros(4)
    attention.part = attention.whole[:2]
    _this_process().on_captured(worker, True)
    worker.update_by_rebinding("part", torch.ones(2))
    assert torch.equal(attention.whole, torch.zeros(4))
    assert "attention.whole lies in the same memory" in moved()["attention.part"]


@in_mode["repair"]
def test_no_graph_is_used_where_two_weights_have_exchanged_their_memory(worker: Any) -> None:
    attention = worker.model_runner.model.attention
    attention.first, attention.second = torch.zeros(4), torch.ones(4)
    _this_process().on_captured(worker, True)

    class Exchanges:
        def update_by_exchange(self: Any) -> None:
            attention.first, attention.second = attention.second, attention.first

    serve_with(worker, Exchanges)
    worker.update_by_exchange()
    assert (attention.first.tolist(), attention.second.tolist()) == ([1.0] * 4, [0.0] * 4)
    assert worker.model_runner.graphs() == 0


@watching
def test_an_update_in_several_calls_is_compared_at_its_end(worker: Any) -> None:
    watch, layer = of_this_rank(), worker.model_runner.model.kv_b_proj
    before = layer.weight.data

    def lift(worker: Any) -> None:
        layer.weight.data = torch.zeros_like(before)

    def lay_back(worker: Any) -> None:
        layer.weight.data = before

    watch.around("start_weight_update", True, lift, worker)
    watch.around("update_weights", True, lambda worker: None, worker)
    _this_process().poll()
    watch.around("finish_weight_update", True, lay_back, worker)
    assert (moved(), counts()["comparisons"]) == ({}, 1)


@watching
def test_whatever_fails_in_it_ends_it_with_one_warning(worker: Any, monkeypatch: Any) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: messages.append(text % args))
    monkeypatch.setattr(Inventory, "moved", lambda *args: 1 / 0)
    worker.reload_weights()
    worker.reload_weights()
    _this_process().poll()
    assert (len(messages), counts()["failures"]) == (1, 1)


@watching
def test_an_engine_that_has_ended_does_not_stay_in_memory(worker: Any) -> None:
    other = WorkerDouble(RunnerDouble())
    _this_process().on_captured(other, True)
    assert of_this_rank()._inventory is not None
    del other
    gc.collect()
    assert of_this_rank()._inventory is None


@in_mode["off"]
def test_nothing_is_wrapped(worker: Any) -> None:
    assert not hasattr(Worker.reload_weights, "__wrapped__")
    assert not hasattr(process_weights_after_loading, "__wrapped__")
    assert counts() == {}
