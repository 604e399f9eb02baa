"""vLLM's compressor of DeepSeek V4 on the CPU: its own layer and metadata builder, with stand-ins for the kernels.

They are in place within `compressor_stand_ins`; `LayerStandIn` is a model of one layer on random caches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.models.deepseek_v4 import compressor
from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache, DeepseekCompressor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker import gpu_ubatch_wrapper, ubatching
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from vllm_graphfix.verify.double.graph import CPUStream, Recorder

CPU = torch.device("cpu")
RATIO, HEAD, COLUMNS = 128, 512, 4
"""Tokens of a group; width of a cache entry; the columns of it that the stand-ins compute."""
STATE_BLOCK, BLOCK = 8, 256
"""Tokens of a block in the cache of states and in the cache of entries."""
REQUESTS, MAX_MODEL_LEN, VOCABULARY = 4, 512, 32
LAYER = "model.layers.0.attn"
STATES = f"{LAYER}.compressor.state_cache"


class LayerStandIn:
    """Stands in for a model: a random state for each token id, and vLLM's compressor on a random cache."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random)

        self._states = numbers(VOCABULARY, 2 * HEAD)
        # Block 0 of both is the null block; the others hold random remains of former requests, as in a used engine.
        self.cache = numbers(1 + REQUESTS * MAX_MODEL_LEN // BLOCK, BLOCK // RATIO, HEAD)
        states = numbers(1 + REQUESTS * MAX_MODEL_LEN // STATE_BLOCK, STATE_BLOCK, 2 * HEAD)
        self.compressor: Any = object.__new__(DeepseekCompressor)
        vars(self.compressor).update(
            compress_ratio=RATIO,
            head_dim=HEAD,
            rope_head_dim=64,
            coff=1,
            overlap=False,
            use_fp4_cache=False,
            ape=numbers(RATIO, HEAD),
            norm=SimpleNamespace(weight=None),
            rms_norm_eps=1e-6,
            state_cache=SimpleNamespace(prefix=STATES, kv_cache=states),
            k_cache_prefix=LAYER,
            eager_scratch_pool=None,
            _static_forward_context={LAYER: SimpleNamespace(kv_cache=self.cache)},
            _use_two_stage_fused_compressor=False,
            **dict.fromkeys(("_quant_block", "_token_stride", "_scale_dim")),
        )

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: None) -> torch.Tensor:
        rotary = SimpleNamespace(cos_sin_cache=None)
        with _recording_in_this_thread(), mock.patch.object(type(current_platform), "is_cuda", return_value=True):
            self.compressor.forward(self._states[input_ids.long()], positions, rotary)
            return positions.unsqueeze(1) * 1.0

    def modules(self) -> list[None]:
        return []


class EntryMetadataBuilderStandIn:
    """Stands in for the builder of the layer that attends to the entries: the compressor reads its slots only."""

    supports_update_block_table = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        return SimpleNamespace(slot_mapping=common_attn_metadata.slot_mapping)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


def state_spec(config: Any) -> Any:
    """Return vLLM's specification of the cache of the compressor's states."""
    cache: Any = object.__new__(CompressorStateCache)
    vars(cache).update(block_size=STATE_BLOCK, state_dim=2 * HEAD, dtype=torch.float32, sliding_window=RATIO)
    return cache.get_kv_cache_spec(config)


def metadata_builder(spec: Any, config: Any) -> Any:
    """Return vLLM's builder of the compressor's metadata."""
    return CompressorBackend.get_builder_cls()(spec, [STATES], config, CPU)


def block_tables() -> list[torch.Tensor]:
    """Return the block tables of states and of entries, (REQUESTS, blocks of a request) int32 each."""
    widths = [MAX_MODEL_LEN // size for size in (STATE_BLOCK, BLOCK)]
    return [torch.arange(1, 1 + REQUESTS * width, dtype=torch.int32).view(REQUESTS, width) for width in widths]


def slots_of(table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    return table[rows, positions // size].long() * size + positions % size


def tokens_of(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (7 * positions + 3 * rows) % VOCABULARY


def entries_of(model: LayerStandIn, groups: dict[int, int]) -> list[float]:
    """Return, for each request in *groups*, the cache entry of that group of its tokens: COLUMNS numbers each."""
    slots = [
        int(block_tables()[1][row, group * RATIO // BLOCK]) * (BLOCK // RATIO) + group % 2
        for row, group in groups.items()
    ]
    entries: list[float] = model.cache.flatten(0, 1)[slots, :COLUMNS].flatten().tolist()
    return entries


def _recording_in_this_thread() -> contextlib.AbstractContextManager[object]:
    """Record in the microbatches' own threads, too: dispatch modes are per thread, and a capture spans all threads."""
    from vllm_graphfix.verify.double import graph

    if graph._capturing and threading.current_thread() is not threading.main_thread():
        return Recorder(graph._capturing[0])
    return contextlib.nullcontext()


@contextlib.contextmanager
def compressor_stand_ins() -> Iterator[None]:
    """Replace, within the block, the compressor's two kernels and the calls of CUDA around them."""
    kernels = ModuleType("vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl")
    vars(kernels).update(
        compress_norm_rope_store_cutedsl=_compress_stand_in, _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL=_compress_stand_in
    )
    saving = "save_partial_states" if hasattr(compressor, "save_partial_states") else "_SAVE_PARTIAL_STATES_KERNEL"
    places: list[tuple[Any, str, Any]] = [
        (compressor, saving, _save_stand_in),
        (CommonAttentionMetadata, "token_to_req_indices", _rows_stand_in),
        (torch.accelerator, "set_device_index", lambda device: None),
        (torch.cuda, "current_blas_handle", lambda: None),
        (torch.cuda, "set_stream", lambda stream: None),
        *[
            (module, "current_stream", CPUStream)
            for module in (ubatching, cudagraph_utils)
            if hasattr(module, "current_stream")
        ],
        (gpu_ubatch_wrapper.DPMetadata, "make", lambda *_: None),
    ]
    if hasattr(gpu_ubatch_wrapper, "create_sm_control_context"):
        places.append((gpu_ubatch_wrapper, "create_sm_control_context", lambda parallel: contextlib.nullcontext()))
    else:
        places.append((UBatchWrapper, "_create_sm_control_context", lambda self, config: contextlib.nullcontext()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {kernels.__name__: kernels}))
        for owner, name, value in places:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _rows_stand_in(common: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Return the request of each token, (tokens,); the first request for padding."""
    counts = common.query_start_loc_cpu.diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    buffer.zero_()
    buffer[: len(rows)] = rows
    return buffer[: common.num_actual_tokens]


def _save_stand_in(
    *, kv: Any, score: Any, ape: Any, positions: Any, state_cache: Any, slot_mapping: Any, **_: object
) -> None:
    """Save kv and score, (tokens, width), in the slots of state_cache, (blocks, tokens, 2 x width).

    Padding goes to block 0.
    """
    states = torch.cat([kv, score + ape[positions % RATIO]], dim=-1)
    state_cache.flatten(0, 1).index_copy_(0, slot_mapping.clamp(min=0), states)


def _compress_stand_in(
    *,
    state_cache: Any,
    num_actual: int,
    token_to_req_indices: Any,
    positions: Any,
    block_table: Any,
    block_size: int,
    state_width: int,
    kv_cache: Any,
    k_cache_metadata: Any,
    **_: object,
) -> None:
    """Write, for the last token of each group, the group's states weighted by their scores.

    Other tokens go to block 0. Norm and RoPE are left out.
    """
    positions, slots = positions[:num_actual], k_cache_metadata.slot_mapping[:num_actual]
    group = (positions // RATIO * RATIO).unsqueeze(1) + torch.arange(RATIO)
    blocks = block_table[token_to_req_indices[:num_actual].long()].gather(1, group // block_size).long()
    scores = state_cache[..., state_width : state_width + COLUMNS][blocks, group % block_size]
    entries = (state_cache[..., :COLUMNS][blocks, group % block_size] * scores.softmax(1)).sum(1)
    last = (positions % RATIO == RATIO - 1) & (slots >= 0)
    kv_cache.flatten(0, 1)[:, :COLUMNS].index_copy_(0, torch.where(last, slots // RATIO, 0), entries)
