"""Whether poison shows in a scenario: it is run without and with it, and nothing is known of what it is for."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.verify.double.steps import poisoned
from vllm_graphfix.verify.poison.kinds import KINDS

if TYPE_CHECKING:
    from vllm_graphfix.verify.trial import Scenario


class NotPoisonedError(Exception):
    """The scenario does not tell where its steps begin."""


def shown_by_poison(scenario: Scenario, kinds: Collection[str] = KINDS, *, trigger: bool = True) -> list[str]:
    """What poison of *kinds* shows in *scenario*, in words.

    Nothing if each number is, to the last bit, that of eager without poison, nobody wrote where nobody may, and the
    graphs came to their end. Raises NotPoisonedError.
    """
    expected = scenario(trigger=trigger).eager
    with poisoned(kinds) as poison:
        found = scenario(trigger=trigger)
    told = [finding.text for finding in poison.findings()]
    for how, numbers in (("without graphs", found.eager), ("with graphs", found.graphed)):
        if how == "with graphs" and found.error is not None:
            told.append(f"{how}: {found.error}")
        elif differing := _different(expected, numbers):
            told.append(f"{how}: {differing} of {len(expected)} numbers differ")
    if not poison.steps:
        raise NotPoisonedError
    return told


def _different(expected: Sequence[float], found: Sequence[float]) -> int:
    pairs = zip(expected, found, strict=True)
    return sum(struct.pack("d", one) != struct.pack("d", other) for one, other in pairs)
