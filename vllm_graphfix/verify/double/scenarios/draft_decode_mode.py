"""draft-decode-mode (PR 39773): draft decodes padded to a capture size, and a draft prefill's stale token indices.

Four prompts are prefilled at once, one of them finishes, and three go on: batches of three in graphs of four. It runs
twice: with PIECEWISE graphs, which pad a batch's tokens but not its requests, and with FULL ones, which record the
draft prefill's gather.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.eagle import speculator as eagle
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.measurement import Measurement

MAX_REQUESTS = 4
DRAFT_TOKENS = 3
CAPTURE_SIZES = [4, 16]
PROMPTS = [9, 7, 12, 5]
STEPS = 4
REJECTED = [0, 1, 2]
"""Draft tokens that the target rejects in each step, of each of the three requests that go on."""
HIDDEN_SIZE = 8
VOCABULARY = 64
MAX_TOKENS = 64
MAX_MODEL_LEN = 64
PAGE_SIZE = 4
LAYER = "draft.layers.0.self_attn"
CPU = torch.device("cpu")


def run(
    *, trigger: bool = True, modes: tuple[CUDAGraphMode, ...] = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
) -> Measurement:
    """Draft for three requests in graphs of four. Without *trigger*, all four requests go on."""
    rejected = REJECTED if trigger else [*REJECTED, 0]
    configured = " and ".join(f"for {mode.name}" for mode in modes)
    numbers = f"draft tokens of {len(rejected)} requests over 4 steps, configured {configured} graphs"
    with cpu_cuda_graphs(), cpu_triton_kernels(eagle, gumbel):
        eager = _draft(CUDAGraphMode.NONE, rejected)
        try:
            graphed = [token for mode in modes for token in _draft(mode, rejected)]
        except (PlanningError, IndexError) as e:
            return Measurement(numbers, tuple(eager * len(modes)), (), error=str(e).splitlines()[0])
    # Stock releases have the first defect alone; nightlies had each without the other.
    counted = {"decode-padded-in-piecewise": STEPS, "prefill-with-old-indices": 0}
    return Measurement(numbers, tuple(eager * len(modes)), tuple(graphed), counted=counted)


class PlanningError(RuntimeError):
    """FlashInfer's planner refuses page offsets that are not of one batch."""


class PagedAttentionStandIn:
    """Stands in for FlashInfer: metadata builder, planner and kernel of the draft model's one layer.

    Like FlashInfer's, the builder keeps the page offsets of all requests in one persistent array, and plans a decode
    for as many of them as the metadata has tokens. 0.17.x describes the unpadded tokens and pads only the query, which
    vLLM's backends cut to size. This stand-in is stricter: it takes each row of the query for a request.
    """

    def __init__(self) -> None:
        self._kv_indptr = torch.zeros(MAX_TOKENS + 1, dtype=torch.int32)
        self._cache = torch.zeros((1 + MAX_REQUESTS * MAX_MODEL_LEN // PAGE_SIZE) * PAGE_SIZE, HIDDEN_SIZE)

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> SimpleNamespace:
        common = common_attn_metadata
        pages = (common.seq_lens + PAGE_SIZE - 1) // PAGE_SIZE
        self._kv_indptr[1 : common.num_reqs + 1] = pages.cumsum(0)
        metadata = SimpleNamespace(
            query_start_loc=common.query_start_loc,
            block_table=common.block_table_tensor,
            decode_rows=common.num_actual_tokens if common.max_query_len == 1 else None,
        )
        if metadata.decode_rows:
            self._plan_decode(metadata.decode_rows)
        return metadata

    def _plan_decode(self, rows: int) -> None:
        """Check page offsets as FlashInfer's planner does.

        Raises:
            PlanningError: the page offsets of the first *rows* requests decrease, for not all are of this batch.
        """
        decreasing = (self._kv_indptr[: rows + 1].diff() < 0).nonzero()
        if len(decreasing):
            row = int(decreasing[0])
            raise PlanningError(f"kv_indptr[{row + 1}] - kv_indptr[{row}] should be non-negative (CPU stand-in)")

    def attend(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the causal attention of the rows (tokens, hidden size), which are their own keys and values."""
        context = get_forward_context()
        metadata, slots = context.attn_metadata[LAYER], context.slot_mapping[LAYER]
        if metadata.decode_rows and metadata.decode_rows < len(hidden):  # the stricter part, which 0.17.x alone reaches
            self._plan_decode(len(hidden))
        slots = slots.clamp(min=0)  # a padded token's -1 becomes the null page
        self._cache.index_copy_(0, slots, hidden[: len(slots)])
        request = _request_of(len(hidden), metadata.query_start_loc).clamp(max=len(metadata.block_table) - 1)
        keys = self._cache[_slots(metadata.block_table[request], torch.arange(MAX_MODEL_LEN).expand(len(hidden), -1))]
        scores = torch.einsum("rd,rkd->rk", hidden, keys)
        scores = scores.masked_fill(torch.arange(MAX_MODEL_LEN) > positions[:, None], float("-inf"))
        return torch.einsum("rk,rkd->rd", scores.softmax(-1), keys)


class DraftModelStandIn:
    """Stands in for an Eagle head: embedding, target's hidden states and attention, random weights."""

    def __init__(self, attention: PagedAttentionStandIn) -> None:
        random = torch.Generator().manual_seed(1)
        self._attention = attention
        self._embedding = torch.randn(VOCABULARY, HIDDEN_SIZE, generator=random)
        self._mix = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=random)
        self._head = torch.randn(HIDDEN_SIZE, VOCABULARY, generator=random)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, inputs_embeds: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self._embedding[input_ids] + hidden_states @ self._mix)
        hidden = hidden + self._attention.attend(hidden, positions)
        return hidden, hidden.tanh()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head


class BlockTablesStandIn:
    """Stands in for `BlockTables`, which needs pinned memory: every request has its pages from the start."""

    cp_size = 1

    def __init__(self) -> None:
        pages = MAX_MODEL_LEN // PAGE_SIZE
        self.input_block_tables = [1 + torch.arange(MAX_REQUESTS * pages, dtype=torch.int32).view(MAX_REQUESTS, pages)]
        self.slot_mappings = torch.zeros(1, MAX_TOKENS, dtype=torch.int64)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return tuple(table[:num_reqs] for table in self.input_block_tables)

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        return self.slot_mappings.fill_(-1)[:, :num_tokens]

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int | None = None,
    ) -> torch.Tensor:
        row = _request_of(len(positions), query_start_loc)
        request = idx_mapping[row.clamp(max=len(idx_mapping) - 1)]
        slots = _slots(self.input_block_tables[0][request], positions[:, None])[:, 0]
        self.slot_mappings.fill_(-1)
        self.slot_mappings[0, : len(positions)] = torch.where(row < len(idx_mapping), slots, -1)
        return self.slot_mappings[:, : num_tokens_padded or len(positions)]


def _request_of(tokens: int, query_start_loc: torch.Tensor) -> torch.Tensor:
    """Return the batch row of each token; for padded tokens, the row behind the batch."""
    return torch.searchsorted(query_start_loc[1:].long(), torch.arange(tokens), right=True)


def _slots(block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return cache slots (rows, n) of *positions* (rows, n) in the requests of *block_tables* (rows, pages)."""
    return block_tables.gather(1, positions // PAGE_SIZE).long() * PAGE_SIZE + positions % PAGE_SIZE


def _speculator(mode: CUDAGraphMode) -> Any:
    """Return an EagleSpeculator in the state that start-up leaves."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=CAPTURE_SIZES,
            static_forward_context={},
            fast_moe_cold_start=False,
            ir_enable_torch_wrap=False,
        ),
        speculative_config=SimpleNamespace(
            method="eagle",
            num_speculative_tokens=DRAFT_TOKENS,
            rejection_sample_method="strict",
            draft_model_config=SimpleNamespace(
                get_hidden_size=lambda: HIDDEN_SIZE,
                get_vocab_size=lambda: VOCABULARY,
                hf_config=None,
                is_multimodal_model=False,
            ),
        ),
        kernel_config=KERNEL_CONFIG,
    )
    speculator = eagle.EagleSpeculator(config, CPU)
    attention = PagedAttentionStandIn()
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=HIDDEN_SIZE, dtype=torch.float32)
    speculator.model = DraftModelStandIn(attention)
    speculator.model_state = object.__new__(DefaultModelState)
    speculator.model_state.max_model_len = MAX_MODEL_LEN
    groups = [KVCacheGroupSpec([LAYER], spec)]
    speculator.kv_cache_config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    speculator.attn_groups = [[AttentionGroup(PagedAttentionStandIn, [LAYER], spec, 0, metadata_builders=[attention])]]
    speculator.draft_attn_layer_names = {LAYER}
    speculator.block_tables = BlockTablesStandIn()
    if hasattr(speculator, "init_cudagraph_manager"):
        speculator.init_cudagraph_manager(mode)
    if mode != CUDAGraphMode.NONE:
        speculator.capture_model()
    return speculator


def _draft(mode: CUDAGraphMode, rejected: list[int] = REJECTED) -> list[float]:
    """Return the draft tokens of each step after the prefill."""
    speculator = _speculator(mode)
    random = torch.Generator().manual_seed(2)
    computed = np.zeros(MAX_REQUESTS, dtype=np.int32)
    _propose(speculator, computed, np.array(PROMPTS), random)
    computed += PROMPTS
    tokens: list[float] = []
    going_on = len(rejected)
    for _ in range(STEPS):
        drafted = _propose(speculator, computed[:going_on], np.full(going_on, 1 + DRAFT_TOKENS), random, rejected)
        tokens += drafted.flatten().float().tolist()
        computed[:going_on] += 1 + DRAFT_TOKENS - np.array(rejected)
    return tokens


def _propose(
    speculator: Any,
    computed: np.ndarray,
    scheduled: np.ndarray,
    random: torch.Generator,
    rejected: list[int] | None = None,
) -> torch.Tensor:
    """Call the speculator as the model runner does after a target step, whose results are random here."""
    rows, tokens = len(scheduled), int(scheduled.sum())
    manager = getattr(speculator, "prefill_cudagraph_manager", None)
    padded = tokens
    if manager:  # the target dispatches in the same way
        uniform = eagle.get_uniform_token_count(rows, tokens, int(scheduled.max()))
        padded = manager.dispatch(rows, tokens, uniform).num_tokens
    query_start_loc = torch.from_numpy(np.concatenate([[0], scheduled.cumsum()]).astype(np.int32))
    positions = torch.zeros(padded, dtype=torch.int64)
    positions[:tokens] = torch.from_numpy(
        np.concatenate([c + np.arange(n) for c, n in zip(computed, scheduled, strict=True)])
    )
    batch = SimpleNamespace(
        num_reqs=rows,
        num_tokens_after_padding=padded,
        num_scheduled_tokens=scheduled,
        idx_mapping=torch.arange(rows, dtype=torch.int32),
        input_ids=torch.zeros(padded, dtype=torch.int32),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=torch.from_numpy((computed + scheduled).astype(np.int32)),
    )
    batch.input_ids[:tokens] = torch.randint(VOCABULARY, (tokens,), generator=random)
    hidden_states = torch.zeros(padded, HIDDEN_SIZE)
    hidden_states[:tokens] = torch.randn(tokens, HIDDEN_SIZE, generator=random)
    sampled = torch.randint(VOCABULARY, (MAX_REQUESTS,), generator=random)
    slot_mappings = speculator.block_tables.compute_slot_mappings(batch.idx_mapping, query_start_loc, positions, padded)
    metadata = build_attn_metadata(
        attn_groups=speculator.attn_groups,
        num_reqs=rows,
        num_tokens=padded,
        query_start_loc_gpu=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        max_query_len=int(scheduled.max()),
        seq_lens=batch.seq_lens,
        max_seq_len=MAX_MODEL_LEN,
        block_tables=speculator.block_tables.get_dummy_block_tables(rows),
        slot_mappings=slot_mappings,
        kv_cache_config=speculator.kv_cache_config,
    )
    drafted: torch.Tensor = speculator.propose(
        batch,
        metadata,
        build_slot_mappings_by_layer(slot_mappings, speculator.kv_cache_config),
        hidden_states,
        None,
        num_sampled=torch.ones(rows, dtype=torch.int32),
        num_rejected=torch.tensor(rejected or [0] * rows, dtype=torch.int32),
        last_sampled=sampled,
        next_prefill_tokens=torch.zeros(MAX_REQUESTS, dtype=torch.int32),
        temperature=torch.zeros(MAX_REQUESTS),
        seeds=torch.zeros(MAX_REQUESTS, dtype=torch.int64),
    )
    return drafted
