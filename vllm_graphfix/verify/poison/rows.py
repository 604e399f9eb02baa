"""Padded rows of a model runner's persistent buffers: recognised by shape, filled with poison for one step.

A buffer is a tensor or an array, on the host or the device, with an axis as long as the maximum number of requests or
tokens in a batch. Rows behind those of a step belong to no request. When vLLM prepares the step, it writes there the
values that its kernels rely on (length 0, slot -1), so earlier poison shows only in rows that vLLM did not write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_graphfix.engine.inventory import items_of, may_hold_tensors
from vllm_graphfix.verify.poison.bits import NAN, as_integers, pattern

_MAX_DEPTH, _MAX_VISITED = 5, 20_000
_MAX_BYTES = 16 << 20
"""Bytes of a buffer that are poisoned, in the rows right behind those of a step, which padding reaches first."""
_NOT_INPUTS = frozenset(
    "model requests vllm_config encoder_cache kv_cache kv_caches kv_cache_config sampler rejection_sampler eplb_state "
    "cudagraph_dispatcher cudagraph_manager".split()
)
"""Attributes that are no inputs, or hold statistics of experts."""
_ACROSS_STEPS = re.compile(
    r"(^|\.)(prev_\w+|num_accepted_tokens\w*|num_computed_tokens|valid_sampled\w+|\w*sampled_token\w*"
    r"|draft_token_ids\w*|\w*arange\w*|\w*_ptrs?|\w*_strides?|\w*generator\w*|num_blocks_per_row)\b"
)
"""Buffers that a step reads at the rows of the step before, and constants."""
_BY_STATE = frozenset({"RequestState", "StagedWriteTensor", "UvaBackedTensor", "UvaBuffer", "UvaBufferPool"})
"""Classes of model runner V2 whose rows are request states; see `states`."""


class Room(NamedTuple):
    """Maximum numbers of requests and tokens in a batch."""

    requests: int
    tokens: int


class Rows(NamedTuple):
    """Numbers of requests and tokens in a step."""

    requests: int
    tokens: int
    live: int = 0
    """Requests in the batch, also those that a step without work leaves out."""


class ValidIds(NamedTuple):
    """Valid ids and lengths: a kernel that reads them does not crash, and shows."""

    block: int
    """A block with poison, both as a block of the engine and as one of the kernels."""
    length: int
    """Tokens of a sequence that fills a row of the block table."""
    block_size: int
    vocabulary: int


class Buffer(NamedTuple):
    name: str
    tensor: Any
    axis: int
    starts: tuple[Callable[[Rows], int], ...]
    """Start of the padding along *axis*, for each meaning that the length of the axis can have."""
    holder: Any
    """The object that has the buffer, perhaps with a block size of its own."""
    state: bool
    """True for the batch's own table of requests, from which the inputs of each step are made."""

    def padding(self, rows: Rows) -> Any:
        """Return a view of the part of the buffer that belongs to no request of a step of *rows*."""
        if self.state:
            rows = Rows(max(rows.requests, rows.live), max(rows.tokens, rows.live))
        start = min(max(begin(rows) for begin in self.starts), self.tensor.shape[self.axis])
        rest = self.tensor.shape[self.axis] - start
        return self.tensor.narrow(self.axis, start, min(rest, self.row_limit))

    @property
    def row_limit(self) -> int:
        """Maximum number of poisoned rows: at most `_MAX_BYTES`, and at least one row."""
        row: int = self.tensor.nbytes // max(1, self.tensor.shape[self.axis])
        return max(1, _MAX_BYTES // max(1, row))


def buffers_of(holders: Mapping[str, Any], room: Room) -> list[Buffer]:
    """Return the buffers in the attributes of *holders*, each memory once."""
    lengths: dict[int, list[Callable[[Rows], int]]] = {}
    for length, start in (
        (room.requests, lambda rows: rows.requests),
        (room.requests + 1, lambda rows: rows.requests + 1),
        (room.tokens, lambda rows: rows.tokens),
        (room.tokens + 1, lambda rows: rows.tokens),
    ):
        if length > 2:  # else there is no padding, and tensors of other meanings have as few rows
            lengths.setdefault(length, []).append(start)
    buffers: dict[tuple[int, tuple[int, ...]], Buffer] = {}
    for name, tensor, holder in _tensors_in(holders):
        axis = next((axis for axis, size in enumerate(tensor.shape) if size in lengths), None)
        if axis is None or not _is_written_anew(name, tensor):
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape))
        state = ".input_batch." in name and not name.endswith(".gpu")
        buffers.setdefault(key, Buffer(name, tensor, axis, tuple(lengths[tensor.shape[axis]]), holder, state))
    return list(buffers.values())


def _is_written_anew(name: str, tensor: torch.Tensor) -> bool:
    if _ACROSS_STEPS.search(name) or tensor.is_complex() or 0 in tensor.stride():
        return False
    if tensor.element_size() == 1 and not (tensor.is_floating_point() or tensor.dtype is torch.bool):
        return False
    # A constant `arange`, of which a step reads a part.
    numbers = torch.arange(len(tensor), device=tensor.device) if tensor.dim() == 1 and len(tensor) > 2 else None
    return numbers is None or not torch.equal(tensor, numbers.to(tensor.dtype))


def _tensors_in(holders: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, Any]]:
    waiting: list[tuple[str, Any, Any, int]] = [(name, value, None, 0) for name, value in holders.items()]
    visited: set[int] = set()
    while waiting and len(visited) < _MAX_VISITED:
        name, value, holder, depth = waiting.pop(0)
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "iufb" and value.flags.writeable:
                yield name, torch.from_numpy(value), holder
        elif isinstance(value, torch.Tensor):
            if value.numel() and value.layout is torch.strided and value.device.type != "meta":
                yield name, value, holder
        elif id(value) not in visited and depth <= _MAX_DEPTH and (not depth or _has_buffers(value)):
            visited.add(id(value))
            inside = isinstance(value, (dict, list, tuple))
            for key, each in items_of(value):
                if key not in _NOT_INPUTS:
                    named = f"{name}[{key}]" if inside else f"{name}.{key}"
                    waiting.append((named, each, holder if inside else value, depth + (not inside)))


def _has_buffers(value: Any) -> bool:
    if type(value).__name__ in _BY_STATE:
        return False
    doubles = isinstance(value, SimpleNamespace) or type(value).__module__.startswith("vllm_graphfix.verify.double")
    return bool(may_hold_tensors(value)) or (doubles and hasattr(value, "__dict__"))


class Lease:
    """Padding that holds poison for a step, with its previous values."""

    def __init__(self) -> None:
        self._filled: list[tuple[Any, Any, int]] = []
        self._filled_rows: list[tuple[Any, int, Any, Any, int]] = []

    def fill(self, buffers: Iterable[Buffer], rows: Rows, valid: ValidIds) -> int:
        """Poison the padding of *buffers* in a step of *rows*; return the number of buffers with padding."""
        for buffer in buffers:
            padding = buffer.padding(rows)
            if padding.numel():
                bits = as_integers(padding)
                number = poison_of(buffer, rows, valid)
                self._filled.append((bits, bits.clone(), number))
                bits.fill_(number)
        return len(self._filled)

    def fill_rows(self, buffer: Buffer, listed: list[int], rows: Rows, valid: ValidIds) -> None:
        """Poison the rows *listed* of *buffer*."""
        bits = as_integers(buffer.tensor)
        index = torch.tensor(listed, dtype=torch.int64, device=bits.device)
        number = poison_of(buffer, rows, valid)
        self._filled_rows.append((bits, buffer.axis, index, bits.index_select(buffer.axis, index), number))
        bits.index_fill_(buffer.axis, index, number)

    def end(self) -> None:
        """Restore the elements that still hold poison; the next step may need them."""
        for bits, before, number in self._filled:
            torch.where(bits == number, before, bits, out=bits)
        for bits, axis, index, before, number in self._filled_rows:
            now = bits.index_select(axis, index)
            bits.index_copy_(axis, index, torch.where(now == number, before, now))
        self._filled, self._filled_rows = [], []


def poison_of(buffer: Buffer, rows: Rows, valid: ValidIds) -> int:
    """Return the value of a padded row of *buffer*: NaN, or that of a request in the middle of its prompt."""
    tensor = buffer.tensor
    if tensor.is_floating_point():
        return pattern(tensor, NAN)
    if tensor.dtype is torch.bool:
        return 1
    name = buffer.name.lower()
    if "slot" in name:
        return valid.block * _block_size(buffer.holder, valid)
    if "table" in name or "state_ind" in name or "block_id" in name:
        return valid.block
    if "embeddings_indices" in name:  # of LoRA: a multiple of the vocabulary, to which a token is added
        return 0
    if "start" in name or "cu_" in name:
        return rows.tokens + 1  # one more row of one token
    if "computed" in name:
        return 1
    if "prompt" in name or "len" in name or "position" in name:
        return valid.length
    if "input_ids" in name or "token_ids" in name:
        return valid.block % valid.vocabulary
    return 1  # a valid count or index of anything


def _block_size(holder: Any, valid: ValidIds) -> int:
    size = getattr(holder, "block_size", None)
    return size if isinstance(size, int) else valid.block_size
