"""draft-idx-mapping (PR 47066): six requests draft in a graph, then five of them in the same graph.

A padded row still refers to its former request, and overwrites that request's logits. Real: vLLM's speculator for
Eagle. Stand-in: the draft model, which has no attention.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
from vllm.config import CompilationConfig, CUDAGraphMode, speculative
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graphfix.verify.double import triton_kernels
from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

REQUESTS = 6
DRAFT_TOKENS = 2
SIZES = [3, 6, 12, 18]
BATCHES = [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 0, 3, 1, 2]]
"""Requests of each step, row by row: all, then one less, then in other rows."""
HIDDEN_SIZE, VOCABULARY, MAX_LENGTH = 8, 16, 64


def run(*, trigger: bool = True) -> Measurement:
    """Draft for six requests in a graph, then for five. Without *trigger*, for all six in every step."""
    batches = BATCHES if trigger else BATCHES[:1] * len(BATCHES)
    with cpu_cuda_graphs():
        eager = _draft(CUDAGraphMode.NONE, batches)
        graphed = _draft(CUDAGraphMode.FULL_DECODE_ONLY, batches)
    return Measurement(
        f"draft logits of the requests of {len(batches)} batches, drafted in graphs for {REQUESTS} rows",
        tuple(eager),
        tuple(graphed),
    )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run`, of draft prefills and draft decodes, for the shadow check."""
    from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

    with wrappers_on_the_double():
        _draft(CUDAGraphMode.FULL_DECODE_ONLY, BATCHES if trigger else BATCHES[:1] * len(BATCHES))


def _draft(mode: Any, batches: list[list[int]]) -> list[float]:
    """Return what each step leaves for the rejection sampler: draft tokens, and the logits they were sampled from."""
    numbers: list[float] = []
    random = torch.Generator().manual_seed(2)
    with _kernels():
        speculator = _speculator(mode)
        for step, batch in enumerate(batches):
            tokens = _propose(speculator, batch, 3 + 3 * step, random)
            for tensor in (tokens, speculator.draft_logits[batch]):
                numbers += tensor.flatten().tolist()
    return numbers


def _kernels() -> ExitStack:
    """Run vLLM's kernels on the CPU, with stand-ins for Triton's random numbers."""

    def number(seed: Any, at: Any) -> Any:
        return (seed * 7919 + at * 104729 + 1) % 1000003

    class Drawing(triton_kernels.Language):
        randint = staticmethod(number)

        @staticmethod
        def rand(seed: Any, at: Any) -> Any:
            return (number(seed, at) + 0.5) / 1000003

    stack = ExitStack()
    stack.enter_context(mock.patch.object(triton_kernels, "Language", Drawing))
    log1p = SimpleNamespace(log1p=torch.log1p)
    for name, value in {"tldevice": log1p, "tl_rand64": lambda seed, at, **_: Drawing.rand(seed, at)}.items():
        stack.enter_context(mock.patch.object(gumbel, name, value, create=True))
    drafting = sys.modules[EagleSpeculator.propose.__module__]
    stack.enter_context(triton_kernels.cpu_triton_kernels(gumbel, drafting))
    return stack


def _speculator(mode: Any, sampling: str | None = None) -> Any:
    """Return vLLM's speculator for Eagle in the state that start-up leaves; by default it samples its drafts."""
    if sampling is None:  # "gumbel" in 0.21; before, the method of rejection decides it
        sampling = get_args(getattr(speculative, "DraftSampleMethod", Literal["strict", "probabilistic"]))[1]
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=list(SIZES))
    compilation.max_cudagraph_capture_size = max(SIZES)
    draft = SimpleNamespace(
        get_hidden_size=lambda: HIDDEN_SIZE,
        get_vocab_size=lambda: VOCABULARY,
        hf_config=None,
        is_multimodal_model=False,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, dtype=torch.float32, use_fp64_gumbel=False),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=max(SIZES)),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_rank=0, tensor_parallel_size=1, is_moe_model=False
        ),
        cache_config=SimpleNamespace(),
        compilation_config=compilation,
        speculative_config=SimpleNamespace(
            method="eagle",
            num_speculative_tokens=DRAFT_TOKENS,
            rejection_sample_method=sampling,
            draft_sample_method=sampling,
            draft_model_config=draft,
        ),
        kernel_config=KERNEL_CONFIG,
    )
    speculator: Any = EagleSpeculator(config, torch.device("cpu"))
    speculator.model = _model()
    speculator.model_state = object.__new__(DefaultModelState)
    speculator.model_state.max_model_len = MAX_LENGTH
    speculator.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
    # The layer is in no group, so that the metadata of a decode are empty.
    speculator.attn_groups, speculator.draft_attn_layer_names = [], {"draft.layers.0"}
    slots = torch.zeros(1, max(SIZES), dtype=torch.int64)
    speculator.block_tables = SimpleNamespace(
        cp_size=1,
        input_block_tables=[],
        slot_mappings=slots,
        get_dummy_block_tables=lambda requests: (),
        get_dummy_slot_mappings=lambda tokens: slots[:, :tokens],
        compute_slot_mappings=lambda *_: slots,
    )
    if hasattr(speculator, "init_cudagraph_manager"):
        speculator.init_cudagraph_manager(mode)
    if mode != CUDAGraphMode.NONE:
        if hasattr(speculator, "capture_model"):
            speculator.capture_model()
        else:  # from 0.21 on with what the target's capture leaves
            state: Any = ({}, {})
            if hasattr(cudagraph_utils, "AttentionStatePair"):
                state = cudagraph_utils.AttentionStatePair(state, state)
            speculator.capture(defaultdict(lambda: state))
    return speculator


def _model() -> Any:
    """Return a stand-in for an Eagle head, with random weights."""
    random = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCABULARY, HIDDEN_SIZE, generator=random)
    mix = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=random)

    class HeadStandIn:
        def __call__(self, input_ids: Any, hidden_states: Any, **_: Any) -> Any:
            hidden = torch.tanh(embedding[input_ids.long()] + hidden_states @ mix)
            return hidden, hidden

        def compute_logits(self, hidden: Any) -> Any:
            return hidden @ embedding.T

    return HeadStandIn()


def _propose(speculator: Any, batch: list[int], computed: int, random: torch.Generator) -> torch.Tensor:
    """Call the speculator as the model runner does after a target step, with *computed* tokens of each request."""
    rows, width = len(batch), 1 + DRAFT_TOKENS
    tokens = rows * width
    # The target model ran in a full graph, too, so that its outputs are padded.
    padded = (
        next(size for size in SIZES if size >= tokens)
        if speculator.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        else tokens
    )
    hidden = torch.zeros(padded, HIDDEN_SIZE)
    positions = torch.zeros(padded, dtype=torch.int64)
    positions[:tokens] = computed + torch.arange(width).repeat(rows)
    target_batch = SimpleNamespace(
        num_reqs=rows,
        num_reqs_after_padding=padded // width,
        num_tokens=tokens,
        num_tokens_after_padding=padded,
        num_scheduled_tokens=np.full(rows, width),
        idx_mapping=torch.tensor(batch, dtype=torch.int32),
        input_ids=torch.randint(VOCABULARY, (tokens,), generator=random, dtype=torch.int32),
        positions=positions,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * width,
        seq_lens=torch.full((rows,), computed + width, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((rows,), computed + width),
    )
    hidden[:tokens] = torch.randn(tokens, HIDDEN_SIZE, generator=random)
    drafted: torch.Tensor = speculator.propose(
        target_batch,
        {},
        {},
        hidden,
        None,
        num_sampled=torch.ones(rows, dtype=torch.int32),
        num_rejected=torch.zeros(rows, dtype=torch.int32),
        last_sampled=torch.randint(VOCABULARY, (REQUESTS,), generator=random),
        next_prefill_tokens=torch.zeros(REQUESTS, dtype=torch.int32),
        temperature=torch.full((REQUESTS,), 0.7),
        seeds=torch.arange(REQUESTS),
    )
    return drafted
