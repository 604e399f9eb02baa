"""The relative error of each real row between two runs of one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_graphfix.shadow.snapshot import Rows

_MARGIN = 8.0
"""A graph's runs may differ from eager ones by more than a few samples of those show among themselves, as with atomic
additions. Corruption is larger by orders of magnitude. If eager runs are equal, every difference counts."""
_CHUNK = 1 << 22
"""Numbers that are compared at once, in a few copies of 8 bytes each, for which `memory.RESERVE` has room: the logits
of a batch are more."""


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model returns, in one order.

    A model returns a tensor, tuples and lists, or the `IntermediateTensors` of a pipeline stage. Raises TypeError for
    anything else.
    """
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from tensors(part)
    elif isinstance(by_name := getattr(output, "tensors", output), dict):
        for name in sorted(by_name):
            yield from tensors(by_name[name])
    elif output is not None:
        raise TypeError(f"a model returned a {type(output).__name__}, which cannot be compared")


def row_errors(actual: list[Tensor], expected: list[Tensor], rows: int) -> Tensor:
    """Return the largest relative error in each of the first *rows* rows over all tensors: (rows,) float64.

    Relative to the largest value expected in the row. NaN on both sides, and the same infinity, are no difference; NaN
    on one side is an infinite one, and so are tensors of another number or shape.
    """
    import torch

    errors = torch.zeros(rows, dtype=torch.float64)
    if len(actual) != len(expected):
        return errors + torch.inf
    for one, other in zip(actual, expected, strict=True):
        if one.shape != other.shape:
            return errors + torch.inf
        here = min(rows, len(one))
        if not one[:here].numel():
            continue
        together = max(1, _CHUNK // one[0].numel())
        for start in range(0, here, together):
            part = slice(start, min(start + together, here))
            errors[part] = torch.maximum(errors[part], _errors(one[part], other[part]).cpu())
    return errors


def _errors(one: Tensor, other: Tensor) -> Tensor:
    import torch

    a, b = (tensor.flatten(1).to(torch.float64) for tensor in (_with_columns(one), _with_columns(other)))
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(b.isfinite(), b.abs(), 0.0).amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    return difference.amax(1) / scale


def rows_drawn_alike(actual: list[Tensor], expected: list[Tensor], rows: int) -> Tensor:
    """Return which rows have the same integers, which are tokens and what follows from them: (rows,) bool."""
    import torch

    alike = torch.ones(rows, dtype=torch.bool)
    for one, other in zip(actual, expected, strict=False):
        if not one.is_floating_point() and one.shape == other.shape and one[:rows].numel():
            here = min(rows, len(one))
            alike[:here] &= (_with_columns(one[:here]) == _with_columns(other[:here])).flatten(1).all(1).cpu()
    return alike


def state_error(actual: list[Rows], expected: list[Rows]) -> float:
    """Return the largest relative error of a row of recurrent state.

    Block 0 does not count: it is the null block, to which padding writes.
    """
    worst = 0.0
    for (rows, one), (_, other) in zip(actual, expected, strict=True):
        if not rows.compared:
            continue
        errors = row_errors([one], [other], len(one))[(rows.blocks > 0).cpu()]
        worst = max(worst, float(errors.max()) if len(errors) else 0.0)
    return worst


def _with_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(-1)


def threshold(noise: float) -> float:
    """Return the error above which a replay is wrong, where eager runs differed among themselves by *noise* at most."""
    return _MARGIN * noise
