"""Compares each replay of a running engine with the same step without its graph, and counts the replays it cannot see.

The shadow check does the comparison, of steps by piecewise and breakable graphs, too: same inputs, same padding, same
state, to the last bit unless two runs without the graph differ as well. Here what both write to caches is compared in
addition. A replay of any other graph is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import State
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.shadow import process
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.layers import first_difference

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_graphfix.shadow.runs import Step

ENVIRONMENT: dict[str, str | None] = {
    # So rare that nothing is checked before `ExactReplays.begin`.
    settings.SHADOW: "1/1000000000",
    settings.SHADOW_ACTION: "report",
    settings.SHADOW_GRAPHS: "all",
}
"""Variables of an engine whose replays are to be compared."""
_LISTED = 5


@dataclass(frozen=True)
class ExactRank:
    """Replays of one rank."""

    compared: int
    """Replayed steps that were compared with the same step without a graph."""
    wrong: int
    skipped: int
    """Replays that were to be compared and could not be judged."""
    unseen: int
    """Replays of other graphs, and so not compared."""
    noise: float
    """Largest relative difference of two runs of one step without its graph."""
    rounding: float
    """Largest relative difference that counts as rounding, of a replay and the same step without its graph."""
    as_captured: float
    """Largest relative difference of a replay from a step without its graph, where it equals, to the last bit, a step
    whose kernels split their work by the capture's longest request."""
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
        self._counted = True
        """False while a replay is compared, which counts it."""
        self._replays = self._wrong = 0
        self._findings: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        import torch

        shadow = process.SHADOW
        if shadow is not None and process.REFUSED is None and shadow.stopped is None:
            self._compare_caches(shadow)
            shadow.may_have_images = False  # no prompt of a comparison has any
            shadow.schedule.check_every_replay()
        stock = torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            self._replays += self._counted
            stock(graph)

        self._replace(torch.cuda.CUDAGraph, "replay", replay)
        self._count_segments()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        stock = getattr(owner, name)
        setattr(owner, name, function)
        self._undo.append(lambda: setattr(owner, name, stock))

    def _count_segments(self) -> None:
        """Count the replays of breakable graphs."""
        # A breakable graph holds the methods of its segments since the capture.
        breakable = sys.modules.get("vllm.compilation.breakable_cudagraph")
        if breakable is None:
            return
        stock = breakable.BreakableCUDAGraphCapture.replay

        def replay(capture: Any) -> None:
            self._replays += self._counted * capture.num_graphs
            stock(capture)

        self._replace(breakable.BreakableCUDAGraphCapture, "replay", replay)

    def _compare_caches(self, shadow: Shadow) -> None:
        """Compare what a replay has written to caches with what the step without its graph writes there."""
        stock, results = shadow.check, shadow.results

        def check(key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
            steps: list[Step] = []
            written: list[list[tuple[str, Tensor]]] = []
            last_run: list[tuple[str, Tensor]] | Exception | None = None

            def described() -> Step:
                steps.append(describe())
                self._graphs[steps[0].graph.name] += 1
                return steps[0]._replace(eager=eager)

            def eager() -> Any:
                nonlocal last_run
                output = steps[0].eager()
                try:
                    last_run = steps[0].caches()
                except Exception as error:  # is none of this run, which would count as one that fails
                    last_run = error
                return output

            def replayed() -> Any:
                output = replay()
                if steps and not written:
                    written.append(steps[0].caches())
                return output

            before = results.checks, results.mismatches
            self._counted = False
            try:
                output = stock(key, described, replayed)
            finally:
                self._counted = True
            if isinstance(last_run, Exception):
                raise last_run
            # The last run of a step that is right is one that the replay equals, but where rounding explains it.
            counts = results.checks, results.mismatches
            if written and last_run and shadow.stopped is None and counts == (before[0] + 1, before[1]):
                layer = first_difference(written[0], last_run)
                if layer is not None and not results.noise and not results.rounding:
                    self._count_wrong(f"{steps[0].graph.name} writes other entries to the cache of {layer}")
            return output

        shadow.check = check  # type: ignore[method-assign]  # of this one instance
        self._undo.append(lambda: vars(shadow).pop("check"))

    def _count_wrong(self, finding: str) -> None:
        self._wrong += 1
        if len(self._findings) < _LISTED:
            self._findings.append(finding)

    def end(self) -> ExactRank:
        while self._undo:
            self._undo.pop()()
        shadow = process.SHADOW
        if shadow is None:
            reason = "the shadow check did not start in this engine"
            return ExactRank(0, 0, 0, self._replays, 0.0, 0.0, 0.0, {}, (), reason)
        shadow.schedule.check_no_more()  # what comes next may be poisoned
        results = shadow.results
        return ExactRank(
            results.checks,
            results.mismatches + self._wrong,
            results.skipped,
            self._replays,
            results.noise,
            results.rounding,
            results.as_captured,
            dict(self._graphs),
            (*(each.sentence() for each in results.to_report(_LISTED)), *self._findings),
            process.REFUSED or shadow.stopped or _why_unwatched(),
        )


def _why_unwatched() -> str | None:
    """Return why the shadow check wraps no graphs of the target model, as in a release that it does not know."""
    import vllm_graphfix

    state = vllm_graphfix.states().get(process.NAME)
    if state is None or state.state in (State.ACTIVE, State.WAITING):
        return None
    return f"the shadow check is {state.state.value}: {state.reason}"
