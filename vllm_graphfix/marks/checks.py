"""Marks of finished blocks and checks of marked ones, each within its share of the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

from vllm_graphfix.marks.budget import Budget
from vllm_graphfix.marks.groups import Group
from vllm_graphfix.marks.ledger import Block, BlockTracker
from vllm_graphfix.marks.sums import BATCH, BlockChecksums
from vllm_graphfix.marks.turns import CheckQueue

SHARE = 0.001
"""The share of the host's time for making checksums: one half for marks, the other for checks."""
IDLE_SHARE = 0.01
"""The share of its time by which a rank without work pays debts for checksums, and half as much again for tracking: it
has no inputs to prepare."""
MAX_CREDIT = 0.025
"""Seconds of credit in each half or, around the steps of a rank without work, of debt."""
_FEW = BATCH // 2
"""Blocks that are worth a batch at once; fewer wait for more."""
_PATIENCE = 0.1
"""Seconds that they wait; the budget sees to it that few batches are small. There may be less than a second between two
pauses."""
_RECENT = 16
"""Steps after a check in which its batch is not checked again because one of its blocks is reallocated."""
_MAX_BATCHES = 256
"""Beyond that the oldest are dropped."""


class BlockChecks:
    """The marked blocks of one cache, the order of their checks, and the budgets of both."""

    def __init__(self, count: Callable[[str, int], None]) -> None:
        """*count* adds a number to an event of a record."""
        self._count = count
        self.groups: dict[int, Group] = {}
        self.queue = CheckQueue()
        self.mark_budget = Budget(SHARE / 2, MAX_CREDIT, IDLE_SHARE / 2)
        self.check_budget = Budget(SHARE / 2, MAX_CREDIT, IDLE_SHARE / 2)
        self._waiting_since: float | None = None

    @property
    def spent(self) -> float:
        """Seconds, in all."""
        return self.mark_budget.spent + self.check_budget.spent

    def mark_finished(self, tracker: BlockTracker, checksums: BlockChecksums, step: int, *, at_once: bool) -> None:
        """Mark a batch of finished blocks if there are enough or they have waited long enough; with *at_once* all.

        Blocks in danger have to be marked before the step that may write to them: a later mark would include what that
        step wrote. So their marks may go into debt.
        """
        if not tracker.finished:
            self._waiting_since = None
            return
        now = time.perf_counter()
        if self._waiting_since is None:
            self._waiting_since = now
        if at_once or len(tracker.finished) >= _FEW or now - self._waiting_since > _PATIENCE:
            more = self.mark_budget.allows(debt=at_once)
            while more:
                marked = self._mark(tracker, checksums, step)
                self.mark_budget.spend()
                if not marked:
                    break
                self._waiting_since = None
                more = at_once and bool(tracker.finished) and self.mark_budget.allows(debt=True)
        while len(self.queue) > _MAX_BATCHES:
            self.forget(tracker, self.queue.drop_oldest())
        if len(tracker.finished) > 2 * BATCH:
            self._skip_oldest(tracker)

    def _mark(self, tracker: BlockTracker, checksums: BlockChecksums, step: int) -> bool:
        """Mark a batch of finished blocks of each group, the newest first; False if too much is under way."""
        by_group: dict[int, list[Block]] = {}
        for block in reversed(tracker.finished.values()):
            by_group.setdefault(block.group, []).append(block)
        for group, blocks in by_group.items():
            batch = checksums.mark(blocks, self.groups[group], step)
            if batch is None:
                return False
            # Only those of the batch, and only now: where there is no room, blocks wait for the next step.
            for block in batch.blocks:
                del tracker.finished[block.number]
                tracker.marked[block.number] = block
            self.queue.add(batch)
            self._count("marks", len(batch.blocks))
        return True

    def _skip_oldest(self, tracker: BlockTracker) -> None:
        """Skip all but the newest finished blocks: one that waits long may change before it is marked, unnoticed."""
        for number in [*islice(tracker.finished, len(tracker.finished) - 2 * BATCH)]:
            tracker.forget(number)
            self._count("passed-over", 1)

    def check_urgent(self, checksums: BlockChecksums, step: int, *, debt: bool) -> None:
        """Check batches that were in danger, before one of their blocks is reallocated and before other batches.

        With *debt* they may do so although other checks, which can wait, have used up the budget.
        """
        queue = self.queue
        while queue.urgent:
            batch = queue.urgent[0]
            if batch.alive and batch.checked_at < step:
                if not (self.check_budget.allows(debt=debt) and checksums.check(batch, step)):
                    return
                queue.put_last(batch)
                self.check_budget.spend()
            queue.urgent.popleft()

    def check_dropped(
        self, tracker: BlockTracker, checksums: BlockChecksums, dropped: Sequence[Block], step: int
    ) -> None:
        """Check the marks of reallocated blocks a last time, and drop them."""
        for batch in self.queue.of(dropped):
            if batch.checked_at < step - _RECENT and self.check_budget.allows():
                if checksums.check(batch, step):
                    self.check_budget.spend()
                else:
                    self._count("passed-over", sum(self.queue.of([block]) == [batch] for block in dropped))
        self.forget(tracker, dropped)

    def check_next(self, checksums: BlockChecksums, step: int) -> None:
        """Check the batch whose turn it is."""
        if (batch := self.queue.next(step)) is None:
            return
        if checksums.check(batch, step):
            self.queue.others.append(batch)
            self.check_budget.spend()
        else:
            self.queue.put_back(batch)

    def forget(self, tracker: BlockTracker, blocks: Sequence[Block]) -> None:
        """Drop the marks of *blocks*, and forget those that nobody has marked again since."""
        for block in blocks:
            ours = self.queue.drop(block)
            if ours and tracker.marked.get(block.number) is block:
                tracker.forget(block.number)
