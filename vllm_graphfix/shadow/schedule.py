"""The choice of the replays that are checked.

It follows from a count that is the same on all ranks that run the same steps, of a tensor-parallel group or a pipeline.
"""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter

from vllm_graphfix.settings.shadow_rate import NEVER, Rate

_FIRST_COST = 5
"""Steps that a check is taken to cost before one was measured: a replay, an eager run, and the copies."""
_IDLE = 1.0
"""Seconds between two steps from which on the engine had nothing to do: such a gap is no part of the step time of which
a budget is a share."""
_HALF_LIFE = 120.0
"""Seconds of steps after which earlier spending counts half: a budget holds over minutes."""
_RECENT = 8
"""Checks whose median cost is expected of the next one."""
_REPLAYS = 1 << 16
"""More than a drafter makes in one step; and so few that no process comes to `NEVER`."""


class Schedule:
    """Counts every call of a model that may replay; from `due` on the next replay is checked, then `check_in` called.

    Where a drafter's replays count too, a call of the target model sets ``count = (count | within) + 1``, and a
    drafter's ``count += 1``. As long as `within` is 0 both are the same, and each is a step. In a pipeline, whose last
    stage alone has the drafter, `step` counts the target model's calls alone, and a drafter's lie in between.
    """

    def __init__(self, rate: Rate) -> None:
        self._every, self.share = rate.every, rate.share
        self._has_all = False
        """Every replay is due, a drafter's too."""
        self.timed = rate.share is not None
        """True if `tick` has to be called at every step of the target model."""
        self.count = 0
        """Each step has ``within + 1`` counts, whether or not as many calls are made."""
        self.within = 0
        """Counts of one step after the target model's, for a drafter's replays."""
        self.drafts = 0
        """Replays of a drafter in the step before this one; 0 unless they lie between steps."""
        self._turns = 0
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._busy, self._last, self._since = 0.0, perf_counter(), 0
        """Seconds of steps since the last check, the clock at the last `tick`, and the step of the last check."""
        self._spent = self._paid_for = self._steps = 0.0
        """Decaying sums: seconds of checks, seconds of steps, and the number of these steps."""
        self.due = self._first()
        """A `count`, not a step, as arguments here and `due` of coordinators are; while `within` is 0 both are one."""

    def _first(self) -> int:
        if self._every is not None:
            return 1 + place(0, self._every)
        return max(1, math.ceil(_FIRST_COST / self.share)) if self.share is not None else NEVER

    @property
    def step(self) -> int:
        return self.count // (self.within + 1)

    def restart(self, *, drafts: bool) -> int:
        """Count from 0, at the same moment on all ranks; return the first step that is due, the same on all.

        *drafts*: a drafter's replays count too.
        """
        self.count, self.within, self._since = 0, _REPLAYS - 1 if drafts else 0, 0
        self.move(self._first())
        return self._first()

    def check_every_replay(self) -> None:
        """Make every replay due from the next one on, at any rate; all ranks call this between the same two steps."""
        self._every, self.share, self._has_all = 1, None, True
        self.move(self.step + 1)

    def check_no_more(self) -> None:
        """Make no replay due any more."""
        self._every, self.share, self._has_all, self.due = None, None, False, NEVER

    def move(self, step: int, *, planned: bool = False) -> None:
        """Make *step* the one that is due: the target model's replay in it, or in turns one of a drafter's.

        *planned*: the step is due for an agreement, whatever it replays.
        """
        self.due = step * (self.within + 1)
        if self._has_all:
            self.due = self.count + 1
        elif not planned:
            self._turns += 1
            self.due += self._turns % (self.drafts + 1)

    def tick(self) -> None:
        """Add the time since the step before, for a budget."""
        now = perf_counter()
        elapsed, self._last = now - self._last, now
        if elapsed < _IDLE:
            self._busy += elapsed

    def wanted(self, cost: float) -> int:
        """Return the steps from this one to the next check, after a check that took *cost* seconds.

        Ranks act on the largest.
        """
        if self._every is not None:
            window = (self.step - 1) // self._every + 1
            return window * self._every + place(window, self._every) + 1 - self.step
        self._costs.append(cost)
        self._spent += cost
        self._paid_for += self._busy
        if self.share is None or self._paid_for <= 0:
            return max(1, math.ceil(_FIRST_COST / (self.share or 1)))
        self._steps += max(1, self.step - self._since)
        step_time = self._paid_for / self._steps
        typical = sorted(self._costs)[(len(self._costs) - 1) // 2]  # the lower median: the first check takes far longer
        # What was spent too much is waited for; what was spent too little is made up for, but not in a burst. Half of
        # the next check is paid for before it, so that the budget holds from both sides, also while the first check,
        # which is slow, makes up most of the spending.
        debt = self._spent - self.share * self._paid_for
        seconds = max(typical / 2 + debt, typical / 2) / self.share
        if self._paid_for > _HALF_LIFE:
            self._spent, self._paid_for, self._steps = self._spent / 2, self._paid_for / 2, self._steps / 2
        return max(1, math.ceil(seconds / step_time))

    def wanted_later(self, cost: float) -> int:
        """Return the steps from this one, which could not be checked and took *cost* seconds, to the next check.

        A budget waits as at the beginning.
        """
        if self.share is None:
            return self.wanted(cost)
        self._spent += cost
        self._paid_for += self._busy
        self._steps += max(1, self.step - self._since)
        return max(1, math.ceil(_FIRST_COST / self.share))

    def check_in(self, steps: int) -> None:
        """Check in so many *steps* from here, on which all ranks have agreed."""
        self.move(self.step + steps)
        self._restart_clock()

    def plan_at(self, step: int) -> None:
        """Make *step* due for the agreement on the next check; none comes before it."""
        self.move(step, planned=True)
        self._restart_clock()

    def _restart_clock(self) -> None:
        """Leave the duration of the check itself out of the step time."""
        self._since, self._busy, self._last = self.step, 0.0, perf_counter()

    def add_planning(self, cost: float) -> None:
        """Add the *cost* in seconds of an agreement on what is due, which is no part of the step time either."""
        self._spent += cost
        self._last += cost


def place(window: int, every: int) -> int:
    """Return which step of a window of *every* is checked, 0 to every - 1.

    It varies: with a batch that repeats at a fixed interval, a fixed place would check the same graph each time, and
    other graphs never.
    """
    # Multiplied and shifted as in a hash: neighbouring windows have unrelated places, and every rank computes the same
    # ones without asking.
    mixed = (window * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 20) % every
