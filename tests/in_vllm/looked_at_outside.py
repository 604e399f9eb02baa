"""The claims of docs/looked-at.md on what graphs leave out, and on copies and hooks that they do not wait for.

As `looked_at.py`: tested on vLLM's own classes, each claim with its releases.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.worker import gpu_model_runner

from any_release import RELEASE, module
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import breakable_graphs, wrappers_on_the_double

# -- the workspace of FlashInfer's all-reduce (PR 45917)


def test_a_workspace_of_flashinfers_all_reduce_has_its_group_from_0_24() -> None:
    fused = module("vllm.distributed.device_communicators.flashinfer_all_reduce")
    if fused is None:
        assert RELEASE < (0, 17)
        return
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(fused)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".create_allreduce_fusion_workspace")
    ]
    keywords = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert keywords
    assert all("group" in names for names in keywords) == (RELEASE >= (0, 24))


# -- breakable graphs of operators that do not break (issue 53030, PR 44275)

LAYER = "model.layers.0"
MAMBA = "vllm.model_executor.layers.mamba"
BREAKS_FROM = {
    "vllm.model_executor.layers.attention.mla_attention.unified_mla_attention_with_output": (0, 22),
    "vllm.model_executor.layers.attention.attention.unified_attention_with_output": (0, 24),
    f"{MAMBA}.gdn.qwen_gdn_linear_attn.qwen_gdn_attention_core": (0, 30),
    f"{MAMBA}.gdn.olmo_gdn_linear_attn.olmo_hybrid_gdn_full_forward": (0, 32),
    f"{MAMBA}.mamba_mixer.mamba_mixer": (0, 32),
    f"{MAMBA}.mamba_mixer2.mamba_mixer2": (0, 32),
    f"{MAMBA}.short_conv.short_conv": (0, 32),
}
has_breakable_graphs = pytest.mark.skipif(RELEASE < (0, 22), reason="breakable graphs begin with 0.22.0")


class LayerStandIn:
    """Stands in for an operator's layer, and its `impl`: writes a number of its metadata, and nothing without them."""

    def __init__(self) -> None:
        self.output = torch.zeros(2, 2)
        self.impl, self.kv_cache, self.hisparse_cache = self, torch.zeros(1), None

    def __getattr__(self, name: str) -> Any:
        return self._write

    def _write(self, *_: Any, **__: Any) -> None:
        metadata = get_forward_context().attn_metadata
        if metadata is not None:
            self.output.fill_(metadata[LAYER])


def as_made_with_the_flag(operator: str) -> Any:
    """Return vLLM's function of that name, made anew: up to 0.32.0 its decorator reads the flag only then."""
    place, _, name = operator.rpartition(".")
    loaded = importlib.import_module(place)
    (node,) = [each for each in ast.parse(inspect.getsource(loaded)).body if getattr(each, "name", None) == name]
    names = dict(vars(loaded))
    with mock.patch.dict(os.environ, VLLM_USE_BREAKABLE_CUDAGRAPH="1"):
        exec(compile(ast.Module([node], []), place, "exec"), names)  # noqa: S102 - vLLM's own code
    return names[name]


@has_breakable_graphs
@pytest.mark.parametrize("captured_with", [None, {LAYER: 1.0}], ids=["V1", "V2"])
@pytest.mark.parametrize("operator", BREAKS_FROM)
def test_an_operator_without_a_break_is_replayed_with_the_metadata_of_the_capture(
    operator: str, captured_with: dict[str, float] | None
) -> None:
    """Model runner V1 captures piecewise graphs without metadata, V2 with those of a dummy batch, from 0.26.0 on."""
    breakable = importlib.import_module("vllm.compilation.breakable_cudagraph")
    layer, function = LayerStandIn(), as_made_with_the_flag(operator)
    known = {"layer_name": LAYER, "fast_kernel": False}
    arguments = [
        known.get(name, layer.output)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    config: Any = SimpleNamespace(compilation_config=None, use_cumem_cudagraph_pool=False)

    def run(graph: Any, metadata: dict[str, float] | None) -> None:
        context: Any = SimpleNamespace(
            attn_metadata=metadata,
            no_compile_layers={LAYER: layer},
            slot_mapping={},
            virtual_engine=0,
            batch_descriptor=2,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
        )
        with override_forward_context(context):
            graph()

    with (
        wrappers_on_the_double(),
        breakable_graphs(),
        mock.patch.object(breakable, "weak_ref_tensor", lambda tensor: tensor),
    ):
        graph = breakable.BreakableCUDAGraphWrapper(lambda: function(*arguments), config)
        run(graph, captured_with)
        layer.output.zero_()
        run(graph, {LAYER: 7.0})
    stale = captured_with[LAYER] if captured_with else 0.0
    assert layer.output.unique().tolist() == [7.0 if BREAKS_FROM[operator] <= RELEASE else stale]


@has_breakable_graphs
def test_no_check_of_the_configuration_asks_whether_operators_break() -> None:
    config = CompilationConfig(mode=0, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    config.set_splitting_ops_for_v1("allgather_reducescatter")
    assert not config.splitting_ops
    assert config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    captures = inspect.getsource(gpu_model_runner.GPUModelRunner)
    assert "force_attention = cudagraph_runtime_mode == CUDAGraphMode.FULL" in captures, "no metadata in others, on V1"
    attention = inspect.getsource(importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils"))
    assert ("and not self.use_breakable_cg" in attention) == (RELEASE >= (0, 26)), "metadata in those of V2"


# -- connectors that load and save by layer (issue 29608, PR 31057)


def test_a_full_graph_calls_no_hook_of_a_connector_again() -> None:
    utils: Any = module("vllm.model_executor.layers.attention.kv_transfer_utils") or importlib.import_module(
        "vllm.attention.utils.kv_transfer_utils"
    )
    hooks: list[str] = []
    loader = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: hooks.append("wait"),
        save_kv_layer=lambda name, cache, metadata: hooks.append("save"),
    )
    output = torch.zeros(2)

    def operator(output: torch.Tensor, layer_name: str) -> None:
        output.add_(1)

    attend = utils.maybe_transfer_kv_layer(operator)
    context: Any = SimpleNamespace(
        attn_metadata={LAYER: "metadata"}, no_compile_layers={LAYER: LayerStandIn()}, slot_mapping={}, virtual_engine=0
    )
    group: dict[str, Any] = {
        "has_kv_transfer_group": lambda: True,
        "is_v1_kv_transfer_group": lambda: True,
        "get_kv_transfer_group": lambda: loader,
    }
    with (
        cpu_cuda_graphs(),
        torch.inference_mode(),
        mock.patch.multiple(utils, **group),
        override_forward_context(context),
    ):
        attend(output, LAYER)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(output, LAYER)
        assert hooks == ["wait", "save"] * 2
        graph.replay()
    assert output.tolist() == [2.0, 2.0]
    assert hooks == ["wait", "save"] * 2, "the replay attends, and calls none"


def connector(place: str, name: str) -> Any:
    loaded = module(f"vllm.distributed.kv_transfer.kv_connector.v1.{place}")
    return loaded and getattr(loaded, name)


def test_connectors_with_hooks_of_layers_do_not_ask_for_piecewise_graphs() -> None:
    """LMCache's own settings in `kv_connector_extra_config` begin with `lmcache.`; another key is asked for."""
    base = connector("base", "KVConnectorBase_V1")
    is_called = hasattr(base, "requires_piecewise_for_cudagraph")
    assert is_called == (RELEASE >= (0, 17))
    lmcache = connector("lmcache_connector", "LMCacheConnectorV1")
    nccl = connector("p2p.p2p_nccl_connector", "P2pNcclConnector")
    moriio = connector("moriio.moriio_connector", "MoRIIOConnector")
    assert (nccl is not None) == (RELEASE < (0, 24))
    for cls in filter(None, (lmcache, nccl, moriio)):
        assert cls.save_kv_layer is not base.save_kv_layer
        if is_called:
            assert cls.requires_piecewise_for_cudagraph({"lmcache.use_layerwise": True}) is False
    if is_called:
        assert lmcache.requires_piecewise_for_cudagraph({"use_layerwise": True}) is True
    adapter = Path(inspect.getfile(base)).parent / "lmcache_integration" / "vllm_v1_adapter.py"
    source = adapter.read_text()
    assert 'if key.startswith("lmcache."):' in source
    assert "self.use_layerwise = config.use_layerwise" in source
    worker = connector("moriio.moriio_connector", "MoRIIOConnectorWorker")
    waits = "wait_for_layer_load" in vars(worker)
    assert waits == ((0, 28) <= RELEASE < (0, 33)), "for what the decode node reads, in mode READ"


def test_lmcache_loads_its_first_layers_before_a_step_and_the_others_in_its_hooks() -> None:
    """A stand-in takes LMCache's engine's place: it loads one layer each time that vLLM's connector advances it."""
    place = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration"
    folder = Path(inspect.getfile(connector("base", "KVConnectorBase_V1"))).parent / "lmcache_integration"
    imports = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module}
    package = {name: mock.MagicMock() for name in names | {"lmcache"} if name.split(".")[0] == "lmcache"}
    package["lmcache.utils"]._lmcache_nvtx_annotate = lambda function: function
    with mock.patch.dict(sys.modules, package):
        adapter = importlib.import_module(f"{place}.vllm_v1_adapter")
    layers, loaded = 4, []

    def retrieve_layer(*_: Any, **__: Any) -> Iterator[Any]:
        for layer in range(layers):
            loaded.append(layer)
            yield None
        yield None
        yield torch.ones(8)

    metadata = adapter.LMCacheConnectorMetadata()
    metadata.requests = [
        SimpleNamespace(
            load_spec=SimpleNamespace(vllm_cached_tokens=0, lmcache_cached_tokens=8, can_load=True),
            token_ids=[0] * 8,
            slot_mapping=SimpleNamespace(cuda=lambda: torch.arange(8)),
        )
    ]
    worker = object.__new__(adapter.LMCacheConnectorV1Impl)
    vars(worker).update(
        kv_caches={LAYER: torch.zeros(1)},
        _parent=SimpleNamespace(_get_connector_metadata=lambda: metadata),
        lmcache_engine=SimpleNamespace(post_init=lambda kvcaches: None, retrieve_layer=retrieve_layer),
        _stats_monitor=mock.MagicMock(),
        _lmcache_chunk_size=8,
        use_layerwise=True,
        enable_blending=False,
        layerwise_retrievers=[],
        num_layers=layers,
    )
    worker.start_load_kv(SimpleNamespace(attn_metadata={LAYER: "metadata"}))
    assert loaded == [0, 1], "all that a full graph's replay has"
    for worker.current_layer in range(layers):
        worker.wait_for_layer_load(LAYER)
    assert loaded == [0, 1, 2, 3]


@pytest.mark.skipif(RELEASE < (0, 33), reason="UMBP begins with 0.33.0")
def test_umbp_has_loaded_before_the_first_layer_where_loads_are_not_asynchronous() -> None:
    worker = SimpleNamespace(waits=[], _submit_loads=lambda request, plans: None)
    worker._drain_load_jobs = lambda *, wait: worker.waits.append(wait)
    load = connector("umbp.worker", "UMBPStoreConnectorWorker").start_load_kv
    for asynchronous in (True, False):
        load(worker, None, SimpleNamespace(async_load=asynchronous, load_requests={"first": ["plan"]}))
    assert worker.waits == [True], "that of asynchronous loads is the scheduler's matter"


# -- copies that nobody waits for, no matter of graphs (issues 45704 and 47282, PRs 46278, 48214 and 48901)


def test_up_to_0_25_a_step_of_unfinished_prompts_to_pool_ends_without_waiting_for_its_copies() -> None:
    """As in chunks of long prompts, without asynchronous scheduling, whose event is what else would wait."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(gpu_model_runner.GPUModelRunner._pool)))
    (nothing_finished,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("not any(finished_mask)")
    ]
    waits = "self._sync_device()" in map(ast.unparse, nothing_finished.body)
    assert waits == (RELEASE >= (0, 26))
    init = inspect.getsource(gpu_model_runner.GPUModelRunner.__init__)
    event = init.index("self.prepare_inputs_event = torch.")
    assert init.rindex("if self.use_async_scheduling:", 0, event) > init.index("self.prepare_inputs_event: ")


def test_stores_to_the_cpu_wait_for_the_step_from_0_24_and_loads_do_not() -> None:
    worker = module("vllm.v1.simple_kv_offload.worker")
    if worker is None:
        assert RELEASE < (0, 19)
        return
    launched: dict[bool, Any] = {}

    def launch_copy(*_: Any, is_store: bool, wait_event: Any = None, **__: Any) -> None:
        launched[is_store] = wait_event

    metadata = mock.MagicMock(load_cpu_blocks=[1], load_gpu_blocks=[2], store_gpu_blocks=[3], store_cpu_blocks=[4])
    offload = mock.MagicMock(
        _connector_metadata=metadata,
        _backend=SimpleNamespace(launch_copy=launch_copy),
        _store_compute_done=None,
        _store_submitted=False,  # 0.30.0
        _pending_load_event_indices=set(),
        _pending_store_event_indices=set(),
    )
    with cpu_cuda_graphs(), mock.patch.object(torch, "Event", CPUStream):
        worker.SimpleCPUOffloadWorker.start_load_kv(offload)
        worker.SimpleCPUOffloadWorker.wait_for_save(offload)
        worker.SimpleCPUOffloadWorker.get_finished(offload, set())
    assert {store: event is not None for store, event in launched.items()} == {False: False, True: RELEASE >= (0, 24)}


# -- pinned inputs of several pipeline stages (PR 47644)


class _EventStandIn:
    """Stands in for an event of CUDA."""

    def __init__(self, **_: object) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("waited")

    def record(self) -> None:
        self.calls.append("recorded")


def event_of_inputs(*, asynchronous: bool) -> Any:
    """Return the event that a model runner V1 has for its inputs, made by its constructor's own statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(gpu_model_runner.GPUModelRunner.__init__)))
    kinds = (ast.AnnAssign, ast.If)
    made: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, kinds) and "prepare_inputs_event" in ast.unparse(node)
    ]
    assert [type(node) for node in made] == list(kinds)
    runner = SimpleNamespace(use_async_scheduling=asynchronous)
    with (
        cpu_cuda_graphs(),
        mock.patch.object(torch, "Event", _EventStandIn),
        mock.patch.object(torch.cuda, "Event", _EventStandIn),
    ):
        names = vars(gpu_model_runner) | {"self": runner}
        exec(compile(ast.Module(made, []), "__init__", "exec"), names)  # noqa: S102 - vLLM's own code
    return runner.prepare_inputs_event


def inputs_prepared(event: Any) -> list[str]:
    calls = event.calls if event else []
    with gpu_model_runner.GPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)):
        calls.append("prepared")
    return calls


def test_pipeline_stages_write_pinned_inputs_without_a_wait_unless_scheduling_is_asynchronous() -> None:
    """Although several batches are in flight; the event would be waited for if it were there."""
    from vllm.config import VllmConfig
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    owner = VllmConfig if hasattr(VllmConfig, "max_concurrent_batches") else MultiprocExecutor
    batches = inspect.getattr_static(owner, "max_concurrent_batches")
    count = getattr(batches, "func", None) or batches.fget
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
    )
    assert count(config) == 2, "batches in flight"
    assert event_of_inputs(asynchronous=False) is None
    assert inputs_prepared(None) == ["prepared"]
    guarded = ["waited", "prepared", "recorded"]
    assert inputs_prepared(event_of_inputs(asynchronous=True)) == guarded
    assert inputs_prepared(_EventStandIn()) == guarded
