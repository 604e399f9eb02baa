"""What marks in the KV cache may cost: shares of the time of the host, which are saved up and owed within bounds."""

from __future__ import annotations

import time


class Budget:
    """A share of the time that has passed."""

    def __init__(self, share: float, most: float, idle_share: float = 0.0) -> None:
        """*most*: seconds that may be saved up, or, where it is allowed, owed.

        *idle_share* is that of a rank without work, out of which it pays what it owes.
        """
        self.share, self._idle_share, self._most = share, idle_share, most
        self._credit, self._credited = most, time.perf_counter()
        self.spent = 0.0
        """Seconds, in all."""

    def allows(self, *, debt: bool = False) -> bool:
        """Whether something may be done now; with *debt*, also what others will have to wait for."""
        self._earn(self.share, self._most)
        return self._credit > (-self._most if debt else 0)

    def is_saved_up(self) -> bool:
        """Whether there is as much as there may be."""
        self._earn(self.share, self._most)
        return self._credit >= self._most

    def repay(self) -> None:
        """Pays what is owed, out of the time since it was asked, in which its rank had no work."""
        if self._credit < 0:
            self._earn(self._idle_share, 0.0)

    def _earn(self, share: float, most: float) -> None:
        now = time.perf_counter()
        self._credit = min(most, self._credit + share * (now - self._credited))
        self._credited = now

    def spend(self) -> None:
        """Takes what has passed since it was asked.

        Of one that took long no more than ends all of them for some time: the machine was busy.
        """
        now = time.perf_counter()
        self._take(now - self._credited)
        self._credited = now

    def charge(self, spent: float) -> None:
        """Takes what has been spent since it was charged last; *spent* in all, which was timed by somebody else."""
        self._take(spent - self.spent)

    def _take(self, seconds: float) -> None:
        self._credit = max(self._credit - seconds, -2 * self._most)
        self.spent += seconds
