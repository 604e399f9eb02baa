"""What poison showed: verdict, words for people, and JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from vllm_graphfix.verify.comparison import finite_or_none, tolerance_of
from vllm_graphfix.verify.engine.job import Poisoned, Said
from vllm_graphfix.verify.engine.poisoned import PASSES, gap_between
from vllm_graphfix.verify.engine.processes import HANG
from vllm_graphfix.verify.poison.kinds import KINDS, NAN_IN_NULL_BLOCK

_NO_FINDING = re.compile(rf"{HANG.pattern}|.*out of memory", re.IGNORECASE | re.DOTALL)
"""What ends a poisoned engine and is no poison's doing: an engine that the limit of a whole one has ended may be slow.
One that hangs with poison is ended before, and says so."""
_SHOWN = 12
"""Prompts that are named; JSON has all."""


@dataclass(frozen=True)
class PoisonReport:
    """An engine with graphs, asked twice without poison and then with it."""

    said: Said | None
    error: str | None = None
    """What it ended in."""
    passes_begun: int = 0
    """With poison, before it ended."""

    @property
    def noise(self) -> float:
        """The engine's own, between two passes without poison; 0 if it gives the same bits."""
        if self.said is None:
            return 0.0
        return max((gap_between(*pair) for pair in zip(*self.said.passes[:2], strict=True)), default=0.0)

    def _shows(self, poisoned: Poisoned) -> bool:
        worse = poisoned.worst > (tolerance_of(self.noise) if self.noise else 0.0)
        return bool(poisoned.findings) or (worse and not math.isinf(self.noise))

    @property
    def found(self) -> bool:
        """Poison reached answers, was overwritten, or ended the engine.

        NaN that shows where large numbers do not is what a kernel multiplies by 0: that harms only if the engine
        itself leaves NaN there.
        """
        if self.said is None:
            return self.passes_begun > 0 and not _NO_FINDING.match(self.error or "")
        first, *alone = self.said.poisoned
        if not self._shows(first) or (self._by_zero(first) and not self._nan_was_there):
            return False
        showing = [each for each in alone if self._shows(each) and not self._by_zero(each)]
        return first.written or self._nan_was_there or bool(showing) or not any(map(self._shows, alone))

    def _by_zero(self, poisoned: Poisoned) -> bool:
        """Whether the same with large numbers in place of NaN shows nothing."""
        passes = self.said.poisoned if self.said else ()
        finite = [each for each in passes if each.finite and each.kinds == poisoned.kinds]
        return not poisoned.written and bool(finite) and not any(map(self._shows, finite))

    @property
    def _nan_was_there(self) -> bool:
        notes = [note for found in self.said.poisoned[0].ranks for note in found["notes"]] if self.said else []
        return any(note.startswith(NAN_IN_NULL_BLOCK) for note in notes)

    @property
    def inconclusive(self) -> str | None:
        """Why silence says nothing; None if it does."""
        if self.found:
            return None
        if self.said is None:
            ended = "ended before it was" if not self.passes_begun else "was not done"
            return f"the engine to be poisoned {ended}: {self.error}"
        if math.isinf(self.noise):
            return "without poison the engine's answers differ in their tokens from one time to the next"
        errors = [found["error"] for each in self.said.poisoned for found in each.ranks if found["error"]]
        if errors:
            return f"poison was taken out of a running engine: {errors[0]}"
        if not all(found["steps"] for each in self.said.poisoned for found in each.ranks):
            return "no step was poisoned"
        return None

    def lines(self) -> list[str]:
        """What people read, without the verdict."""
        passes = self.said.poisoned[:1] if self.said else ()
        notes = dict.fromkeys(note for each in passes for found in each.ranks for note in found["notes"])
        return [*self.shown(), *filter(None, [self.told_of_padding]), *notes]

    def shown(self) -> list[str]:
        """The part of it that is about what poison showed."""
        if self.said is None:
            return [f"with poison the engine ends: {self.error}"] if self.found else []
        told = []
        halves = [each for each in self.said.poisoned if each.buffers is not None]
        for each in self.said.poisoned:
            if each in halves[:-1]:
                continue
            where = ", ".join(each.buffers or each.kinds) + (" (large numbers, no NaN)" if each.finite else "")
            if self._shows(each):
                numbers = f"log-probabilities by up to {each.worst:.3g}"
                gap = "another token, or NaN" if math.isinf(each.worst) else numbers
                differing = ", ".join(map(str, each.prompts[:_SHOWN])) + (" …" if len(each.prompts) > _SHOWN else "")
                told.append(f"{where}: answers of prompts {differing} differ ({gap})" if each.prompts else f"{where}:")
                ranks = len(each.ranks) > 1
                told += [
                    f"  step {step}{f' of rank {rank}' if ranks else ''}: {found}"
                    for rank, step, found, _ in each.findings
                ]
                if self._by_zero(each):
                    told.append("  a kernel multiplies it by 0, and gets NaN: harmless where none is left there")
            elif len(self.said.poisoned) > 1:
                told.append(f"{where}: nothing")
        return told

    @property
    def told_of_padding(self) -> str:
        if self.padded is None:
            return ""
        return (
            f"padded rows of the model's output are NaN from step {self.padded} on, though they begin as a token "
            "and no cache has NaN: harmless where rows do not meet, as in one fp8 scale for a batch"
        )

    @property
    def padded(self) -> int | None:
        """The first step in which padded rows of the model's output were NaN that no cache had; None if there is none.

        No finding: they are nobody's.
        """
        passes = self.said.poisoned if self.said else ()
        alone = [each for each in passes if each.kinds == KINDS[:1] and each.buffers is None]
        return min((step for each in alone for step in each.padded), default=None)

    def summary(self) -> str:
        """How much was poisoned."""
        if self.said is None:
            return ""
        first = self.said.poisoned[0].ranks[0]
        amounts = ", ".join(f"{kind} {number}" for kind, number in first["most"].items())
        exact = "to the last bit" if not self.noise else f"beyond the engine's own noise of {self.noise:.3g}"
        return f"{first['steps']} steps poisoned (at most {amounts}); answers compared {exact}"

    def as_json(self) -> dict[str, Any]:
        passes = self.said.poisoned if self.said else ()
        return {
            "found": self.found,
            "inconclusive": self.inconclusive,
            "error": self.error,
            "padded": self.padded,
            "noise": finite_or_none(self.noise) if self.said else None,
            "passes": [
                {
                    "kinds": list(each.kinds),
                    "finite": each.finite,
                    "inputs": None if each.buffers is None else list(each.buffers),
                    "shows": self._shows(each),
                    "prompts": list(each.prompts),
                    "distance": finite_or_none(each.worst),
                    "ranks": [
                        {name: found[name] for name in ("steps", "most", "findings", "notes", "error")}
                        for found in each.ranks
                    ],
                }
                for each in passes
            ],
        }


def report_of(said: Said | None, error: str | None, observed: dict[str, list[float]]) -> PoisonReport:
    """What an engine's end means; *observed* is what it had told before."""
    return PoisonReport(said, error, int(observed.get(PASSES, [0.0])[0]))
