"""Calls of one layer, compared: stock, fixed and observed in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from measuring import interleaved

Function = Callable[..., Any]

REQUESTS, PADDED_REQUESTS = 200, 256
"""The sizes of a batch with padding; one without has as many requests as rows."""
CALLS = {"alone": 200, "real": 20}


class Calls(NamedTuple):
    """What is compared: the least that puts right, with the fix; stock on the same batch, and observed."""

    stock: Function
    fixed: Function
    unobserved: Function
    observed: Function


def compared(label: str, around: str, calls: Calls, rounds: int, *, target: bool) -> tuple[object, ...]:
    times = interleaved(calls._asdict(), calls=CALLS[around], rounds=rounds)
    return label, around, *(times[name] for name in Calls._fields), target


def call(function: Function, *arguments: Any, **keywords: Any) -> Callable[[], object]:
    return lambda: function(*arguments, **keywords)
