"""The shadow check on vLLM's own `ModelCudaGraphManager` and forward context; graphs are the CPU double's.

Stand-ins: the model, its metadata and the configuration, as in `wrapped_model`; and `execute_model`, with the variables
that vLLM's has in every release (`tests/test_shadow.py` looks there).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from wrapped_model import CAPTURED, EVERY_STEP, WIDTH, MetadataStandIn, ModelStandIn

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import RunnerV2StandIn


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = process.SHADOW
    with cpu_cuda_graphs(), torch.inference_mode():
        yield
    process.SHADOW, process.REFUSED = before, None


class Served:
    """A model whose full graph vLLM's manager has, with the buffers of a model runner; one token a request."""

    def __init__(
        self, rate: Rate = EVERY_STEP, action: Action = Action.REPORT, *, stale: bool = False, **config: Any
    ) -> None:
        self.shadow: Any = Shadow(rate, action, process.refuse) if rate else None
        self.model, self.stale, self.steps = ModelStandIn(), stale, 0
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=self.model.layers,
                fast_moe_cold_start=False,
                static_all_moe_layers=[],
                ir_enable_torch_wrap=False,
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1, is_moe_model=False, use_sequence_parallel_moe=False),
            cache_config=SimpleNamespace(),
            kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(set_priority=contextlib.nullcontext)),
        )
        vars(self.config).update(config)
        self.hidden = torch.zeros(CAPTURED, WIDTH)
        self.slots, self.rows = torch.full((CAPTURED,), -1), torch.zeros(CAPTURED, dtype=torch.int32)
        self.scale, self.generator = torch.ones(1), torch.Generator().manual_seed(0)
        self.desc = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=CAPTURED, num_reqs=CAPTURED)
        self.manager: Any = object.__new__(ModelCudaGraphManager)
        graph: Any = torch.cuda.CUDAGraph()
        vars(self.manager).update(
            vllm_config=self.config,
            graphs={self.desc: graph},
            hidden_states=torch.zeros(CAPTURED, WIDTH),
            aux_hidden_states=[],
            use_aux_hidden_state_outputs=False,
            is_last_pp_rank=True,
        )
        with torch.cuda.graph(graph), set_forward_context(self.metadata(), self.config, slot_mapping=self.by_layer()):
            self.manager.hidden_states[:] = self.model(self.hidden)
        self.model.eager_runs = 0
        if self.shadow:
            self.shadow.schedule.due = 1

    def metadata(self) -> dict[str, Any]:
        return dict.fromkeys(
            self.model.layers, MetadataStandIn(self.rows, self.scale, torch.ones(CAPTURED, 2, dtype=torch.int32))
        )

    def by_layer(self) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.model.layers, self.slots)

    def step(self, requests: int = 3, *, dummy_run: bool = False) -> torch.Tensor:
        self.steps += 1
        self.hidden[:requests] = torch.randn(requests, WIDTH, generator=self.generator)
        self.hidden[requests:] = float("nan")
        self.slots.fill_(-1)[:requests] = torch.arange(requests) * 4 + 4 + self.steps % 4
        self.rows.fill_(0)[:requests] = torch.arange(1, 1 + requests)
        if self.stale:
            self.scale = torch.full((1,), 1.0 + self.steps)
        else:
            self.scale.fill_(1.0 + self.steps)
        process.SHADOW = self.shadow
        runner, batch = RunnerV2StandIn(self.manager, self.model), SimpleNamespace(num_tokens=requests)
        output: torch.Tensor = runner.execute_model(
            self.metadata(), self.by_layer(), batch, {"hidden": self.hidden}, self.desc, dummy_run
        )
        return output[:requests].clone()

    def caches(self) -> list[torch.Tensor]:
        return [layer.kv_cache[0][1:].clone() for layer in self.model.layers.values()]


def test_a_right_graph_serves_the_same_bits_with_and_without_the_check() -> None:
    unwatched, served = Served(Rate()), Served()
    for requests in (3, 4, 1, 3, 2):
        assert torch.equal(served.step(requests), unwatched.step(requests))
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    results = served.shadow.results
    assert (results.checks, results.mismatches, results.noise, served.shadow.stopped) == (5, 0, 0.0, None)


def test_a_stale_graph_is_a_mismatch_and_quarantine_corrects_its_steps() -> None:
    right, served = Served(Rate()), Served(action=Action.QUARANTINE, stale=True)
    for _ in range(2):
        served.step(), right.step()
    first, second = served.shadow.results.first_mismatches
    assert (first.rows, len(first.errors), first.graph.rows) == (3, 3, CAPTURED)
    assert "BatchExecutionDescriptor(" in first.graph.name
    assert second.first_layer == "layer.1"
    for mine, correct in zip(served.model.layers.values(), right.model.layers.values(), strict=True):
        mine.kv_cache[0].copy_(correct.kv_cache[0])
    for _ in range(3):
        assert torch.equal(served.step(), right.step())


def test_a_moved_weight_is_a_mismatch_and_one_written_in_place_is_none() -> None:
    served = Served()
    layer = served.model.layers["layer.0"]
    served.step()
    layer.weight.fill_(2.0)
    served.step()
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (2, 0)
    layer.weight = torch.full((1,), 3.0)  # the graph goes on with the other one
    served.step()
    assert (served.shadow.results.checks, served.shadow.results.mismatches) == (3, 1)


def test_dummy_batches_and_other_callers_are_not_checked() -> None:
    served = Served()
    served.step(dummy_run=True)
    process.SHADOW = served.shadow
    served.manager.run_fullgraph(served.desc)
    assert (served.shadow.results.checks, served.shadow.stopped) == (0, None)
    served.step()
    assert served.shadow.results.checks == 1


def test_in_a_pipeline_each_replay_of_the_target_model_is_a_step() -> None:
    served = Served()
    assert served.shadow.schedule.restart(drafts=True) == 1
    for step in range(1, 4):
        served.step(dummy_run=step == 2)
        assert served.shadow.schedule.step == step
    assert (served.shadow.results.checks, served.shadow.stopped) == (2, None)


def test_an_engine_whose_steps_cannot_run_twice_is_refused_and_serves() -> None:
    unwatched = Served(Rate())
    served = Served(attention_config=SimpleNamespace(hisparse_config=SimpleNamespace()))
    assert torch.equal(served.step(), unwatched.step())
    assert "HiSparse" in (process.REFUSED or "")
    assert served.shadow.results.checks == 0


def test_a_failing_eager_run_turns_the_check_off_and_serving_goes_on() -> None:
    unwatched, served = Served(Rate()), Served()
    served.model.breaks_at = 1
    for _ in range(3):
        assert torch.equal(served.step(), unwatched.step())
        assert all(map(torch.equal, served.caches(), unwatched.caches()))
    assert served.shadow.stopped == "RuntimeError: planted"


def test_an_engine_with_a_kv_connector_is_checked() -> None:
    served = Served(kv_transfer_config=SimpleNamespace())
    served.step()
    assert (served.shadow.results.checks, process.REFUSED) == (1, None)
