"""Reduces a wrong case, as long as it stays wrong: fewer flags, then fewer requests, then fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_graphfix.commands.hunt.design import DIMENSIONS, YOURS, Architecture, HuntCase

_TOGETHER = ("compile", "breaks")
"""Dimensions of which neither value may be changed alone: breaks switch torch.compile off."""


class Size(NamedTuple):
    """Number of requests of a case, and the length of their answers."""

    requests: int
    tokens: int
    """Tokens of the longest answer."""


def smaller(
    case: HuntCase, size: Size, architecture: Architecture, is_wrong: Callable[[HuntCase, Size], bool]
) -> tuple[HuntCase, Size]:
    """Return a smaller case and size that are wrong, too: each dimension at its default, each number halved in turn."""
    default = {key: YOURS if case.deployed else next(iter(values)) for key, values in DIMENSIONS.items()}
    for dimensions in (_TOGETHER, *((each,) for each in DIMENSIONS)):
        settings = {**case.settings} | {each: default[each] for each in dimensions}
        other = case._replace(settings=settings)
        if other != case and architecture.allows(settings) and is_wrong(other, size):
            case = other
    for number in Size._fields:
        while getattr(size, number) > 1:
            half = size._replace(**{number: getattr(size, number) // 2})
            if not is_wrong(case, half):
                break
            size = half
    return case, size
