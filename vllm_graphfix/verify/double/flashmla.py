"""CPU stand-ins for FlashMLA's compiled kernels, so that vLLM's own Python around them runs without a GPU.

As on a GPU, a planner kernel cuts the KV blocks of a batch into parts, and a decode kernel attends to exactly the
blocks that the plan lists. A plan for other lengths gives wrong numbers, a plan that was never computed gives NaN.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch

SM_PARTS = 4
"""Parts of a plan; a GPU has one or two for each multiprocessor."""
PLAN_WIDTH = 8
"""int32 values of a part: first request, its first block, last request, its end block (exclusive), first split."""

FP8_BLOCK_SIZE = 64
"""Tokens of a block for the dense fp8 planner, whose arguments do not say so."""

_OPERATORS_MODULE = "vllm.v1.attention.ops.flashmla"
_COMPILED_MODULES = ("vllm._flashmla_C", "vllm._flashmla_extension_C")


class CompiledModuleStandIn(ModuleType):
    """Stands in for a compiled extension, which vLLM does no more than import."""


def install_flashmla_stand_ins() -> None:
    """Let vLLM find FlashMLA on this CPU, with stand-in kernels.

    Raises:
        RuntimeError: vLLM has imported its FlashMLA operators before, with the real kernels or with none.
    """
    if all(isinstance(sys.modules.get(name), CompiledModuleStandIn) for name in _COMPILED_MODULES):
        return
    if _OPERATORS_MODULE in sys.modules:
        raise RuntimeError(f"{_OPERATORS_MODULE} was imported before the FlashMLA stand-ins; install them first")
    from vllm.platforms import current_platform

    for name in _COMPILED_MODULES:
        sys.modules[name] = CompiledModuleStandIn(name)
    with mock.patch.object(type(current_platform), "is_cuda", return_value=True):
        importlib.import_module(_OPERATORS_MODULE)


# Both precisions


def plan_blocks(cache_seqlens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the blocks of every request into `SM_PARTS` parts of about equal work.

    Returns (SM_PARTS, PLAN_WIDTH) int32 and the requests' running number of splits, (requests + 1,) int32.
    A request of length 0 counts as one block: its output row has to be written.
    """
    blocks = [max(1, -(-length // block_size)) for length in cache_seqlens.tolist()]
    work = [(request, block) for request, count in enumerate(blocks) for block in range(count)]
    share = -(-len(work) // SM_PARTS)
    plan = torch.zeros(SM_PARTS, PLAN_WIDTH, dtype=torch.int32)
    splits = [0] * len(blocks)
    for part in range(SM_PARTS):
        mine = work[part * share : (part + 1) * share]
        if not mine:
            plan[part, 0] = len(blocks)  # first request behind the last: an empty part
            continue
        (first, first_block), (last, last_block) = mine[0], mine[-1]
        plan[part, :5] = torch.tensor([first, first_block, last, last_block + 1, splits[first]])
        for request in range(first, last + 1):
            splits[request] += 1
    return plan, torch.tensor([0, *splits], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    plan: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the blocks that `plan` lists.

    q (requests, query tokens, heads, d), k_cache (blocks, block size, 1, d), block_table (requests, blocks).
    Returns (requests, query tokens, heads, head_dim_v) and the log-sum-exp (requests, heads, query tokens) float32.
    The row of a request without a part stays NaN: no kernel writes it.
    """
    requests, query_tokens, heads, width = q.shape
    block_size = k_cache.shape[1]
    out = torch.full((requests, query_tokens, heads, head_dim_v), torch.nan)
    lse = torch.full((requests, heads, query_tokens), torch.nan)
    for request, blocks in enumerate(_blocks_of_requests(plan, requests, cache_seqlens, block_size)):
        if blocks is None:
            continue
        length = int(cache_seqlens[request])
        positions = (torch.tensor(blocks, dtype=torch.long)[:, None] * block_size + torch.arange(block_size)).flatten()
        end = torch.full((query_tokens,), length)
        if causal:
            end = end - query_tokens + 1 + torch.arange(query_tokens)
        visible = positions[None, :] < end[:, None]
        keys = k_cache[block_table[request, blocks].long()].float().reshape(-1, width)
        keys = torch.where(positions[:, None] < length, keys, 0.0)  # a block's unwritten tail is masked, not multiplied
        scores = torch.einsum("qhd,kd->hqk", q[request].float(), keys) * softmax_scale
        scores = scores.masked_fill(~visible, -torch.inf)
        lse[request] = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num(0.0) if length else torch.zeros_like(scores)
        out[request] = torch.einsum("hqk,kd->qhd", weights, keys[:, :head_dim_v])
    return out.to(q.dtype), lse


def _blocks_of_requests(
    plan: torch.Tensor, requests: int, cache_seqlens: torch.Tensor, block_size: int
) -> list[list[int] | None]:
    """Return the blocks that the plan lists and that hold tokens, by request; None for a request without a part."""
    counts = [-(-length // block_size) for length in cache_seqlens.tolist()]
    listed: list[list[int] | None] = [None] * requests
    for first, first_block, last, end_block in plan[:, :4].tolist():
        if not 0 <= first <= last < requests or first_block < 0:
            continue
        for request in range(first, last + 1):
            begin = first_block if request == first else 0
            end = min(end_block, counts[request]) if request == last else counts[request]
            listed[request] = (listed[request] or []) + list(range(begin, end))
    return listed


# bf16: vLLM's third_party/flashmla calls dense_decode_fwd, which plans if it gets no plan

_bf16 = torch.library.Library("_flashmla_C", "FRAGMENT")
_bf16.define("plan_stand_in(Tensor cache_seqlens, int block_size) -> (Tensor, Tensor)")
_bf16.define(
    "decode_stand_in(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, Tensor block_table, "
    "float softmax_scale, bool causal, Tensor plan, Tensor num_splits) -> (Tensor, Tensor)"
)
_bf16.define(
    "dense_decode_fwd(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, Tensor block_table, "
    "float softmax_scale, bool causal, Tensor? tile_scheduler_metadata, Tensor? num_splits, Tensor? out=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_bf16, "plan_stand_in", "CPU")
def _plan(cache_seqlens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return plan_blocks(cache_seqlens, block_size)


@torch.library.impl(_bf16, "plan_stand_in", "Meta")
def _plan_shape(cache_seqlens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        cache_seqlens.new_empty((SM_PARTS, PLAN_WIDTH), dtype=torch.int32),
        cache_seqlens.new_empty(cache_seqlens.shape[0] + 1, dtype=torch.int32),
    )


@torch.library.impl(_bf16, "decode_stand_in", "CPU")
def _decode(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *without_splits, _ = arguments
    return attend(*without_splits)


@torch.library.impl(_bf16, "decode_stand_in", "Meta")
def _decode_shape(
    q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, query_tokens, heads, _width = q.shape
    return (
        q.new_empty((requests, query_tokens, heads, head_dim_v)),
        q.new_empty((requests, heads, query_tokens), dtype=torch.float32),
    )


@torch.library.impl(_bf16, "dense_decode_fwd", "CompositeImplicitAutograd")
def _dense_decode_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand in for the compiled operation, which plans only if it gets no plan.

    It is a composite, so that a graph records planner and decode apart.
    """
    if tile_scheduler_metadata is None or num_splits is None:
        tile_scheduler_metadata, num_splits = torch.ops._flashmla_C.plan_stand_in(cache_seqlens, k_cache.shape[1])
    attended, lse = torch.ops._flashmla_C.decode_stand_in(
        q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal, tile_scheduler_metadata, num_splits
    )
    if out is not None:  # from 0.20.0 on
        attended = out.copy_(attended)
    return attended, lse, tile_scheduler_metadata, num_splits


# dense fp8: vLLM's v1/attention/ops/flashmla plans by itself and hands plan and splits to fwd_kvcache_mla_fp8

_fp8 = torch.library.Library("_flashmla_extension_C", "FRAGMENT")
_fp8.define(
    "get_mla_decoding_metadata_dense_fp8(Tensor cache_seqlens, int num_q_tokens_per_head_k, int num_heads_k) "
    "-> (Tensor, Tensor)"
)
_fp8.define(
    "fwd_kvcache_mla_fp8(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, Tensor block_table, "
    "float softmax_scale, bool causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor descale_q, "
    "Tensor descale_k) -> (Tensor, Tensor)"
)


@torch.library.impl(_fp8, "get_mla_decoding_metadata_dense_fp8", "CPU")
def _plan_fp8(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return plan_blocks(cache_seqlens, FP8_BLOCK_SIZE)


@torch.library.impl(_fp8, "get_mla_decoding_metadata_dense_fp8", "Meta")
def _plan_fp8_shape(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _plan_shape(cache_seqlens, FP8_BLOCK_SIZE)


@torch.library.impl(_fp8, "fwd_kvcache_mla_fp8", "CPU")
def _decode_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    descale_q: torch.Tensor,
    descale_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32, where a GPU returns bf16: rounding would only blur the comparison."""
    requests, block_size = len(q), k_cache.shape[1]
    plan = tile_scheduler_metadata
    for request, blocks in enumerate(_blocks_of_requests(plan, requests, cache_seqlens, block_size)):
        if blocks is None:
            continue
        # FlashMLA's first dense kernel, which the fp8 one follows, loads a block before its loop over blocks, even for
        # a request without blocks. (There it reads the table's entry before the row's first: of the padded row before.)
        for block_id in block_table[request, blocks or [0]].tolist():
            if not 0 <= block_id < len(k_cache):
                raise RuntimeError(
                    f"illegal memory access (CPU stand-in): request {request} of {requests}, of length "
                    f"{int(cache_seqlens[request])}, reads block {block_id} of a cache of {len(k_cache)} blocks"
                )
    q, k_cache = q.float() * descale_q, k_cache.float() * descale_k
    out, lse = attend(q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal, plan)
    # A request's partial results are merged by `num_splits`; a count other than written reads unwritten memory.
    row = torch.arange(requests)
    written = ((plan[:, :1] <= row) & (row <= plan[:, 2:3])).sum(0)
    out[num_splits.diff() != written] = torch.nan
    return out, lse


@torch.library.impl(_fp8, "fwd_kvcache_mla_fp8", "Meta")
def _decode_fp8_shape(
    q: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _decode_shape(q.float(), k_cache, head_dim_v)
