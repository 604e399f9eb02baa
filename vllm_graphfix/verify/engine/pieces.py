"""Compares each replay of a piece, the graph of what lies between two attention layers, with the same piece without it.

vLLM's `CUDAGraphWrapper` gets the tensors of a piece as arguments, at the addresses of the capture, and returns memory
of the graph. A piece is compiled code without a state of its own, so it can run again at once, from the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.comparison import row_errors, tensors, threshold
from vllm_graphfix.shadow.judge import MAX_BASELINE_NOISE
from vllm_graphfix.shadow.snapshot import same_bits

if TYPE_CHECKING:
    from torch import Tensor

_PIECEWISE = "PIECEWISE"
_FILLS = (0x55, 0x2A)
"""Bytes that an output of the graph is filled with before a replay: what still holds each of them was not written."""


class PieceError(NamedTuple):
    """Relative differences: of a replay from the piece without its graph, and of two runs without it (*noise*)."""

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
    padded_rows: slice,
) -> tuple[Any, PieceError | None]:
    """Return what *call* of *wrapper* returns, and how it compares; None if it has not replayed one graph.

    What is left in memory is what the replay has left. Weights are not copied: no piece writes to them. *padded_rows*
    are left out of tensors with a row for each of the step's tokens, whose number is where the slice ends: attention
    leaves there what was in memory, and experts chosen by that may differ between two runs.
    """
    import torch

    def real(tensor: Tensor) -> Tensor:
        return tensor[: padded_rows.start] if tensor.dim() and len(tensor) == padded_rows.stop else tensor

    written = [
        each for each in arguments if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)
    ]
    before = [each.clone() for each in written]
    output = call()
    if not has_replayed():
        return output, None
    served = [*tensors(output), *written]
    after = [each.clone() for each in served]

    def restore() -> None:
        for tensor, copy in zip(written, before, strict=True):
            tensor.copy_(copy)

    def run() -> list[Tensor]:
        restore()
        return [*tensors(wrapper.runnable(*arguments, **keywords)), *written]

    outputs = len(served) - len(written)
    try:
        first = run()
        differing = [
            number
            for number, (one, other) in enumerate(zip(after, first, strict=True))
            if one.shape != other.shape or not same_bits(real(one), real(other))
        ]
        if not _on_any_rank(differing):
            return output, PieceError(0.0, 0.0)
        copies = [_copy(first[number]) for number in differing]
        again = [_copy(each) for number, each in enumerate(run()) if number in differing]
        unwritten = _unwritten(served, [number for number in differing if number < outputs], restore, call)
    finally:
        for tensor, copy in zip(served, after, strict=True):
            tensor.copy_(copy)
    error = noise = 0.0
    for number, one, two in zip(differing, copies, again, strict=True):
        actual = _copy(after[number])
        if number in unwritten and actual.shape == one.shape:
            for each in (actual, one, two):
                _bytes_of(each)[unwritten[number]] = 0
        error = max(error, _error(real(actual), real(one)))
        noise = max(noise, _error(real(two), real(one)))
    return output, PieceError(error, noise)


def _on_any_rank(differing: Sequence[int]) -> bool:
    """Return True if a rank has to run the piece again: then all do, since a piece has collectives."""
    if ranks.is_single_rank():
        return bool(differing)
    with ranks.deadline(ranks.step_timeout()):
        return ranks.all_reduce_max(float(bool(differing)))[0] > 0


def _unwritten(
    served: Sequence[Tensor], outputs: Sequence[int], restore: Callable[[], None], replay: Callable[[], Any]
) -> dict[int, Tensor]:
    """Return which bytes of these *outputs* a replay does not write, by number.

    A piece also returns memory that attention is to write to. What a graph leaves out by a defect is not seen so.
    """
    unwritten: dict[int, Tensor] = {}
    for byte in _FILLS:
        for number in outputs:
            served[number].copy_(_filled(served[number], byte))
        restore()  # after the outputs, since a piece may return what it was given
        replay()
        for number in outputs:
            same = _bytes_of(_copy(served[number])) == byte
            unwritten[number] = unwritten[number] & same if number in unwritten else same
    return unwritten


def _filled(tensor: Tensor, byte: int) -> Tensor:
    filled = _copy(tensor)
    _bytes_of(filled).fill_(byte)
    return filled


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
