"""The layers of a model as vLLM's forward context names them: caches, recurrent state, and the first wrong layer.

A replayed graph runs no hook, and a compiled model has none inside. What both kinds of run leave for each layer is its
cache. What a layer writes there follows from its input, so the first cache that differs is of the layer after the first
wrong output, or of that layer itself if its state is made of its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.shadow.cache_classes import (
    OF_A_STATE,
    OTHER_DEVICES,
    RECURRENT,
    UNKNOWN,
    CacheClass,
    Treatment,
    known,
)
from vllm_graphfix.shadow.failures import StepNotCheckable
from vllm_graphfix.shadow.snapshot import StateRows, same_bits

if TYPE_CHECKING:
    from torch import Tensor

_OTHERS = frozenset(OTHER_DEVICES)
_MAX_COPIED = 256 << 20
"""Bytes of blocks that are copied in all to find the first layer; further blocks are skipped."""
_MANY_BLOCKS, _MANY_TOKENS = 1 << 30, 1 << 20
"""Sizes of a hypothetical cache whose shape a backend is asked for; no other axis of it has them."""


def unknown_cache(layers: Mapping[str, Any]) -> str | None:
    """Describe the first layer with a cache that a step may not be able to write twice; None if there is none."""
    for name, layer in layers.items():
        if "AttentionLayerBase" not in {kind.__name__ for kind in type(layer).__mro__}:
            continue
        kind = _class_of_cache(layer)
        if kind is None or kind.treatment is Treatment.REFUSED:
            return f"{name} is a {type(layer).__name__}; {kind.why if kind else UNKNOWN}"
    return None


def _class_of_cache(layer: Any) -> CacheClass | None:
    """Return the entry for the class that defines the cache of *layer*; None if that is not known.

    A subclass that overrides it may use it otherwise than its base, and so may a class for another device.
    """
    kinds = type(layer).__mro__
    if any(kind.__module__.startswith("vllm.models.") and _OTHERS & {*kind.__module__.split(".")} for kind in kinds):
        return None
    if RECURRENT in {kind.__name__ for kind in kinds}:
        return OF_A_STATE
    defining = next((kind for kind in kinds if "get_kv_cache_spec" in vars(kind)), None)
    return known(defining) if defining is not None else None


def caches_of(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer's cache.

    Up to 0.19.1 they are in a list with one entry for each virtual engine, of which there is one.
    """
    import torch

    def flat(value: Any) -> Iterable[Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for part in value:
                yield from flat(part)

    return [tensor for tensor in flat(getattr(layer, "kv_cache", None)) if tensor.numel()]


def recurrent_rows(layers: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[StateRows]:
    """Return the rows of recurrent state that a step may read or write.

    These are all that its metadata name, including those of padding (the null block), but for snapshots of a prompt's
    states, which a step only writes. Raises LookupError for metadata of a recurrent layer that name none.
    """
    import torch

    states: list[StateRows] = []
    indices: dict[int, Tensor | None] = {}
    for name, layer in layers.items():
        if name not in metadata or RECURRENT not in {kind.__name__ for kind in type(layer).__mro__}:
            continue
        of_layer = metadata[name]
        if id(of_layer) not in indices:  # layers of one group share their metadata
            named = [
                value.flatten()
                for attribute, value in sorted(vars(of_layer).items())
                if "state_indices" in attribute and isinstance(value, torch.Tensor) and value.numel()
            ]
            indices[id(of_layer)] = torch.cat([each.long() for each in named]).clamp_min(0) if named else None
        index = indices[id(of_layer)]
        if index is None:
            raise LookupError(f"{type(of_layer).__name__} of {name} names no rows of state")
        states += [StateRows(name, memory, index) for memory in caches_of(layer)]
    return states


def ring_rows(layers: Mapping[str, Any], metadata: Mapping[str, Any], *, every: bool) -> list[StateRows]:
    """Return the blocks of the rings that a step writes to, which are also all that it reads of them.

    A request has one block. Its slots, (tokens,) and -1 for none, are in the layer's own metadata: those of the forward
    context do not wrap around. Raises StepNotCheckable if *every* layer runs in the step, and one with a ring has no
    metadata.
    """
    states: list[StateRows] = []
    for name, layer in layers.items():
        if (kind := _class_of_cache(layer)) is None or kind.treatment is not Treatment.RING:
            continue
        if name not in metadata:
            if every:
                raise StepNotCheckable(f"it is not known which blocks of {name}, a ring, it writes to")
            continue
        slots = metadata[name].slot_mapping
        for cache in caches_of(layer):  # (blocks, slots, …)
            blocks = slots[slots >= 0].long().div(cache.shape[1], rounding_mode="floor").unique()
            states.append(StateRows(name, cache, blocks))
    return states


def written(
    layers: Mapping[str, Any], slots: Mapping[str, Tensor], states: list[StateRows]
) -> list[tuple[str, Tensor]]:
    """Copy what the layers hold for the tokens of a step: blocks and rows of state, in the order of *layers*.

    The blocks are those of *slots*, (tokens,) and -1 for none. Whole blocks: in a quantised cache the scales of a block
    may lie behind all its tokens.
    """
    by_layer: dict[str, list[Tensor]] = {}
    for rows in states:
        by_layer.setdefault(rows.layer, []).append(rows.memory.index_select(0, rows.blocks))
    budget = _MAX_COPIED
    blocks_by_slots: dict[tuple[int, int], Tensor] = {}
    for name, layer in layers.items():
        of_layer = slots.get(name)
        if of_layer is None or name in by_layer or not hasattr(layer, "kv_cache"):
            continue
        for cache in caches_of(layer):
            if (axes := block_and_token(layer, cache)) is None:
                continue
            # In DeepSeek V4 and its like an entry stands for several tokens, which have a slot each.
            axis, tokens = axes[0], cache.shape[axes[1]] * max(1, getattr(layer, "compress_ratio", 1))
            if (id(of_layer), tokens) not in blocks_by_slots:
                named = of_layer[of_layer >= 0].div(tokens, rounding_mode="floor").unique()
                blocks_by_slots[id(of_layer), tokens] = named
            blocks = blocks_by_slots[id(of_layer), tokens]
            nbytes = blocks.numel() * cache.select(axis, 0).numel() * cache.element_size()
            # In a cache that counts otherwise, a block that does not exist would end the process.
            if nbytes > budget or (nbytes and int(blocks[-1]) >= cache.shape[axis]):
                continue
            budget -= nbytes
            by_layer.setdefault(name, []).append(cache.index_select(axis, blocks))
    return [(name, tensor) for name in layers if name in by_layer for tensor in by_layer[name]]


def block_and_token(layer: Any, cache: Tensor) -> tuple[int, int] | None:
    """Return the axes of blocks and of a block's tokens; None where they are not known.

    A layer's blocks are those of its kernels: groups of layers differ in them, and the block size of the engine is
    often a multiple. Up to 0.28 the backend knows the shape of a cache; from 0.29 on it is (blocks, heads, tokens,
    width), without heads for MLA, and with those two axes swapped for Qwen4-exp's keys of several tokens each.
    """
    try:
        backend = layer.get_attn_backend()
        if not hasattr(backend, "get_kv_cache_shape"):
            swapped = cache.dim() == 4 and cache.shape[2] == 1 and getattr(layer, "compress_ratio", 1) > 1
            return (0, 1 if swapped else cache.dim() - 2) if cache.dim() in (3, 4) else None
        shape = backend.get_kv_cache_shape(_MANY_BLOCKS, _MANY_TOKENS, 1, 128)
        axes = shape.index(_MANY_BLOCKS), shape.index(_MANY_TOKENS)
    except Exception:  # of a backend without such an axis, or that takes other arguments
        return None
    return axes if len(shape) == cache.dim() else None


def first_difference(one: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> str | None:
    """Return the first layer whose copies differ; None if none does."""
    for (name, actual), (_, expected) in zip(one, other, strict=False):
        if actual.shape != expected.shape or not same_bits(actual, expected):
            return name
    return None
