"""Marks in the KV cache of one rank: finished blocks must not change until they are allocated anew.

Before a step runs, some blocks that are full by then are marked: a sum over their bytes is made on the device. Before
later steps it is made again and compared there, and the host reads what came of it when it is there. A block that has
changed was written by somebody whose it is not: a rank without work, a padded row, a graph with the slots of another
batch. No rank waits for another, nor for its device.

Wrapped are methods of this worker alone, not of its class, and of no worker where nothing is marked. What fails in here
turns it off, with one warning.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

from vllm_graphfix.log import logger
from vllm_graphfix.marks.budget import Budget
from vllm_graphfix.marks.last_step import LastStep
from vllm_graphfix.marks.ledger import Block, Ledger
from vllm_graphfix.marks.sums import MOST, Group, Looked, Sums, UnsafeCacheError, groups
from vllm_graphfix.marks.turns import Turns
from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.settings.shadow_rate import Abort

SHARE = 0.001
"""The part of the time that the host may spend on making sums: one half on marks, the other on looking at them."""
IDLE_SHARE = 0.01
"""The part of its time out of which a rank without work pays what it owes of them, and half as much again of following:
it has no inputs to prepare."""
MOST_CREDIT = 0.025
"""Seconds of each half which it may have saved up, or, around the steps of a rank without work, owe."""
FOLLOWING = 0.0008
"""The part of the time that the host may spend on following blocks, where not all requests are marked.

Where it takes more, nothing is followed for some time: a defect that writes to blocks does so again.
"""
MOST_FOLLOWING = 0.012
"""Seconds of it that may be saved up, or owed: a rest is over after 15 s, and one that owes most after 45."""
_FEW = MOST // 2
"""Blocks that are worth a batch at once; fewer wait for more."""
_PATIENCE = 0.1
"""Seconds that they wait; what sums may cost sees to it that few batches are small. Between two rests there may be less
than a second."""
_RECENT = 16
"""Steps within which a batch is not looked at again because one of its blocks is given away."""
_MOST_WAITING = 15
"""Steps that change little, which are followed together with the next one: Python that runs once in some milliseconds
finds the processor's caches cold, and takes ten times as long."""
_LONG = 16
"""Steps without work after which what is in danger is looked at meanwhile; again after twice as many, and so on."""
_REST = 256
"""Steps that run in a rest before it is asked again whether that is over; asking is most of what a rest costs."""
_MANY = 10_000
"""Steps in which something should have been marked."""
_MOST_BATCHES = 256
"""The oldest go first."""
_REMEMBERED = 4096
"""Steps of which it is known whether they had requests."""
_SAID, _KEPT = 20, 5
"""Foreign writes that are logged one by one, and those in a record."""
_NEW_CACHE = ("sleep", "discard", "wake_up", "reinitialize_distributed", "initialize_from_config")
"""Methods of a worker after which the cache holds something else, or nothing."""


class ForeignWrite(NamedTuple):
    """A finished block that has changed."""

    block: Block
    layers: tuple[str, ...]
    """Of those that were marked, the ones in whose caches it differs."""
    before: int
    """It was as marked before this step, …"""
    after: int
    """… and was not before this one."""
    steps: int
    """The steps of requests in between; …"""
    idle: int
    """… and those without, of a rank that keeps the others company."""

    def sentence(self) -> str:
        more = f" and {len(self.layers) - 1} more layers" if len(self.layers) > 1 else ""
        return (
            f"block {self.block.number} of cache group {self.block.group} has changed although it was finished (block "
            f"{self.block.place} of request {ascii(self.block.request)[1:-1][:80]}), in {self.layers[0]}{more}; "
            f"between steps {self.before} and {self.after} of this rank: {self.ran()}"
        )

    def ran(self) -> str:
        """Who may have been it."""
        return f"{self.steps} with requests, {self.idle} of a rank without work"


def unsafe(config: Any) -> str | None:
    """Why no block of an engine with this `VllmConfig` can be marked; None if nothing is known against it."""
    parallel = config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector writes to blocks without a word to the model's worker"
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return "micro-batches write on streams of their own"
    if getattr(parallel, "enable_elastic_ep", False):
        return "elastic expert parallelism makes the cache anew"
    if getattr(parallel, "distributed_executor_backend", None) == "ray":
        return "Ray's executor has steps run past the worker, which is told of blocks"
    if getattr(config.model_config, "is_diffusion", False):
        return "a diffusion model writes the same tokens again and again"
    scheduler = getattr(config.scheduler_config, "scheduler_cls", None)
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", "vllm.")
    if not name.startswith("vllm."):
        return f"blocks are given out by a scheduler of somebody else's ({name})"
    return None


class KVMarks:
    """The marks of this process, in the cache of the rank that has begun to serve in it last."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        """*tell* is called when a block has changed."""
        self._tell = tell
        self._abort: Abort | None = None
        self.cannot_abort: str | None = None
        self.every: int | None = None
        self.refused: str | None = None
        self.stopped: str | None = None
        self._counts: dict[str, int] | None = None
        self.found: list[ForeignWrite] = []
        self._seconds = 0.0
        self._forget()

    def begin(self, every: int | None, abort: Abort | None = None) -> None:
        """Marks the blocks of one of *every* requests, from the next engine on in this process; none with None.

        *abort*: by which those are ended who have a block that has changed; None: they are not.
        """
        self._seconds = 0.0
        self._end()
        self._abort, self.cannot_abort = abort, None
        self.every, self.refused, self.stopped = every, None, None
        self._counts, self.found = None, []

    def _forget(self) -> None:
        self._worker: Any = None
        self._ledger: Ledger | None = None
        self._last = LastStep({}, MOST, 0)
        self._sums: Sums | None = None
        self._groups: dict[int, Group] = {}
        self._turns = Turns()
        self._idle: deque[bool] = deque(maxlen=_REMEMBERED)
        self._step = 0
        self._idle_run = 0
        """The number of steps without work since the last one of requests."""
        self._for_marks = Budget(SHARE / 2, MOST_CREDIT, IDLE_SHARE / 2)
        self._for_looks = Budget(SHARE / 2, MOST_CREDIT, IDLE_SHARE / 2)
        self._for_following = Budget(FOLLOWING, MOST_FOLLOWING, IDLE_SHARE / 2)
        self._for_following.spent = self._seconds  # by others, before this engine
        self._rests = False
        """Whether nothing is followed, since following has cost what it may."""
        self._to_rest = self._resting = 0
        """Steps of a rest until it is asked whether that is over, and the number of them when it was asked last."""
        self._waiting_since: float | None = None
        self._to_wait = self._granted = 0
        """Steps that may be put off from the next one on, and those that might since the last one that was followed."""
        self._timed, self._takes = 0, 0.0
        """How many of the steps that were put off have been timed, and the seconds that the first of them took.

        Each of those that were not timed is taken to have cost as much.
        """

    # -- an engine -----------------------------------------------------------------------------------------------

    def serve(self, worker: Any) -> None:
        """Begins with *worker*, which is about to serve."""
        if self.every is not None:
            self._end()
            self._guarded(self._serve, worker)

    def _serve(self, worker: Any) -> None:
        device = worker.model_runner.device
        reason = unsafe(worker.vllm_config)
        wrapped = ("execute_model", "execute_dummy_batch", *_NEW_CACHE)
        if reason is None and (theirs := [name for name in wrapped if name in vars(worker)]):
            reason = f"{theirs[0]} of this worker is somebody else's wrapper"
        if reason is None and device.type not in ("cuda", "cpu"):
            reason = f"a device of the kind {device.type} is not known"
        try:
            self._groups = groups(worker) if reason is None else {}
        except UnsafeCacheError as error:
            reason = str(error)
        if reason is not None:
            self.refused = reason
            logger.warning("graphfix: no cache block of this engine is marked: %s", reason)
            return
        tokens = {number: group.tokens for number, group in self._groups.items()}
        slack, doubt = _slack_and_doubt(worker.vllm_config)
        self._ledger = Ledger(tokens, self.every or 1, slack, doubt)
        self._last = LastStep(tokens, MOST, doubt)
        self._sums = Sums(device)
        self._sums.warm_up(self._groups)
        # Of these, requests that were aborted count where they end: `engine.abort`.
        counted = ("marks", "looks", "changed", "aborted", "passed-over", "rests", "rested", "failures")
        self._counts = dict.fromkeys(counted, 0)
        # A worker that ends takes with it what is held here.
        self._worker = weakref.ref(worker, lambda ended: self._forget() if ended is self._worker else None)
        worker.execute_model = self._around_steps(self._ledger, self._worker)
        for name in wrapped[1:]:
            if callable(getattr(type(worker), name, None)):
                setattr(worker, name, self._around(name, self._worker))

    def _around_steps(self, ledger: Ledger, of: Callable[[], Any]) -> Callable[..., Any]:
        """What is called as method `execute_model` of the worker that *of* returns: its class's, and ours before it.

        A step of requests that is put off, as most are, takes no other function of ours than the ledger's: see there.
        One of a rest takes none.
        """
        last = self._last

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            worker = of()
            try:
                output: Any = args[0] if args else kwargs.get("scheduler_output")
                if output.num_scheduled_tokens:
                    last.output = output
                else:
                    last.ends(worker.model_runner)
                if self._to_rest:
                    self._to_rest -= 1
                elif not ledger.put_off(output):
                    self._before(output)
            except Exception as error:
                if self._ledger is ledger:  # else it has ended, and somebody has kept this
                    self._stop(error)
            return type(worker).execute_model(worker, *args, **kwargs)

        return execute_model

    def _around(self, name: str, of: Callable[[], Any]) -> Callable[..., Any]:
        """What is called as method *name* of the worker that *of* returns: its class's, and before or after it ours."""

        def method(*args: Any, **kwargs: Any) -> Any:
            worker = of()
            stock = getattr(type(worker), name)
            if name in _NEW_CACHE:
                self._guarded(self._new_cache)
                try:
                    return stock(worker, *args, **kwargs)
                finally:
                    self._guarded(self._new_cache)
            self._guarded(self._before, None)
            return stock(worker, *args, **kwargs)

        return method

    def _end(self) -> None:
        """Takes the wrappers away."""
        worker = self._worker() if self._worker is not None else None
        for name in ("execute_model", "execute_dummy_batch", *_NEW_CACHE) if worker is not None else ():
            vars(worker).pop(name, None)
        if self._ledger is not None:
            self._ledger.clear()  # in which no step waits any more, though somebody may have kept the wrapper
        self._forget()

    def _clear(self) -> None:
        if self._ledger is not None and self._sums is not None:
            self._ledger.clear()
            self._sums.forget()
            self._granted = self._to_wait = self._timed = self._idle_run = 0
            self._turns = Turns()

    def _new_cache(self) -> None:
        self._clear()
        self._last.forget()

    # -- a step --------------------------------------------------------------------------------------------------

    def _before(self, output: Any) -> None:
        """Before a step: of requests, *output* a `SchedulerOutput`, or of a rank without work, None."""
        ledger, sums = self._ledger, self._sums
        if ledger is None or sums is None or self._counts is None:
            return
        if output is None and self._rests and self._last.has_filled():
            self._end_rest()  # until it is known whether the steps that come now write there
        if output is None and (self._rests or not self._idle_run_tells(sums)):
            self._passes(idle=True)
            return
        begun = time.perf_counter()
        if first := self._to_wait:
            self._granted, self._to_wait = ledger.let_wait(first), 0
        if output is not None and ledger.put_off(output):
            self._timed += 1
            if first:
                self._takes = time.perf_counter() - begun
            self._seconds += time.perf_counter() - begun
            return
        if not (self._rests and self._rest_goes_on()):
            self._follow(ledger, sums, output)
        self._seconds += time.perf_counter() - begun
        self._for_following.charge(self._seconds - self._for_marks.spent - self._for_looks.spent)

    def _idle_run_tells(self, sums: Sums) -> bool:
        """Whether a step without work is one to mark or look before, or to read what came of a look; most are not.

        Such a rank makes thousands of them in a row, and does not ask the clock in the others; nor, where looks owe
        what they have cost and have to wait, in each step until they may go on.
        """
        run = self._idle_run
        return not run or bool(sums.looks) or _is_long(run) or bool(self._turns.first and run % _LONG == 0)

    def _passes(self, *, idle: bool) -> None:
        self._idle.append(idle)
        self._step += 1
        if idle and not self._rests:
            self._idle_run += 1

    def _follow(self, ledger: Ledger, sums: Sums, output: Any) -> None:
        """Follows the steps that wait and this one; then marks and looks, before it runs."""
        if self._step == 0 and self._abort is not None and (why_not := self._abort.why_not()) is not None:
            self._cannot_abort(why_not)
        if waited := self._granted - ledger.may_wait:
            self._idle.extend(repeat(False, waited))
            self._step += waited
            self._seconds = self.seconds()
        for looked in sums.results() if sums.looks else ():
            self._note(looked)
        idle, run = output is None, self._idle_run
        if run:
            for budget in (self._for_marks, self._for_looks, self._for_following):
                budget.repay()
        tired = (self.every or 1) > 1 and not self._for_following.allows()
        if tired and not sums.looks and self._may_rest(idle=idle):
            self._rest()
            if idle:
                self._last.take()  # which is too late with the next step: this one may write there
            self._passes(idle=idle)
            return
        dropped: list[Block] = []
        if idle:
            ledger.settle()
            if not run:
                ledger.adopt(self._last.take())
        else:
            dropped = ledger.step(output)
        if ledger.finished:
            self._make(ledger, sums, at_once=idle and not run)
        else:
            self._waiting_since = None
        if idle and not run:
            self._turns.note_danger(ledger.newest, self._step)
        elif (run and not idle) or _is_long(run):
            self._turns.begin_with_danger()
        if self._turns.first:
            self._look_first(sums, debt=not idle)
        if dropped:
            self._look_last(sums, dropped)
        if not tired and self._turns and self._for_looks.allows():
            self._look_in_turn(sums)
        if not idle:
            self._idle_run = 0
        self._passes(idle=idle)
        # What comes of a look is read before the next step: who has the block is to end before it has an answer.
        self._to_wait = 0 if idle or sums.looks else _MOST_WAITING
        self._granted, self._timed = ledger.let_wait(0), 0

    def _may_rest(self, *, idle: bool) -> bool:
        """Whether nothing is lost now that would be missed: what steps without work may have written to is looked at.

        Who owes a lot does not wait for that: a rank may have none again and again.
        """
        return not (idle or self._idle_run or self._turns.first) or not self._for_following.allows(debt=True)

    def _rest(self) -> None:
        """Forgets all marks, and follows nothing until what that may cost is saved up again.

        Then requests that begin are followed, as after a sleep: of the others it is not known what they have.
        """
        self._clear()
        self._count("rests", 1)
        self._rests = True
        self._to_rest = self._resting = _REST

    def _rest_goes_on(self) -> bool:
        """Whether it does in this step of requests, which counts as one of it then."""
        self._end_rest()
        self._rests = not self._for_following.is_saved_up()
        if self._rests:
            self._passes(idle=False)
            self._count("rested", 1)
            self._to_rest = self._resting = _REST
        return self._rests

    def _end_rest(self) -> None:
        ran = self._resting - self._to_rest
        self._idle.extend(repeat(False, ran))
        self._step += ran
        self._count("rested", ran)
        self._to_rest = self._resting = 0
        self._rests = False

    def _make(self, ledger: Ledger, sums: Sums, *, at_once: bool) -> None:
        """Marks what is finished, if it is enough, has waited long enough, or is *at_once* in danger: then all of it.

        What is in danger has to be marked before the step that may write to it: later the mark would be one of what
        that step has left. So it may owe what others have used up.
        """
        now = time.perf_counter()
        if self._waiting_since is None:
            self._waiting_since = now
        if at_once or len(ledger.finished) >= _FEW or now - self._waiting_since > _PATIENCE:
            more = self._for_marks.allows(debt=at_once)
            while more:
                marked = self._mark(ledger, sums)
                self._for_marks.spend()
                if not marked:
                    break
                self._waiting_since = None
                more = at_once and bool(ledger.finished) and self._for_marks.allows(debt=True)
        while len(self._turns) > _MOST_BATCHES:
            self._forget_marks(self._turns.drop_oldest())
        if len(ledger.finished) > 2 * MOST:
            self._leave_out(ledger)

    def _mark(self, ledger: Ledger, sums: Sums) -> bool:
        """Marks a batch of each group of what is finished, the newest first; False if too much is under way."""
        by_group: dict[int, list[Block]] = {}
        for block in reversed(ledger.finished.values()):
            by_group.setdefault(block.group, []).append(block)
        for group, blocks in by_group.items():
            batch = sums.mark(blocks, self._groups[group], self._step)
            if batch is None:
                return False
            for block in batch.blocks:
                del ledger.finished[block.number]
                ledger.marked[block.number] = block
            self._turns.add(batch)
            self._count("marks", len(batch.blocks))
        return True

    def _leave_out(self, ledger: Ledger) -> None:
        """Of what waits only the newest are kept: a block may change before it is marked, and nobody would know."""
        for number in [*islice(ledger.finished, len(ledger.finished) - 2 * MOST)]:
            ledger.forget(number)
            self._count("passed-over", 1)

    def _look_first(self, sums: Sums, *, debt: bool) -> None:
        """Looks at what was in danger before a block of it is given away, or another one has its turn.

        With *debt* it may owe what other looks have used up: they are at whatever comes round, and come too late.
        """
        turns = self._turns
        while turns.first:
            batch = turns.first[0]
            if batch.alive and batch.looked < self._step:
                if not (self._for_looks.allows(debt=debt) and sums.look(batch, self._step)):
                    return
                turns.looked_at(batch)
                self._for_looks.spend()
            turns.first.popleft()

    def _look_last(self, sums: Sums, dropped: Sequence[Block]) -> None:
        """Looks at blocks that are given away now, a last time."""
        for given in self._turns.of(dropped):
            if given.looked < self._step - _RECENT and self._for_looks.allows():
                sums.look(given, self._step)
                self._for_looks.spend()
        self._forget_marks(dropped)

    def _look_in_turn(self, sums: Sums) -> None:
        if (batch := self._turns.next(self._step)) is not None:
            sums.look(batch, self._step)
            self._turns.others.append(batch)
            self._for_looks.spend()

    def _forget_marks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            ours = self._turns.drop(block)
            if ours and self._ledger is not None and self._ledger.marked.get(block.number) is block:
                self._ledger.forget(block.number)

    # -- what was seen -------------------------------------------------------------------------------------------

    def _note(self, looked: Looked) -> None:
        batch = looked.batch
        self._count("looks", len(looked.alive))
        fresh: list[ForeignWrite] = []
        for at, layers in looked.changed.items():
            if at in batch.told:
                continue
            batch.told.add(at)
            ran = self._ran(batch.since, looked.step)
            fresh.append(ForeignWrite(batch.blocks[at], tuple(layers), batch.since, looked.step, *ran))
        batch.since = max(batch.since, looked.step)
        users = [name for each in fresh for name in (self._ledger.users(each.block) if self._ledger else ())]
        self._forget_marks([each.block for each in fresh if self._turns.of([each.block]) == [batch]])
        for each in fresh:
            self._count("changed", 1)
            if len(self.found) < _SAID:
                self.found.append(each)
                logger.warning("graphfix: %s. docs/kv-marks.md says what to do", each.sentence())
        if fresh:
            self._end_users(fresh, tuple(dict.fromkeys(users)))
            self._tell()

    def _end_users(self, fresh: Sequence[ForeignWrite], users: Sequence[str]) -> None:
        if self._abort is None:
            return
        why = f"a cache block that it has was overwritten by somebody else ({fresh[0].sentence()})"
        try:
            self._abort.tell(users, [each.block.number for each in fresh], why)
        except OSError as error:
            self._cannot_abort(str(error))

    def _cannot_abort(self, why: str) -> None:
        if self.cannot_abort is not None:
            return
        self.cannot_abort = why  # of this verdict: the next one may come through
        logger.warning("graphfix: requests whose cache blocks change are not ended: %s", why)

    def _ran(self, before: int, after: int) -> tuple[int, int]:
        """The number of steps from *before* on and up to *after*, with requests and without."""
        first = self._step - len(self._idle)
        ran = list(self._idle)[max(0, before - first) : max(0, after - first)]
        return len(ran) - sum(ran), sum(ran)

    def _count(self, event: str, more: int) -> None:
        if self._counts is not None:
            self._counts[event] += more

    # -- for others ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """For the events of a record; nothing where no block can be marked."""
        return {} if self._counts is None else self._counts | {"milliseconds": int(1000 * self.seconds())}

    def marks_nothing(self) -> bool:
        """Whether nothing has been marked in so many steps that nobody should rely on it."""
        return self._counts is not None and not self._counts["marks"] and self._step >= _MANY

    def seconds(self) -> float:
        """The host's time in it, as far as it is over."""
        waiting = self._granted - self._ledger.may_wait if self._ledger is not None else 0
        return self._seconds + (waiting - self._timed) * self._takes

    def to_report(self) -> list[ForeignWrite]:
        """The first foreign writes."""
        return self.found[:_KEPT]

    def forked(self) -> None:
        """In a forked child: it serves nothing yet."""
        self._forget()
        self._counts, self.found = None, []

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.stopped = f"{type(error).__name__}: {error}"
        guarded(self._count, "failures", 1)  # here nothing may fail: this is called in the handlers of hooks
        logger.warning(
            "graphfix: cache blocks are not marked any more on this rank; serving goes on: %s",
            self.stopped,
            exc_info=error,
        )
        guarded(self._end)


def _is_long(run: int) -> bool:
    """Whether after so many steps without work what is in danger is looked at meanwhile."""
    return run >= _LONG and not run & (run - 1)


def _slack_and_doubt(config: Any) -> tuple[int, int]:
    """The last tokens of a request that may be computed again, and those that are counted and may have been refused.

    Without drafts there are none. With asynchronous scheduling a step is made before the drafts of those under way were
    verified.
    """
    drafts = int(getattr(getattr(config, "speculative_config", None), "num_speculative_tokens", 0) or 0)
    if not drafts:
        return 0, 0
    under_way = int(config.parallel_config.pipeline_parallel_size) + 1
    if not getattr(config.scheduler_config, "async_scheduling", False):
        under_way -= 1
    return (drafts + 1) * (under_way + 1), drafts * under_way
