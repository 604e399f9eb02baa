"""Poison in blocks of the KV caches: the null block, and blocks that no request holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_graphfix.verify.poison.bits import NAN, as_integers, pattern

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 64 << 20
"""Bytes that are compared at a time."""


class Cache(NamedTuple):
    """A tensor of a layer's cache, with its blocks along *axis*."""

    layer: str
    tensor: Tensor
    axis: int = 0
    kernel_blocks: int = 1
    """Kernel blocks in one block of the engine."""
    group: int | None = None
    """Number of the layer's cache group; None if it has none of its own."""


class Blocks:
    """All caches of a model, each memory once. A block is poisoned or held by a request."""

    def __init__(
        self, caches: Sequence[Cache], count: int, byte: int = NAN, groups: Mapping[int, int] | None = None
    ) -> None:
        """*groups*, which may change, has the cache group that a block was last allocated for."""
        unique: dict[object, Cache] = {}
        by_group: dict[object, Cache] = {}
        for cache in caches:
            key = (cache.tensor.data_ptr(), tuple(cache.tensor.shape), tuple(cache.tensor.stride()))
            first = unique.setdefault(key, cache)
            by_group.setdefault((key, first.group if cache.group is None else cache.group), cache)
        self._caches, self._by_group = list(unique.values()), list(by_group.values())
        self._groups = {} if groups is None else groups
        self.count, self._byte = count, byte
        self.poisoned: set[int] = set()

    def fill(self, blocks: Iterable[int]) -> None:
        self._write(blocks, self._byte)
        self.poisoned.update(blocks)

    def wipe(self, blocks: Iterable[int]) -> None:
        """Fill *blocks* with zeros, as in a new engine: a kernel may multiply a block's unwritten tail by 0."""
        self._write(blocks, 0)
        self.poisoned.difference_update(blocks)

    def last_free(self, held: set[int]) -> int:
        """Return the last block that no request holds, or the null block.

        It is free both as a block of the engine and as a block of kernels with smaller blocks.
        """
        many = {cache.kernel_blocks for cache in self._caches}
        last = range(self.count - 1, 0, -1)
        return next((block for block in last if all(block // each and block // each not in held for each in many)), 0)

    def _write(self, blocks: Iterable[int], byte: int) -> None:
        listed = sorted(blocks)
        if listed:
            for cache in self._caches:
                memory = as_integers(cache.tensor)
                memory.index_fill_(cache.axis, _index(listed, cache), pattern(cache.tensor, byte))

    def overwritten(self, blocks: Iterable[int]) -> dict[str, list[int]]:
        """Return the poisoned *blocks* that do not hold poison any more, by layer."""
        listed = sorted(self.poisoned.intersection(blocks))
        by_layer: dict[str, list[int]] = {}
        for cache in self._caches:
            memory = as_integers(cache.tensor)
            number = pattern(cache.tensor, self._byte)
            changed = self._where(cache, listed, memory, functools.partial(torch.ne, other=number))
            if changed:
                by_layer.setdefault(cache.layer, []).extend(changed)
        return by_layer

    def with_nan(self, blocks: Iterable[int]) -> dict[str, list[int]]:
        """Return *blocks* with a NaN, by layer, in the order of the layers; caches of one-byte types are skipped.

        A layer's blocks are those of its own group. Groups share memory: half of a float32 state may be a bfloat16 NaN.
        """
        numbers = sorted(blocks)
        by_layer: dict[str, list[int]] = {}
        for cache in self._by_group:
            if cache.tensor.is_floating_point() and cache.tensor.element_size() > 1:
                group = cache.group
                listed = [each for each in numbers if group is None or self._groups.get(each, group) == group]
                wrong = self._where(cache, listed, cache.tensor, torch.isnan)
                if wrong:
                    by_layer.setdefault(cache.layer, []).extend(wrong)
        return by_layer

    @staticmethod
    def _where(cache: Cache, listed: list[int], memory: Tensor, holds: Callable[[Tensor], Tensor]) -> list[int]:
        """Return the blocks *listed* with an element that *holds*, in *memory*, the cache's tensor or a view of it."""
        size = cache.tensor.element_size() * cache.tensor.numel() // max(1, cache.tensor.shape[cache.axis])
        step = max(1, _AT_ONCE // max(1, size * cache.kernel_blocks))
        matching: list[int] = []
        for begin in range(0, len(listed), step):
            some = listed[begin : begin + step]
            part = memory.index_select(cache.axis, _index(some, cache))
            flags = holds(part).movedim(cache.axis, 0).flatten(1).any(1)
            flags = flags.view(len(some), cache.kernel_blocks).any(1)
            matching += [block for block, flag in zip(some, flags.tolist(), strict=True) if flag]
        return matching


def _index(blocks: Sequence[int], cache: Cache) -> Tensor:
    numbers = torch.tensor(blocks, dtype=torch.int64, device=cache.tensor.device)
    if cache.kernel_blocks == 1:
        return numbers
    inside = torch.arange(cache.kernel_blocks, device=numbers.device)
    return (numbers[:, None] * cache.kernel_blocks + inside).flatten()


def caches_of(layers: Mapping[str, Sequence[Tensor]], count: int) -> tuple[list[Cache], list[str]]:
    """Return the caches of *layers* with *count* blocks, or a multiple, along an axis, and the other layers' names."""
    caches: list[Cache] = []
    unknown: list[str] = []
    for name, tensors in layers.items():
        for tensor in tensors:
            axes = [axis for axis, size in enumerate(tensor.shape[:2]) if size and size % count == 0]
            if not axes or count < 3:
                unknown.append(name)
                continue
            # In a small cache the number of tokens may be that of blocks, or a multiple.
            axis = next((axis for axis in axes if tensor.shape[axis] == count), axes[0])
            caches.append(Cache(name, tensor, axis, tensor.shape[axis] // count))
    return caches, unknown
