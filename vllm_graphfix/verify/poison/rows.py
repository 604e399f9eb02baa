"""Padded rows of the buffers that a model runner has for all steps: found by their shapes, lent to poison for a step.

A buffer is a tensor or an array, on the host or on the device, with an axis as long as there can be requests or tokens
in a batch. What lies behind the rows of a step belongs to no request. vLLM writes there what its kernels rely on when
it prepares the step (length 0, slot -1), so poison that is put there before shows only where nobody wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_graphfix.engine.inventory import held_by, looked_into
from vllm_graphfix.verify.poison.bits import NAN, as_integers, pattern

_DEEPEST, _MOST = 5, 20_000
_LARGEST = 16 << 20
"""Bytes of a buffer that are poisoned: the rows right behind those of a step, which padding reaches first."""
_NOT_INPUTS = frozenset(
    "model requests vllm_config encoder_cache kv_cache kv_caches kv_cache_config sampler rejection_sampler eplb_state "
    "cudagraph_dispatcher cudagraph_manager".split()
)
"""Attributes that are no inputs, and what statistics of experts are kept in."""
_ACROSS_STEPS = re.compile(
    r"(^|\.)(prev_\w+|num_accepted_tokens\w*|num_computed_tokens|valid_sampled\w+|\w*sampled_token\w*"
    r"|draft_token_ids\w*|\w*arange\w*|\w*_ptrs?|\w*_strides?|\w*generator\w*|num_blocks_per_row)\b"
)
"""What a step reads at the rows that its requests had in the step before, and what is the same in all steps."""
_BY_STATE = frozenset({"RequestState", "StagedWriteTensor", "UvaBackedTensor", "UvaBuffer", "UvaBufferPool"})
"""Classes of model runner V2 whose rows are states of requests, in an order of their own."""


class Room(NamedTuple):
    """How many there can be in a batch."""

    requests: int
    tokens: int


class Rows(NamedTuple):
    """How many there are in a step."""

    requests: int
    tokens: int
    live: int = 0
    """Requests in the batch: more than take part in a step without work."""


class Seen(NamedTuple):
    """Ids and lengths that exist, so that whoever reads them is seen and does not crash."""

    block: int
    """A block of the cache that holds poison, whether it is counted in the engine's blocks or in those of kernels."""
    length: int
    """Tokens of a sequence, which all of a block table's columns hold."""
    block_size: int
    vocabulary: int


class Buffer(NamedTuple):
    name: str
    tensor: Any
    axis: int
    starts: tuple[Callable[[Rows], int], ...]
    """Where padding begins along *axis*, for each meaning that its length can have."""
    holder: Any
    """The object that has the buffer; it may know its own block size."""
    state: bool
    """The batch's own record of its requests, in its rows, from which each step's inputs are made."""

    def padding(self, rows: Rows) -> Any:
        """The part of the buffer that belongs to no request of a step of *rows*; a view."""
        if self.state:
            rows = Rows(max(rows.requests, rows.live), max(rows.tokens, rows.live))
        start = min(max(begin(rows) for begin in self.starts), self.tensor.shape[self.axis])
        rest = self.tensor.shape[self.axis] - start
        return self.tensor.narrow(self.axis, start, min(rest, self.row_limit))

    @property
    def row_limit(self) -> int:
        """The number of rows that are poisoned at most: those of `_LARGEST` bytes, and at least one."""
        row: int = self.tensor.nbytes // max(1, self.tensor.shape[self.axis])
        return max(1, _LARGEST // max(1, row))


def buffers_of(holders: Mapping[str, Any], room: Room) -> list[Buffer]:
    """The buffers that *holders* have, by name, each memory once."""
    lengths: dict[int, list[Callable[[Rows], int]]] = {}
    for length, start in (
        (room.requests, lambda rows: rows.requests),
        (room.requests + 1, lambda rows: rows.requests + 1),
        (room.tokens, lambda rows: rows.tokens),
        (room.tokens + 1, lambda rows: rows.tokens),
    ):
        if length > 2:  # else there is no padding, and many a tensor has as few rows
            lengths.setdefault(length, []).append(start)
    found: dict[tuple[int, tuple[int, ...]], Buffer] = {}
    for name, tensor, holder in _tensors_in(holders):
        axis = next((axis for axis, size in enumerate(tensor.shape) if size in lengths), None)
        if axis is None or not _is_written_anew(name, tensor):
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape))
        state = ".input_batch." in name and not name.endswith(".gpu")
        found.setdefault(key, Buffer(name, tensor, axis, tuple(lengths[tensor.shape[axis]]), holder, state))
    return list(found.values())


def _is_written_anew(name: str, tensor: torch.Tensor) -> bool:
    if _ACROSS_STEPS.search(name) or tensor.is_complex() or 0 in tensor.stride():
        return False
    if tensor.element_size() == 1 and not (tensor.is_floating_point() or tensor.dtype is torch.bool):
        return False
    # A table of numbers: a step reads as many of them as it needs, and nobody writes any.
    numbers = torch.arange(len(tensor), device=tensor.device) if tensor.dim() == 1 and len(tensor) > 2 else None
    return numbers is None or not torch.equal(tensor, numbers.to(tensor.dtype))


def _tensors_in(holders: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, Any]]:
    waiting: list[tuple[str, Any, Any, int]] = [(name, value, None, 0) for name, value in holders.items()]
    visited: set[int] = set()
    while waiting and len(visited) < _MOST:
        name, value, holder, depth = waiting.pop(0)
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "iufb" and value.flags.writeable:
                yield name, torch.from_numpy(value), holder
        elif isinstance(value, torch.Tensor):
            if value.numel() and value.layout is torch.strided and value.device.type != "meta":
                yield name, value, holder
        elif id(value) not in visited and depth <= _DEEPEST and (not depth or _has_buffers(value)):
            visited.add(id(value))
            inside = isinstance(value, (dict, list, tuple))
            for key, each in held_by(value):
                if key not in _NOT_INPUTS:
                    named = f"{name}[{key}]" if inside else f"{name}.{key}"
                    waiting.append((named, each, holder if inside else value, depth + (not inside)))


def _has_buffers(value: Any) -> bool:
    if type(value).__name__ in _BY_STATE:
        return False
    doubles = isinstance(value, SimpleNamespace) or type(value).__module__.startswith("vllm_graphfix.verify.double")
    return bool(looked_into(value)) or (doubles and hasattr(value, "__dict__"))


class Lease:
    """Padding that holds poison for a step, and what it held before."""

    def __init__(self) -> None:
        self._lent: list[tuple[str, Any, Any, int]] = []
        self._lent_rows: list[tuple[Any, int, Any, Any, int]] = []

    def fill(self, buffers: Iterable[Buffer], rows: Rows, seen: Seen) -> int:
        """Poisons the padding of *buffers* in a step of *rows*; returns how many have some."""
        for buffer in buffers:
            padding = buffer.padding(rows)
            if padding.numel():
                bits = as_integers(padding)
                number = poison_of(buffer, rows, seen)
                self._lent.append((buffer.name, bits, bits.clone(), number))
                bits.fill_(number)
        return len(self._lent)

    def fill_rows(self, buffer: Buffer, listed: list[int], rows: Rows, seen: Seen) -> None:
        """Poisons the rows *listed* of *buffer*, wherever they are."""
        bits = as_integers(buffer.tensor)
        index = torch.tensor(listed, dtype=torch.int64, device=bits.device)
        number = poison_of(buffer, rows, seen)
        self._lent_rows.append((bits, buffer.axis, index, bits.index_select(buffer.axis, index), number))
        bits.index_fill_(buffer.axis, index, number)

    def end(self) -> None:
        """Gives back what nobody has overwritten: a step later it may be a request's."""
        for _, bits, before, number in self._lent:
            torch.where(bits == number, before, bits, out=bits)
        for bits, axis, index, before, number in self._lent_rows:
            now = bits.index_select(axis, index)
            bits.index_copy_(axis, index, torch.where(now == number, before, now))
        self._lent, self._lent_rows = [], []

    @property
    def lent(self) -> list[str]:
        return [name for name, *_ in self._lent]


def poison_of(buffer: Buffer, rows: Rows, seen: Seen) -> int:
    """What a padded row of *buffer* holds: NaN, or what a request in the middle of its prompt would have there."""
    tensor = buffer.tensor
    if tensor.is_floating_point():
        return pattern(tensor, NAN)
    if tensor.dtype is torch.bool:
        return 1
    name = buffer.name.lower()
    if "slot" in name:
        return seen.block * _block_size(buffer.holder, seen)
    if "table" in name or "state_ind" in name or "block_id" in name:
        return seen.block
    if "start" in name or "cu_" in name:
        return rows.tokens + 1  # one more row of one token
    if "computed" in name:
        return 1
    if "prompt" in name or "len" in name or "position" in name:
        return seen.length
    if "input_ids" in name or "token_ids" in name:
        return seen.block % seen.vocabulary
    return 1  # whatever it counts, there is a first or a second one


def _block_size(holder: Any, seen: Seen) -> int:
    size = getattr(holder, "block_size", None)
    return size if isinstance(size, int) else seen.block_size
