"""The marks of this process: their start, their state, and their part in records, `fleet` and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.patching.applied_fix import FixState

if TYPE_CHECKING:
    from vllm_graphfix.marks.watch import ChecksumMonitor
    from vllm_graphfix.settings.shadow_rate import Abort

NAME = "kv-marks"
"""The name of the marks in records, `fleet` and metrics, where they stand beside the fixes."""
NONE_MARKED = "in more than 10,000 steps none has been marked yet"
"""The end of the reason of an active state where nothing is marked; `fleet` recognises such an engine by it."""


class Marks:
    """Off until `start` gets a fraction; torch is imported with the first engine that is marked."""

    def __init__(self, publish: Callable[[], None]) -> None:
        """*publish* is called when a block has changed."""
        self._publish = publish
        self._every: int | None = None
        self._abort: Abort | None = None
        self._monitor: ChecksumMonitor | None = None

    def start(self, every: int | None, abort: Abort | None = None) -> None:
        """Mark the finished blocks of one of *every* requests, from the next engine on; none with None."""
        self._every, self._abort = every, abort
        if self._monitor is not None:
            self._monitor.start(every, abort)

    def on_captured(self, worker: Any) -> None:
        if self._every is None:
            return
        if self._monitor is None:
            from vllm_graphfix.marks.watch import ChecksumMonitor

            self._monitor = ChecksumMonitor(self._publish)
            self._monitor.start(self._every, self._abort)
        self._monitor.on_captured(worker)

    def after_fork(self) -> None:
        if self._monitor is not None:
            self._monitor.after_fork()

    def states(self) -> dict[str, FixState]:
        if self._every is None:
            return {}
        monitor, code = self._monitor, Code.NONE
        if monitor is None or not (monitor.counts() or monitor.refused or monitor.stopped):
            state, reason = State.WAITING, "no engine serves in this process yet"
        elif monitor.refused is not None:
            state, reason, code = State.INCOMPATIBLE, monitor.refused, Code.ENGINE
        elif monitor.stopped is not None:
            state, reason, code = State.FAILED, f"no block is marked any more: {monitor.stopped}", Code.ERROR
        else:
            action = "abort" if self._abort is not None else "report"
            if monitor.cannot_abort is not None:
                action, code = f"report, since {monitor.cannot_abort}", Code.CANNOT_ABORT
            so_far = ""
            if monitor.marks_nothing():
                so_far, code = f"; {NONE_MARKED}", Code.NOTHING_MARKED
            state, reason = (
                State.ACTIVE,
                f"the finished cache blocks of one of {self._every} requests are marked; action: {action}{so_far}",
            )
        return {NAME: FixState(NAME, Mode.AUTO, None, state, reason, code)}

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events of a record."""
        events = self._monitor.counts() if self._monitor is not None else {}
        return {NAME: events} if events else {}

    def overwritten(self) -> tuple[Any, ...]:
        """Return the `OverwrittenBlock`s of a record: the first foreign writes."""
        if self._monitor is None or not self._monitor.foreign_writes:
            return ()
        from vllm_graphfix.records.record import SHORT, OverwrittenBlock

        return tuple(
            OverwrittenBlock(
                each.block.number,
                each.block.group,
                each.block.place,
                ascii(", ".join(each.layers))[1:-1][:SHORT],
                each.ran()[:SHORT],
            )
            for each in self._monitor.to_report()
        )
