"""flashmla-fp8 (PR 35175): a decode graph with an fp8 KV cache reads the plan of its capture at every later step."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graphfix.verify.double import steps
from vllm_graphfix.verify.double.flashmla import FP8_BLOCK_SIZE, PLAN_WIDTH, SM_PARTS, install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement
from vllm_graphfix.verify.poison.rows import Room, Rows

HEADS, LATENT, ROPE = 2, 512, 64
"""Heads of one rank, and the two widths of a cached token, the only ones that the compiled kernel takes."""
FP8, CPU = torch.float8_e4m3fn, torch.device("cpu")
MAX_REQUESTS, MAX_BLOCKS = 4, 4
LAYER = "model.layers.0.self_attn.attn"
STEPS = [[60 + step, 127 + step, 200 + step] for step in range(4)]
"""Lengths of the requests, step by step."""


def run(*, trigger: bool = True) -> Measurement:
    """Decode in a graph without padded rows. Without *trigger*, decode without graphs."""
    install_flashmla_stand_ins()
    eager = DenseFP8Decode()
    expected = [eager.step(lengths) for lengths in STEPS]
    with cpu_cuda_graphs():
        graphed = DenseFP8Decode(captured_requests=3 if trigger else None)
        replayed = [graphed.step(lengths) for lengths in STEPS]
    return Measurement(
        numbers="attention output of 3 requests over 4 decode steps (every 64th of 512 values a head)",
        eager=tuple(chain.from_iterable(expected)),
        graphed=tuple(chain.from_iterable(replayed)),
        counted={"plan-outside-buffers": 1 + len(STEPS)},  # with the capture's
    )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check.

    Without *trigger*, requests have the lengths of the capture.
    """
    install_flashmla_stand_ins()
    from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

    with wrappers_on_the_double():
        graphed = DenseFP8Decode(captured_requests=3, wrapped=True)
        for lengths in STEPS if trigger else [[1, 1, 1]] * len(STEPS):
            graphed.step(lengths)


class LengthsStandIn:
    """A runner's buffer on host and device; slicing returns the device tensor, which `seq_lens` is from 0.19 on."""

    def __init__(self, size: int) -> None:
        self.cpu = torch.zeros(size, dtype=torch.int32)
        self.gpu = torch.zeros_like(self.cpu)
        self.np = self.cpu.numpy()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.gpu[rows]

    def set(self, values: list[int], padding: int) -> None:
        self.cpu.fill_(padding)
        self.cpu[: len(values)] = torch.tensor(values)
        self.gpu.copy_(self.cpu)


class DenseFP8Decode:
    """V1's GPUModelRunner from lengths and block tables to attention metadata, and a FlashMLA layer with an fp8 cache.

    `captured_requests` is the size of its one decode graph, to which a step's batch is padded; None runs eagerly.
    *wrapped* puts the graph in vLLM's wrapper.
    """

    def __init__(self, captured_requests: int | None = None, *, wrapped: bool = False) -> None:
        from vllm.v1.worker.block_table import BlockTable

        self._random = torch.Generator().manual_seed(0)
        blocks = 1 + MAX_REQUESTS * MAX_BLOCKS  # block 0 is the null block
        self._cache = torch.randn(blocks, FP8_BLOCK_SIZE, LATENT + ROPE, generator=self._random).to(FP8)
        self._query = torch.zeros(MAX_REQUESTS, HEADS, LATENT + ROPE).to(FP8)
        self._layer = SimpleNamespace(_q_scale=torch.tensor(0.5), _k_scale=torch.tensor(0.25))
        self._lengths, self._query_start = LengthsStandIn(MAX_REQUESTS), LengthsStandIn(MAX_REQUESTS + 1)
        self._block_table = BlockTable(
            block_size=FP8_BLOCK_SIZE,
            max_num_reqs=MAX_REQUESTS,
            max_num_blocks_per_req=MAX_BLOCKS,
            max_num_batched_tokens=MAX_REQUESTS,
            pin_memory=False,
            device=CPU,
            kernel_block_size=FP8_BLOCK_SIZE,
            cp_kv_cache_interleave_size=1,
        )
        self._runner = self._model_runner(full_graphs=captured_requests is not None)
        self._engine = steps.Engine(
            self,
            {"runner": self._runner, "query": self._query},
            Room(MAX_REQUESTS, MAX_REQUESTS),
            {LAYER: self._cache},
            MAX_BLOCKS * FP8_BLOCK_SIZE,
            FP8_BLOCK_SIZE,
        )
        self.graphs: Any = None
        self._captured_requests = captured_requests
        if captured_requests is not None:
            self._capture(captured_requests, wrapped)
        for row, ids in enumerate(torch.arange(1, blocks).view(MAX_REQUESTS, MAX_BLOCKS).tolist()):
            self._block_table.add_row(ids, row)

    def step(self, lengths: list[int]) -> list[float]:
        """Decode one token a request, counted in *lengths*. Returns requests * heads * 8 values of the output."""
        requests = len(lengths)
        held = range(1, requests * MAX_BLOCKS + 1)
        steps.begin_step(self._engine, Rows(requests, requests), held)
        self._query[:requests] = torch.randn(requests, HEADS, LATENT + ROPE, generator=self._random).to(FP8)
        self._block_table.commit_block_table(requests)
        padded = self._captured_requests or requests
        metadata = self._metadata(lengths, padded)
        if self.graphs is None:
            output = self._attention(metadata, requests)
        else:
            output = self.graphs.replay(padded, metadata, requests)
        values: list[float] = output[:requests, :, ::64].flatten().tolist()
        return values

    def _capture(self, requests: int, wrapped: bool) -> None:
        """Capture as the runner's dummy run does: one token a request, and metadata built outside of the graph."""
        from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedGraphs

        metadata = self._metadata([1] * requests, requests, for_cudagraph_capture=True)
        self.graphs = BareGraphs(self._attention)
        if wrapped:
            self.graphs = WrappedGraphs(LAYER, SimpleNamespace(), self._attention, FP8_BLOCK_SIZE)
        self.graphs.capture(requests, metadata)

    def _metadata(self, lengths: list[int], padded_requests: int, for_cudagraph_capture: bool = False) -> Any:
        requests = len(lengths)
        self._lengths.set(lengths, padding=0)
        self._query_start.set(list(range(requests + 1)), padding=requests)
        by_layer, _ = self._runner._build_attention_metadata(
            num_tokens=requests,
            num_reqs=requests,
            max_query_len=1,
            num_tokens_padded=padded_requests,
            num_reqs_padded=padded_requests,
            for_cudagraph_capture=for_cudagraph_capture,
            slot_mappings={0: torch.zeros(padded_requests, dtype=torch.int64)},
        )
        return by_layer[LAYER]

    def _attention(self, metadata: Any, rows: int) -> torch.Tensor:
        from vllm.v1.attention.backends.mla.flashmla import FlashMLAImpl

        implementation = object.__new__(FlashMLAImpl)
        implementation.__dict__.update(kv_cache_dtype="fp8", kv_lora_rank=LATENT, scale=(LATENT + ROPE) ** -0.5)
        decode = getattr(implementation, "forward_mqa" if hasattr(FlashMLAImpl, "forward_mqa") else "_forward_decode")
        output: torch.Tensor
        output, _ = decode(self._query[:rows], self._cache, metadata, self._layer)
        return output

    def _model_runner(self, full_graphs: bool) -> Any:
        """Return a GPUModelRunner with what `_build_attention_metadata` reads in 0.15 to 0.23, and nothing else."""
        from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from vllm.v1.worker.utils import AttentionGroup

        spec = MLAAttentionSpec(block_size=FP8_BLOCK_SIZE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=FP8)
        builder = _metadata_builder(full_graphs)
        zeros = torch.zeros(MAX_REQUESTS, dtype=torch.int32)
        runner = object.__new__(GPUModelRunner)
        runner.__dict__.update(
            device=CPU,
            max_model_len=MAX_BLOCKS * FP8_BLOCK_SIZE,
            kv_cache_config=KVCacheConfig(1 + MAX_REQUESTS * MAX_BLOCKS, [], [KVCacheGroupSpec([LAYER], spec)]),
            attn_groups=[[AttentionGroup(FlashMLABackend, [LAYER], spec, 0, [builder])]],
            input_batch=SimpleNamespace(
                block_table=[self._block_table],
                num_computed_tokens_cpu_tensor=zeros,
                num_prompt_tokens_cpu_tensor=zeros,
            ),
            seq_lens=self._lengths,
            optimistic_seq_lens_cpu=self._lengths.cpu,
            query_start_loc=self._query_start,
            dcp_world_size=1,
            speculative_config=None,
            use_async_spec_decode=False,
            is_mm_prefix_lm=False,
            routed_experts_initialized=False,
            model_config=SimpleNamespace(enable_return_routed_experts=False),
            positions=torch.zeros(MAX_REQUESTS, dtype=torch.int64),
        )
        return runner


def _metadata_builder(full_graphs: bool) -> Any:
    """Return a FlashMLAMetadataBuilder with what it reads for decodes, and the buffers that its `__init__` makes."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.mla.flashmla import FlashMLAMetadata, FlashMLAMetadataBuilder

    mode = CUDAGraphMode.FULL_DECODE_ONLY if full_graphs else CUDAGraphMode.NONE
    builder = object.__new__(FlashMLAMetadataBuilder)
    builder.__dict__.update(
        device=CPU,
        metadata_cls=FlashMLAMetadata,
        model_config=SimpleNamespace(get_head_size=lambda: LATENT + ROPE),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        num_q_heads=HEADS,
        is_fp8_kvcache=True,
        dcp_world_size=1,
        _use_fi_prefill=False,
        cg_buf_tile_scheduler_metadata=torch.zeros(SM_PARTS, PLAN_WIDTH, dtype=torch.int32) if full_graphs else None,
        cg_buf_num_splits=torch.empty(MAX_REQUESTS + 1, dtype=torch.int32) if full_graphs else None,
    )
    return builder
