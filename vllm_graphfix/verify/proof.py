"""Proof of one fix on one vLLM: its measurements, and the outcome that they lead to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_graphfix.fix import Diagnosis, Fix, State, Verdict
from vllm_graphfix.settings.environment import PREFIX
from vllm_graphfix.verify.measurement import Measurement, Watch

MODES_OF_A_PROOF = f"{PREFIX}=off (stock), every fix auto (patched)"
_TOLERANCE = 1e-6
"""Tolerance relative to the largest number, for the order of operations: in float32 on one device they are equal."""


@dataclass(frozen=True)
class Proof:
    """Measurements of one fix on one vLLM, stock and patched."""

    fix: Fix
    diagnosis: Diagnosis
    stock: Measurement | None
    patched: Measurement | None
    failure: str | None
    """Reason why there is no measurement."""
    stock_state: tuple[str, str]
    patched_state: tuple[str, str]
    """State and reason of the fix in the patched process; above, in the stock process."""
    skipped: str | None = None
    """Reason why the fix was not tried."""
    watched: Mapping[str, Watch] = field(default_factory=dict)
    """Verdicts of the shadow check, ``stock`` and ``patched``, if it must see the defect."""
    poisoned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Effects of poison, ``stock`` and ``patched``, if it was tried and leads to a verdict."""
    poison_notes: Mapping[str, str] = field(default_factory=dict)
    """By mode, the reason why poison leads to no verdict, or why no effect is no fault."""
    further: str | None = None
    """Name of the case, if it is not the first one of the fix."""
    why_unwatched: str = ""
    """Reason why the shadow check cannot see the defect in a replay, from the fix's trial."""
    was_run: bool = False
    """True if the scenario was run although the diagnosis is `fixed`: a scenario that fails then proves nothing."""

    @property
    def title(self) -> str:
        return self.fix.name if self.further is None else f"{self.fix.name} ({self.further})"

    @property
    def outcome(self) -> str:
        """``proven``, ``nothing patched``, or the first condition that does not hold."""
        if self.skipped is not None:
            return "skipped"
        if self.diagnosis.verdict is Verdict.UNRECOGNISED:
            return self._outcome_of_a_run
        if self.diagnosis.verdict is not Verdict.AFFECTED:
            if self.stock is not None and _shows_the_defect(self.stock):
                return "affected: no patch fits"
            if self.failure is not None and not self.was_run:
                return "not left alone"
            expected = State.NOT_NEEDED.value
            return (
                "nothing patched" if self.patched_state[0] == expected else f"{self.patched_state[0]}, not {expected}"
            )
        if self.failure is not None or self.stock is None or self.patched is None:
            return "scenario failed"
        if self.stock_state[0] != State.OFF.value:
            return f"{self.stock_state[0]} in the stock process"
        if self.patched_state[0] != State.ACTIVE.value:
            return f"{self.patched_state[0]} in the patched process"
        if not self.stock.eager or differing(self.stock.eager, self.patched.eager):
            return "the references differ"
        if not _shows_the_defect(self.stock):
            return "defect not shown on stock"
        if self.patched.error or differing(self.patched.eager, self.patched.graphed):
            return "defect still there"
        # The expected counts of a scenario are those of released code.
        if self.patched.miscounted and self.diagnosis.known:
            return "miscounted"
        if self.poisoned.get("patched"):
            return "poison is still seen"
        if "stock" in self.poisoned and not self.poisoned["stock"] and "stock" not in self.poison_notes:
            return "missed by poison"
        return self._fault_of_checks() or "proven"

    @property
    def _outcome_of_a_run(self) -> str:
        """Outcome for code that is not recognised: ``right``, ``affected: …`` or ``not decided``."""
        if self.failure is not None or self.stock is None or self.patched is None:
            return "not decided"
        if not _shows_the_defect(self.stock):
            return "right"
        if self.patched_state[0] != State.ACTIVE.value:
            return "affected: no patch fits"
        remains = self.patched.error or differing(self.patched.eager, self.patched.graphed)
        return "affected: the fix does not help" if remains else "affected: the fix helps"

    @property
    def names_tree(self) -> str | None:
        """Setting that patches this very code, if a run has proven that this helps; else None."""
        helps = self.outcome == "affected: the fix helps"
        return f"{self.fix.variable}=on:{self.diagnosis.tree}" if helps else None

    def _fault_of_checks(self) -> str | None:
        """Return the first fault of the shadow check on any kind of graphs, or None."""
        stock, patched = (
            (watch, *watch.further) if watch else () for watch in map(self.watched.get, ("stock", "patched"))
        )
        return next(filter(None, itertools.starmap(_fault_of_check, itertools.zip_longest(stock, patched))), None)

    @property
    def unwatched(self) -> str | None:
        """Reason why the shadow check cannot see the defect in a replay, if the fix was tried without it."""
        tried = self.stock is not None and self.further is None and not self.watched
        return (self.why_unwatched or None) if tried else None

    @property
    def holds(self) -> bool:
        return self.outcome in ("proven", "nothing patched", "right")


def _fault_of_check(stock: Watch | None, patched: Watch | None) -> str | None:
    """Return the fault of the shadow check, or None.

    It is no fault if stock crashes before a check, or if the check is inactive in this engine.
    """
    for watch in (patched, None if stock and stock.error else stock):
        if watch and (watch.error or watch.state == State.FAILED.value):
            return "the shadow check failed"
        if watch and watch.state == State.ACTIVE.value and not watch.checks:
            return "nothing was checked by the shadow check"
    if stock and stock.checks and not stock.mismatches and not stock.error:
        return "missed by the shadow check"
    return "false alarm of the shadow check" if patched and patched.mismatches else None


def _shows_the_defect(stock: Measurement) -> bool:
    first = stock.deciding
    if first is None and stock.error:
        return True
    return bool(differing(stock.eager[:first], stock.graphed[:first]))


def differing(reference: tuple[float, ...], actual: tuple[float, ...]) -> int:
    """Return the number of elements that differ from the reference; all of them if the lengths differ."""
    if len(reference) != len(actual):
        return max(len(reference), len(actual))
    scale = max((abs(number) for number in reference if math.isfinite(number)), default=1.0)
    return sum(not abs(a - b) <= _TOLERANCE * max(scale, 1.0) for a, b in zip(reference, actual, strict=True))
