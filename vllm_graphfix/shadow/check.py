"""The checks of one process: what its ranks agree on, what counts as a mismatch, and what follows from one."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import NEVER, Abort, Action, Rate
from vllm_graphfix.shadow import lockstep, ranks, stages, watchdog
from vllm_graphfix.shadow.comparison import threshold
from vllm_graphfix.shadow.concerned import requests_of_rows
from vllm_graphfix.shadow.failures import FailedElsewhereError, UnfitStep, UnsafeError, description, is_lost, tried
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
        _, failed = tried(self.lockstep.introduce)
        if failed is not None:
            self.stop(description(failed), failed)

    def all_replay(self, shape: Shape | None) -> bool:
        """Whether every rank that shares experts replays a graph of this *shape* in the step that all are making.

        *shape* is None where this rank replays none. Every rank calls it at a step that is due, and at each step where
        graphs are in quarantine, and if its check is over, it tells the others here.
        """
        alike, failed = tried(lambda: self._all_replay(shape))
        if failed is not None:
            tried(lambda: self.stop(description(failed), failed))
        return bool(alike)

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
        missing, failed = tried(others.missing)
        if missing is not None:
            others.met = not missing
        elif step >= others.first:  # if all take part, the others wait for this rank now, but not without a bound
            others.met = False
        if others.met is not False:
            self.schedule.move(max(step, others.first))
        if failed is not None:
            self.stop(description(failed), failed)
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
            tried(self._stages.end)

    def plan(self) -> None:
        """Agrees which step is due next, at the step for which the stages of a pipeline have agreed to do so.

        All ranks of the group are here at once. Raises nothing: where it fails, by a thread that cannot be started say,
        the check is off, and in a group this process ends.
        """
        _, failed = tried(self._plan)
        if failed is not None:
            self._stop_alone(failed)

    def _stop_alone(self, failed: Exception) -> None:
        """Turns the check off for an error of its own bookkeeping, of which the other ranks of a group cannot know.

        They wait for this rank in an agreement, now or at the next step that is due, for as long as a step may take,
        which is minutes. So this process ends, and with it the engine in seconds.
        """
        tried(lambda: self.stop(description(failed), failed))
        if not ranks.alone():
            watchdog.end(f"the check has failed on this rank: {description(failed)}")

    def _plan(self) -> None:
        others, step = self._stages, self.schedule.step
        if others is None or self.schedule.due >= NEVER or step < others.plan_at:
            return
        begun = time.perf_counter()
        if not others.told:  # in the whole window nothing was replayed
            others.leave(step + 1)
        with ranks.limited(ranks.to_begin()):
            found, failed = tried(lambda: others.plan(step))
            agreed = self._agree(failed, *(found or (0, 0)))
        if agreed is None:
            return
        due, later = map(int, agreed)
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
            checked, failed = tried(lambda: CheckedStep(describe(), self._why_no_room(key)))
            ready = self._all_ready(failed, begun, key)
        if not ready or checked is None:  # which it is not: of a rank that has no step none is ready
            return replay()
        with ranks.limited():
            return self._check_ready(key, checked, replay, begun)

    def _check_ready(self, key: Hashable, checked: CheckedStep, replay: Callable[[], Any], begun: float) -> Any:
        """All ranks are in this step."""
        output = replay()
        _, broken = tried(lambda: self._compare(key, checked, replay, tried(lambda: checked.replayed(output))[1]))
        _, failed = tried(checked.put_back)
        if failed is not None:
            failed = RuntimeError(
                f"the changes of the eager run could not be undone ({description(failed)}): requests in this step may "
                "be wrong"
            )
            if self._is_over:  # which has told of another failure, and will not tell of this one
                logger.warning("graphfix: %s", failed)
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        self._plan_next(cost, failed or broken)
        return output

    def without_graph(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """The result of a step whose graph is in quarantine.

        If the step cannot be run without its graph, it runs by it, which is what stock does.
        """
        known = self._histories.setdefault(key, GraphHistory())
        output, failed = tried(lambda: self._run_in_quarantine(key, describe))
        if failed is None:
            known.failed = 0
            return output
        if is_lost(failed):
            raise failed
        if not self._replayed_in_quarantine:
            self._replayed_in_quarantine = True
            logger.warning(
                "graphfix: a step whose graph is in quarantine cannot run without it, so it is replayed as on stock: "
                "%s",
                description(failed),
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

    def _agree(self, failed: Exception | None, *values: float) -> tuple[float, ...] | None:
        """The largest of each value among all ranks.

        None, and the check is off, if a step before failed on one of them.
        """
        try:
            anywhere, *agreed = ranks.largest(failed is not None, *values)
        except Exception as error:
            anywhere, agreed, failed = 1.0, [], failed or error
        if anywhere:
            self.stop(description(failed or FailedElsewhereError()), failed)
            return None
        return tuple(agreed)

    def _all_ready(self, failed: Exception | None, begun: float, key: Hashable) -> bool:
        """Whether no rank has a reason against checking this step, which was *begun* at that time of the clock."""
        unfit = isinstance(failed, UnfitStep)
        agreed = self._agree(None if unfit else failed, unfit)
        if agreed is None:
            return False
        if agreed[0]:
            if failed is not None and not self._was_unfit:
                self._was_unfit = True
                logger.info(
                    "graphfix: a step is not checked: %s; of others like it, steps-left-out has the number", failed
                )
            self._histories.setdefault(key, GraphHistory()).left_out += 1
            self._skip_step(begun)
            return False
        return True

    def _skip_step(self, begun: float) -> None:
        cost = time.perf_counter() - begun
        self.results.skipped += 1
        self.results.seconds += cost
        if not self._is_over and (agreed := self._agree(None, self.schedule.wanted_later(cost))):
            self._schedule_next(int(agreed[0]))

    def _plan_next(self, cost: float, failed: Exception | None) -> None:
        if not self._is_over and (agreed := self._agree(failed, self.schedule.wanted(cost))):
            self._schedule_next(int(agreed[0]))

    def _schedule_next(self, steps: int) -> None:
        """*steps*, or as many as another stage of a pipeline wants."""
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
        first, error = tried(lambda: FirstRun(checked, locate=locate))
        learning = self.results.checks < _LEARNING or not known.checks
        agreed = self._agree(failed or error, first.worst if first else 0.0)
        if agreed is None or first is None:
            return
        of_first = agreed[0]
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
            second, error = tried(lambda: SecondRun(checked, first))
            if second and (first.failure is None) != (second.failure is None):  # by chance, then, and not by the graph
                error = first.failure or second.failure
            agreed = self._agree(error, second.noise if second else 0.0, second.worst if second else 0.0, known.noise)
            if agreed is None or second is None:
                return None
            self.results.changed_inputs.update(second.changed_inputs)
            noise, worst, noise_before = agreed
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
        error, failed = tried(error_of)
        agreed = self._agree(failed, error if error is not None else 0.0)
        return agreed[0] if agreed is not None else None

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
            _, failed = tried(lambda: self._end_requests(mismatch))
            if failed is not None:  # which the next one may not
                self._cannot_abort(str(failed) if isinstance(failed, OSError) else description(failed))
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
