"""Verdict on an engine whose replays were compared with the same steps without their graphs, in lines and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_graphfix.shadow.verdict import TARGET
from vllm_graphfix.verify.codec import to_builtins
from vllm_graphfix.verify.engine.exact import ExactRank


@dataclass(frozen=True)
class ExactReport:
    """An engine with graphs, asked once with each replayed step compared with the same step without graphs."""

    ranks: Sequence[ExactRank]
    error: str | None = None
    """The error that ended the engine."""

    @property
    def detected(self) -> bool:
        return any(rank.wrong for rank in self.ranks)

    @property
    def sees_all(self) -> bool:
        """True if there was no replay, such as one of an encoder's graph, that was not compared."""
        return not any(rank.unseen for rank in self.ranks)

    @property
    def is_exact(self) -> bool:
        """True if each replay equals a run without its graph to the last bit, in cache entries, too."""
        return not any(rank.noise or rank.rounding for rank in self.ranks)

    @property
    def inconclusive(self) -> str | None:
        """Reason why a report without a finding proves nothing; None if it does, or if there is a finding."""
        if self.detected:
            return None
        if self.error is not None:
            return f"the engine whose replays were to be compared ended: {self.error}"
        if reason := next((rank.reason for rank in self.ranks if rank.reason), None):
            return f"not every replay was compared: {reason}"
        # A drafter's alone prove nothing of the target model's tokens.
        if not self.ranks or not all(_has_target(rank) for rank in self.ranks):
            unseen = max((rank.unseen for rank in self.ranks), default=0)
            return f"no replay of a graph of the {TARGET} was compared; {unseen} replays were not looked at"
        if skipped := max(rank.skipped for rank in self.ranks):
            return (
                f"{skipped} replays could not be judged: there was no room for copies, or two runs of such a step "
                "without its graph differ by more than 1 %"
            )
        return None

    def lines(self) -> list[str]:
        """Return the lines for people, without the verdict."""
        if not any(rank.compared for rank in self.ranks):
            return []
        compared, wrong, unseen = (
            max(getattr(rank, name) for rank in self.ranks) for name in ("compared", "wrong", "unseen")
        )
        noise, rounding, as_captured = (
            max(getattr(rank, name) for rank in self.ranks) for name in ("noise", "rounding", "as_captured")
        )
        graphs = len({name for rank in self.ranks for name in rank.graphs})
        equal = f"{rounding:.3g} apart at most, which counts as rounding" if rounding else "equal to the last bit"
        if as_captured:
            equal += (
                f", some with a step whose kernels split their work by the capture's longest request (up to "
                f"{as_captured:.3g} apart from one that splits by its own)"
            )
        outcome = f"{wrong} wrong" if wrong else equal
        if noise:
            outcome += f" (two runs without the graph: up to {noise:.3g})"
        first = (
            f"replays: {compared} steps of {graphs} sizes compared with the same step without a graph: {outcome}; "
            f"{unseen} of other graphs not compared"
        )
        return [first, *dict.fromkeys(finding for rank in self.ranks for finding in rank.findings)]

    def as_json(self) -> dict[str, Any]:
        return {
            "wrong": self.detected,
            "inconclusive": self.inconclusive,
            "error": self.error,
            "ranks": [to_builtins(rank) for rank in self.ranks],
        }


def _has_target(rank: ExactRank) -> bool:
    return any(name.startswith(TARGET) for name in rank.graphs)
