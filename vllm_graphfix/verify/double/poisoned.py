"""Effects of poison on a scenario, which runs without and with it."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.verify.double.steps import poisoned
from vllm_graphfix.verify.poison.kinds import KINDS

if TYPE_CHECKING:
    from vllm_graphfix.verify.trial import Scenario


class NotPoisonedError(Exception):
    """The scenario does not announce its steps, so that nothing was poisoned."""


def effects_of_poison(scenario: Scenario, kinds: Collection[str] = KINDS, *, trigger: bool = True) -> list[str]:
    """Return the effects of poison of *kinds* on *scenario*, as sentences for the report.

    There are none if each number equals, to the last bit, that of the eager run without poison, no step wrote to blocks
    that are nobody's, and the graphs raised no error.

    Raises:
        NotPoisonedError: the scenario announces no steps.
    """
    expected = scenario(trigger=trigger).eager
    with poisoned(kinds) as poison:
        measured = scenario(trigger=trigger)
    effects = [finding.text for finding in poison.findings()]
    for how, numbers in (("without graphs", measured.eager), ("with graphs", measured.graphed)):
        if how == "with graphs" and measured.error is not None:
            effects.append(f"{how}: {measured.error}")
        elif differing := _different(expected, numbers):
            effects.append(f"{how}: {differing} of {len(expected)} numbers differ")
    if not poison.steps:
        raise NotPoisonedError
    return effects


def _different(expected: Sequence[float], measured: Sequence[float]) -> int:
    pairs = zip(expected, measured, strict=True)
    return sum(struct.pack("d", one) != struct.pack("d", other) for one, other in pairs)
