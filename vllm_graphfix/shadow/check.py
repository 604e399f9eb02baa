"""The checks of one process: when one is due, and how the ranks prepare it together."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import NEVER, Abort, Action, Rate
from vllm_graphfix.shadow import lockstep, ranks, stages, watchdog
from vllm_graphfix.shadow.acceptance import Acceptance
from vllm_graphfix.shadow.consequences import Consequences
from vllm_graphfix.shadow.failures import (
    Attempt,
    FailedElsewhereError,
    StepNotCheckable,
    UnsafeError,
    clear_traceback,
    description,
    is_gpu_lost,
)
from vllm_graphfix.shadow.judge import Judge
from vllm_graphfix.shadow.lockstep import DataParallelCoordinator, Shape
from vllm_graphfix.shadow.memory import Memory
from vllm_graphfix.shadow.ranks import GroupAttempt
from vllm_graphfix.shadow.runs import CheckedStep, MemoryShortage, QuarantinedStep, Replay, Step, run_quarantined
from vllm_graphfix.shadow.schedule import Schedule
from vllm_graphfix.shadow.stages import PipelineCoordinator
from vllm_graphfix.shadow.verdict import GraphHistory, Results

T = TypeVar("T")
_MAX_SKIPPED = 5
"""Steps of a graph that were due and were skipped, one after the other, after which the state says so."""


class Shadow:
    """The shadow check of one process."""

    def __init__(
        self,
        rate: Rate,
        action: Action,
        refuse: Callable[[str], None],
        abort: Abort | None = None,
        *,
        pieces: bool = False,
    ) -> None:
        """*refuse* takes the reason why no step of this engine may run twice; *abort* ends requests, as that action.

        *pieces*: steps that run by piecewise and breakable graphs are checked, too.
        """
        self._refuse = refuse
        self.checks_pieces = pieces
        self.without_pieces: str | None = None
        """The reason for which steps in pieces are not checked though they were to be."""
        self.checks_encoder = pieces
        """Graphs of an encoder are checked."""
        self.without_encoder: str | None = None
        """The reason for which they are not though they were to be."""
        self.may_have_images = True
        """False: no request has an image."""
        self.schedule = Schedule(rate)
        self.results = Results()
        self.judge = Judge(self.results, self.stop)
        self.consequences = Consequences(action, abort, self.judge)
        self.quarantined = self.consequences.quarantined
        """The keys of graphs that are not replayed any more."""
        self.memory = Memory()
        self.acceptance = Acceptance()
        self._histories: dict[Hashable, GraphHistory] = {}
        self._logged_skip = False
        self._is_over = False
        """Nothing is checked any more."""
        self._readable: set[str] = set()
        """The models whose calls every rank of the group can read."""
        self.stopped: str | None = None
        """The failure that ended the check."""
        self._pipeline: PipelineCoordinator | None = None
        """The other stages of a pipeline that keeps a budget."""
        self.lockstep: DataParallelCoordinator | None = None
        """The other data-parallel ranks with which this one shares experts."""

    def leave_out_pieces(self, reason: str) -> None:
        """Check no step in pieces, for a *reason* that holds on all ranks; full graphs are checked on."""
        self.checks_pieces, self.without_pieces = False, reason
        logger.warning("graphfix: the shadow check leaves piecewise and breakable graphs alone: %s", reason)

    def leave_out_encoder(self, reason: str) -> None:
        """Check no graph of an encoder, for a *reason* that holds on all ranks."""
        self.checks_encoder, self.without_encoder = False, reason
        logger.warning("graphfix: the shadow check leaves an encoder's graphs alone: %s", reason)

    def is_due_in_pieces(self, *, target: bool = True) -> bool:
        """Count a call of a model that may run in pieces; tell whether it is to be checked, or may be in quarantine.

        *target*: the call is the target model's. Raises nothing.
        """
        schedule = self.schedule
        if self.lockstep is not None:  # common steps alone count
            return False
        try:
            before = schedule.count
            schedule.count = (before | schedule.within if target else before) + 1
            if target and schedule.timed:
                schedule.tick()
            if schedule.count < schedule.due and not self.quarantined:
                return False
            if target:
                schedule.drafts = before & schedule.within
        except Exception as error:  # raised here it would leave the other ranks in a collective of the model
            self.stop_on_this_rank(error)
            return False
        # Last: stages of a pipeline count alike, though one may leave pieces alone before another does.
        return self.checks_pieces

    def skips_a_graph(self) -> bool:
        """Tell whether step after step of some graph was skipped, so that nobody knows whether it is right."""
        # A copy, made by one call in C: the heartbeat asks, while the thread that runs the model adds to it.
        return any(history.skipped_in_a_row >= _MAX_SKIPPED for history in list(self._histories.values()))

    def start_in_pipeline(self, *, drafts: bool) -> None:
        """Count steps from here on, as all stages do.

        With a fraction they check the same steps by that alone; with a budget they have to agree.
        """
        first = self.schedule.restart(drafts=drafts)
        if self.schedule.share is not None:
            self._pipeline = stages.of_this_rank(self.schedule.share, first)
        if self._is_over:
            self.end()

    def start_in_lockstep(self) -> None:
        """Count steps from here on, as all data-parallel ranks that share experts do; their steps are common ones."""
        if self.checks_pieces:
            self.leave_out_pieces("data-parallel ranks that share experts do not all have such a step at a time")
        self.lockstep = lockstep.of_this_rank(self.schedule.restart(drafts=False))
        self.judge.adapters_anywhere = True
        self.schedule.move(1)
        try:
            self.lockstep.introduce()
        except Exception as error:
            self.stop(error)

    def all_ranks_replay(self, shape: Shape | None) -> bool:
        """Tell whether every rank that shares experts replays a graph of this *shape* in the common step.

        *shape* is None where this rank replays none. Every rank calls this at a step that is due, and at each step
        while graphs are in quarantine; a rank whose check is over says so here.
        """
        try:
            return self._all_ranks_replay(shape)
        except Exception as error:
            with suppress(Exception):
                self.stop(error)
            return False

    def _all_ranks_replay(self, shape: Shape | None) -> bool:
        others, step, begun = self.lockstep, self.schedule.step, time.perf_counter()
        if others is None:
            return False
        if others.all_take_part is None:
            self._find_participants(others, step)
        if not others.all_take_part or step < others.first:
            return False
        number = shape.number if shape is not None else 0
        with ranks.deadline(ranks.step_timeout()):
            # One all-reduce for both bounds
            over, largest, minus_smallest = ranks.all_reduce_max(self._is_over, number, -number)
        if over:
            self.stop(FailedElsewhereError())
            self.schedule.due = NEVER
        alike = largest > 0 and largest == -minus_smallest
        if alike:
            others.resume()
        elif step >= self.schedule.due:
            self.schedule.move(step + others.pause())
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        self.schedule.add_planning(cost)
        return alike

    def _find_participants(self, others: DataParallelCoordinator, step: int) -> None:
        """Learn whether all ranks take part, which has the same answer on all of them."""
        missing: list[int] | None = None
        with Attempt() as attempt:
            missing = others.missing()
        if missing is not None:
            others.all_take_part = not missing
        elif step >= others.first:  # if all take part, the others wait for this rank now, but not without a bound
            others.all_take_part = False
        if others.all_take_part is not False:
            self.schedule.move(max(step, others.first))
        if attempt.error is not None:
            self.stop(attempt.error)
        if missing:
            names = ", ".join(map(str, missing))
            self._refuse(f"rank {names} of the ranks that share experts takes no part in it")
        if others.all_take_part is False:
            self.end()

    def stop(self, error: Exception) -> None:
        """Turn the check off for good on this rank, with one warning. Graphs in quarantine stay there."""
        if self._is_over:
            return
        self.end()
        if isinstance(error, UnsafeError):
            self._refuse(str(error))
        else:
            self.stopped = description(error)
            trace = error if error.__traceback__ is not None else None
            logger.warning("graphfix: the shadow check is now off; serving goes on: %s", self.stopped, exc_info=trace)

    def end(self) -> None:
        """Make no further step due, and tell the other stages of a pipeline not to wait for this one. Logs nothing.

        In lockstep the next due step stays due: other ranks wait for this one there, and learn there that it is over.
        """
        self._is_over = True
        if self.lockstep is None or self.lockstep.all_take_part is False:
            self.schedule.due = NEVER
        if self._pipeline is not None:
            with suppress(Exception):
                self._pipeline.end()

    def read(self, model: str, function: Callable[[], T]) -> T | None:
        """Return `function()`, which reads a replay of *model* that is due; None for another call, or an error.

        All ranks of the group are here at once, and all find a replay, or none does. All ranks agree on the first
        result per model: where vLLM's code is not as expected, reading it fails on each, and nobody checks. A later
        error is this rank's alone and ends its process. Raises nothing.
        """
        try:
            return self._read(model, function)
        except Exception as error:
            # In lockstep the others learn of it in the agreement that follows. UnsafeError is said of the engine or of
            # vLLM's code, which are the same on every rank.
            if self.lockstep is not None or isinstance(error, UnsafeError):
                self.stop(error)
            else:
                self.stop_on_this_rank(error)
        return None

    def _read(self, model: str, function: Callable[[], T]) -> T | None:
        if self.lockstep is not None or model in self._readable:
            return function()
        result = None
        with Attempt() as attempt:
            result = function()
        if result is None and self.memory.measuring:
            return None  # before the capture ranks may make calls of their own; an error comes again after it
        with ranks.deadline(ranks.step_timeout()), GroupAttempt(self.stop, error=attempt.error) as agreed:
            pass
        if agreed.failed:
            return None
        self._readable.add(model)
        return result

    def plan_next(self) -> None:
        """Agree on the step that is due next, at the step that the stages of a pipeline have set for that.

        All ranks of the group are here at once. Raises nothing: where it fails, by a thread that cannot be started say,
        the check is off, and in a group this process ends.
        """
        try:
            self._plan_next()
        except Exception as error:
            self.stop_on_this_rank(error)

    def stop_on_this_rank(self, error: Exception) -> None:
        """Turn the check off for an error of its own bookkeeping; ends this process if its group has other ranks.

        They cannot know of the error, and wait for this rank in an agreement, now or at the next step that is due, for
        as long as a step may take, which is minutes. So this process ends, and with it the engine, within seconds.
        """
        with suppress(Exception):
            self.stop(error)
        if not ranks.is_single_rank():
            watchdog.end(f"the check has failed on this rank: {description(error)}")

    def _plan_next(self) -> None:
        others, step = self._pipeline, self.schedule.step
        if others is None or self.schedule.due >= NEVER or step < others.plan_at:
            return
        begun = time.perf_counter()
        if not others.has_published:  # nothing was replayed in the whole window
            others.publish_earliest(step + 1)
        with ranks.deadline(ranks.step_timeout()), GroupAttempt(self.stop, 0, 0) as agreed:
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
        self.schedule.add_planning(cost)

    def run(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """Return the result of a step of the graph *key*: replayed, replayed and checked, or run without its graph.

        A graph's key is the pair of its owner and its descriptor; its `Shape` in place of that where data-parallel
        ranks share experts. The owner is the id of the wrapper or manager, for pieces with the name of the graphs.
        """
        if key in self.quarantined:
            return self.run_without_graph(key, describe, replay)
        if self.schedule.count < self.schedule.due:
            return replay()
        return self.check(key, describe, replay)

    def check(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """Return the result of *replay*, vLLM's own, after comparing it with eager runs of the same step.

        *describe* makes the step of the graph *key*; an error of it turns the check off. Raises only what *replay*
        raises. All ranks of the group are here at the same step, and each takes part in every agreement, whatever
        failed on it: otherwise the others would wait until their processes end.
        """
        replayed: Replay | None = None
        try:
            replayed = Replay(replay)
            return self._check(key, describe, replayed)
        except Exception as error:
            if replayed is not None and error is replayed.error:  # vLLM's own
                raise
            failed = error
        self.stop_on_this_rank(failed)
        return replayed.output if replayed is not None and replayed.done else replay()

    def _check(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        self.results.steps.append(self.schedule.step)
        # What may fail on one rank alone comes before the ranks agree, and nothing runs before that.
        with ranks.deadline(ranks.step_timeout()):
            checked = self._prepare(key, describe, begun)
        if checked is None:
            return replay()
        with ranks.deadline():
            return self._check_prepared(key, checked, replay, begun)

    def _prepare(self, key: Hashable, describe: Callable[[], Step], begun: float) -> CheckedStep | None:
        """Return the step, checked from clock time *begun* on; None if it cannot be checked on one of the ranks."""
        checked, reason = None, ""
        with GroupAttempt(self.stop, 0.0) as skipped:
            try:
                checked = CheckedStep(describe(), self._memory_for(key))
            except StepNotCheckable as error:
                skipped.values, reason = (1.0,), str(error)
        if skipped.failed:
            return None
        if not skipped.values[0]:
            return checked
        if reason and not self._logged_skip:
            self._logged_skip = True
            logger.info("graphfix: a step is not checked: %s; of others like it, steps-left-out has the number", reason)
        self._history(key).skipped_in_a_row += 1
        self.results.skipped += 1
        self._schedule_next(self.schedule.wanted_later, begun)
        return None

    def _check_prepared(self, key: Hashable, checked: CheckedStep, replay: Callable[[], Any], begun: float) -> Any:
        """Replay the step, judge the replay, and restore what the replay left. All ranks are in this step.

        That is output, inputs, recurrent rows and rings; attention caches keep what the last run wrote (see
        `Judge._is_explained`).
        """
        output = replay()
        with Attempt() as save:
            checked.save_replay(output)
        with Attempt() as judge:
            # Also if this rank could not save the replay: the others run the step, and wait for this one in it.
            mismatch = self.judge.judge(checked, replay, self._history(key), save.error)
            if mismatch is not None:
                self.consequences.record(key, self._history(key), mismatch)
        with Attempt() as restore:
            checked.restore()
        failed = judge.error
        if restore.error is not None:
            failed = RuntimeError(
                f"the changes of the eager run could not be undone ({description(restore.error)}): requests in this "
                "step may be wrong"
            )
            if self._is_over:  # `stop` has logged another failure, and will not log this one
                logger.warning("graphfix: %s", failed)
        self._schedule_next(self.schedule.wanted, begun, failed)
        return output

    def _schedule_next(self, wanted: Callable[[float], int], begun: float, failed: Exception | None = None) -> None:
        """Agree on the next check after one that started at clock time *begun*.

        *wanted* turns the seconds that this one took into steps to the next; the largest number of all ranks counts, in
        a pipeline that of all stages.
        """
        cost = time.perf_counter() - begun
        self.results.seconds += cost
        if self._is_over:
            return
        with GroupAttempt(self.stop, 0, error=failed) as agreed:
            agreed.values = (wanted(cost),)
        if agreed.failed:
            return
        steps = int(agreed.values[0])
        if self._pipeline is None:
            self.schedule.check_in(steps)
        else:
            self._pipeline.publish_earliest(self.schedule.step + steps)
            self.schedule.plan_at(self._pipeline.plan_at)

    def run_without_graph(self, key: Hashable, describe: Callable[[], Step], replay: Callable[[], Any]) -> Any:
        """Return the result of a step whose graph is in quarantine, run without it.

        If that fails, the graph is replayed, as on stock.
        """
        history = self._history(key)
        try:
            output = run_quarantined(lambda: QuarantinedStep(describe(), self._memory_for(key)))
        except Exception as error:
            clear_traceback(error)
            if is_gpu_lost(error):
                raise
            reason = description(error)
        else:
            history.quarantine_failures = 0
            return output
        self.consequences.note_failed_quarantine(key, history, reason)
        return replay()

    def _memory_for(self, key: Hashable) -> MemoryShortage:
        """Return the `MemoryShortage` of a step of the graph *key*; from here on no warm-up is measured any more."""
        self.memory.measuring = False  # steps of requests replay graphs, so all of them are captured
        owner, descriptor = key if isinstance(key, tuple) else (key, None)
        tokens, must_know = getattr(descriptor, "num_tokens", None), not ranks.is_single_rank()
        return lambda copies: self.memory.shortage(copies, owner, tokens, must_know=must_know)

    def _history(self, key: Hashable) -> GraphHistory:
        return self._histories.setdefault(key, GraphHistory())
