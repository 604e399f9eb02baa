"""draft-non-causal (PR 48167): DFlash drafts on FlashInfer, with attention that is not causal, step by step.

Real: vLLM's `initialize_kv_cache`, its speculator for DFlash with its manager of graphs, and FlashInfer's metadata
builder, on a Blackwell. Stand-ins: the draft model, which attends according to the metadata, and FlashInfer's kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import attn_utils, model_runner
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG, supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.measurement import Measurement

with mock.patch.dict(
    sys.modules, {f"flashinfer{name}": mock.MagicMock() for name in ("", ".decode", ".prefill", ".utils")}
):
    flashinfer: Any = importlib.import_module("vllm.v1.attention.backends.flashinfer")

LAYER = "draft.layers.0.attention"
DEVICE = torch.device("cpu")
DRAFT_TOKENS = 2
WIDTH = 1 + DRAFT_TOKENS
REQUESTS, MAX_LENGTH, PAGE_SIZE, HIDDEN, VOCABULARY = 4, 64, 16, 8, 64
PAGES = MAX_LENGTH // PAGE_SIZE
SIZES = [WIDTH, 2 * WIDTH, 4 * WIDTH]
LENGTHS = ((37,), (5, 42), (17, 3, 29), (18, 4, 30, 9))
"""Tokens of each request before the drafts, step by step; the third step has a padded row."""
_OF_OTHER_PARTS = (
    "check_attention_cp_compatibility",
    "get_kv_connector",
    "init_kv_cache",
    "initialize_mamba_ssu_backend",
)
"""Other calls of `initialize_kv_cache`, which do nothing here."""


def run(*, trigger: bool = True) -> Measurement:
    """Draft with attention that is not causal. Without *trigger*, with causal attention, which TRT-LLM's kernels do."""
    with cpu_cuda_graphs(), _on_a_blackwell():
        eager = _serve(CUDAGraphMode.NONE, causal=not trigger)
        graphed = _serve(CUDAGraphMode.FULL_DECODE_ONLY, causal=not trigger)
    return Measurement(
        f"draft tokens of {len(LENGTHS)} steps of 1 to {REQUESTS} requests, {DRAFT_TOKENS} of each",
        tuple(eager),
        tuple(graphed),
        counted={"graph-of-a-plan": len(SIZES) if trigger else 0},
    )


def watched(*, trigger: bool) -> None:
    """Draft in graphs alone, which the shadow check looks at; *trigger* as in `run`."""
    with cpu_cuda_graphs(), _on_a_blackwell():
        _serve(CUDAGraphMode.FULL_DECODE_ONLY, causal=not trigger)


@contextlib.contextmanager
def _on_a_blackwell() -> Iterator[None]:
    """Let FlashInfer's builder choose TRT-LLM's kernels, and run the kernels of builder and speculator on the CPU."""
    with (
        mock.patch.object(flashinfer, "can_use_trtllm_attention", return_value=True),
        mock.patch.object(flashinfer, "use_trtllm_attention", return_value=True),
        mock.patch.object(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", PrefillWrapperStandIn),
        mock.patch.object(flashinfer, "get_kv_cache_layout", return_value="NHD"),
        mock.patch.object(dflash, "replace", lambda of, **new: SimpleNamespace(**vars(of) | new), create=True),
        cpu_triton_kernels(flashinfer, dflash),
    ):
        yield


class PrefillWrapperStandIn:
    """Stands in for FlashInfer's wrapper of prefills, made as vLLM makes it, without `use_cuda_graph`.

    Its `plan` then copies what it is given to new memory of the device, where `run` reads it (flashinfer/prefill.py).
    """

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None: ...

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        **_: Any,
    ) -> None:
        self._queries, self._pages = qo_indptr.clone(), paged_kv_indptr.clone()
        self._last, self._table = paged_kv_last_page_len.clone(), paged_kv_indices

    def run(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attend with *query*, (tokens, width), to all tokens of its request in *cache*, (slots, width)."""
        request = _request_of(len(query), self._queries)
        pages = self._pages.diff()
        lengths = torch.where(pages > 0, (pages - 1) * PAGE_SIZE + self._last, 0)
        at = (self._pages[:-1, None] + torch.arange(PAGES)).clamp(max=len(self._table) - 1)
        return _attend(query, cache, self._table[at.long()][request], lengths[request])


def _request_of(tokens: int, starts: torch.Tensor) -> torch.Tensor:
    """Return the request of each token; for padded tokens, the last one."""
    rows = torch.arange(tokens)
    return torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=len(starts) - 2)


def _attend(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Attend with each row of *query* to the first *lengths* tokens in the pages of *table*, (rows, pages)."""
    positions = torch.arange(MAX_LENGTH)
    slots = table[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    keys = cache[slots]
    there = positions < lengths.clamp(min=1)[:, None]
    # In double precision, so that the number of padded rows does not change the last bit of the result.
    weights = torch.einsum("th,tph->tp", query.double(), keys).masked_fill(~there, -torch.inf).softmax(1)
    attended: torch.Tensor = torch.einsum("tp,tph->th", weights, keys)
    return attended.to(query.dtype)


class DraftModelStandIn:
    """Stands in for a DFlash draft of one attention layer, on a full random KV cache."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self._embedding = torch.randn(VOCABULARY, HIDDEN, generator=random)
        self._cache = torch.randn((1 + REQUESTS * PAGES) * PAGE_SIZE, HIDDEN, generator=random).double()

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> Any:
        query = self._embedding[input_ids.long()] + positions[:, None] / MAX_LENGTH
        metadata = get_forward_context().attn_metadata[LAYER]
        if metadata.prefill is not None:
            return query + metadata.prefill.wrapper.run(query, self._cache)
        lengths, table = metadata.decode.seq_lens, metadata.decode.block_tables
        row = torch.arange(len(query)) // WIDTH
        causal = lengths[row] - (WIDTH - 1) + torch.arange(len(query)) % WIDTH
        return query + _attend(query, self._cache, table[row], causal)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._embedding.T

    def precompute_and_store_context_kv(self, *_: object, **__: object) -> None:
        """Store nothing: the cache has all contexts."""


class BlockTablesStandIn:
    """Stands in for `BlockTables`: every request has its pages from the start."""

    cp_size = 1

    def __init__(self, **_: object) -> None:
        self.block_sizes = self.kernel_block_sizes = [PAGE_SIZE]
        self.input_block_tables = [1 + torch.arange(REQUESTS * PAGES, dtype=torch.int32).view(REQUESTS, PAGES)]
        self.slot_mappings = torch.zeros(1, REQUESTS * WIDTH, dtype=torch.int64)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return tuple(table[:num_reqs] for table in self.input_block_tables)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        return self.slot_mappings[:, :num_tokens]


def _config(mode: CUDAGraphMode, *, causal: bool) -> Any:
    compilation = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=list(SIZES))
    compilation.max_cudagraph_capture_size = max(SIZES)
    draft = SimpleNamespace(
        get_hidden_size=lambda: HIDDEN,
        get_vocab_size=lambda: VOCABULARY,
        hf_config=SimpleNamespace(dflash_config={"causal": causal, "mask_token_id": 0}, num_hidden_layers=1),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(
            max_model_len=MAX_LENGTH,
            dtype=torch.float32,
            use_fp64_gumbel=False,
            get_num_attention_heads=lambda parallel: 1,
            hf_config=SimpleNamespace(),
        ),
        attention_config=SimpleNamespace(use_non_causal=False, use_trtllm_attention=None),
        scheduler_config=SimpleNamespace(
            max_num_seqs=REQUESTS, max_num_batched_tokens=REQUESTS * WIDTH, max_num_encoder_input_tokens=0
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            tensor_parallel_size=1,
            is_moe_model=False,
            use_sequence_parallel_moe=False,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=PAGE_SIZE, enable_prefix_caching=False),
        speculative_config=SimpleNamespace(
            method="dflash",
            num_speculative_tokens=DRAFT_TOKENS,
            draft_sample_method="greedy",
            use_local_argmax_reduction=False,
            uses_dynamic_speculative_decoding=lambda: False,
            parallel_drafting=True,
            use_parallel_drafting=lambda: True,
            draft_model_config=draft,
        ),
        num_speculative_tokens=DRAFT_TOKENS,
        mamba_config=None,
        kernel_config=KERNEL_CONFIG,
    )


def _speculator(mode: CUDAGraphMode, *, causal: bool) -> Any:
    """Return vLLM's speculator for DFlash in the state that start-up leaves, its graphs captured."""
    config = _config(mode, causal=causal)
    speculator: Any = dflash.DFlashSpeculator(config, DEVICE)
    speculator.model, speculator.draft_attn_layer_names = DraftModelStandIn(), {LAYER}
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=HIDDEN, dtype=torch.float32)
    groups = [KVCacheGroupSpec([LAYER], spec)]
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    runner = mock.MagicMock(
        **vars(config),
        vllm_config=config,
        decode_query_len=WIDTH,
        max_num_reqs=REQUESTS,
        max_model_len=MAX_LENGTH,
        dcp_size=1,
        lora_capture_cases=[0],
        device=DEVICE,
        speculator=speculator,
        is_encoder_decoder=False,
    )
    layers = {LAYER: SimpleNamespace(get_attn_backend=lambda: flashinfer.FlashInferBackend, num_heads=1)}
    there = [name for name in _OF_OTHER_PARTS if hasattr(model_runner, name)]

    def create(group: Any, vllm_config: Any, **_: Any) -> None:
        group.metadata_builders = [_builder(vllm_config, spec)]

    with (
        mock.patch.multiple(model_runner, **{name: mock.MagicMock() for name in there}),
        mock.patch.object(model_runner, "BlockTables", BlockTablesStandIn),
        mock.patch.object(attn_utils, "get_layers_from_vllm_config", return_value=layers),
        mock.patch.object(attn_utils, "get_shared_kv_cache_layers", return_value={}, create=True),
        mock.patch.object(AttentionGroup, "create_metadata_builders", create),
    ):
        model_runner.GPUModelRunner.initialize_kv_cache(runner, caches)
    if mode != CUDAGraphMode.NONE:
        speculator.capture(**supported_kwargs(speculator.capture, {"attn_states": {}}))
    return speculator


def _builder(config: Any, spec: Any) -> Any:
    """Return FlashInfer's metadata builder with what its constructor makes of a dense model in one precision."""
    builder: Any = object.__new__(flashinfer.FlashInferMetadataBuilder)
    data_type = dict.fromkeys(("q_data_type", "q_data_type_prefill", "q_data_type_decode"), torch.float32)
    vars(builder).update(
        vllm_config=config,
        kv_cache_spec=spec,
        layer_names=[LAYER],
        device=DEVICE,
        model_config=config.model_config,
        attention_config=config.attention_config,
        compilation_config=config.compilation_config,
        _workspace_buffer=torch.zeros(1, dtype=torch.uint8),
        _prefill_wrapper=None,
        _noncausal_prefill_wrapper=None,
        prefill_fixed_split_size=-1,
        disable_split_kv=False,
        dcp_world_size=1,
        use_dcp=False,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN,
        page_size=PAGE_SIZE,
        cache_dtype="auto",
        is_kvcache_nvfp4=False,
        kv_cache_dtype=torch.float32,
        use_trtllm_decode_attention=True,
        flashinfer_trtllm_api_decode_kernel="TRT-LLM's",
        global_hyperparameters=SimpleNamespace(has_same_window_lefts=True, has_same_all_params=True),
        sm_scale=1.0,
        window_left=-1,
        logits_soft_cap=0.0,
        has_sinks=False,
        pin_memory=False,
        **data_type,
    )
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    builder.paged_kv_indptr, builder.paged_kv_last_page_len = (builder._make_buffer(REQUESTS + 1) for _ in range(2))
    builder.paged_kv_indices = builder._make_buffer(REQUESTS * PAGES)
    builder.paged_kv_indptr_cpu_buffer = torch.zeros_like(builder.paged_kv_indptr.cpu)
    return builder


def _serve(mode: CUDAGraphMode, *, causal: bool) -> list[float]:
    """Return the draft tokens of each step."""
    speculator = _speculator(mode, causal=causal)
    random = torch.Generator().manual_seed(2)
    return [token for lengths in LENGTHS for token in _propose(speculator, lengths, random).flatten().tolist()]


def _propose(speculator: Any, lengths: tuple[int, ...], random: torch.Generator) -> Any:
    """Call the speculator as the model runner does after a step of the target, which had one token of each request."""
    rows = len(lengths)
    requests = torch.arange(rows, dtype=torch.int32)
    batch = SimpleNamespace(
        req_ids=[str(row) for row in range(rows)],
        num_reqs=rows,
        num_tokens=rows,
        num_scheduled_tokens=np.ones(rows, dtype=np.int32),
        idx_mapping=requests,
        positions=torch.tensor(lengths) - 1,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
    )
    return speculator.propose(
        batch,
        {},
        {},
        torch.zeros(rows, HIDDEN),
        None,
        num_sampled=torch.ones(rows, dtype=torch.int32),
        num_rejected=torch.zeros(rows, dtype=torch.int32),
        last_sampled=torch.randint(VOCABULARY, (REQUESTS,), generator=random),
        next_prefill_tokens=torch.zeros(REQUESTS, dtype=torch.int32),
        temperature=torch.zeros(REQUESTS),
        seeds=torch.zeros(REQUESTS, dtype=torch.int64),
    )
