"""A process that left a record."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_graphfix.records import Liveness, Record, StoredRecord


@dataclass(frozen=True)
class Member:
    """A process that left a record."""

    found: StoredRecord
    liveness: Liveness
    age: float
    """Seconds since its record was last written or touched."""
    visible: bool = False
    """It would be seen from here if it did not exist."""

    @property
    def record(self) -> Record:
        return self.found.record

    @property
    def live(self) -> bool:
        return self.liveness is Liveness.ALIVE

    ahead: float = 0.0
    """Seconds by which its record is dated after now, by the clock of its folder."""

    @property
    def misdated(self) -> bool:
        """Its record is dated so far ahead that it is no sign of life: the clock was set back since."""
        return self.liveness is Liveness.SILENT and self.ahead > 0.0

    @property
    def hangs(self) -> bool:
        """Its process exists and is not heard of."""
        return self.liveness is Liveness.SILENT and self.visible and not self.misdated

    @property
    def unchanged(self) -> float:
        """Seconds since its record last changed."""
        return self.age + max(self.found.heartbeat - self.record.written, 0.0)

    @property
    def in_step(self) -> float | None:
        """Seconds that its present step lasts, where that is so long that it may never end."""
        since = self.record.in_step_since
        return None if since is None or not self.live else max(self.age + self.found.heartbeat - since, 0.0)

    @property
    def world(self) -> str:
        """Names the ranks that this one was compared with."""
        record = self.record
        if record.agreement is not None:
            return record.agreement.group
        return f"{record.rank.world_size}" if record.rank is not None else ""
