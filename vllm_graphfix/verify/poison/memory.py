"""Memory that nobody has: what PyTorch's allocator could give to the next who asks, and vLLM's shared workspaces."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from vllm_graphfix.verify.poison.bits import NAN


class Free(NamedTuple):
    """A part of the device's memory that no tensor has."""

    address: int
    nbytes: int


def fill() -> int:
    """Poisons all of it on the current device, in the pools of graphs too; returns bytes. Waits for the device."""
    filled = 0
    for workspace in workspaces():
        workspace.view(torch.uint8).fill_(NAN)
        filled += workspace.nbytes
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # another stream may still work in what it has given back
        device = torch.cuda.current_device()
        for part in free_parts(torch.cuda.memory_snapshot(), device):
            torch.as_tensor(_Bytes(part), device="cuda").fill_(NAN)
            filled += part.nbytes
        torch.cuda.synchronize()
    return filled


def workspaces() -> list[torch.Tensor]:
    """The scratch memory that vLLM shares among layers; what it keeps there beyond a call is in tensors of its own."""
    manager = getattr(sys.modules.get("vllm.v1.worker.workspace"), "_manager", None)
    given = getattr(manager, "_current_workspaces", None) or []
    return [each for each in given if isinstance(each, torch.Tensor) and each.numel()]


def free_parts(segments: Iterable[Mapping[str, Any]], device: int) -> list[Free]:
    """The free parts of *segments*, as `torch.cuda.memory_snapshot` describes them, that lie on *device*."""
    found = []
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"]:
                found.append(Free(block.get("address", address), block["size"]))
            address += block["size"]
    return found


class _Bytes:
    """Memory as CuPy's protocol describes it: a tensor of it is no copy."""

    def __init__(self, part: Free) -> None:
        self.__cuda_array_interface__ = {
            "shape": (part.nbytes,),
            "typestr": "|u1",
            "data": (part.address, False),
            "version": 2,
        }
