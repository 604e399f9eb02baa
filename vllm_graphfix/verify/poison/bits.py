"""Poison as bytes, the same for every dtype, so that layers that share memory agree on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAN = 0xFF
"""All bits set: NaN in every floating-point type, fp8 included."""
LOUD = 0x47
"""A large finite number, which a kernel may mask by multiplying with 0: 51,015 in bf16 and float32, 7.3 in float16,
3.75 and 7 in fp8."""


def as_integers(tensor: Tensor) -> Tensor:
    """View *tensor* as integers of the same width."""
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def pattern(tensor: Tensor, byte: int) -> int:
    """Return the value of an element of `as_integers(tensor)` whose bytes are all *byte*."""
    width = tensor.element_size()
    return int.from_bytes(bytes([byte]) * width, "little", signed=width > 1)
