"""prompt-logprobs (PR 53520): a drafter's graph overwrites the target's hidden states.

That happens before a prompt is scored from them. Three requests, two of which ask for log-probabilities of their
prompts: one prompt in a single step, one in two chunks. In each step the target runs, vLLM samples, drafts and does its
bookkeeping; target and drafter have graphs that share one pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, override_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from vllm_graphfix.verify.double import graph
from vllm_graphfix.verify.double.arguments import cached_request, input_batch, supported_kwargs
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement

CAPTURE_SIZES = (8, 16)
MAX_REQUESTS = 4
MAX_TOKENS = 32
MAX_MODEL_LEN = 64
HIDDEN_SIZE = 8
VOCABULARY = 32
DRAFT_TOKENS = 2
CPU = torch.device("cpu")

PROMPTS = {"scored": 5, "plain": 3, "chunked": 7}
SCORED = ("scored", "chunked")
STEPS: list[dict[str, int]] = [{"scored": 5, "plain": 3, "chunked": 4}, {"scored": 1, "plain": 1, "chunked": 3}]
"""Tokens that the scheduler gives to each request, step by step."""


def run(*, trigger: bool = True) -> Measurement:
    """Score prompts with a drafter. Without *trigger*, the drafter runs after the bookkeeping."""
    numbers = "log-probabilities of the 10 scored tokens of 2 prompts, with the best token's"
    with one_memory():
        eager, graphed = (
            _serve(mode, disable_padded_drafter_batch=not trigger) for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL)
        )
    counted = {"prompt-logprobs-after-draft": len(STEPS)}  # each step scores a prompt
    return Measurement(numbers, tuple(eager), tuple(graphed), counted=counted)


class PoolStandIn:
    """Stands in for the memory of CUDA's graph pool, which later graphs reuse once an output is released.

    The double gives every tensor of a graph its own memory. vLLM refers to a graph's output by its address alone
    (`weak_ref_tensors`), so that the pool reuses that memory for the next graph's tensor of the same size.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._allocate = graph._unwritten_like

    def release(self, output: torch.Tensor) -> torch.Tensor:
        """Release *output*, in place of `weak_ref_tensors`, whose kernel needs CUDA."""
        if all(output.data_ptr() != free.data_ptr() for free in self._free):
            self._free.append(output)
        return output

    def allocate(self, layout: Any) -> Any:
        """Return released memory of that layout if there is some, in place of the double's new memory."""
        for number, free in enumerate(self._free if isinstance(layout, graph.Layout) else ()):
            if (free.shape, free.dtype) == (layout.shape, layout.dtype):
                return graph.fill_as_unwritten_(self._free.pop(number))
        return self._allocate(layout)


@contextmanager
def one_memory() -> Iterator[None]:
    """Put all graphs, the double's, in one pool within the block, and run vLLM's compiled ranking as Python."""
    pool = PoolStandIn()
    with (
        unpinned(),
        cpu_cuda_graphs(),
        mock.patch.object(graph, "_unwritten_like", pool.allocate),
        mock.patch.object(cuda_graph, "weak_ref_tensors", pool.release),
        mock.patch.object(cuda_graph, "current_stream", CPUStream),
        mock.patch.object(torch, "Event", CPUStream),  # of outputs with asynchronous scheduling
        torch.compiler.set_stance("force_eager"),
    ):
        yield


class ModelStandIn:
    """Stands in for a target or draft model: two layers of random weights on persistent inputs."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self._embedding = torch.randn(VOCABULARY, HIDDEN_SIZE, generator=random)
        self._mix = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=random)
        self._head = torch.randn(HIDDEN_SIZE, VOCABULARY, generator=random)

    def __call__(self, num_tokens: int) -> torch.Tensor:
        """Return the hidden states, (tokens, hidden size)."""
        embedded = self._embedding[self.input_ids[:num_tokens]]
        return torch.tanh(embedded @ self._mix)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self._head


class Graphed:
    """A model in vLLM's own `CUDAGraphWrapper`, as the model runner and the drafter dispatch it."""

    def __init__(self, model: ModelStandIn, mode: CUDAGraphMode) -> None:
        self.model, self._mode = model, mode
        config = SimpleNamespace(compilation_config=SimpleNamespace(), use_cumem_cudagraph_pool=False)
        full = mode != CUDAGraphMode.NONE
        self._run = cuda_graph.CUDAGraphWrapper(model, config, CUDAGraphMode.FULL) if full else model

    def __call__(self, num_tokens: int, mode: CUDAGraphMode | None = None) -> torch.Tensor:
        """Return hidden states, padded to a capture size that fits; *mode* is for a step without a graph."""
        padded = min((size for size in CAPTURE_SIZES if size >= num_tokens), default=num_tokens)
        mode = self._mode if mode is None and num_tokens <= max(CAPTURE_SIZES) else CUDAGraphMode.NONE
        context: Any = SimpleNamespace(batch_descriptor=BatchDescriptor(padded), cudagraph_runtime_mode=mode)
        with override_forward_context(context):
            hidden_states: torch.Tensor = self._run(padded)
        return hidden_states

    def capture(self) -> None:
        for size in reversed(CAPTURE_SIZES):
            self(size)


class DrafterStandIn(gpu_model_runner.EagleProposer):  # type: ignore[misc]  # vLLM is a peer
    """Stands in for an EagleProposer, whose kernels need a GPU.

    The draft model runs on the target's tokens, in its graph.
    """

    supports_mm_inputs = False

    def __init__(self, model: Graphed) -> None:
        self.graphed = model
        self.seen: list[torch.Tensor] = []
        """Hidden states of the target at each draft."""
        self.dummy_runs = 0

    def prepare_next_token_ids_padded(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled = next(each for each in args if isinstance(each, torch.Tensor))
        return sampled[:, 0], torch.ones(len(sampled), dtype=torch.int32)

    def prepare_next_token_ids_cpu(self, sampled_token_ids: list[list[int]], *args: Any) -> torch.Tensor:
        return torch.tensor([tokens[0] if tokens else 0 for tokens in sampled_token_ids])

    def propose(
        self, target_token_ids: torch.Tensor, target_hidden_states: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        self.seen.append(target_hidden_states.clone())
        self.graphed.model.input_ids[: len(target_token_ids)] = target_token_ids
        drafted = self.graphed.model.compute_logits(self.graphed(len(target_token_ids)))
        return drafted[: len(arguments["next_token_ids"])].argmax(-1, keepdim=True).repeat(1, DRAFT_TOKENS).int()

    def take_last_draft_probs(self) -> None:
        """Return None, for the target samples greedily."""

    def dummy_run(self, num_tokens: int, **_: Any) -> None:
        self.dummy_runs += 1
        self.graphed(num_tokens)


def _serve(mode: CUDAGraphMode, **speculation: Any) -> list[float]:
    """Return the log-probabilities of the scored prompts, one request after the other."""
    runner = make_runner(mode, **speculation)
    scored: dict[str, Any] = {}
    for scheduled in STEPS:
        scored.update(step(runner, scheduled).prompt_logprobs_dict)
    return [number for name in SCORED for number in scored[name].logprobs.flatten().tolist()]


class Speculation(SimpleNamespace):
    """Stands in for a SpeculativeConfig."""

    method = "eagle"
    disable_padded_drafter_batch = False
    num_speculative_tokens = DRAFT_TOKENS

    def use_eagle(self) -> bool:
        return self.method == "eagle"

    def uses_draft_model(self) -> bool:
        return self.method == "draft_model"

    def uses_extract_hidden_states(self) -> bool:
        return self.method == "extract_hidden_states"

    def use_ngram_gpu(self) -> bool:
        return self.method == "ngram_gpu"

    def use_dflash(self) -> bool:
        return self.method == "dflash"


def make_runner(mode: CUDAGraphMode, asynchronous: bool = False, **speculation: Any) -> Any:
    """Return a GPUModelRunner with what `sample_tokens` reads, with captured graphs and an empty batch."""
    runner: Any = object.__new__(GPUModelRunner)
    runner.target, runner.draft = (Graphed(ModelStandIn(seed), mode) for seed in (1, 2))
    if mode != CUDAGraphMode.NONE:
        for size in reversed(CAPTURE_SIZES):  # in vLLM's order: the drafter's right after the target's of the same size
            runner.target(size)
            runner.draft(size)
    runner.model, runner.drafter = runner.target.model, DrafterStandIn(runner.draft)
    runner.get_model = lambda: runner.model
    runner.sampler = Sampler()
    runner.input_batch = input_batch(MAX_REQUESTS, MAX_MODEL_LEN, MAX_TOKENS, [MAX_MODEL_LEN], CPU, VOCABULARY)
    runner.requests, runner.num_prompt_logprobs = {}, {}
    runner.computed = dict.fromkeys(PROMPTS, 0)
    runner.speculative_config = Speculation(**speculation)
    runner.compilation_config = SimpleNamespace(
        cudagraph_mode=mode, max_cudagraph_capture_size=max(CAPTURE_SIZES) if mode != CUDAGraphMode.NONE else 0
    )
    runner.model_config = SimpleNamespace(
        is_hybrid=False, logprobs_mode="raw_logprobs", enable_return_routed_experts=False
    )
    runner.parallel_config = SimpleNamespace(enable_eplb=False, data_parallel_size=1)
    runner.device, runner.max_model_len = CPU, MAX_MODEL_LEN
    runner.effective_drafter_max_model_len, runner.num_spec_tokens = MAX_MODEL_LEN, DRAFT_TOKENS
    runner.use_async_scheduling = asynchronous
    runner.async_output_copy_stream = CPUStream()
    runner.valid_sampled_token_count_event = CPUStream() if asynchronous else None
    runner.valid_sampled_token_count_copy_stream = CPUStream()
    runner.valid_sampled_token_count_cpu = torch.zeros(MAX_REQUESTS, dtype=torch.int32)
    runner.draft_token_ids_event, runner.draft_token_ids_copy_stream = CPUStream(), CPUStream()
    runner.draft_token_ids_cpu = torch.zeros(MAX_REQUESTS, DRAFT_TOKENS, dtype=torch.int32)
    runner.sampled_token_ids_pinned_cpu = torch.zeros(MAX_REQUESTS, 1, dtype=torch.int32)
    runner.transfer_event = CPUStream()
    unpinned = supported_kwargs(CpuGpuBuffer, {"device": CPU, "pin_memory": False})
    runner.discard_request_mask = CpuGpuBuffer(MAX_REQUESTS, dtype=torch.bool, **unpinned)
    runner.query_start_loc = CpuGpuBuffer(MAX_REQUESTS + 1, dtype=torch.int32, **unpinned)
    runner.input_ids = SimpleNamespace(gpu=runner.model.input_ids)
    runner.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    runner._get_positions = lambda num_tokens: runner.positions[:num_tokens]
    runner._sync_device = lambda: None
    for absent in (
        "uses_mrope",
        "supports_mm_inputs",
        "broadcast_pp_output",
        "use_aux_hidden_state_outputs",
        "use_async_spec_decode",
        "routed_experts_initialized",
        "eep_eplb_suppressed",
        "enable_prompt_embeds",
        "check_ep_fault",
    ):
        setattr(runner, absent, False)
    for nothing in ("kv_connector_output", "execute_model_state", "_draft_token_ids", "_draft_token_req_ids"):
        setattr(runner, nothing, None)
    runner.finalize_kv_connector = runner.clear_kv_connector_metadata = lambda: None
    return runner


def tokens_of(name: str) -> list[int]:
    """Return the token ids of a request's prompt."""
    number = list(PROMPTS).index(name)
    return [(11 * number + 5 * place + place * place) % VOCABULARY for place in range(PROMPTS[name])]


def step(
    runner: Any, scheduled: dict[str, int], ask: tuple[str, ...] = SCORED, mode: CUDAGraphMode | None = None
) -> Any:
    """Run a step as the worker does: inputs, the target, `sample_tokens`, whose output is returned."""
    prepare(runner, scheduled, ask, mode)
    output = runner.sample_tokens(None)
    for name, count in scheduled.items():
        runner.computed[name] += count
    return output


def prepare(
    runner: Any, scheduled: dict[str, int], ask: tuple[str, ...] = SCORED, mode: CUDAGraphMode | None = None
) -> None:
    """Prepare the state that `execute_model` passes to `sample_tokens`."""
    batch = runner.input_batch
    for name in scheduled:
        if name not in runner.requests:
            sampling = SamplingParams(temperature=0.0, prompt_logprobs=1 if name in ask else None)
            request = cached_request(name, tokens_of(name), ([1],), sampling_params=sampling)
            runner.requests[name] = request
            batch.add_request(request)
            if name in ask:
                runner.num_prompt_logprobs[name] = sampling.prompt_logprobs
    batch.refresh_metadata()
    counts = [scheduled[name] for name in batch.req_ids]
    ends = np.cumsum(counts)
    runner.query_start_loc.np[1 : len(counts) + 1] = ends
    tokens: list[int] = []
    for row, (name, count) in enumerate(zip(batch.req_ids, counts, strict=True)):
        request = runner.requests[name]
        request.num_computed_tokens = done = runner.computed[name]
        tokens += (tokens_of(name) + request.output_token_ids)[done : done + count]
        runner.discard_request_mask.np[row] = done + count < PROMPTS[name]
    runner.discard_request_mask.copy_to_gpu()
    runner.model.input_ids.zero_()[: len(tokens)] = torch.tensor(tokens)
    hidden_states = runner.target(len(tokens), mode)
    sampled = hidden_states[torch.from_numpy(ends - 1)]
    state = {
        "scheduler_output": SimpleNamespace(
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=len(tokens),
            has_structured_output_requests=False,
            num_spec_tokens_to_schedule=DRAFT_TOKENS,
        ),
        "logits": runner.model.compute_logits(sampled),
        "spec_decode_common_attn_metadata": SimpleNamespace(max_seq_len=max(runner.computed.values()) + max(counts)),
        "hidden_states": hidden_states,
        "sample_hidden_states": sampled,
    }
    runner.execute_model_state = ExecuteModelState(
        **dict.fromkeys(set(ExecuteModelState._fields) - set(state)), **state
    )
