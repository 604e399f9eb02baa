"""Compares each replay of a running engine with the same step without its graph, and counts the replays it cannot see.

The shadow check does the comparison: same inputs, same padding, same state, to the last bit unless two runs without the
graph differ, too. It looks at full graphs. A replay of any other graph, such as a piece of a mixed batch, is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from vllm_graphfix.fix import State
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow

ENVIRONMENT: dict[str, str | None] = {
    # So rare that nothing is checked before `ExactReplays.begin`.
    settings.SHADOW: "1/1000000000",
    settings.SHADOW_ACTION: "report",
}
"""Variables of an engine whose replays are to be compared."""
_LISTED = 5


@dataclass(frozen=True)
class ExactRank:
    """Replays of one rank."""

    compared: int
    """Replays that were compared with the same step without their graph."""
    wrong: int
    skipped: int
    """Replays that were to be compared and could not be judged."""
    unseen: int
    """Replays of graphs at which the shadow check does not look."""
    noise: float
    """Largest relative difference of two runs of one step without its graph."""
    rounding: float
    """Largest relative difference that counts as rounding, of a replay and the same step without its graph."""
    graphs: dict[str, int]
    """Replays that were to be compared, by graph."""
    findings: tuple[str, ...]
    """Sentences on the first wrong replay of each graph."""
    reason: str | None
    """Why this rank compared nothing, or ended before the last replay."""


class ExactReplays:
    """The comparison on one rank, from `begin` to `end`; no request may be running at either."""

    def __init__(self) -> None:
        self._graphs: Counter[str] = Counter()
        self._in_check = False
        self._unseen = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        import torch

        shadow = process.SHADOW
        if shadow is not None and process.REFUSED is None and shadow.stopped is None:
            self._record_graphs(shadow)
            shadow.schedule.check_every_replay()
        stock = torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            self._unseen += not self._in_check
            stock(graph)

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
        self._undo.append(lambda: setattr(torch.cuda.CUDAGraph, "replay", stock))

    def _record_graphs(self, shadow: Shadow) -> None:
        stock = shadow.check

        def check(key: Hashable, describe: Callable[[], Any], replay: Callable[[], Any]) -> Any:
            def described() -> Any:
                step = describe()
                self._graphs[step.graph.name] += 1
                return step

            self._in_check = True
            try:
                return stock(key, described, replay)
            finally:
                self._in_check = False

        shadow.check = check  # type: ignore[method-assign]  # of this one instance
        self._undo.append(lambda: vars(shadow).pop("check"))

    def end(self) -> ExactRank:
        while self._undo:
            self._undo.pop()()
        shadow = process.SHADOW
        if shadow is None:
            return ExactRank(0, 0, 0, self._unseen, 0.0, 0.0, {}, (), "the shadow check did not start in this engine")
        results = shadow.results
        return ExactRank(
            results.checks,
            results.mismatches,
            results.skipped,
            self._unseen,
            results.noise,
            results.rounding,
            dict(self._graphs),
            tuple(each.sentence() for each in results.to_report(_LISTED)),
            process.REFUSED or shadow.stopped or _why_unwatched(),
        )


def _why_unwatched() -> str | None:
    """Return why the shadow check wraps no graphs of the target model, as in a release that it does not know."""
    import vllm_graphfix

    state = vllm_graphfix.states().get(process.NAME)
    if state is None or state.state in (State.ACTIVE, State.WAITING):
        return None
    return f"the shadow check is {state.state.value}: {state.reason}"
