"""`compare --exact`: the replay of a piece beside the same piece without its graph, on tensors of a CPU.

A capture is a double: the replay is a function that writes to the memory of an earlier output.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graphfix.verify.engine.pieces import PieceError, compare_piece

WEIGHTS = torch.nn.Parameter(torch.eye(8) * 2, requires_grad=False)
NO_PADDING = slice(0, 0)
Piece = Callable[[torch.Tensor], Any]


def compared(
    piece: Piece,
    replayed: Callable[[torch.Tensor], object],
    hidden: torch.Tensor,
    output: Any,
    padded: slice = NO_PADDING,
) -> Any:
    """Compare *piece* with a graph of it, which writes to *output* what *replayed* writes there."""

    def call() -> Any:
        replayed(hidden)
        return output

    wrapper = SimpleNamespace(runnable=lambda hidden, weights: piece(hidden))
    returned, error = compare_piece(wrapper, (hidden, WEIGHTS), {}, call, lambda: True, padded)
    assert returned is output
    return error


@pytest.mark.parametrize(("added", "wrong"), [(0.0, False), (0.5, True)])
def test_a_replay_that_computes_something_else_is_wrong(added: float, wrong: bool) -> None:
    hidden, output = torch.ones(4, 8), torch.zeros(4, 8)
    error = compared(lambda each: each @ WEIGHTS, lambda each: output.copy_(each @ WEIGHTS + added), hidden, output)
    assert (error.is_wrong, error.is_noisy) == (wrong, False)
    assert output.tolist() == (hidden @ WEIGHTS + added).tolist()


@pytest.mark.parametrize(("added", "wrong"), [(1.0, False), (2.0, True)])
def test_what_a_piece_leaves_in_its_arguments_is_compared_and_stays_as_the_replay_left_it(
    added: float, wrong: bool
) -> None:
    hidden, output = torch.ones(4, 8), torch.zeros(4, 8)

    def replayed(each: torch.Tensor) -> None:
        output.copy_(each.add_(added) * 0 + 5)

    error = compared(lambda each: each.add_(1) * 0 + 5, replayed, hidden, output)
    assert error.is_wrong is wrong
    assert (hidden.unique().tolist(), output.unique().tolist()) == ([1 + added], [5.0])


@pytest.mark.parametrize("wrong", [False, True])
def test_memory_for_attention_to_write_to_is_not_compared(wrong: bool) -> None:
    """Half of the output is written, by the graph and by the piece; the rest is whatever was there."""
    hidden, output = torch.ones(4, 8), torch.full((4, 8), 3e37)
    output[2, 3] = torch.nan
    left = output[:, 4:].clone()

    def piece(each: torch.Tensor) -> torch.Tensor:
        fresh = torch.full((4, 8), torch.rand(()).item())
        fresh[:, :4] = each[:, :4]
        return fresh

    error = compared(piece, lambda each: output[:, :4].copy_(each[:, :4] + wrong), hidden, output)
    assert error == PieceError(1.0, 0.0) if wrong else error == PieceError(0.0, 0.0)
    assert torch.equal(output[:, 4:], left) or torch.isnan(left).any()


@pytest.mark.parametrize(("real", "wrong"), [(3, False), (4, True)])
def test_padded_rows_are_not_compared(real: int, wrong: bool) -> None:
    hidden, output = torch.ones(4, 8), torch.zeros(4, 8)
    last = torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None]
    error = compared(
        lambda each: each * 2, lambda each: output.copy_(each * 2 + last), hidden, output, slice(real, len(hidden))
    )
    assert (error.is_wrong, error.is_noisy) == (wrong, False)
    assert torch.equal(output, hidden * 2 + last)


def test_a_piece_that_gives_something_else_each_time_is_noisy() -> None:
    hidden, output = torch.ones(4, 8), torch.zeros(4, 8)
    error = compared(
        lambda each: each + torch.rand(4, 8), lambda each: output.copy_(each + torch.rand(4, 8)), hidden, output
    )
    assert error.is_noisy


def test_a_call_that_replays_no_graph_is_not_compared() -> None:
    wrapper = SimpleNamespace(runnable=None)
    assert compare_piece(wrapper, (torch.ones(2),), {}, lambda: 7, lambda: False, NO_PADDING) == (7, None)
