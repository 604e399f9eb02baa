"""Poison as bits: the same bytes whatever type a tensor has, so that layers which share memory agree on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAN = 0xFF
"""All bits set are NaN in every floating-point type, in two halves of one, and in fp8."""
LOUD = 0x47
"""A number far from any model's, yet finite, so that a kernel may multiply it by 0: 51,015 in bf16 and float32, 7.3 in
float16, 3.75 and 7 in fp8."""


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def pattern(tensor: Tensor, byte: int) -> int:
    """The number that an element of `as_integers(tensor)` is if all of its bytes are *byte*."""
    width = tensor.element_size()
    return int.from_bytes(bytes([byte]) * width, "little", signed=width > 1)
