"""Poison in request states of model runner V2, in the rows that no request has.

A row belongs to a request from its first step to its end, whatever its place in a batch. vLLM writes a row when it adds
a request, so no step may read what an earlier request left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vllm_graphfix.verify.poison.rows import Buffer

_TABLES = ("block_tables", "num_blocks")
"""Attributes of `BlockTables` with a row per request; the others have one per place in the batch."""


def free_rows(runner: Any) -> list[int]:
    """Return the rows that no request has, the next one to be used first; none on model runner V1."""
    states = getattr(runner, "req_states", None)
    return list(reversed(getattr(states, "free_indices", ())))


def states_of(runner: Any) -> list[Buffer]:
    """Return the buffers of request states. Call it in each step: some states move from buffer to buffer."""
    states = getattr(runner, "req_states", None)
    if states is None or not hasattr(states, "free_indices"):
        return []
    tables = [(name, getattr(runner.block_tables, name)) for name in _TABLES]
    buffers = []
    for name, value in (*vars(states).items(), *tables):
        for named, tensor in _tensors(f"requests.{name}", value):
            axis = _axis(tensor, int(runner.max_num_reqs))
            if axis is not None:
                buffers.append(Buffer(named, tensor, axis, (), states, state=True))
    return buffers


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "if" and value.flags.writeable:
            yield name, torch.from_numpy(value)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}[{number}]", each)
    else:  # a StagedWriteTensor, or a UvaBackedTensor with a copy on the host
        for side in ("cpu", "gpu"):
            if isinstance(tensor := getattr(value, side, None), torch.Tensor):
                yield f"{name}.{side}", tensor


def _axis(tensor: torch.Tensor, requests: int) -> int | None:
    """Return the axis as long as *requests*, or None if there is none or more than one."""
    axes = [axis for axis, size in enumerate(tensor.shape[:2]) if size == requests]
    return axes[0] if len(axes) == 1 and tensor.numel() else None
