"""The checks of one process: what its ranks agree on, what counts as a mismatch, and what follows from one."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import Any

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import NEVER, Abort, Action, Rate
from vllm_graphfix.shadow import lockstep, ranks, stages, watchdog
from vllm_graphfix.shadow.comparison import threshold
from vllm_graphfix.shadow.concerned import requests_of_rows
from vllm_graphfix.shadow.failures import (
    Attempt,
    FailedElsewhereError,
    UnfitStep,
    UnsafeError,
    clear_traceback,
    description,
    is_lost,
)
from vllm_graphfix.shadow.lockstep import Lockstep, Shape
from vllm_graphfix.shadow.memory import Memory
from vllm_graphfix.shadow.runs import (
    CheckedStep,
    FirstRun,
    Lacks,
    QuarantinedStep,
    Replay,
    SecondRun,
    Step,
    as_captured,
    run_again,
)
from vllm_graphfix.shadow.schedule import Schedule
from vllm_graphfix.shadow.stages import Stages
from vllm_graphfix.shadow.verdict import TARGET, Graph, GraphHistory, Mismatch, Results

CONFIRMATIONS = 2
"""Mismatches of one graph, each confirmed by a second eager run, after which it is put into quarantine."""
_LEARNING = 8
"""First checks that measure eager against eager, and look for inputs that a run changed, also where nothing differs."""
_LOUD = 0.01
"""Beyond this error of eager runs among themselves a step says nothing: eight times as much would pass for rounding."""
_TRIES = 3
"""Further runs of a step without its graph, where runs differ, before an error that they do not explain counts."""
_FADING = 0.75
"""The part of a graph's noise that is left after its next check, so that a step which is noisy by chance blinds no
later one for long."""
_ROUNDING = 0.05
"""The largest error that a kernel which cuts its work otherwise can explain, of a row's largest value, behind all
layers."""
_LAST_BITS = 4
"""So many of a row's largest value may be another one behind all layers, where kernels add in any order; one was."""
_UNSEEN = 5
"""Steps of a graph that were due, one after the other, and all left out, after which the state says so."""
_GIVEN_UP = 3
"""Steps of a graph in quarantine, one after the other, that cannot be run without it, after which it is replayed
again."""


class _Agreement(Attempt):
    """A block that every rank of the group runs, whatever fails in it on one of them.

    At its end `values` are the largest that any rank has, and where it has failed on one of them, `failed` is true and
    the check is off on all.
    """

    def __init__(self, shadow: Shadow, *values: float, error: Exception | None = None) -> None:
        """*error* has happened on this rank before, and counts as one of the block's."""
        super().__init__()
        self._shadow, self.values, self.error = shadow, values, error
        self.failed = True

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not super().__exit__(kind, error, trace) and error is not None:
            return False
        try:
            anywhere, *values = ranks.largest(self.error is not None, *self.values)
            self.values = tuple(values)
        except Exception as failure:
            anywhere, self.error = 1.0, self.error or failure
        self.failed = bool(anywhere)
        if self.failed:
            self._shadow.stop(description(self.error or FailedElsewhereError()), self.error)
        return True


class Shadow:
    """The shadow check of one process."""

    def __init__(self, rate: Rate, action: Action, refuse: Callable[[str], None], abort: Abort | None = None) -> None:
        """*refuse* is told why no step of this engine may run twice; *abort* ends requests, if that is the action."""
        self._refuse = refuse
        self._abort = abort
        self.cannot_abort: str | None = None
        """Why no request can be ended, though that is the action."""
        self.schedule = Schedule(rate)
        self.action = action
        self.results = Results()
        self.quarantined: set[Hashable] = set()
        self.memory = Memory()
        self._histories: dict[Hashable, GraphHistory] = {}
        self._expected = 0.0
        """The least error that can be wrong, where it is known beforehand that runs round differently."""
        self._replayed_in_quarantine = self._was_loud = self._was_unfit = False
        self._is_over = False
        """Nothing is checked any more."""
        self.stopped: str | None = None
        """The failure that it is over for."""
        self._stages: Stages | None = None
        """The stages of a pipeline that keeps a budget."""
        self.lockstep: Lockstep | None = None
        """The other data-parallel ranks with which this one shares experts."""

    def leaves_out_a_graph(self) -> bool:
        """Whether of some graph one step after another was left out, so that nobody sees whether it is right."""
        # A copy, by one call in C: the heartbeat asks, and the thread that runs the model adds to it.
        return any(known.left_out >= _UNSEEN for known in list(self._histories.values()))

    def expect_adapters(self, dtype: Any) -> None:
        """Steps of an engine with LoRA, whose numbers are of torch's *dtype*, may round differently from here on.

        That is so of graphs in which kernels of adapters run.

        vLLM's kernels for adapters cut a sum in up to 64 parts and add these atomically. In which order depends on what
        runs before: two runs without a graph agree mostly, and so do two replays, but not always these with those. Once
        in some thousand steps a last bit is another one, and behind all layers it is a few.
        """
        import torch

        self._expected = _LAST_BITS * torch.finfo(dtype).eps

    def begin_in_pipeline(self, *, drafts: bool) -> None:
        """All stages count their steps from here on.

        With a fraction they check the same ones, with a budget they have to agree.
        """
        first = self.schedule.begin_together(drafts=drafts)
        if self.schedule.share is not None:
            self._stages = stages.of_this_rank(self.schedule.share, first)
        if self._is_over:
            self.end()

    def begin_in_lockstep(self) -> None:
        """All data-parallel ranks that share experts count their steps from here on, which are the same ones."""
        self.lockstep = lockstep.of_this_rank(self.schedule.begin_together(drafts=False))
        self.schedule.move(1)
        try:
            self.lockstep.introduce()
        except Exception as error:
            self.stop(description(error), error)

    def all_replay(self, shape: Shape | None) -> bool:
        """Whether every rank that shares experts replays a graph of this *shape* in the step that all are making.

        *shape* is None where this rank replays none. Every rank calls it at a step that is due, and at each step where
        graphs are in quarantine, and if its check is over, it tells the others here.
        """
        try:
            return self._all_replay(shape)
        except Exception as error:
            with suppress(Exception):
                self.stop(description(error), error)
            return False

    def _all_replay(self, shape: Shape | None) -> bool:
        others, step, begun = self.lockstep, self.schedule.step, time.perf_counter()
        if others is None:
            return False
        if others.met is None:
            self._meet(others, step)
        if not others.met or step < others.first:
            return False
        number = shape.number if shape is not None else 0
        with ranks.limited(ranks.to_begin()):
            over, most, least = ranks.largest(self._is_over, number, -number)
        if over:
            self.stop(description(FailedElsewhereError()))
            self.schedule.due = NEVER
        alike = most == -least > 0
        if alike:
            others.resume()
        elif step >= self.schedule.due:
            self.schedule.move(step + others.pause())
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        self.schedule.plan(cost)
        return alike

    def _meet(self, others: Lockstep, step: int) -> None:
        """Learns whether all ranks take part, which is the same for all of them."""
        missing: list[int] | None = None
        with Attempt() as attempt:
            missing = others.missing()
        if missing is not None:
            others.met = not missing
        elif step >= others.first:  # if all take part, the others wait for this rank now, but not without a bound
            others.met = False
        if others.met is not False:
            self.schedule.move(max(step, others.first))
        if attempt.error is not None:
            self.stop(description(attempt.error), attempt.error)
        if missing:
            named = ", ".join(map(str, missing))
            self._refuse(f"rank {named} of the ranks that share experts takes no part in it")
        if others.met is False:
            self.end()

    def stop(self, reason: str, error: Exception | None = None) -> None:
        """For good, with one warning. What is in quarantine stays there."""
        if self._is_over:
            return
        self.end()
        if isinstance(error, UnsafeError):
            self._refuse(str(error))
        else:
            self.stopped = reason
            logger.warning("graphfix: the shadow check is now off; serving goes on: %s", reason, exc_info=error)

    def end(self) -> None:
        """No step is due any more, and no other stage of a pipeline has to wait for this one's.

        Data-parallel ranks that wait for this one at the step that is due, or may do so, are told there.
        """
        self._is_over = True
        if self.lockstep is None or self.lockstep.met is False:
            self.schedule.due = NEVER
        if self._stages is not None:
            with suppress(Exception):
                self._stages.end()

    def plan(self) -> None:
        """Agrees which step is due next, at the step for which the stages of a pipeline have agreed to do so.

        All ranks of the group are here at once. Raises nothing: where it fails, by a thread that cannot be started say,
        the check is off, and in a group this process ends.
        """
        try:
            self._plan()
        except Exception as error:
            self._stop_alone(error)

    def _stop_alone(self, failed: Exception) -> None:
        """Turns the check off for an error of its own bookkeeping, of which the other ranks of a group cannot know.

        They wait for this rank in an agreement, now or at the next step that is due, for as long as a step may take,
        which is minutes. So this process ends, and with it the engine in seconds.
        """
        with suppress(Exception):
            self.stop(description(failed), failed)
        if not ranks.alone():
            watchdog.end(f"the check has failed on this rank: {description(failed)}")

    def _plan(self) -> None:
        others, step = self._stages, self.schedule.step
        if others is None or self.schedule.due >= NEVER or step < others.plan_at:
            return
        begun = time.perf_counter()
        if not others.told:  # in the whole window nothing was replayed
            others.leave(step + 1)
        with ranks.limited(ranks.to_begin()), _Agreement(self, 0, 0) as agreed:
            agreed.values = others.plan(step)
        if agreed.failed:
            return
        due, later = map(int, agreed.values)
        if due:
            others.move(due)
            self.schedule.move(due)
        else:
            others.wait(later)
            self.schedule.move(later, planned=True)
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        self.schedule.plan(cost)

    def check(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """The result of *replay*, vLLM's own, compared with an eager run of the same step.

        Raises what *replay* raises, and nothing else.

        *describe* tells the step of the graph *key*; what it raises turns the check off. All ranks of the group are
        here at the same step, and each of them takes part in every agreement, whatever failed in it: one that did not
        would leave the others waiting, until they end.
        """
        replayed: Replay | None = None
        try:
            replayed = Replay(replay)
            return self._check(key, describe, replayed)
        except Exception as error:
            if replayed is not None and error is replayed.error:  # vLLM's own
                raise
            failed = error
        self._stop_alone(failed)
        return replayed.output if replayed is not None and replayed.done else replay()

    def _check(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        self.results.steps.append(self.schedule.step)
        # Everything that may fail on one rank alone comes before the ranks agree, and nothing is run before that.
        with ranks.limited(ranks.to_begin()):
            checked = self._ready_step(key, describe, begun)
        if checked is None:
            return replay()
        with ranks.limited():
            return self._check_ready(key, checked, replay, begun)

    def _check_ready(self, key: Hashable, checked: CheckedStep, replay: Callable[[], Any], begun: float) -> Any:
        """All ranks are in this step."""
        output = replay()
        with Attempt() as keep:
            checked.replayed(output)
        with Attempt() as compare:
            self._compare(key, checked, replay, keep.error)
        with Attempt() as put_back:
            checked.put_back()
        failed = compare.error
        if put_back.error is not None:
            failed = RuntimeError(
                f"the changes of the eager run could not be undone ({description(put_back.error)}): requests in this "
                "step may be wrong"
            )
            if self._is_over:  # which has told of another failure, and will not tell of this one
                logger.warning("graphfix: %s", failed)
        self._schedule_next(self.schedule.wanted, begun, failed)
        return output

    def without_graph(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """The result of a step whose graph is in quarantine.

        If the step cannot be run without its graph, it runs by it, which is what stock does.
        """
        known = self._histories.setdefault(key, GraphHistory())
        try:
            output = self._run_in_quarantine(key, describe)
        except Exception as error:
            clear_traceback(error)
            if is_lost(error):
                raise
            reason = description(error)
        else:
            known.failed = 0
            return output
        if not self._replayed_in_quarantine:
            self._replayed_in_quarantine = True
            logger.warning(
                "graphfix: a step whose graph is in quarantine cannot run without it, so it is replayed as on stock: "
                "%s",
                reason,
            )
        known.failed += 1
        if known.failed == _GIVEN_UP:
            self.quarantined.discard(key)
            self.results.given_up += 1
            logger.warning(
                "graphfix: %s is replayed again as on stock, although it was found wrong: "
                "%s steps in a row cannot run without it",
                known.graph.name if known.graph else key,
                _GIVEN_UP,
            )
        return replay()

    def _run_in_quarantine(self, key: Hashable, describe: Callable[[], Step]) -> Any:
        """What a run without the graph returns on all ranks.

        What it raises leaves the step as its graph would have found it.
        """
        begun: QuarantinedStep | None = None

        def prepare() -> None:
            nonlocal begun
            begun = QuarantinedStep(describe(), self._why_no_room(key))
            begun.prepare()

        try:
            return ranks.paired(prepare, lambda: begun.run() if begun is not None else None, ranks.to_begin())
        except Exception as error:
            if begun is not None and not is_lost(error):
                begun.put_back()
            raise

    def _why_no_room(self, key: Hashable) -> Lacks:
        self.memory.measuring = False  # steps of requests replay graphs, so that all were captured
        owner, descriptor = key if isinstance(key, tuple) else (key, None)
        tokens, must_know = getattr(descriptor, "num_tokens", None), not ranks.alone()
        return lambda copies: self.memory.lacks(copies, owner, tokens, must_know=must_know)

    def _ready_step(self, key: Hashable, describe: Callable[[], Step], begun: float) -> CheckedStep | None:
        """The step, which was *begun* at that time of the clock; None if a rank has a reason against checking it."""
        checked, reason = None, ""
        with _Agreement(self, 0.0) as unfit:
            try:
                checked = CheckedStep(describe(), self._why_no_room(key))
            except UnfitStep as error:
                unfit.values, reason = (1.0,), str(error)
        if unfit.failed:
            return None
        if unfit.values[0]:
            if reason and not self._was_unfit:
                self._was_unfit = True
                logger.info(
                    "graphfix: a step is not checked: %s; of others like it, steps-left-out has the number", reason
                )
            self._histories.setdefault(key, GraphHistory()).left_out += 1
            self.results.skipped += 1
            self._schedule_next(self.schedule.wanted_later, begun)
            return None
        return checked

    def _schedule_next(self, wanted: Callable[[float], int], begun: float, failed: Exception | None = None) -> None:
        """After a step that was *begun* at that time of the clock; *wanted* makes the number of steps of what it cost.

        All ranks go by the largest number, in a pipeline by that of all stages.
        """
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        if self._is_over:
            return
        with _Agreement(self, 0, error=failed) as agreed:
            agreed.values = (wanted(cost),)
        if agreed.failed:
            return
        steps = int(agreed.values[0])
        if self._stages is None:
            self.schedule.checked(steps)
        else:
            self._stages.leave(self.schedule.step + steps)
            self.schedule.wait(self._stages.plan_at)

    def _compare(
        self, key: Hashable, checked: CheckedStep, replay: Callable[[], Any], failed: Exception | None
    ) -> None:
        known = self._histories.setdefault(key, GraphHistory())
        graph, locate = checked.step.graph, known.wants_layer
        learning = self.results.checks < _LEARNING or not known.checks
        with _Agreement(self, 0.0, error=failed) as agreed:
            first = FirstRun(checked, locate=locate)
            agreed.values = (first.worst,)
        if agreed.failed:
            return
        of_first = agreed.values[0]
        known.sought += locate
        if of_first <= self._rounding(graph, 0.0) and not learning:
            self._count_check(known, 0.0)
            return
        repeated = self._repeat(checked, first, known, graph)
        if repeated is None:
            return
        second, own_noise, worst, noise_before = repeated
        if not own_noise <= _LOUD:  # not `>`: NaN is loud, too
            known.left_out += 1
            self._skip_noisy_step(checked, replay, own_noise, of_first)
            return
        # Runs that are equal leave nothing to explain a difference with, whatever other steps did.
        noise = max(own_noise, noise_before) if own_noise else 0.0
        self._count_check(known, own_noise)
        rounding = self._rounding(graph, noise)
        if worst > rounding and not self._is_explained(known, checked, replay, second.worst, worst, noise):
            here = second.worst > rounding
            self._record_mismatch(
                key,
                Mismatch(
                    graph,
                    first.rows,
                    tuple(first.errors.tolist()) if here else (),
                    noise,
                    first.layer,
                    self.results.checks,
                    time.time(),
                    here,
                    description(first.failure) if first.failure is not None else None,
                ),
            )

    def _repeat(
        self, checked: CheckedStep, first: FirstRun, known: GraphHistory, graph: Graph
    ) -> tuple[SecondRun, float, float, float] | None:
        """Further runs without the graph: the last one, and the largest of all ranks: noise, error, the graph's noise.

        Ranks go on by one measure, also where their batches differ in adapters and so belong to different graphs. None
        if a run failed on one of them, and the check is off.
        """
        own_noise, error_of_all = 0.0, math.inf
        for remaining in reversed(range(_TRIES)):
            with _Agreement(self, 0.0, 0.0, known.noise) as agreed:
                second = SecondRun(checked, first)
                agreed.values = second.noise, second.worst, known.noise
                if (first.failure is None) != (second.failure is None):  # by chance, then, and not by the graph
                    agreed.error = first.failure or second.failure
            if agreed.failed:
                return None
            self.results.changed_inputs.update(second.changed_inputs)
            noise, worst, noise_before = agreed.values
            own_noise = max(noise, own_noise)  # in this order NaN stays NaN
            error_of_all = min(error_of_all, worst)
            explained = error_of_all <= self._rounding(graph, max(own_noise, noise_before))
            # Runs that differ, now or at times, may be alike by chance: the replay then seems to differ from all.
            small = threshold(_LOUD if own_noise else self.results.noise)
            by_chance = not (own_noise and explained) and 0 < error_of_all <= small
            if not remaining or not by_chance or not own_noise <= _LOUD:
                return second, own_noise, error_of_all, noise_before
        return None

    def _count_check(self, known: GraphHistory, noise: float) -> None:
        known.checks += 1
        known.left_out = 0
        self.results.checks += 1
        known.noise *= _FADING
        self._raise_noise(known, noise)

    def _raise_noise(self, known: GraphHistory, noise: float) -> None:
        known.noise = max(known.noise, noise)
        self.results.noise = max(self.results.noise, noise)

    def _rounding(self, graph: Graph, noise: float) -> float:
        """The error above which a replay of *graph* is wrong, where runs without it differ by *noise*.

        It is the same on all ranks, which go on by it: data-parallel ranks replay graphs of one shape, but not all of
        them may have adapters in theirs.
        """
        expected = self._expected if graph.adapters or self.lockstep is not None else 0.0
        return max(threshold(noise), expected)

    def _skip_noisy_step(self, checked: CheckedStep, replay: Callable[[], Any], noise: float, of_first: float) -> None:
        """Runs without the graph that differ that much say nothing of a replay; others of the same graph may."""
        self.results.skipped += 1
        if not of_first:
            reason = (
                "a first run of a step without its graph equals the replay and a second one does not: "
                "the model consumes what it is given"
            )
            self.stop(reason, UnsafeError(reason))
        elif not self._was_loud:
            self._was_loud = True
            logger.warning(
                "graphfix: two runs of one step without its graph differ by %.3g of their largest value; "
                "such a step says nothing about its replay",
                noise,
            )
        # In the caches is then what the replay leaves, and not the last run.
        self._largest_error(lambda: checked.again(replay))

    def _is_explained(
        self,
        known: GraphHistory,
        checked: CheckedStep,
        replay: Callable[[], Any],
        here: float,
        anywhere: float,
        noise: float,
    ) -> bool:
        """Whether the replay, as far apart as rounding may be, differs from run to run or is launched as captured.

        *here*: its error on this rank. If so, the caches then hold what the replay leaves, and otherwise what an eager
        run does.
        """
        if not anywhere <= _ROUNDING:
            return False
        again = self._largest_error(lambda: checked.again(replay))
        if again is None:
            return True
        if again <= _LOUD:
            self._raise_noise(known, again)
            noise = max(noise, again)
        rounding = self._rounding(checked.step.graph, noise)
        if anywhere <= rounding:
            return True
        for launch in checked.step.launches:
            then = self._largest_error(functools.partial(as_captured, checked, launch, here))
            if then is None or then <= rounding:
                self._largest_error(lambda: checked.again(replay))
                return True
        self._largest_error(lambda: float(run_again(checked)[1] is not None))
        return False

    def _largest_error(self, error_of: Callable[[], float]) -> float | None:
        """The largest of all ranks; None, and the check is off, where it fails on one."""
        with _Agreement(self, 0.0) as agreed:
            agreed.values = (error_of(),)
        return None if agreed.failed else agreed.values[0]

    def _record_mismatch(self, key: Hashable, mismatch: Mismatch) -> None:
        known = self._histories[key]
        known.graph = mismatch.graph
        known.mismatches += 1
        self.results.add(mismatch)
        if known.mismatches == 1:
            logger.warning("graphfix: %s", mismatch.sentence())
        elif mismatch.first_layer and not known.layer:
            known.layer = mismatch.first_layer
            logger.warning("graphfix: %s first goes wrong in %s, or just before it", mismatch.graph.name, known.layer)
        if self.action is Action.ABORT and mismatch.here:
            try:
                self._end_requests(mismatch)
            except Exception as error:  # which the next one may not raise
                self._cannot_abort(str(error) if isinstance(error, OSError) else description(error))
        if self.action is Action.QUARANTINE and known.mismatches == CONFIRMATIONS:
            self.quarantined.add(key)
            self.results.quarantined.append(mismatch.graph)
            logger.warning(
                "graphfix: %s is no longer replayed; its steps now run without a graph, more slowly",
                mismatch.graph.name,
            )

    def _end_requests(self, mismatch: Mismatch) -> None:
        """Ends those requests of the step that is running whose rows are wrong."""
        if self._abort is None or not mismatch.graph.name.startswith(TARGET):
            return  # what a drafter proposes is verified
        rounding = self._rounding(mismatch.graph, mismatch.noise)
        wrong = [not error <= rounding for error in mismatch.errors]  # not `>`: NaN is wrong, too
        # Where a step failed, or only a state is wrong, nobody knows whose: all of the step end.
        names = requests_of_rows(wrong if mismatch.failure is None and any(wrong) else ())
        self._abort.tell(names, (), f"its tokens came of a wrong replay of a CUDA graph ({mismatch.sentence()})")

    def _cannot_abort(self, why: str) -> None:
        if self.cannot_abort is None:
            self.cannot_abort = why
            logger.warning("graphfix: requests of a step that was replayed wrongly are not ended: %s", why)
