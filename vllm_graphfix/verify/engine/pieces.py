"""Compares each replay of a piece, the graph of what lies between two attention layers, with the same piece without it.

vLLM's `CUDAGraphWrapper` gets the tensors of a piece as arguments, at the addresses of the capture, and returns memory
of the graph. A piece is compiled code without a state of its own, so it can run again at once, from the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow.comparison import row_errors, tensors, threshold
from vllm_graphfix.shadow.judge import MAX_BASELINE_NOISE
from vllm_graphfix.shadow.snapshot import same_bits

if TYPE_CHECKING:
    from torch import Tensor

_PIECEWISE = "PIECEWISE"
_FILLS = (0x55, 0x2A)
"""Bytes of which the memory of outputs is made before a piece runs again: what still holds them was not written."""


class PieceError(NamedTuple):
    """How far a replay is from the same piece without its graph, and two such runs from each other, relatively."""

    error: float
    noise: float

    @property
    def is_wrong(self) -> bool:
        return self.error > threshold(self.noise)

    @property
    def is_noisy(self) -> bool:
        return not self.noise <= MAX_BASELINE_NOISE  # not `>`: NaN counts as noise


def compare_piece(
    wrapper: Any,
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    call: Callable[[], Any],
    has_replayed: Callable[[], bool],
) -> tuple[Any, PieceError | None]:
    """Return what *call* of *wrapper* returns, and how it compares; None if it has not replayed one graph.

    What is left in memory is what the replay has left. Weights are not copied: no piece writes to them.
    """
    import torch

    written = [
        each for each in arguments if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)
    ]
    before = [each.clone() for each in written]
    output = call()
    if not has_replayed():
        return output, None
    served = [*tensors(output), *written]
    after = [each.clone() for each in served]

    def run() -> list[Tensor]:
        for tensor, copy in zip(written, before, strict=True):
            tensor.copy_(copy)
        return [*tensors(wrapper.runnable(*arguments, **keywords)), *written]

    try:
        error = _compare(after, run, len(served) - len(written))
    finally:
        for tensor, copy in zip(served, after, strict=True):
            tensor.copy_(copy)
    return output, error


def _compare(expected: Sequence[Tensor], run: Callable[[], list[Tensor]], outputs: int) -> PieceError:
    first = run()
    differing = [
        number
        for number, (one, other) in enumerate(zip(expected, first, strict=True))
        if one.shape != other.shape or not same_bits(one, other)
    ]
    if not differing:
        return PieceError(0.0, 0.0)
    # A piece also returns memory that attention is to write to. PyTorch's allocator gives the same memory to the same
    # requests, so that what a run does not write is still what it was filled with.
    copies = [_copy(first[number]) for number in differing]
    unwritten = None
    again: list[Tensor] = []
    for byte in _FILLS:
        for number in differing:
            if number < outputs and first[number].is_contiguous():
                _bytes_of(first[number]).fill_(byte)
        del first
        first = run()
        again = [_copy(first[number]) for number in differing]
        filled = [_bytes_of(each) == byte for each in again]
        unwritten = filled if unwritten is None else [one & two for one, two in zip(unwritten, filled, strict=True)]
    error = noise = 0.0
    for number, one, two, mask in zip(differing, copies, again, unwritten or (), strict=True):
        actual = _copy(expected[number])
        if number < outputs and actual.shape == one.shape:
            for each in (actual, one, two):
                _bytes_of(each)[mask] = 0
        error = max(error, _error(actual, one))
        noise = max(noise, _error(two, one))
    return PieceError(error, noise)


def _copy(tensor: Tensor) -> Tensor:
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _bytes_of(tensor: Tensor) -> Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _error(actual: Tensor, expected: Tensor) -> float:
    one, other = (each.detach().reshape(each.shape or (1,)) for each in (actual, expected))
    errors = row_errors([one], [other], len(other))
    return float(errors.max()) if len(errors) else 0.0


def is_piece(wrapper: Any) -> bool:
    return getattr(getattr(wrapper, "runtime_mode", None), "name", "") == _PIECEWISE
