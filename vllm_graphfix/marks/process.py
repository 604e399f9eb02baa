"""The marks of this process: when they begin, their state, and what records, `fleet` and metrics have of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.patching.applied_fix import FixState

if TYPE_CHECKING:
    from vllm_graphfix.marks.watch import KVMarks
    from vllm_graphfix.settings.shadow_rate import Abort

NAME = "kv-marks"
"""Under which records, `fleet` and metrics tell of it, as of a fix."""
NONE_MARKED = "in more than 10,000 steps none has been marked yet"
"""The end of the reason of an active state where the marks see nothing, by which `fleet` knows such an engine."""


class Marks:
    """Off until `begin` is told otherwise; torch is imported with the first engine that is marked."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """*tell* is called when a block has changed."""
        self._tell = tell
        self._every: int | None = None
        self._abort: Abort | None = None
        self._watch: KVMarks | None = None

    def begin(self, every: int | None, abort: Abort | None = None) -> None:
        """The finished blocks of one of *every* requests are marked, from the next engine on; none with None."""
        self._every, self._abort = every, abort
        if self._watch is not None:
            self._watch.begin(every, abort)

    def serve(self, worker: Any) -> None:
        if self._every is None:
            return
        if self._watch is None:
            from vllm_graphfix.marks.watch import KVMarks

            self._watch = KVMarks(self._tell)
            self._watch.begin(self._every, self._abort)
        self._watch.serve(worker)

    def forked(self) -> None:
        if self._watch is not None:
            self._watch.forked()

    def states(self) -> dict[str, FixState]:
        if self._every is None:
            return {}
        watch, code = self._watch, Code.NONE
        if watch is None or not (watch.counts() or watch.refused or watch.stopped):
            state, reason = State.WAITING, "no engine serves in this process yet"
        elif watch.refused is not None:
            state, reason, code = State.INCOMPATIBLE, watch.refused, Code.ENGINE
        elif watch.stopped is not None:
            state, reason, code = State.FAILED, f"no block is marked any more: {watch.stopped}", Code.ERROR
        else:
            action = "abort" if self._abort is not None else "report"
            if watch.cannot_abort is not None:
                action, code = f"report, since {watch.cannot_abort}", Code.CANNOT_ABORT
            so_far = ""
            if watch.marks_nothing():
                so_far, code = f"; {NONE_MARKED}", Code.NOTHING_MARKED
            state, reason = (
                State.ACTIVE,
                f"the finished cache blocks of one of {self._every} requests are marked; action: {action}{so_far}",
            )
        return {NAME: FixState(NAME, Mode.AUTO, None, state, reason, code)}

    def counts(self) -> dict[str, dict[str, int]]:
        """For the events of a record."""
        found = self._watch.counts() if self._watch is not None else {}
        return {NAME: found} if found else {}

    def overwritten(self) -> tuple[Any, ...]:
        """For a record: the first foreign writes."""
        if self._watch is None or not self._watch.found:
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
            for each in self._watch.to_report()
        )
