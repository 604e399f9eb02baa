"""adaptive-schedule: decodes with DSpark's adaptive verification in full graphs, on FlashAttention 3.

Real: model runner V2's `prepare_inputs` (its kernels on the CPU) with the cut of drafts, the dummy batch of a capture,
the model state that builds metadata of both, FlashAttention's builder and layer, and the descriptors of graphs.
Stand-ins: FlashAttention's kernel and its scheduler, the drafter, and the choice of how many drafts to verify.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import cudagraph_utils, input_batch, model_runner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.flash_attention import (
    BLOCK_SIZE,
    BLOCKS,
    LAYER,
    attention_layer,
    flash_attention_stand_ins,
    metadata_builder,
)
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import BareGraphs, ManagedGraphs, wrappers_on_the_double
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement

REQUESTS, DRAFTS, TOKENS = 3, 2, 9
"""Requests of the one graph, most drafts of a request, and tokens of the graph."""
Step = tuple[Sequence[int], int]
"""Drafts of each request, and the number of all of them that is verified."""
STEPS: tuple[Step, ...] = (((1, 1, 0), 2), ((2, 2, 2), 6), ((0, 0, 0), 0), ((1, 1, 1), 1), ((2, 1, 0), 3))
"""In three of these no request has the most drafts: some have fewer, or none have any, or the drafts were cut."""
WHOLE: tuple[Step, ...] = (((2, 2, 2), 6), ((2, 1, 0), 3), ((2, 2, 1), 2))
"""In each of these a request has the most drafts, or had them before they were cut."""
CPU = torch.device("cpu")


def run(*, trigger: bool = True) -> Measurement:
    """Serve steps with few drafts in a graph for all. Without *trigger*, some request has the most drafts."""
    steps = STEPS if trigger else WHOLE
    eager = _serve(steps, captured=False)
    with cpu_cuda_graphs():
        graphed = _serve(steps, captured=True)
    shorter = sum(max(drafts) < DRAFTS for drafts, _ in steps)
    return Measurement(
        f"attention of {REQUESTS} requests in {len(steps)} steps of a graph for up to {1 + DRAFTS} tokens of each",
        tuple(eager),
        tuple(graphed),
        counted={"schedule-of-a-shorter-step": shorter},
    )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's manager of graphs, for the shadow check."""
    with wrappers_on_the_double():
        _serve(STEPS if trigger else WHOLE, captured=True, wrapped=True)


def _serve(steps: Sequence[Step], *, captured: bool, wrapped: bool = False) -> list[float]:
    """Return the attention output of each step's tokens."""
    random = torch.Generator().manual_seed(0)
    with prepared_on_the_cpu():
        runner = RunnerStandIn()
        layer, inputs, forward = attention_layer(REQUESTS, TOKENS, random)
        graphs: Any = ManagedGraphs(LAYER, layer, forward, BLOCK_SIZE, 1 + DRAFTS) if wrapped else BareGraphs(forward)
        if captured:
            graphs.capture(TOKENS, runner.capture())
        numbers: list[float] = []
        for drafts, verified in steps:
            tokens = REQUESTS + verified
            for tensor in inputs:
                tensor[:tokens] = torch.randn(tokens, *tensor.shape[1:], generator=random)
            metadata = runner.metadata(runner.prepare(drafts, verified, in_a_graph=captured), in_a_graph=captured)
            output = graphs.replay(TOKENS, metadata, tokens) if captured else forward(metadata)
            numbers += output[:tokens].flatten().tolist()
    return numbers


@contextlib.contextmanager
def prepared_on_the_cpu() -> Iterator[None]:
    """Prepare steps on a CPU within the block: kernels on the CPU, no pinned memory, no compiler."""
    with contextlib.ExitStack() as stack:
        for each in (cpu_triton_kernels(input_batch), unpinned(), flash_attention_stand_ins(3)):
            stack.enter_context(each)
        for module in (model_runner, adaptive_verification):
            if hasattr(module, "async_copy_to_gpu"):  # up to 0.28
                stack.enter_context(mock.patch.object(module, "async_copy_to_gpu", _copied))
        plain = adaptive_verification._assign_draft_token_budget
        stack.enter_context(mock.patch.object(adaptive_verification, "_assign_draft_token_budget_compiled", plain))
        yield


def _copied(data: Any, out: torch.Tensor | None = None, device: Any = None) -> torch.Tensor:
    """Stand in for a copy by way of pinned memory."""
    data = torch.as_tensor(data)
    return data.clone() if out is None else out.copy_(data)


class RunnerStandIn:
    """vLLM's model runner V2 with what prepares a step of decodes and its metadata, and nothing else."""

    def __init__(self) -> None:
        self.buffers = input_batch.InputBuffers(REQUESTS, TOKENS, CPU)
        self._computed = torch.arange(5, 5 + 4 * REQUESTS, 4, dtype=torch.int32)
        states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=self._computed),
            num_computed_tokens_np=self._computed.numpy(),
            prefill_len=SimpleNamespace(gpu=torch.full((REQUESTS,), 2, dtype=torch.int32)),
            last_sampled_tokens=torch.ones(REQUESTS, 1, dtype=torch.int64),
            draft_tokens=torch.ones(REQUESTS, DRAFTS, dtype=torch.int64),
            num_speculative_steps=DRAFTS,
            device=CPU,
        )
        self.verification: Any = object.__new__(adaptive_verification.AdaptiveVerificationManager)
        vars(self.verification).update(
            req_states=states,
            num_speculative_steps=DRAFTS,
            num_bonus_tokens=1,
            query_start_loc=self.buffers.query_start_loc,
            _copy_admitted_drafts_to_host=False,
            _batch_draft_capacity=torch.zeros(REQUESTS, dtype=torch.int32),
            _num_non_draft_tokens=torch.zeros(REQUESTS, dtype=torch.int32),
            _cu_num_logits=torch.zeros(REQUESTS + 1, dtype=torch.int32),
            _confidence_probs=torch.full((REQUESTS, DRAFTS), 0.5),
        )
        self.runner: Any = object.__new__(model_runner.GPUModelRunner)
        vars(self.runner).update(
            input_buffers=self.buffers,
            device=CPU,
            max_num_reqs=REQUESTS,
            req_states=states,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            adaptive_verification=self.verification,
            decode_query_len=1 + DRAFTS,
            model_config=SimpleNamespace(rswa_window=None),
            pcp_manager=None,
            fast_prefill=None,
            use_dcp=False,
            use_pp=False,
        )
        self._table = torch.arange(REQUESTS * BLOCKS, dtype=torch.int32).view(REQUESTS, BLOCKS)
        spec = SimpleNamespace(block_size=BLOCK_SIZE)
        self._groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)])
        self._state: Any = object.__new__(DefaultModelState)
        length = BLOCKS * BLOCK_SIZE
        vars(self._state).update(model_config=SimpleNamespace(max_model_len=length), supports_mm_inputs=False)
        if not hasattr(DefaultModelState, "max_model_len"):  # the configuration's, later on
            self._state.max_model_len = length
        self._attention = AttentionGroup(flash_attn.FlashAttentionBackend, [LAYER], spec, 0)
        self._attention.metadata_builders = [metadata_builder(CUDAGraphMode.FULL_DECODE_ONLY, REQUESTS, [TOKENS])]

    def capture(self) -> Any:
        """Return the metadata of a capture."""
        batch = input_batch.InputBatch.make_dummy(REQUESTS, TOKENS, self.buffers, max_query_len=1 + DRAFTS)
        return self.metadata(batch, in_a_graph=True, captures=True)

    def prepare(self, drafts: Sequence[int], verified: int, *, in_a_graph: bool, **described: Any) -> Any:
        """Return the batch of a step in which requests have *drafts*, *verified* of all of which are verified."""
        names, per_request = [f"request {row}" for row in range(REQUESTS)], np.array(drafts, dtype=np.int32)
        descriptor = described_graph(**described) if in_a_graph else eager_step(REQUESTS + verified)
        scheduled = {name: [1] * count for name, count in zip(names, drafts, strict=True) if count}
        self.verification._batch_budget = (
            dict(zip(names, drafts, strict=True)),
            dict.fromkeys(names, 1),
            verified,
        )
        values = {
            "req_ids": names,
            "num_scheduled_tokens": 1 + per_request,
            "num_tokens": REQUESTS + verified,
            "num_draft_tokens_np": per_request if scheduled else None,
            "idx_mapping_np": np.arange(REQUESTS, dtype=np.intp),
            "prefill_len_np": np.full(REQUESTS, 2, dtype=np.int32),
            "num_computed_prefill_tokens_np": np.full(REQUESTS, 2, dtype=np.int32),
            "is_prefilling_np": np.zeros(REQUESTS, dtype=bool),
            "max_seq_len_np": None,
            "has_prefill": False,
            "prefill_runs_as_decode_np": None,
            "decode_graph_eligible": True,
        }
        state = model_runner.BatchReqState(**supported_kwargs(model_runner.BatchReqState, values))
        output: Any = SimpleNamespace(scheduled_spec_decode_tokens=scheduled, has_structured_output_requests=False)
        rest = supported_kwargs(self.runner.prepare_inputs, {"num_active_loras": 0})
        return self.runner.prepare_inputs(output, state, descriptor, **rest)

    def metadata(self, batch: Any, *, in_a_graph: bool, captures: bool = False) -> Any:
        """Return the layer's metadata for *batch*."""
        made = self._state.prepare_attn(
            batch,
            CUDAGraphMode.FULL if in_a_graph else CUDAGraphMode.NONE,
            (self._table,),
            torch.zeros(1, TOKENS, dtype=torch.int64),
            [[self._attention]],
            self._groups,
            for_capture=captures,
        )
        return made[LAYER]


def described_graph(mode: Any = CUDAGraphMode.FULL, longest: int | None = 1 + DRAFTS) -> Any:
    """Return the descriptor of the graph for all steps, or of another one."""
    return cudagraph_utils.BatchExecutionDescriptor(
        cg_mode=mode, num_tokens=TOKENS, num_reqs=REQUESTS, max_query_len=longest
    )


def eager_step(tokens: int) -> Any:
    """Return the descriptor of a step without a graph."""
    return cudagraph_utils.BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=tokens, num_reqs=REQUESTS)
