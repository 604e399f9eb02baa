"""The layers of a model as vLLM's forward context names them.

It covers their caches, their recurrent state, and which layer goes wrong first.

A replayed graph runs no hook, and a compiled model has none inside. What both kinds of run leave for each layer is its
cache: what it writes follows from what comes in, so the first cache that differs is of the layer after the first wrong
output, or of the same one where the state is made of the output.
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
from vllm_graphfix.shadow.failures import UnfitStep
from vllm_graphfix.shadow.snapshot import StateRows, same_bits

if TYPE_CHECKING:
    from torch import Tensor

_OTHERS = frozenset(OTHER_DEVICES)
_MOST_COPIED = 256 << 20
"""Bytes of blocks that are copied in all to find the first layer; what is beyond is passed over."""
_MANY_BLOCKS, _MANY_TOKENS = 1 << 30, 1 << 20
"""Numbers for a cache whose shape a backend is asked for, which no other axis of it has."""


def unknown_cache(layers: Mapping[str, Any]) -> str | None:
    """The first layer with a cache of a kind of which it is not known whether a step may write it twice."""
    for name, layer in layers.items():
        if "AttentionLayerBase" not in {kind.__name__ for kind in type(layer).__mro__}:
            continue
        found = _class_of_cache(layer)
        if found is None or found.treatment is Treatment.REFUSED:
            return f"{name} is a {type(layer).__name__}; {found.why if found else UNKNOWN}"
    return None


def _class_of_cache(layer: Any) -> CacheClass | None:
    """What is known of the class that says what the cache of *layer* is.

    A subclass that says it anew may use it otherwise than its base, and so may one for another device.
    """
    kinds = type(layer).__mro__
    if any(kind.__module__.startswith("vllm.models.") and _OTHERS & {*kind.__module__.split(".")} for kind in kinds):
        return None
    if RECURRENT in {kind.__name__ for kind in kinds}:
        return OF_A_STATE
    says = next((kind for kind in kinds if "get_kv_cache_spec" in vars(kind)), None)
    return known(says) if says is not None else None


def caches_of(layer: Any) -> list[Tensor]:
    """The tensors of a layer's cache.

    Up to 0.19.1 they are in a list with one entry for each virtual engine, of which there is one.
    """
    import torch

    def flat(found: Any) -> Iterable[Tensor]:
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, (list, tuple)):
            for part in found:
                yield from flat(part)

    return [tensor for tensor in flat(getattr(layer, "kv_cache", None)) if tensor.numel()]


def recurrent_rows(layers: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[StateRows]:
    """The rows of recurrent state that a step may read or write.

    These are all that its metadata name, those of padding (the null block) included.
    """
    import torch

    found: list[StateRows] = []
    indices: dict[int, Tensor | None] = {}
    for name, layer in layers.items():
        if name not in metadata or RECURRENT not in {kind.__name__ for kind in type(layer).__mro__}:
            continue
        given = metadata[name]
        if id(given) not in indices:
            named = [
                value.flatten()
                for attribute, value in sorted(vars(given).items())
                if "state_indices" in attribute and isinstance(value, torch.Tensor) and value.numel()
            ]
            indices[id(given)] = torch.cat([each.long() for each in named]).clamp_min(0) if named else None
        index = indices[id(given)]
        if index is None:
            raise LookupError(f"{type(given).__name__} of {name} names no rows of state")
        found += [StateRows(name, memory, index) for memory in caches_of(layer)]
    return found


def ring_rows(layers: Mapping[str, Any], metadata: Mapping[str, Any], *, every: bool) -> list[StateRows]:
    """The blocks of the rings that a step writes to, which are also all that it reads of them.

    A request has one block. Its slots, (tokens,) and -1 for none, are in the layer's own metadata: those of the forward
    context do not go round. Raises UnfitStep if *every* layer runs in the step and one with a ring has no metadata.
    """
    found: list[StateRows] = []
    for name, layer in layers.items():
        if (kind := _class_of_cache(layer)) is None or kind.treatment is not Treatment.RING:
            continue
        if name not in metadata:
            if every:
                raise UnfitStep(f"it is not known which blocks of {name}, a ring, it writes to")
            continue
        slots = metadata[name].slot_mapping
        for cache in caches_of(layer):  # (blocks, slots, …)
            blocks = slots[slots >= 0].long().div(cache.shape[1], rounding_mode="floor").unique()
            found.append(StateRows(name, cache, blocks))
    return found


def written(
    layers: Mapping[str, Any], slots: Mapping[str, Tensor], states: list[StateRows]
) -> list[tuple[str, Tensor]]:
    """Copies of what the layers hold for the tokens of a step: blocks and rows of state.

    The blocks are those of *slots*, (tokens,) and -1 for none. Blocks, not tokens alone: in a quantised cache the
    scales of a block may be behind all its tokens.
    """
    by_layer: dict[str, list[Tensor]] = {}
    for rows in states:
        by_layer.setdefault(rows.layer, []).append(rows.memory.index_select(0, rows.blocks))
    left = _MOST_COPIED
    named: dict[tuple[int, int], Tensor] = {}
    for name, layer in layers.items():
        given = slots.get(name)
        if given is None or name in by_layer or not hasattr(layer, "kv_cache"):
            continue
        for cache in caches_of(layer):
            if (axes := block_and_token(layer, cache)) is None:
                continue
            # Of DeepSeek V4 and its like an entry stands for several tokens, which have a slot each.
            axis, tokens = axes[0], cache.shape[axes[1]] * max(1, getattr(layer, "compress_ratio", 1))
            if (id(given), tokens) not in named:
                named[id(given), tokens] = given[given >= 0].div(tokens, rounding_mode="floor").unique()
            blocks = named[id(given), tokens]
            nbytes = blocks.numel() * cache.select(axis, 0).numel() * cache.element_size()
            # A block that there is not, in a cache that counts otherwise, would end the process.
            if nbytes > left or (nbytes and int(blocks[-1]) >= cache.shape[axis]):
                continue
            left -= nbytes
            by_layer.setdefault(name, []).append(cache.index_select(axis, blocks))
    return [(name, tensor) for name in layers if name in by_layer for tensor in by_layer[name]]


def block_and_token(layer: Any, cache: Tensor) -> tuple[int, int] | None:
    """The axes of blocks and of a block's tokens; None where that is not known.

    A layer's blocks are those of its kernels: groups of layers differ in them, and the block size of the engine is
    often a multiple. Up to 0.28 the backend knows the shape of a cache; from 0.29 on each is (blocks, heads, tokens,
    width), without heads for MLA, and with the two turned around for Qwen4-exp's keys of several tokens each.
    """
    try:
        backend = layer.get_attn_backend()
        if not hasattr(backend, "get_kv_cache_shape"):
            turned = cache.dim() == 4 and cache.shape[2] == 1 and getattr(layer, "compress_ratio", 1) > 1
            return (0, 1 if turned else cache.dim() - 2) if cache.dim() in (3, 4) else None
        shape = backend.get_kv_cache_shape(_MANY_BLOCKS, _MANY_TOKENS, 1, 128)
        found = shape.index(_MANY_BLOCKS), shape.index(_MANY_TOKENS)
    except Exception:  # of a backend that has no such axis, or that wants to know more
        return None
    return found if len(shape) == cache.dim() else None


def first_difference(one: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> str | None:
    """The first layer whose copies differ; None if none does."""
    for (name, found), (_, expected) in zip(one, other, strict=False):
        if found.shape != expected.shape or not same_bits(found, expected):
            return name
    return None
