"""States of requests that model runner V2 keeps in rows of their own: those of rows that no request has are poisoned.

A row is a request's from its first step until it ends, wherever the request is in a batch. What the last one has left
there nobody may read, and what the next one needs vLLM writes when it adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vllm_graphfix.verify.poison.rows import Buffer

_TABLES = ("block_tables", "num_blocks")
"""What `BlockTables` has by request; the rest of it is of the batch."""


def free_rows(runner: Any) -> list[int]:
    """Those that no request has, the next one to be given away first; none on model runner V1."""
    states = getattr(runner, "req_states", None)
    return list(reversed(getattr(states, "free_indices", ())))


def states_of(runner: Any) -> list[Buffer]:
    """By what *runner* has now: some move from one buffer to the next in each step."""
    states = getattr(runner, "req_states", None)
    if states is None or not hasattr(states, "free_indices"):
        return []
    tables = [(name, getattr(runner.block_tables, name)) for name in _TABLES]
    found = []
    for name, value in (*vars(states).items(), *tables):
        for named, tensor in _tensors(f"requests.{name}", value):
            axis = _axis(tensor, int(runner.max_num_reqs))
            if axis is not None:
                found.append(Buffer(named, tensor, axis, (), states, state=True))
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "if" and value.flags.writeable:
            yield name, torch.from_numpy(value)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}[{number}]", each)
    else:  # a StagedWriteTensor, or an UvaBackedTensor, which has a host's side
        for side in ("cpu", "gpu"):
            if isinstance(tensor := getattr(value, side, None), torch.Tensor):
                yield f"{name}.{side}", tensor


def _axis(tensor: torch.Tensor, requests: int) -> int | None:
    """The one along which requests are; None if that is not clear."""
    axes = [axis for axis, size in enumerate(tensor.shape[:2]) if size == requests]
    return axes[0] if len(axes) == 1 and tensor.numel() else None
