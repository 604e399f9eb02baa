"""Verdict on an engine that was asked with poison, as lines for people and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_graphfix.verify.comparison import finite_or_none, tolerance_of
from vllm_graphfix.verify.engine.job import EngineResult, PoisonPass
from vllm_graphfix.verify.engine.poisoned import PASSES, gap_between
from vllm_graphfix.verify.engine.processes import HANG
from vllm_graphfix.verify.poison.kinds import NAN_IN_NULL_BLOCK, ROWS

_NO_FINDING = re.compile(rf"{HANG.pattern}|.*out of memory", re.IGNORECASE | re.DOTALL)
"""Errors that poison does not cause. An engine that ran into the time limit of a whole engine may be slow; one that
hangs with poison is ended before that, with another error."""
LISTED_PROMPTS = 12
"""Prompts in a line for people; JSON has all."""


@dataclass(frozen=True)
class PoisonReport:
    """An engine with graphs, asked twice without poison and then with it."""

    result: EngineResult | None
    error: str | None = None
    """The error that ended the engine."""
    passes_begun: int = 0
    """Passes with poison that had begun before the error."""

    @property
    def passes(self) -> tuple[PoisonPass, ...]:
        return self.result.poisoned if self.result else ()

    @property
    def noise(self) -> float:
        """Largest difference between two passes without poison; 0 if they are bitwise equal."""
        if self.result is None:
            return 0.0
        return max((gap_between(*pair) for pair in zip(*self.result.passes[:2], strict=True)), default=0.0)

    def _shows(self, poisoned: PoisonPass) -> bool:
        worse = poisoned.worst > (tolerance_of(self.noise) if self.noise else 0.0)
        return bool(poisoned.findings) or (worse and not math.isinf(self.noise))

    @property
    def detected(self) -> bool:
        """True if poison reached an answer, was overwritten, or ended the engine.

        NaN that shows where large numbers do not is multiplied by 0 in a kernel. That is harmful only if the engine
        itself leaves NaN there.
        """
        if self.result is None:
            return self.passes_begun > 0 and not _NO_FINDING.match(self.error or "")
        first, *alone = self.passes
        if not self._shows(first) or (self._multiplied_by_zero(first) and not self._nan_from_engine):
            return False
        harmful = any(self._shows(each) and not self._multiplied_by_zero(each) for each in alone)
        return first.written or self._nan_from_engine or harmful or not any(map(self._shows, alone))

    def _multiplied_by_zero(self, poisoned: PoisonPass) -> bool:
        """True if the same kinds with large numbers in place of NaN show nothing."""
        finite = [each for each in self.passes if each.finite and each.kinds == poisoned.kinds]
        return not poisoned.written and bool(finite) and not any(map(self._shows, finite))

    @property
    def _nan_from_engine(self) -> bool:
        ranks = self.passes[0].ranks if self.passes else ()
        return any(note.startswith(NAN_IN_NULL_BLOCK) for rank in ranks for note in rank["notes"])

    @property
    def inconclusive(self) -> str | None:
        """Reason why a report without a finding proves nothing; None if it does, or if there is a finding."""
        if self.detected:
            return None
        if self.result is None:
            ended = "ended before it was" if not self.passes_begun else "was not done"
            return f"the engine to be poisoned {ended}: {self.error}"
        if math.isinf(self.noise):
            return "without poison the engine's answers differ in their tokens from one time to the next"
        ranks = [rank for each in self.passes for rank in each.ranks]
        errors = [rank["error"] for rank in ranks if rank["error"]]
        if errors:
            return f"poison was taken out of a running engine: {errors[0]}"
        if not all(rank["steps"] for rank in ranks):
            return "no step was poisoned"
        return None

    def lines(self) -> list[str]:
        """Return all lines for people, without the verdict."""
        ranks = self.passes[0].ranks if self.passes else ()
        notes = dict.fromkeys(note for rank in ranks for note in rank["notes"])
        return [*self.effects(), *filter(None, [self.padding_note]), *notes]

    def effects(self) -> list[str]:
        """Return the lines on what poison changed, pass by pass."""
        if self.result is None:
            return [f"with poison the engine ends: {self.error}"] if self.detected else []
        # Of the passes that halve the inputs, only the last one names what is enough.
        halves = [each for each in self.passes if each.buffers is not None]
        passes = [each for each in self.passes if each not in halves[:-1]]
        return [line for each in passes for line in self._effects_of(each)]

    def _effects_of(self, poisoned: PoisonPass) -> list[str]:
        place = place_of(poisoned.buffers or poisoned.kinds, finite=poisoned.finite)
        if not self._shows(poisoned):
            return [f"{place}: nothing"] if len(self.passes) > 1 else []
        lines = [f"{place}:"]
        if poisoned.prompts:
            gap = gap_text(finite_or_none(poisoned.worst))
            lines = [f"{place}: answers of prompts {listed_prompts(poisoned.prompts)} differ ({gap})"]
        several = len(poisoned.ranks) > 1
        lines += [
            f"  step {step}{f' of rank {rank}' if several else ''}: {text}" for rank, step, text, _ in poisoned.findings
        ]
        if self._multiplied_by_zero(poisoned):
            lines.append("  a kernel multiplies it by 0, and gets NaN: harmless where none is left there")
        return lines

    @property
    def padding_note(self) -> str:
        if self.padded is None:
            return ""
        return (
            f"padded rows of the model's output are NaN from step {self.padded} on, though they begin as a token "
            "and no cache has NaN: harmless where rows do not meet, as in one fp8 scale for a batch"
        )

    @property
    def padded(self) -> int | None:
        """First step in which padded rows of the model's output were NaN while no cache had NaN, or None.

        It is no finding: those rows belong to no request.
        """
        rows_alone = [each for each in self.passes if each.kinds == (ROWS,) and each.buffers is None]
        return min((step for each in rows_alone for step in each.padded), default=None)

    def summary(self) -> str:
        """Return the amount of poison in a line."""
        if not self.passes:
            return ""
        first = self.passes[0].ranks[0]
        amounts = ", ".join(f"{kind} {number}" for kind, number in first["most"].items())
        exact = "to the last bit" if not self.noise else f"beyond the engine's own noise of {self.noise:.3g}"
        return f"{first['steps']} steps poisoned (at most {amounts}); answers compared {exact}"

    def as_json(self) -> dict[str, Any]:
        return {
            "found": self.detected,
            "inconclusive": self.inconclusive,
            "error": self.error,
            "padded": self.padded,
            "noise": finite_or_none(self.noise) if self.result else None,
            "passes": [
                {
                    "kinds": list(each.kinds),
                    "finite": each.finite,
                    "inputs": None if each.buffers is None else list(each.buffers),
                    "shows": self._shows(each),
                    "prompts": list(each.prompts),
                    "distance": finite_or_none(each.worst),
                    "ranks": [
                        {name: rank[name] for name in ("steps", "most", "findings", "notes", "error")}
                        for rank in each.ranks
                    ],
                }
                for each in self.passes
            ],
        }


def report_of(result: EngineResult | None, error: str | None, observed: dict[str, list[float]]) -> PoisonReport:
    """Report on an engine that ended with *result* or *error*; *observed* survives a crash."""
    return PoisonReport(result, error, int(observed.get(PASSES, [0.0])[0]))


def place_of(names: Sequence[str], *, finite: bool) -> str:
    """Return the kinds or inputs *names* in words."""
    return ", ".join(names) + (" (large numbers, no NaN)" if finite else "")


def gap_text(distance: float | None) -> str:
    """Return the largest difference of log-probabilities in words; None is infinite, as in JSON."""
    return "another token, or NaN" if distance is None else f"log-probabilities by up to {distance:.3g}"


def listed_prompts(prompts: Sequence[int]) -> str:
    return ", ".join(map(str, prompts[:LISTED_PROMPTS])) + (" …" if len(prompts) > LISTED_PROMPTS else "")
