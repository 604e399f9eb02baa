"""Graphs of model runner V2 that an engine discards and captures anew while it serves (0.28.0 and later).

Real: `GPUModelRunner.capture_model`, its manager of graphs, FlashAttention's builder. Stand-ins: the model, the worker,
the rest of the runner; the CPU double of CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bypass import Engine
from vllm.forward_context import get_forward_context
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_graphfix import _this_process
from vllm_graphfix.engine.capture_hooks import CaptureHooks
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.decoding import MAX_REQUESTS, Step
from vllm_graphfix.verify.double.flash_attention import LAYER, flash_attention_stand_ins
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import RunnerV2StandIn
from vllm_graphfix.verify.double.unpinned import unpinned


class Weighted(torch.nn.Module):
    """Its output is the length of each request, by the attention metadata, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        lengths: torch.Tensor = get_forward_context().attn_metadata[LAYER].seq_lens
        return lengths[:, None].float() * self.weight


class Runner(GPUModelRunner):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Model runner V2 with what its `capture_model` reads."""

    def __init__(self, parts: Any, config: Any, manager: Any) -> None:
        vars(parts.block_tables).update(cp_rank=0, cp_interleave=1)
        self.__dict__.update(vars(parts), vllm_config=config, model=Weighted(), cudagraph_manager=manager)
        self.device = torch.device("cpu")
        self.model_state.capture_inner_cudagraphs = lambda *_: None
        self.kv_connector = SimpleNamespace(reset_capture_state=lambda: None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get_model(self) -> Any:
        return self.model


class Worker:
    def __init__(self, runner: Runner) -> None:
        self.model_runner, self.vllm_config, self.device = runner, runner.vllm_config, runner.device
        self.local_rank, self.use_v2_model_runner = 0, True

    def compile_or_warm_up_model(self) -> None:
        self.model_runner.capture_model()


GATE = _this_process().gate
CaptureHooks(GATE).watch_capture("Worker", "compile_or_warm_up_model", SimpleNamespace(Worker=Worker))


class Served:
    """An engine that has captured."""

    def __init__(self) -> None:
        engine = Engine()
        engine.config.parallel_config.pipeline_parallel_size = 1
        engine.config.model_config.enforce_eager = False
        self.parts, self.manager = engine.runner, engine.manager
        self.worker = Worker(Runner(engine.runner, engine.config, engine.manager))
        self.model = self.worker.model_runner.model
        self.worker.compile_or_warm_up_model()
        self.shadow: Any = process.SHADOW

    def step(self) -> list[float]:
        """Serve a step of three requests by the graph of all."""
        metadata, slots = self.parts.prepare(Step((5, 9, 3)), padded_requests=MAX_REQUESTS)
        ((descriptor,),) = self.manager._capture_descs.values()
        inputs = self.parts.model_inputs(descriptor.num_tokens)
        stand_in = RunnerV2StandIn(self.manager, self.model)
        output = stand_in.execute_model(metadata, slots, SimpleNamespace(num_tokens=3), inputs, descriptor)
        rows: list[float] = output.flatten().tolist()
        return rows[:3]

    def release(self) -> None:
        if hasattr(self.manager, "release_graphs"):  # 0.32.0 and later
            self.manager.release_graphs()
        else:
            self.manager.graphs.clear()
            self.manager._graphs_captured = False

    def move_weight(self, value: float) -> None:
        """Put the weight elsewhere, as a load of weights does that does not copy."""
        watch = _this_process().component("addresses").watch
        replaced = torch.nn.Parameter(torch.full((1,), value), requires_grad=False)
        watch.of_rank.around("reload_weights", True, lambda: setattr(self.model, "weight", replaced))


@pytest.fixture
def served() -> Iterator[Served]:
    streams = mock.patch.object(cudagraph_utils, "current_stream", CPUStream, create=True)
    with contextlib.ExitStack() as stack:
        for each in (cpu_cuda_graphs(), streams, unpinned(), flash_attention_stand_ins(3), torch.inference_mode()):
            stack.enter_context(each)
        for name, answer in (("empty_cache", None), ("get_memory_info", (1 << 30, 1 << 30))):
            stack.enter_context(mock.patch.object(torch.accelerator, name, lambda *_, answer=answer: answer))
        workspace.init_workspace_manager(torch.device("cpu"))
        stack.callback(workspace.reset_workspace_manager)
        _this_process().start()
        yield Served()


def moved() -> set[str]:
    return {each.name for each in _this_process().component("addresses").watch.moved()}


RIGHT = [5.0, 9.0, 3.0]


def test_a_worker_asks_the_gate_once_though_its_runner_captures(served: Served) -> None:
    served.release()
    with mock.patch.object(GATE, "before_capture", wraps=GATE.before_capture) as gate:
        served.worker.compile_or_warm_up_model()
    assert gate.call_count == 1


def test_a_capture_by_the_runner_alone_goes_through_the_gate_and_has_addresses_of_its_own(served: Served) -> None:
    served.move_weight(2.0)
    assert moved() == {"weight"}
    served.release()
    with mock.patch.object(GATE, "before_capture", wraps=GATE.before_capture) as gate:
        served.worker.model_runner.capture_model()
    assert gate.call_count == 1
    assert moved() == set()
    assert served.step() == [2 * each for each in RIGHT]
    served.move_weight(3.0)
    assert moved() == {"weight"}


def test_no_tensor_has_moved_under_graphs_that_are_gone(served: Served) -> None:
    served.release()
    served.move_weight(2.0)
    assert moved() == set()
    served.worker.model_runner.capture_model()
    served.move_weight(3.0)
    assert moved() == {"weight"}


def test_a_heartbeat_reports_nothing_under_graphs_that_are_gone(served: Served) -> None:
    served.release()
    served.model.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    for _ in range(3):
        _this_process().poll()
    assert moved() == set()
    served.worker.model_runner.capture_model()
    served.model.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    for _ in range(3):
        _this_process().poll()
    assert moved() == {"weight"}


def test_a_graph_in_quarantine_stays_there_when_it_is_captured_anew(served: Served) -> None:
    served.model.weight = torch.nn.Parameter(torch.full((1,), 2.0), requires_grad=False)  # the graph has the other one
    wrong = [served.step() for _ in range(3)]
    assert wrong == [RIGHT, RIGHT, [2 * each for each in RIGHT]]
    assert len(served.shadow.quarantined) == 1
    served.release()
    served.worker.model_runner.capture_model()
    before = served.shadow.results.checks
    assert served.step() == [2 * each for each in RIGHT]
    assert (len(served.shadow.quarantined), served.shadow.results.checks) == (1, before)
    served.shadow.quarantined.clear()


def test_graphs_that_were_captured_anew_are_checked_like_the_first(served: Served) -> None:
    assert served.step() == RIGHT
    served.release()
    served.worker.model_runner.capture_model()
    results, metadata = served.shadow.results, _this_process().component("metadata").check
    checks, mismatches = results.checks, results.mismatches
    compared = metadata.counts()["metadata"]
    assert served.step() == RIGHT
    assert metadata.counts()["metadata"] == compared | {"compared": compared["compared"] + 1}
    assert (results.checks, results.mismatches, served.shadow.stopped) == (checks + 1, mismatches, None)
    served.model.weight = torch.nn.Parameter(torch.full((1,), 2.0), requires_grad=False)
    served.step()
    assert results.mismatches == mismatches + 1
    assert _this_process().component("bypass").watch._pending, "calls before replays are watched again"


def test_a_field_of_metadata_that_graphs_of_a_later_capture_do_not_know_is_named(served: Served) -> None:
    served.release()
    served.worker.model_runner.capture_model()
    served.parts.input_buffers.seq_lens = served.parts.input_buffers.seq_lens.clone()  # elsewhere from now on
    served.step()
    findings = _this_process().component("metadata").check.findings()
    assert [each.field for each in findings] == ["FlashAttentionMetadata.seq_lens"]


def test_a_capture_of_a_runner_that_no_worker_serves_with_is_vllms_alone(served: Served) -> None:
    engine = Engine()
    other = Runner(engine.runner, engine.config, engine.manager)
    with mock.patch.object(GATE, "before_capture") as gate:
        other.capture_model()
    assert not gate.called
    assert len(engine.manager.graphs) == 1
