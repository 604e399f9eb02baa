"""Compares each replay of a running engine with the same step without its graph, and counts the replays it cannot see.

The shadow check does the comparison of full graphs: same inputs, same padding, same state, to the last bit unless two
runs without the graph differ, too. Here what both write to caches is compared as well, and each piece of a mixed batch
with the same piece without its graph; of a breakable graph the whole step. A replay of any other graph is counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm_graphfix.fix import State
from vllm_graphfix.settings import environment as settings
from vllm_graphfix.shadow import process, runner_v1
from vllm_graphfix.shadow.check import Shadow
from vllm_graphfix.shadow.failures import UnsafeError
from vllm_graphfix.shadow.forward import unsafe
from vllm_graphfix.shadow.layers import first_difference
from vllm_graphfix.verify.engine import pieces

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_graphfix.shadow.runs import Step

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
    """Replays of graphs that are neither full graphs of a model nor pieces nor breakable, and so were not compared."""
    noise: float
    """Largest relative difference of two runs of one step without its graph."""
    rounding: float
    """Largest relative difference that counts as rounding, of a replay and the same step without its graph."""
    graphs: dict[str, int]
    """Replays that were to be compared, by graph."""
    findings: tuple[str, ...]
    """Sentences on the first wrong replay of each graph."""
    pieces: int
    """Replays of pieces that were compared, beside *compared*."""
    reason: str | None
    """Why this rank compared nothing, or ended before the last replay."""


class ExactReplays:
    """The comparison on one rank, from `begin` to `end`; no request may be running at either."""

    def __init__(self) -> None:
        self._graphs: Counter[str] = Counter()
        self._counted = True
        """False while a replay is compared, which counts it."""
        self._replays = self._pieces = self._wrong = self._skipped = 0
        self._noise = self._rounding = 0.0
        self._findings: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        import torch

        shadow = process.SHADOW
        if shadow is not None and process.REFUSED is None and shadow.stopped is None:
            self._compare_caches(shadow)
            shadow.schedule.check_every_replay()
        stock = torch.cuda.CUDAGraph.replay

        def replay(graph: Any) -> None:
            self._replays += self._counted
            stock(graph)

        self._replace(torch.cuda.CUDAGraph, "replay", replay)
        self._compare_breakable()
        self._compare_pieces()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        stock = getattr(owner, name)
        setattr(owner, name, function)
        self._undo.append(lambda: setattr(owner, name, stock))

    def _compare_breakable(self) -> None:
        """Compare replays of breakable graphs, which hold the methods of their segments since the capture.

        A full graph that is a breakable one is the shadow check's own.
        """
        try:
            from vllm import forward_context
            from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper
        except ImportError:
            return
        stock, stock_replay = BreakableCUDAGraphCapture.replay, BreakableCUDAGraphWrapper._replay

        def count(capture: Any) -> None:
            self._replays += self._counted * capture.num_graphs
            stock(capture)

        def replay(wrapper: Any, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = functools.partial(stock_replay, wrapper, entry, args, kwargs)
            shadow, context = process.SHADOW, forward_context._forward_context
            if not self._counted or not _can_check(shadow, wrapper) or not context or not context.attn_metadata:
                return run()
            tokens = context.batch_descriptor.num_tokens
            # Warm-ups of these graphs are not measured, and more than one rank checks no step that was not.
            shadow.memory.needs.setdefault((id(wrapper), tokens), 0)
            describe = functools.partial(runner_v1.step, shadow, wrapper, context, args, kwargs)
            return shadow.check((id(wrapper), context.batch_descriptor), describe, run)

        self._replace(BreakableCUDAGraphCapture, "replay", count)
        self._replace(BreakableCUDAGraphWrapper, "_replay", replay)

    def _compare_caches(self, shadow: Shadow) -> None:
        """Compare what a replay has written to caches with what the step without its graph writes there."""
        stock, results = shadow.check, shadow.results

        def check(key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
            steps: list[Step] = []
            written: list[list[tuple[str, Tensor]]] = []

            def described() -> Step:
                steps.append(describe())
                self._graphs[steps[0].graph.name] += 1
                return steps[0]

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
            # The last run of a step that is right is one without the graph, but where rounding had to be explained.
            if written and (results.checks, results.mismatches) == (before[0] + 1, before[1]):
                layer = first_difference(written[0], steps[0].caches())
                if layer is not None and not results.noise and not results.rounding:
                    self._count_wrong(f"{steps[0].graph.name} writes other entries to the cache of {layer}")
            return output

        shadow.check = check  # type: ignore[method-assign]  # of this one instance
        self._undo.append(lambda: vars(shadow).pop("check"))

    def _compare_pieces(self) -> None:
        try:
            from vllm import forward_context
            from vllm.compilation.cuda_graph import CUDAGraphWrapper
        except ImportError:
            return
        stock = CUDAGraphWrapper.__call__

        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._counted or not pieces.is_piece(wrapper):
                return stock(wrapper, *args, **kwargs)
            before, padded = self._replays, _padded_rows(forward_context._forward_context, wrapper.vllm_config)
            replay = functools.partial(stock, wrapper, *args, **kwargs)
            output, error = pieces.compare_piece(
                wrapper, args, kwargs, replay, lambda: self._replays == before + 1, padded
            )
            if error is not None:
                self._replays = before
                self._count_piece(error)
            return output

        self._replace(CUDAGraphWrapper, "__call__", call)

    def _count_piece(self, error: pieces.PieceError) -> None:
        self._noise = max(self._noise, error.noise)
        if error.is_noisy:
            self._skipped += 1
            return
        self._pieces += 1
        if error.is_wrong:
            self._count_wrong(f"a piece differs by {error.error:.3g} from the same piece without its graph")
        else:
            self._rounding = max(self._rounding, error.error)

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
            return ExactRank(0, 0, 0, self._replays, 0.0, 0.0, {}, (), 0, reason)
        shadow.schedule.check_no_more()  # what comes next may be poisoned
        results = shadow.results
        return ExactRank(
            results.checks,
            results.mismatches + self._wrong,
            results.skipped + self._skipped,
            self._replays,
            max(results.noise, self._noise),
            max(results.rounding, self._rounding),
            dict(self._graphs),
            (*(each.sentence() for each in results.to_report(_LISTED)), *self._findings),
            self._pieces,
            process.REFUSED or shadow.stopped or _why_unwatched(),
        )


def _padded_rows(context: Any, config: Any) -> slice:
    """Return which rows of a step's tensors are padding, as far as the forward context tells."""
    if context is None or context.batch_descriptor is None or not context.attn_metadata:
        return slice(0, 0)
    tokens = context.batch_descriptor.num_tokens
    try:
        return slice(runner_v1.real_rows(context, config), tokens)
    except UnsafeError:
        return slice(tokens, tokens)


def _can_check(shadow: Shadow | None, wrapper: Any) -> TypeGuard[Shadow]:
    """Tell whether steps of *wrapper*'s model may run twice; ranks in lockstep do not replay the same ones."""
    return (
        shadow is not None
        and shadow.stopped is None
        and process.REFUSED is None
        and shadow.lockstep is None
        and unsafe(wrapper.vllm_config) is None
    )


def _why_unwatched() -> str | None:
    """Return why the shadow check wraps no graphs of the target model, as in a release that it does not know."""
    import vllm_graphfix

    state = vllm_graphfix.states().get(process.NAME)
    if state is None or state.state in (State.ACTIVE, State.WAITING):
        return None
    return f"the shadow check is {state.state.value}: {state.reason}"
