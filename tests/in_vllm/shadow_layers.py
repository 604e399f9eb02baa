"""Which layer is the first whose cache differs.

The layer classes and backends are vLLM's own, whose blocks are of several sizes and shapes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBackend
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from vllm_graphfix.shadow import layers

KINDS = {
    "flash": (Attention, FlashAttentionBackend, 16),
    "triton": (Attention, TritonAttentionBackend, 48),
    "flex": (Attention, FlexAttentionBackend, 32),
    "mla": (MLAAttention, MLACommonBackend, 64),
    "indexer": (DeepseekV32IndexerCache, DeepseekV32IndexerBackend, 80),
}
"""vLLM's own layers and backends, and tokens of a block, of groups that differ in them."""
HEADS, HEAD, MANY = 3, 20, 7


def layer_of(kind: type, backend: Any, tokens: int) -> Any:
    """A layer of vLLM's own class with a cache of (MANY, …) blocks, in the shape that vLLM gives it.

    No other number of that shape is MANY.
    """
    layer: Any = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer._vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False))
    if kind is not DeepseekV32IndexerCache:
        layer.attn_backend = backend
    heads = HEADS if kind is Attention else 1
    if hasattr(backend, "get_kv_cache_shape"):
        layer.kv_cache = torch.zeros(backend.get_kv_cache_shape(MANY, tokens, heads, HEAD))
    else:
        spec: Any = kv_cache_interface.FullAttentionSpec(
            block_size=3 * tokens, num_kv_heads=heads, head_size=HEAD, dtype=torch.float32
        )
        *shape, nbytes = kv_cache_interface.compute_layer_kv_cache_shape_bytes(spec, 1, tokens)
        layer.bind_kv_cache(torch.zeros(MANY, *shape[1:], nbytes // 4))
    return layer


def cell(cache: torch.Tensor, tokens: int, block: int, offset: int) -> torch.Tensor:
    """A view of what is kept of a token."""
    at: list[Any] = [slice(None)] * cache.dim()
    at[cache.shape.index(MANY)], at[cache.shape.index(tokens)] = block, offset
    return cache[tuple(at)]


def test_the_first_layer_is_named_whatever_the_blocks_of_its_group() -> None:
    actual = {name: layer_of(*kind) for name, kind in KINDS.items()}
    slots = {name: torch.tensor([-1, 3 * tokens + 5, 5 * tokens]) for name, (*_, tokens) in KINDS.items()}
    before = layers.written(actual, slots, [])
    assert [name for name, _ in before] == list(KINDS)
    for name in reversed(KINDS):
        cache, tokens = actual[name].kv_cache, KINDS[name][2]
        cell(cache, tokens, 4, 5).fill_(1)  # another request's
        cell(cache, tokens, 0, 0).fill_(1)
        assert layers.first_difference(before, layers.written(actual, slots, [])) != name
        cell(cache, tokens, 3, 5).fill_(1)
        assert layers.first_difference(before, layers.written(actual, slots, [])) == name


def test_caches_are_copied_up_to_a_limit_and_missing_slots_never() -> None:
    actual = {name: layer_of(*kind) for name, kind in KINDS.items()}
    slots = {name: torch.tensor([5]) for name in KINDS}
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in layers.written(actual, slots, [])]
    with mock.patch.object(layers, "_MAX_COPIED", sum(sizes[:2])):
        assert [name for name, _ in layers.written(actual, slots, [])] == list(KINDS)[:2]
    slots["triton"] = torch.tensor([7 * 48])
    assert "triton" not in dict(layers.written(actual, slots, []))


def test_an_entry_of_several_tokens_is_in_the_block_of_their_slots() -> None:
    """DeepSeek V4's: a block has slots for four times as many tokens as it has entries."""
    kind, backend, tokens = KINDS["mla"]
    layer = layer_of(kind, backend, tokens)
    layer.compress_ratio = 4
    slots = {"entries": torch.tensor([-1, 3 * 4 * tokens + 5])}
    before = layers.written({"entries": layer}, slots, [])
    cell(layer.kv_cache, tokens, 3, 1).fill_(1)
    assert layers.first_difference(before, layers.written({"entries": layer}, slots, [])) == "entries"


def test_a_key_of_several_tokens_is_copied_with_swapped_axes() -> None:
    """Qwen4-exp's: (blocks, keys, 1, width)."""
    caches: Any = pytest.importorskip("vllm.models.qwen4_exp.common.qsa_cache", reason="from 0.29.0 on")
    layer: Any = object.__new__(caches.QSACompressedKeyCache)
    torch.nn.Module.__init__(layer)
    layer.head_size, layer.dtype, layer.compress_ratio = HEAD, torch.float32, 4
    layer.bind_kv_cache(torch.zeros(MANY, 1, 24, HEAD))
    slots = {"keys": torch.tensor([-1, 3 * 4 * 24 + 5])}
    before = layers.written({"keys": layer}, slots, [])
    layer.kv_cache[0, 1].fill_(1)
    assert layers.first_difference(before, layers.written({"keys": layer}, slots, [])) is None
    layer.kv_cache[3, 1].fill_(1)
    assert layers.first_difference(before, layers.written({"keys": layer}, slots, [])) == "keys"
