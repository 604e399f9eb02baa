"""The shadow check on RoBERTa models, whose padded positions grow from step to step on stock until they end the engine.

Such models pool, and run in pieces alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, override_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
from vllm_graphfix.verify.trials import roberta_positions as trial

_MAX_STEPS = 20


class Served:
    """A RoBERTa model in vLLM's model runner, with batches of six tokens in graphs of eight."""

    def __init__(self, rate: Rate) -> None:
        process.start(rate, Action.REPORT, pieces=True)
        self.shadow: Any = process.SHADOW
        self.runner = trial._runner()
        self.runner.model = trial._model("RobertaEmbeddingModel")
        self.runner.vllm_config = self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={}, fast_moe_cold_start=False, static_all_moe_layers=[]
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(),
            use_cumem_cudagraph_pool=False,
        )
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
            self._forward(trial.GRAPH_SIZE, mode, None)  # a warm-up, and the capture
        self.steps = 0
        if self.shadow is not None:
            self.shadow.memory.measuring = False
            self.shadow.schedule.count, self.shadow.schedule.due = 0, 1

    def _forward(self, tokens: int, mode: CUDAGraphMode, metadata: Any) -> torch.Tensor:
        scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
        input_ids, embeddings, positions, *_ = self.runner._preprocess(scheduled, trial.GRAPH_SIZE)
        context = create_forward_context(
            metadata,
            self.config,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(trial.GRAPH_SIZE),
            slot_mapping={},
        )
        with override_forward_context(context):
            output: torch.Tensor = GPUModelRunner._model_forward(
                self.runner, input_ids=input_ids, positions=positions, inputs_embeds=embeddings
            )
        return output

    def step(self) -> torch.Tensor | None:
        """Return the rows of requests; None if an index was out of bounds, which ends an engine."""
        tokens = sum(trial.SHORT)
        trial._prepare(self.runner, trial.SHORT, self.steps)
        self.steps += 1
        metadata = SimpleNamespace(query_start_loc=torch.tensor([0, trial.SHORT[0], tokens]))
        try:
            return self._forward(tokens, CUDAGraphMode.PIECEWISE, {"encoder.layer.0.attention": metadata})[:tokens]
        except IndexError:
            return None


def test_positions_that_grow_are_no_mismatch_and_grow_no_faster_for_a_check() -> None:
    """Runs with and without the graph have the same positions, and rows of requests are right up to the end."""
    with wrappers_on_the_double():
        unwatched = Served(Rate())
        expected = [unwatched.step() for _ in range(_MAX_STEPS)]
        served = Served(Rate(every=1))
        actual = [served.step() for _ in range(_MAX_STEPS)]
    process.start(Rate(), Action.REPORT)
    alive = [each for each in expected if each is not None]
    assert 0 < len(alive) < _MAX_STEPS
    assert [each is not None for each in actual] == [each is not None for each in expected]
    assert all(map(torch.equal, actual, alive))  # type: ignore[arg-type]
    results = served.shadow.results
    assert (results.checks, results.mismatches, served.shadow.stopped) == (len(alive), 0, None)
