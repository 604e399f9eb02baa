"""The decision whether the replay of one step was wrong, on which all ranks of a group agree."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_graphfix.log import logger
from vllm_graphfix.shadow.comparison import threshold
from vllm_graphfix.shadow.failures import UnsafeError, description
from vllm_graphfix.shadow.ranks import GroupAttempt, Stop
from vllm_graphfix.shadow.runs import CheckedStep, FirstRun, FurtherRun, error_as_captured, run_again
from vllm_graphfix.shadow.verdict import Graph, GraphHistory, Mismatch, Results

_LEARNING = 8
"""First checks that measure eager against eager, and look for inputs that a run changed, even if nothing differs."""
MAX_BASELINE_NOISE = 0.01
"""The largest error of eager runs among themselves at which a step is judged: eight times as much would pass for
rounding."""
_MAX_REPEATS = 3
"""Further eager runs of a step whose runs differ, before an error that they do not explain counts."""
_NOISE_DECAY = 0.75
"""The part of a graph's noise that remains after its next check, so that a step which is noisy by chance does not blind
later checks for long."""
MAX_ROUNDING = 0.05
"""The largest error that a kernel which splits its work otherwise can explain, relative to a row's largest value, after
all layers; a larger one is explained by a run that is equal to the replay."""
_LONGEST_QUERY = "max_query_len"
_LAST_BITS = 4
"""Units in the last place by which a row's largest value may differ after all layers where kernels add in any order;
one was seen."""


class Repeated(NamedTuple):
    """Further eager runs of one step."""

    run: FurtherRun
    """The last of them, on this rank."""
    step_noise: float
    """The largest error of the step's eager runs among themselves, of all ranks."""
    error: float
    """The least error of the replay in any of the runs, each time the largest of all ranks."""
    graph_noise: float
    """The noise of earlier steps of the graph, the largest of all ranks."""


class Judge:
    """Judges the checks of this process, and counts them in its *results*; *stop* turns the check off."""

    def __init__(self, results: Results, stop: Stop) -> None:
        self.results, self._stop = results, stop
        self.adapters_anywhere = False
        """Ranks of the group may have adapters in a graph in which this one has none."""
        self._adapter_rounding = 0.0
        self._warned_of_noise = False

    def allow_adapter_rounding(self, dtype: Any) -> None:
        """Allow the rounding of LoRA kernels, in torch's *dtype*, in graphs in which adapters run.

        vLLM's kernels for adapters split a sum into up to 64 parts and add these atomically, in an order that depends
        on what ran before: two runs without a graph mostly agree, and so do two replays, but not always these with
        those. Once in some thousand steps a last bit differs, and after all layers it is a few.
        """
        import torch

        self._adapter_rounding = _LAST_BITS * torch.finfo(dtype).eps

    def tolerance(self, graph: Graph, noise: float) -> float:
        """Return the error above which a replay of *graph* is wrong, where eager runs differ by *noise*.

        It is the same on all ranks, which act on it together: data-parallel ranks replay graphs of one shape, but not
        all of them may have adapters in theirs.
        """
        expected = self._adapter_rounding if graph.adapters or self.adapters_anywhere else 0.0
        return max(threshold(noise), expected)

    def judge(
        self, checked: CheckedStep, replay: Callable[[], Any], history: GraphHistory, error: Exception | None
    ) -> Mismatch | None:
        """Run the step without its graph as often as it takes; return the mismatch, or None if the replay was right.

        *error*: this rank has failed before, which stops the check on all. Ranks that did not fail still run the step
        once, since the others may be in its collectives.
        """
        graph, locate = checked.step.graph, history.wants_layer
        learning = self.results.checks < _LEARNING or not history.checks
        with GroupAttempt(self._stop, 0.0, error=error) as agreed:
            first = FirstRun(checked, locate=locate)
            agreed.values = (first.worst,)
        if agreed.failed:
            return None
        if checked.step.compared is not None and first.failure is None:
            checked.step.compared(checked.output, first.output)
        (error_of_first,) = agreed.values
        history.layer_searches += locate
        if error_of_first <= self.tolerance(graph, 0.0) and not learning:
            self._count_check(history, 0.0)
            self._accept(error_of_first)
            return None
        repeated = self._repeat(checked, first, history, graph)
        if repeated is None:
            return None
        step_noise, error_anywhere, error_here = repeated.step_noise, repeated.error, repeated.run.worst
        if not step_noise <= MAX_BASELINE_NOISE:  # not `>`: NaN counts as noise
            history.skipped_in_a_row += 1
            self._skip_noisy_step(checked, replay, step_noise, error_of_first)
            return None
        # Runs that are equal leave nothing to explain a difference with, whatever other steps did.
        noise = max(step_noise, repeated.graph_noise) if step_noise else 0.0
        self._count_check(history, step_noise)
        tolerance = self.tolerance(graph, noise)
        if not error_anywhere > tolerance:
            self._accept(error_anywhere)
            return None
        if self._is_explained(history, checked, replay, error_here, error_anywhere, noise):
            return None
        found_here = error_here > tolerance
        return Mismatch(
            graph,
            first.rows,
            tuple(first.errors.tolist()) if found_here else (),
            noise,
            first.layer,
            self.results.checks,
            time.time(),
            found_here,
            description(first.failure) if first.failure is not None else None,
        )

    def _repeat(self, checked: CheckedStep, first: FirstRun, history: GraphHistory, graph: Graph) -> Repeated | None:
        """Run the step eagerly again, up to `_MAX_REPEATS` times; None if a run failed on a rank, and the check is off.

        Ranks act on one tolerance even where their batches differ in adapters and so belong to different graphs.
        """
        step_noise, least_error = 0.0, math.inf
        for remaining in reversed(range(_MAX_REPEATS)):
            with GroupAttempt(self._stop, 0.0, 0.0, history.noise) as agreed:
                run = FurtherRun(checked, first)
                agreed.values = run.noise, run.worst, history.noise
                if (first.failure is None) != (run.failure is None):  # then it fails by chance, not by its graph
                    agreed.error = first.failure or run.failure
            if agreed.failed:
                return None
            self.results.changed_inputs.update(run.changed_inputs)
            noise, worst, graph_noise = agreed.values
            step_noise = max(noise, step_noise)  # in this order NaN stays NaN
            least_error = min(least_error, worst)
            explained = least_error <= self.tolerance(graph, max(step_noise, graph_noise))
            # Runs that differ, now or at times, may be alike by chance: the replay then seems to differ from all.
            # `results.noise` is equal on all ranks, as agreed numbers alone enter it: so all repeat equally often.
            small = threshold(MAX_BASELINE_NOISE if step_noise else self.results.noise)
            by_chance = not (step_noise and explained) and 0 < least_error <= small
            if not remaining or not by_chance or not step_noise <= MAX_BASELINE_NOISE:
                return Repeated(run, step_noise, least_error, graph_noise)
        return None

    def _count_check(self, history: GraphHistory, noise: float) -> None:
        history.checks += 1
        history.skipped_in_a_row = 0
        self.results.checks += 1
        history.noise *= _NOISE_DECAY
        self._raise_noise(history, noise)

    def _accept(self, error: float) -> None:
        self.results.rounding = max(self.results.rounding, error)

    def _raise_noise(self, history: GraphHistory, noise: float) -> None:
        history.noise = max(history.noise, noise)
        self.results.noise = max(self.results.noise, noise)

    def _skip_noisy_step(
        self, checked: CheckedStep, replay: Callable[[], Any], noise: float, error_of_first: float
    ) -> None:
        """Skip a step whose eager runs differ too much to judge a replay by; other steps of its graph may be fit."""
        self.results.skipped += 1
        if not error_of_first:
            self._stop(
                UnsafeError(
                    "a first run of a step without its graph equals the replay and a second one does not: "
                    "the model consumes what it is given"
                )
            )
        elif not self._warned_of_noise:
            self._warned_of_noise = True
            logger.warning(
                "graphfix: two runs of one step without its graph differ by %.3g of their largest value; "
                "such a step says nothing about its replay",
                noise,
            )
        # Replay once more, so that the caches hold what the replay leaves, and not the last run.
        self._max_error(lambda: checked.error_of_another_replay(replay))

    def _is_explained(
        self,
        history: GraphHistory,
        checked: CheckedStep,
        replay: Callable[[], Any],
        error_here: float,
        error_anywhere: float,
        noise: float,
    ) -> bool:
        """Tell whether rounding explains the error: the replay varies from run to run, or splits work as captured.

        *error_here* is this rank's, *error_anywhere* the largest of all. If it is explained, it is counted, and the
        caches then hold what the replay leaves, otherwise what an eager run does.
        """
        launches = checked.step.launches
        # The largest of the capture's numbers bounds every query of a replay. It is the number of rows in a graph of
        # prompts, and less than that in one for decodes of varying lengths.
        bound = max((launch.get(_LONGEST_QUERY, 0) for launch in launches), default=0)
        bounds = [launch for launch in launches if launch.get(_LONGEST_QUERY, bound) == bound]
        tolerance = 0.0
        varied: float | None = 0.0
        if error_anywhere <= MAX_ROUNDING:
            varied = self._max_error(lambda: checked.error_of_another_replay(replay))
            if varied is None:
                return True
            if varied <= MAX_BASELINE_NOISE:
                self._raise_noise(history, varied)
                noise = max(noise, varied)
            tolerance = self.tolerance(checked.step.graph, noise)
            if error_anywhere <= tolerance:
                self._accept(error_anywhere)
                return True
        else:
            # An attention that picks one key of many turns a last bit into more. Runs that are equal, and equal to the
            # replay once kernels get the capture's upper bounds of the numbers, leave nothing to doubt.
            if noise or not math.isfinite(error_anywhere):
                return False
            launches = bounds
        for launch in launches:
            error = self._max_error(functools.partial(error_as_captured, checked, launch, error_here))
            if error is None:  # the check is off
                return True
            if error <= tolerance:
                # The caches then hold what the replay leaves. One that varies equals a run by chance.
                again = self._max_error(lambda: checked.error_of_another_replay(replay))
                if launch in bounds and tolerance == varied == again == 0:
                    self.results.as_captured = max(self.results.as_captured, error_anywhere)
                else:
                    self._accept(error_anywhere)
                return True
        # Only for its effect: the caches then hold the values of an eager run, the right ones.
        self._max_error(lambda: float(run_again(checked)[1] is not None))
        return False

    def _max_error(self, error_of: Callable[[], float]) -> float | None:
        """Return the maximum over all ranks; None, and the check is off, if it fails on one."""
        with GroupAttempt(self._stop, 0.0) as agreed:
            agreed.values = (error_of(),)
        return None if agreed.failed else agreed.values[0]
