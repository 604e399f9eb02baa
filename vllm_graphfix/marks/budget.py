"""Shares of the host's time that checksums of the KV cache may cost, with bounded credit and debt."""

from __future__ import annotations

import time


class Budget:
    """A share of the time that passes, as credit in seconds."""

    def __init__(self, share: float, most: float, idle_share: float = 0.0) -> None:
        """*most*: the largest credit, and the largest debt where one is allowed, in seconds.

        *idle_share*: the share by which a rank without work pays its debt.
        """
        self.share, self._idle_share, self._most = share, idle_share, most
        self._credit, self._credited = most, time.perf_counter()
        self.spent = 0.0
        """Seconds, in all."""

    def allows(self, *, debt: bool = False) -> bool:
        """Tell whether there is credit; with *debt*, whether the debt is below its bound."""
        self._earn(self.share, self._most)
        return self._credit > (-self._most if debt else 0)

    def is_full(self) -> bool:
        """Tell whether the credit is as large as it may be."""
        self._earn(self.share, self._most)
        return self._credit >= self._most

    def repay(self) -> None:
        """Pay debt out of the time since the last call, in which this rank had no work."""
        if self._credit < 0:
            self._earn(self._idle_share, 0.0)

    def _earn(self, share: float, most: float) -> None:
        now = time.perf_counter()
        self._credit = min(most, self._credit + share * (now - self._credited))
        self._credited = now

    def spend(self) -> None:
        """Charge the time since the last call.

        The debt is bounded: work that took long because the machine was busy must not stop all checks for minutes.
        """
        now = time.perf_counter()
        self._take(now - self._credited)
        self._credited = now

    def charge(self, spent: float) -> None:
        """Charge what is new in *spent*, the seconds in all by another clock."""
        self._take(spent - self.spent)

    def _take(self, seconds: float) -> None:
        self._credit = max(self._credit - seconds, -2 * self._most)
        self.spent += seconds
