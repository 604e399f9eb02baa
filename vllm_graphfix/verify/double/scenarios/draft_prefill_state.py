"""draft-prefill-state (PR 44253): the draft's prefill graph is captured with states of the target's capture."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

install_flashmla_stand_ins()

from vllm.config.compilation import CUDAGraphMode  # noqa: E402 - FlashMLA is looked for when vLLM is imported
from vllm.forward_context import get_forward_context  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBuffers  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator  # noqa: E402

from vllm_graphfix.verify.double.decoding import (  # noqa: E402
    DEVICE,
    HIDDEN,
    MAX_REQUESTS,
    MAX_TOKENS,
    ModelStandIn,
    RunnerStandIn,
    Step,
    attention_without_a_plan,
    configuration,
    measure,
)

DRAFT_TOKENS = 1
QUERY_TOKENS = DRAFT_TOKENS + 1
SIZES = (2, 4, 8)
DUMMY = Step((QUERY_TOKENS,) * MAX_REQUESTS, QUERY_TOKENS)
"""Batch of the largest graph's warm-up."""
STEPS = tuple(
    Step(lengths, QUERY_TOKENS)
    for lengths in (
        (38,),
        (6, 43),
        (18, 4, 30),  # one padded request
        (20, 6, 31, 10),
    )
)
TARGET, DRAFT = "target.attention", "draft.attention"


def run(*, trigger: bool = True) -> Measurement:
    """Prefill the draft: in the largest graph's warm-up, then in each step without and after the target's graph.

    Without *trigger*, layers need no plan.
    """
    numbers = (
        f"draft prefill: warm-up, {len(STEPS)} steps of 1 to {MAX_REQUESTS} requests, without and after the target's"
    )
    with nullcontext() if trigger else attention_without_a_plan():
        return measure(numbers, _eager, _graphed, {"captured-state-reused": len(SIZES)})


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` as an Eagle speculator does, for the shadow check."""
    from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

    drafting = Drafting()
    with wrappers_on_the_double(), nullcontext() if trigger else attention_without_a_plan():
        target = _capture_target(drafting)
        for step in STEPS:
            descriptor = target.dispatch(len(step.lengths), step.num_tokens, QUERY_TOKENS)
            metadata, slots = drafting.prepare(step, descriptor.num_reqs)
            batch = SimpleNamespace(
                num_reqs=len(step.lengths),
                num_reqs_after_padding=descriptor.num_reqs,
                num_tokens_after_padding=descriptor.num_tokens,
            )
            propose(drafting.speculator, batch, metadata, slots, descriptor)


def propose(
    self: Any, input_batch: Any, attn_metadata: Any, slot_mappings: Any, desc: Any, *, dummy_run: bool = False
) -> None:
    """Stand in for the speculator's method that replays a draft prefill.

    The shadow check reads its local variables from the frame, so that they have vLLM's names.
    """
    num_reqs, num_tokens_across_dp, mm_inputs = input_batch.num_reqs, None, None
    self.prefill_cudagraph_manager.run_fullgraph(desc)
    del num_reqs, num_tokens_across_dp, mm_inputs


class Drafting:
    """A target and a draft model as vLLM's model runner and Eagle speculator hold them."""

    def __init__(self) -> None:
        config = configuration(CUDAGraphMode.FULL_DECODE_ONLY, SIZES, DRAFT_TOKENS)
        self.runner = RunnerStandIn(config, [TARGET, DRAFT])
        self.target, self.draft = ModelStandIn([TARGET]), ModelStandIn([DRAFT], seed=1)
        speculator: Any = object.__new__(EagleSpeculator)  # its __init__ reads the configuration of a real draft model
        vars(speculator).update(self.runner.capture_inputs())
        vars(speculator).update(
            vllm_config=config,
            device=DEVICE,
            method="mtp",
            num_speculative_steps=DRAFT_TOKENS,
            max_num_reqs=MAX_REQUESTS,
            max_num_tokens=MAX_TOKENS,
            draft_attn_layer_names={DRAFT},
            supports_mm_inputs=False,
            model=self.draft,
            draft_logits=None,
            input_buffers=InputBuffers(max_num_reqs=MAX_REQUESTS, max_num_tokens=MAX_TOKENS, device=DEVICE),
            hidden_states=torch.zeros(MAX_TOKENS, HIDDEN),
            idx_mapping=torch.zeros(MAX_REQUESTS, dtype=torch.int32),
            last_token_indices=torch.zeros(MAX_REQUESTS, dtype=torch.int64),
            draft_tokens=torch.zeros(MAX_REQUESTS, DRAFT_TOKENS, dtype=torch.int64),
            current_draft_step=torch.tensor(0),
        )
        self.speculator = speculator

    def prepare(self, step: Step, padded_requests: int | None = None) -> tuple[Any, Any]:
        """Write what model runner and speculator write before a draft prefill, after an eager run of the target."""
        target_states = self.runner.run_eagerly(self.target, step)
        prepared = self.runner.prepare(step, padded_requests)
        tokens, requests, speculator = step.num_tokens, len(step.lengths), self.speculator
        speculator.hidden_states[:tokens] = target_states
        speculator.input_buffers.input_ids[:tokens] = self.runner.input_buffers.input_ids[:tokens]
        speculator.input_buffers.positions[:tokens] = self.runner.input_buffers.positions[:tokens]
        speculator.last_token_indices.zero_()
        speculator.last_token_indices[:requests] = torch.arange(1, requests + 1) * step.query_tokens - 1
        return prepared

    def outputs(self, step: Step) -> list[torch.Tensor]:
        requests = len(step.lengths)
        return [self.speculator.hidden_states[:requests].clone(), self.speculator.draft_tokens[:requests, 0].clone()]


def _eager() -> list[torch.Tensor]:
    drafting = Drafting()
    speculator = drafting.speculator
    # The dummy batch is all zeros. Its first request alone has this length in every capture.
    metadata, slot_mappings = drafting.runner.prepare(DUMMY)
    states, _ = speculator.run_model(DUMMY.num_tokens, metadata, slot_mappings, None)
    outputs = [states[:QUERY_TOKENS].clone()]
    for step in STEPS:
        metadata, slot_mappings = drafting.prepare(step)
        speculator.prefill(len(step.lengths), step.num_tokens, metadata, slot_mappings, None)
        outputs += drafting.outputs(step) * 2
    return outputs


def _graphed() -> list[torch.Tensor]:
    drafting = Drafting()
    speculator = drafting.speculator
    warm_ups = _ExecutedOutputs(drafting.draft)
    with cpu_cuda_graphs():
        target = _capture_target(drafting)
        outputs = [warm_ups.outputs[0][:QUERY_TOKENS]]
        for step in STEPS:
            for target_replays in (False, True):
                descriptor = target.dispatch(len(step.lengths), step.num_tokens, QUERY_TOKENS)
                drafting.prepare(step, descriptor.num_reqs)
                if target_replays:
                    target.run_fullgraph(descriptor)
                speculator.prefill_cudagraph_manager.run_fullgraph(descriptor)
                outputs += drafting.outputs(step)
    return outputs


def _capture_target(drafting: Drafting) -> Any:
    """Capture the target's graphs, then the speculator's. Returns the manager of the former."""
    runner, speculator = drafting.runner, drafting.speculator
    mode = runner.config.compilation_config.cudagraph_mode
    target: Any = ModelCudaGraphManager(runner.config, DEVICE, mode, QUERY_TOKENS)
    speculator.init_cudagraph_manager(target.cudagraph_mode)
    states = target.capture(model=drafting.target, intermediate_tensors=None, **runner.capture_inputs())
    speculator.capture(states)
    return target


class _ExecutedOutputs:
    """Collects the outputs of *model* with attention whose operations were executed, not recorded."""

    def __init__(self, model: ModelStandIn) -> None:
        self.outputs: list[torch.Tensor] = []
        model.register_forward_hook(self)

    def __call__(self, model: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        if not torch.cuda.is_current_stream_capturing() and get_forward_context().attn_metadata is not None:
            self.outputs.append(output.clone())
