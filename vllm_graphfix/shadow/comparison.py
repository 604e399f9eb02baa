"""Whether two runs of one step came to the same: the relative error of each real row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_graphfix.shadow.snapshot import Rows

_MARGIN = 8.0
"""Where eager runs differ among themselves, by atomic additions say, a graph's may differ from both by more than they
do: a few samples do not show the largest difference. Corruption is larger by orders of magnitude. Where they do not
differ, every difference is one."""
_AT_ONCE = 1 << 22
"""Numbers that are compared at once, in a few copies of 8 bytes each, which `memory.RESERVE` has room for: the logits
of a batch are more."""


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a model returns, in one order.

    A model returns one tensor, tuples and lists, or the `IntermediateTensors` of a pipeline stage.
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


def row_errors(found: list[Tensor], expected: list[Tensor], rows: int) -> Tensor:
    """The relative error of each of the first *rows* rows of all tensors: (rows,) float64.

    It is the largest difference in the row divided by the largest value expected there.

    NaN where NaN is expected, and the same infinity, are no difference; NaN on one side alone is an infinite one.
    """
    import torch

    errors = torch.zeros(rows, dtype=torch.float64)
    if len(found) != len(expected):
        return errors + torch.inf
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return errors + torch.inf
        here = min(rows, len(one))
        if not one[:here].numel():
            continue
        together = max(1, _AT_ONCE // one[0].numel())
        for start in range(0, here, together):
            part = slice(start, min(start + together, here))
            errors[part] = torch.maximum(errors[part], _errors(one[part], other[part]).cpu())
    return errors


def _errors(one: Tensor, other: Tensor) -> Tensor:
    import torch

    a, b = (tensor.flatten(1).to(torch.float64) for tensor in (_rows_first(one), _rows_first(other)))
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(b.isfinite(), b.abs(), 0.0).amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    return difference.amax(1) / scale


def rows_drawn_alike(found: list[Tensor], expected: list[Tensor], rows: int) -> Tensor:
    """(rows,) bool: the rows in which all integers, which are tokens and what follows from them, are the same."""
    import torch

    alike = torch.ones(rows, dtype=torch.bool)
    for one, other in zip(found, expected, strict=False):
        if not one.is_floating_point() and one.shape == other.shape and one[:rows].numel():
            here = min(rows, len(one))
            alike[:here] &= (_rows_first(one[:here]) == _rows_first(other[:here])).flatten(1).all(1).cpu()
    return alike


def state_error(found: list[Rows], expected: list[Rows]) -> float:
    """The largest relative error of a row of recurrent state.

    Block 0 is the null block, where padding writes what it will.
    """
    worst = 0.0
    for (rows, one), (_, other) in zip(found, expected, strict=True):
        if not rows.compared:
            continue
        errors = row_errors([one], [other], len(one))[(rows.blocks > 0).cpu()]
        worst = max(worst, float(errors.max()) if len(errors) else 0.0)
    return worst


def _rows_first(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(-1)


def threshold(noise: float) -> float:
    """The error above which a replay is wrong, where eager runs differed among themselves by *noise* at most."""
    return _MARGIN * noise
