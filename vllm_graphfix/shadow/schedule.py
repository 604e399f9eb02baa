"""Which replays are checked.

That follows from a count which all ranks share that run the same steps, of a tensor-parallel group or of a pipeline.
"""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter

from vllm_graphfix.settings.shadow_rate import NEVER, Rate

_FIRST_COST = 5
"""Steps that a check is taken to cost before one was measured: a replay, an eager run, and the copies."""
_PAUSE = 1.0
"""Seconds between two steps from which on the engine had nothing to do: such a pause is no part of the step time of
which a budget is a share."""
_MEMORY = 120.0
"""Seconds of steps after which what was spent counts half: a budget is kept over minutes."""
_RECENT = 8
"""Checks whose median cost is expected of the next one."""
_REPLAYS = 1 << 16
"""More than a drafter makes in one step; and so few that no process comes to `NEVER`."""


class Schedule:
    """Counts every call of a model that may replay; from ``due`` on the next replay is checked.

    After that, `checked` is called.

    Where a drafter's replays count too, a call of the target model is ``count = (count | within) + 1``, and a drafter's
    ``count += 1``. As long as *within* is 0 that is the same, and each of them a step. In a pipeline, whose last stage
    alone has the drafter, `step` counts the target model's calls alone, and a drafter's come between.
    """

    def __init__(self, rate: Rate) -> None:
        self._every, self._share = rate.every, rate.share
        self.timed = rate.share is not None
        """Whether `tick` is to be called at every step of the target model."""
        self.count = self.within = 0
        self.drafts = 0
        """Replays of a drafter in the step before this one; 0 unless they come between steps."""
        self._turns = 0
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._busy, self._last, self._since = 0.0, perf_counter(), 0
        self._spent = self._paid_for = self._steps = 0.0
        self.due = self._first()

    def _first(self) -> int:
        if self._every is not None:
            return 1 + place(0, self._every)
        return max(1, math.ceil(_FIRST_COST / self._share)) if self._share is not None else NEVER

    @property
    def step(self) -> int:
        return self.count // (self.within + 1)

    @property
    def share(self) -> float | None:
        return self._share

    def begin_together(self, *, drafts: bool) -> int:
        """Begins at the same moment on all ranks; returns the first step that is due, which is the same on all.

        *drafts*: a drafter's replays count too.
        """
        self.count, self.within, self._since = 0, _REPLAYS - 1 if drafts else 0, 0
        self.move(self._first())
        return self._first()

    def move(self, step: int, *, planned: bool = False) -> None:
        """Makes *step* the one that is due.

        In a pipeline, it is the target model's replay of it or one of a drafter's, in turns; *planned*: whatever there
        is.
        """
        self.due = step * (self.within + 1)
        if not planned:
            self._turns += 1
            self.due += self._turns % (self.drafts + 1)

    def tick(self) -> None:
        """Adds the time since the step before, for a budget."""
        now = perf_counter()
        taken, self._last = now - self._last, now
        if taken < _PAUSE:
            self._busy += taken

    def wanted(self, cost: float) -> int:
        """The number of steps after this one at which the next is to be checked; this one's check took *cost* seconds.

        Ranks go by the largest.
        """
        if self._every is not None:
            window = (self.step - 1) // self._every + 1
            return window * self._every + place(window, self._every) + 1 - self.step
        self._costs.append(cost)
        self._spent += cost
        self._paid_for += self._busy
        if self._share is None or self._paid_for <= 0:
            return max(1, math.ceil(_FIRST_COST / (self._share or 1)))
        self._steps += max(1, self.step - self._since)
        step_time = self._paid_for / self._steps
        typical = sorted(self._costs)[(len(self._costs) - 1) // 2]  # the lower median: the first check takes far longer
        # What was spent too much is waited for; what was spent too little is made up for, if not in a burst. Half of
        # the next check is paid for before it, so that the budget is kept from both sides, also while the first one,
        # which is slow, is most of what was spent.
        debt = self._spent - self._share * self._paid_for
        seconds = max(typical / 2 + debt, typical / 2) / self._share
        if self._paid_for > _MEMORY:
            self._spent, self._paid_for, self._steps = self._spent / 2, self._paid_for / 2, self._steps / 2
        return max(1, math.ceil(seconds / step_time))

    def wanted_later(self, cost: float) -> int:
        """The number of steps to the next check after one that could not be checked, which took *cost* seconds.

        A budget waits as at the beginning.
        """
        if self._share is None:
            return self.wanted(cost)
        self._spent += cost
        self._paid_for += self._busy
        self._steps += max(1, self.step - self._since)
        return max(1, math.ceil(_FIRST_COST / self._share))

    def checked(self, steps: int) -> None:
        """The next check is *steps* from here, as all ranks have agreed. The time that this one took is no step's."""
        self.move(self.step + steps)
        self._pause()

    def wait(self, step: int) -> None:
        """Nothing is due before *step*, and only there it is known when the next check is."""
        self.move(step, planned=True)
        self._pause()

    def _pause(self) -> None:
        self._since, self._busy, self._last = self.step, 0.0, perf_counter()

    def plan(self, cost: float) -> None:
        """*cost* seconds, which are no step's either, went into the agreement on what is due."""
        self._spent += cost
        self._last += cost


def place(window: int, every: int) -> int:
    """Which step of a window of *every* is checked, 0 to every - 1.

    It is not always the same one: with a batch that repeats at a fixed interval, the same graph would be checked each
    time, and others never.
    """
    # Multiplied and shifted as in a hash: the places of neighbouring windows have nothing to do with each other, and
    # every rank computes the same ones without asking.
    mixed = (window * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 20) % every
