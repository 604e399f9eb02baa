"""Poison in free memory: blocks in PyTorch's caching allocator, and vLLM's shared workspaces."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from vllm_graphfix.verify.poison.bits import NAN


class Free(NamedTuple):
    """A free part of the device's memory."""

    address: int
    nbytes: int


def fill() -> int:
    """Fill all free memory of the current device, also in graphs' pools, and return bytes. Synchronises the device."""
    filled = 0
    for workspace in workspaces():
        workspace.view(torch.uint8).fill_(NAN)
        filled += workspace.nbytes
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # another stream may still use memory that it has freed
        device = torch.cuda.current_device()
        for part in free_parts(torch.cuda.memory_snapshot(), device):
            torch.as_tensor(_Bytes(part), device="cuda").fill_(NAN)
            filled += part.nbytes
        torch.cuda.synchronize()
    return filled


def workspaces() -> list[torch.Tensor]:
    """Return the scratch memory that vLLM shares among layers, whose contents no layer needs after its call."""
    manager = getattr(sys.modules.get("vllm.v1.worker.workspace"), "_manager", None)
    current = getattr(manager, "_current_workspaces", None) or []
    return [each for each in current if isinstance(each, torch.Tensor) and each.numel()]


def free_parts(segments: Iterable[Mapping[str, Any]], device: int) -> list[Free]:
    """Return the free parts on *device* of *segments*, which `torch.cuda.memory_snapshot` returns."""
    free = []
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"]:
                free.append(Free(block.get("address", address), block["size"]))
            address += block["size"]
    return free


class _Bytes:
    """Memory with CuPy's array interface, of which torch makes a tensor without a copy."""

    def __init__(self, part: Free) -> None:
        self.__cuda_array_interface__ = {
            "shape": (part.nbytes,),
            "typestr": "|u1",
            "data": (part.address, False),
            "version": 2,
        }
