"""Calls of one layer, compared: stock, fixed and observed in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from measuring import elsewhere, interleaved

Function = Callable[..., Any]

REQUESTS, PADDED_REQUESTS = 200, 256
"""The sizes of a batch with padding; one without has as many requests as rows."""
CALLS = {"alone": 200, "real": 20}
COLD = 10
"""In so many rounds one is with cold caches: with the reading of other memory before each call it takes longer."""


class Calls(NamedTuple):
    """What is compared: the least that puts right, with the fix; stock on the same batch, and observed."""

    stock: Function
    fixed: Function
    unobserved: Function
    observed: Function


def compared(label: str, around: str, calls: Calls, rounds: int, *, target: bool) -> tuple[object, ...]:
    """The label, what the fix is around, the times of each with warm caches and with cold ones, and *target*."""
    warm = interleaved(calls._asdict(), calls=CALLS[around], rounds=rounds)
    cold = interleaved(calls._asdict(), calls=1, rounds=max(rounds // COLD, 2), between=elsewhere())
    return label, around, *(times[name] for times in (warm, cold) for name in Calls._fields), target


def call(function: Function, *arguments: Any, **keywords: Any) -> Callable[[], object]:
    return lambda: function(*arguments, **keywords)
