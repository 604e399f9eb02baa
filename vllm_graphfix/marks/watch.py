"""Checksums of finished blocks in the KV cache of one rank, which must not change until they are reallocated.

Before a step runs, some blocks that are full by then are marked: the device makes a checksum of their bytes. Before
later steps it makes the checksum again and compares, and the host reads the result once it has arrived. A block that
has changed was written by a step that does not own it: that of a rank without work, of a padded row, of a graph with
the slots of another batch. No rank waits for another, nor for its device.

Methods of this worker alone are wrapped, not of its class, and of no worker where nothing is marked. An error in here
turns the marks off, with one warning.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from vllm_graphfix.log import logger
from vllm_graphfix.marks import checks
from vllm_graphfix.marks.budget import Budget
from vllm_graphfix.marks.foreign_writes import ForeignWrite
from vllm_graphfix.marks.groups import UnsafeCacheError, groups, slack_and_doubt, unsafe
from vllm_graphfix.marks.last_step import LastStep
from vllm_graphfix.marks.ledger import Block, BlockTracker
from vllm_graphfix.marks.sums import BATCH, BlockChecksums, ChecksumResult
from vllm_graphfix.marks.turns import CheckQueue
from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.settings.shadow_rate import Abort
from vllm_graphfix.text import error_text

TRACKING = 0.0008
"""The share of the host's time for tracking blocks, where not all requests are marked.

If it takes more, nothing is tracked for some time: a defect that writes to blocks does so again.
"""
MAX_TRACKING = 0.012
"""Seconds of credit or debt for it: a pause is over after 15 s, and after 45 s with the largest debt."""
_MAX_DEFERRED = 15
"""Steps that change little, which are tracked together with the next one: Python that runs once in some milliseconds
finds the processor's caches cold, and takes ten times as long."""
_LONG = 16
"""Steps without work after which batches in danger are checked; again after twice as many, and so on."""
_PAUSE_STEPS = 256
"""Steps of a pause between two looks at the budget, which are most of the cost of a pause."""
_MANY = 10_000
"""Steps in which something should have been marked."""
_REMEMBERED = 4096
"""Steps of which it is known whether they had requests."""
_MAX_LOGGED, _MAX_RECORDED = 20, 5
"""Foreign writes that are logged one by one, and those in a record."""
_NEW_CACHE = ("sleep", "discard", "wake_up", "reinitialize_distributed", "initialize_from_config")
"""Methods of a worker after which the cache holds something else, or nothing."""
_WRAPPED = ("execute_model", "execute_dummy_batch", *_NEW_CACHE)


class ChecksumMonitor:
    """The marks of this process, in the cache of the rank that has started in it last."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when a block has changed."""
        self._publish = publish
        self._abort: Abort | None = None
        self.cannot_abort: str | None = None
        self.every: int | None = None
        self.refused: str | None = None
        self.stopped: str | None = None
        self._counts: dict[str, int] | None = None
        self.foreign_writes: list[ForeignWrite] = []
        self._seconds = 0.0
        self._forget()

    def start(self, every: int | None, abort: Abort | None = None) -> None:
        """Mark the blocks of one of *every* requests, from the next engine on in this process; none with None.

        *abort* ends the requests that have a block that has changed; None: they continue.
        """
        self._seconds = 0.0  # first: the budget that `_unwrap` makes anew starts from it
        self._unwrap()
        self._abort, self.cannot_abort = abort, None
        self.every, self.refused, self.stopped = every, None, None
        self._counts, self.foreign_writes = None, []

    def _forget(self) -> None:
        self._worker: Any = None
        self._wrappers: list[Callable[..., Any]] = []
        """Ours, of its methods."""
        self._tracker: BlockTracker | None = None
        self._last_step = LastStep({}, BATCH, 0)
        self._checksums: BlockChecksums | None = None
        self._checks = checks.BlockChecks(self._count)
        self._idle: deque[bool] = deque(maxlen=_REMEMBERED)
        self._step = 0
        self._idle_run = 0
        """The number of steps without work since the last one of requests."""
        self._tracking_budget = Budget(TRACKING, MAX_TRACKING, checks.IDLE_SHARE / 2)
        self._tracking_budget.spent = self._seconds  # by earlier engines
        self._paused = False
        """Nothing is tracked, since that has cost its share."""
        self._pause_remaining = self._pause_length = 0
        """Steps until the next look whether the pause is over, and their number at the last look."""
        self._to_defer = self._allowed = 0
        """Steps that may be deferred from the next one on, and those that could be since the last tracked one."""
        self._timed_steps, self._seconds_each = 0, 0.0
        """The number of deferred steps that were timed, and the seconds that the first of them took.

        The others are taken to have cost as much.
        """

    # -- an engine -----------------------------------------------------------------------------------------------

    def on_captured(self, worker: Any) -> None:
        """Start on *worker*, which has captured its graphs and is about to serve."""
        if self.every is not None:
            self._unwrap()
            self._guarded(self._start_on, worker)

    def _start_on(self, worker: Any) -> None:
        device = worker.model_runner.device
        reason = unsafe(worker.vllm_config)
        if reason is None and (theirs := [name for name in _WRAPPED if name in vars(worker)]):
            reason = f"{theirs[0]} of this worker is somebody else's wrapper"
        if reason is None and device.type not in ("cuda", "cpu"):
            reason = f"a device of the kind {device.type} is not known"
        try:
            self._checks.groups = groups(worker) if reason is None else {}
        except UnsafeCacheError as error:
            reason = str(error)
        if reason is not None:
            self.refused = reason
            logger.warning("graphfix: no cache block of this engine is marked: %s", reason)
            return
        tokens = {number: group.tokens for number, group in self._checks.groups.items()}
        slack, doubt = slack_and_doubt(worker.vllm_config)
        self._tracker = BlockTracker(tokens, self.every or 1, slack, doubt)
        self._last_step = LastStep(tokens, BATCH, doubt)
        self._checksums = BlockChecksums(device)
        self._checksums.warm_up(self._checks.groups)
        # The scheduler's process counts aborted requests, where they end: `engine.abort`.
        counted = ("marks", "looks", "changed", "aborted", "passed-over", "rests", "rested", "failures")
        self._counts = dict.fromkeys(counted, 0)
        # A weak reference: when the worker ends, everything that belongs to its cache goes with it.
        self._worker = weakref.ref(worker, lambda ended: self._forget() if ended is self._worker else None)
        worker.execute_model = self._around_steps(self._tracker, self._worker)
        for name in _WRAPPED[1:]:
            if callable(getattr(type(worker), name, None)):
                setattr(worker, name, self._around(name, self._tracker, self._worker))

    def _around_steps(self, tracker: BlockTracker, of: Callable[[], Any]) -> Callable[..., Any]:
        """Return a method `execute_model` for the worker that *of* returns: it acts before the class's own.

        A deferred step of requests, as most are, calls no function of ours but the tracker's, for the reason given
        there; a step in a pause calls none. Another wrapper may still call it when the marks have ended with *tracker*.
        """
        last = self._last_step

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            worker = of()
            if self._tracker is tracker:
                try:
                    output: Any = args[0] if args else kwargs.get("scheduler_output")
                    if output.num_scheduled_tokens:
                        last.output = output
                    else:
                        last.finish(worker.model_runner)
                    if self._pause_remaining:
                        self._pause_remaining -= 1
                    elif not tracker.try_defer(output):
                        self._before(output)
                except Exception as error:
                    # Whatever fails in here, the step runs.
                    self._stop(error)
            return type(worker).execute_model(worker, *args, **kwargs)

        self._wrappers.append(execute_model)
        return execute_model

    def _around(self, name: str, tracker: BlockTracker, of: Callable[[], Any]) -> Callable[..., Any]:
        """Return a method *name* for the worker that *of* returns: it acts before, or also after, the class's own.

        Another wrapper may still call it when the marks have ended with *tracker*.
        """

        def method(*args: Any, **kwargs: Any) -> Any:
            worker = of()
            stock = getattr(type(worker), name)
            if self._tracker is not tracker:
                return stock(worker, *args, **kwargs)
            if name in _NEW_CACHE:
                self._guarded(self._new_cache)
                try:
                    return stock(worker, *args, **kwargs)
                finally:
                    self._guarded(self._new_cache)
            self._guarded(self._before, None)
            return stock(worker, *args, **kwargs)

        self._wrappers.append(method)
        return method

    def _unwrap(self) -> None:
        """Remove our wrappers from the worker, but for those under somebody else's, which do nothing from now on."""
        worker = self._worker() if self._worker is not None else None
        for name in _WRAPPED if worker is not None else ():
            if any(vars(worker).get(name) is ours for ours in self._wrappers):
                del vars(worker)[name]
        if self._tracker is not None:
            self._tracker.clear()  # a wrapper under somebody else's holds it, and the last output
        self._last_step.forget()
        self._forget()

    def _clear(self) -> None:
        if self._tracker is not None and self._checksums is not None:
            self._tracker.clear()
            self._checksums.forget()
            self._allowed = self._to_defer = self._timed_steps = self._idle_run = 0
            self._checks.queue = CheckQueue()

    def _new_cache(self) -> None:
        self._clear()
        self._last_step.forget()

    # -- a step --------------------------------------------------------------------------------------------------

    def _before(self, output: Any) -> None:
        """Act before a step of requests, *output* a `SchedulerOutput`, or of a rank without work, None."""
        tracker, checksums = self._tracker, self._checksums
        if tracker is None or checksums is None or self._counts is None:
            return
        if output is None and self._paused and self._last_step.has_filled():
            self._end_pause()  # to see whether the steps that come now write to those blocks
        if output is None and (self._paused or not self._idle_step_matters(checksums)):
            self._count_step(idle=True)
            return
        begun = time.perf_counter()
        if first := self._to_defer:
            self._allowed, self._to_defer = tracker.allow_deferring(first), 0
        if output is not None and tracker.try_defer(output):
            self._timed_steps += 1
            if first:
                self._seconds_each = time.perf_counter() - begun
            self._seconds += time.perf_counter() - begun
            return
        if not (self._paused and self._pause_continues()):
            self._track(tracker, checksums, output)
        self._seconds += time.perf_counter() - begun
        self._tracking_budget.charge(self._seconds - self._checks.spent)

    def _idle_step_matters(self, checksums: BlockChecksums) -> bool:
        """Tell whether to mark, check or read a result before a step without work; before most there is nothing to do.

        Such a rank makes thousands of them in a row, and does not read the clock in the others; nor in each step while
        checks wait because their budget is in debt.
        """
        run = self._idle_run
        return (
            not run or bool(checksums.checks) or _is_long(run) or bool(self._checks.queue.urgent and run % _LONG == 0)
        )

    def _count_step(self, *, idle: bool) -> None:
        self._idle.append(idle)
        self._step += 1
        if idle and not self._paused:
            self._idle_run += 1

    def _count_steps(self, number: int) -> None:
        """Count so many steps of requests that were deferred, or in a pause."""
        self._idle.extend(repeat(False, number))
        self._step += number

    def _track(self, tracker: BlockTracker, checksums: BlockChecksums, output: Any) -> None:
        """Track the deferred steps and this one; then mark and check, before it runs."""
        if self._step == 0 and self._abort is not None and (why_not := self._abort.why_not()) is not None:
            self._cannot_abort(why_not)
        if deferred := self._allowed - tracker.may_defer:
            self._count_steps(deferred)
            self._seconds = self.seconds()
        for result in checksums.results() if checksums.checks else ():
            self._note(result)
        idle, run = output is None, self._idle_run
        if run:
            for budget in (self._checks.mark_budget, self._checks.check_budget, self._tracking_budget):
                budget.repay()
        exhausted = (self.every or 1) > 1 and not self._tracking_budget.allows()
        if exhausted and not checksums.checks and self._may_pause(idle=idle):
            self._pause()
            if idle:
                self._last_step.take()  # this step may write to them, and the next one is too late to mark them
            self._count_step(idle=idle)
            return
        dropped: list[Block] = []
        if idle:
            tracker.settle()
            if not run:
                tracker.adopt(self._last_step.take())
        else:
            dropped = tracker.step(output)
        blocks, step = self._checks, self._step
        blocks.mark_finished(tracker, checksums, step, at_once=idle and not run)
        if idle and not run:
            blocks.queue.note_danger(tracker.newest, step)
        elif (run and not idle) or _is_long(run):
            blocks.queue.put_danger_first()
        blocks.check_urgent(checksums, step, debt=not idle)
        if dropped:
            blocks.check_dropped(tracker, checksums, dropped, step)
        if not exhausted and blocks.queue and blocks.check_budget.allows():
            blocks.check_next(checksums, step)
        if not idle:
            self._idle_run = 0
        self._count_step(idle=idle)
        # A result is read before the next step: a request that has a changed block has to end before it gets an answer.
        self._to_defer = 0 if idle or checksums.checks else _MAX_DEFERRED
        self._allowed, self._timed_steps = tracker.allow_deferring(0), 0

    def _may_pause(self, *, idle: bool) -> bool:
        """Tell whether a pause would lose nothing: the blocks to which steps without work may have written are checked.

        With a large debt it does not matter: a rank may be without work again and again.
        """
        return not (idle or self._idle_run or self._checks.queue.urgent) or not self._tracking_budget.allows(debt=True)

    def _pause(self) -> None:
        """Forget all marks, and track nothing until the budget is full again.

        From then on new requests are tracked, as after a sleep: the blocks of the others are not known.
        """
        self._clear()
        self._count("rests", 1)
        self._paused = True
        self._pause_remaining = self._pause_length = _PAUSE_STEPS

    def _pause_continues(self) -> bool:
        """Tell whether this step of requests is in the pause still, and count it if so."""
        self._end_pause()
        self._paused = not self._tracking_budget.is_full()
        if self._paused:
            self._count_step(idle=False)
            self._count("rested", 1)
            self._pause_remaining = self._pause_length = _PAUSE_STEPS
        return self._paused

    def _end_pause(self) -> None:
        ran = self._pause_length - self._pause_remaining
        self._count_steps(ran)
        self._count("rested", ran)
        self._pause_remaining = self._pause_length = 0
        self._paused = False

    # -- results -------------------------------------------------------------------------------------------

    def _note(self, result: ChecksumResult) -> None:
        batch = result.batch
        self._count("looks", len(result.alive))
        fresh: list[ForeignWrite] = []
        for at, layers in result.changed.items():
            if at in batch.reported:
                continue
            batch.reported.add(at)
            ran = self._ran(batch.since, result.step)
            fresh.append(ForeignWrite(batch.blocks[at], tuple(layers), batch.since, result.step, *ran))
        batch.since = max(batch.since, result.step)
        users = [name for each in fresh for name in (self._tracker.users(each.block) if self._tracker else ())]
        if self._tracker is not None:
            ours = [each.block for each in fresh if self._checks.queue.of([each.block]) == [batch]]
            self._checks.forget(self._tracker, ours)
        for each in fresh:
            self._count("changed", 1)
            if len(self.foreign_writes) < _MAX_LOGGED:
                self.foreign_writes.append(each)
                logger.warning("graphfix: %s. docs/kv-marks.md says what to do", each.sentence(named=True))
        if fresh:
            self._end_users(fresh, tuple(dict.fromkeys(users)))
            self._publish()

    def _end_users(self, fresh: Sequence[ForeignWrite], users: Sequence[str]) -> None:
        if self._abort is None:
            return
        why = f"a cache block that it has was overwritten by somebody else ({fresh[0].sentence()})"
        try:
            self._abort.deliver(users, [each.block.number for each in fresh], why)
        except OSError as error:
            self._cannot_abort(str(error))

    def _cannot_abort(self, why: str) -> None:
        if self.cannot_abort is not None:
            return
        self.cannot_abort = why  # the next verdict may still come through
        logger.warning("graphfix: requests whose cache blocks change are not ended: %s", why)

    def _ran(self, before: int, after: int) -> tuple[int, int]:
        """Count the steps from *before* on and up to *after*: (with requests, without)."""
        first = self._step - len(self._idle)
        ran = list(self._idle)[max(0, before - first) : max(0, after - first)]
        return len(ran) - sum(ran), sum(ran)

    def _count(self, event: str, more: int) -> None:
        if self._counts is not None:
            self._counts[event] += more

    # -- state and counts ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the events of a record; none where no block can be marked."""
        return {} if self._counts is None else self._counts | {"milliseconds": int(1000 * self.seconds())}

    def marks_nothing(self) -> bool:
        """Tell whether nothing was marked in so many steps that nobody should rely on the marks."""
        return self._counts is not None and not self._counts["marks"] and self._step >= _MANY

    def seconds(self) -> float:
        """Return the host's time in here so far."""
        deferred = self._allowed - self._tracker.may_defer if self._tracker is not None else 0
        return self._seconds + (deferred - self._timed_steps) * self._seconds_each

    def to_report(self) -> list[ForeignWrite]:
        """Return the foreign writes of a record, the first ones."""
        return self.foreign_writes[:_MAX_RECORDED]

    def after_fork(self) -> None:
        """Start anew in a forked child, which serves nothing yet."""
        self._forget()
        self._counts, self.foreign_writes = None, []

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.stopped = error_text(error)
        guarded(self._count, "failures", 1)  # hooks call this in their handlers, where nothing may fail
        logger.warning(
            "graphfix: cache blocks are not marked any more on this rank; serving goes on: %s",
            self.stopped,
            exc_info=error,
        )
        guarded(self._unwrap)


def _is_long(run: int) -> bool:
    """Tell whether to check batches in danger after so many steps without work."""
    return run >= _LONG and not run & (run - 1)
