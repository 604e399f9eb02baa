"""The reports of this rank in the store of the ranks, around a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.patching.hooks import guarded
from vllm_graphfix.ranks import StoreLostError, common_store, world

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext

PROFILING, WARM_UP, CAPTURED = "profiling", "warm-up", "captured"
"""The stages of the comparisons: before a capture that measures graphs, before the one whose graphs serve, after it."""
Published = tuple[Any, str, Any]
"""A report in the ranks' store: that store, its place in it, and the report."""


class RankReports:
    """Publishes the reports of this rank for the others, and keeps the last one until the ranks are compared."""

    def __init__(self, context: EngineContext, requires_a_fix: Callable[[], bool]) -> None:
        self._context, self._requires_a_fix = context, requires_a_fix
        self.pending: Published | None = None
        """The report that this rank has published and not compared yet."""
        self._error: Exception | None = None
        """The error for which this rank could not publish its last report."""
        self.post_capture_group: tuple[Any, int, int] | None = None
        """Store, rank and world size of the ranks that are compared again after this capture."""

    def publish_report(self, stage: str) -> None:
        """Publish this rank's report for the others."""
        try:
            from vllm_graphfix.engine import rank_agreement

            # First: after an error below, the report of an earlier stage must not be compared.
            self.pending = self._error = None
            rank, world_size = world()
            report = self.report() if world_size > 1 else None
            if report is not None:
                store = self._store()
                self.pending = store, rank_agreement.publish(store, stage, rank, report), report
        except Exception as error:
            self.note_unpublished(error)
            # Another rank may already wait for this one at the gate; not in a store that is lost, which takes as long.
            if stage == PROFILING and not isinstance(error, StoreLostError):
                guarded(self.publish_unchecked, stage, error)
            raise

    def note_unpublished(self, error: Exception) -> None:
        """Let `take` raise *error*, instead of returning an earlier report, or none."""
        self.pending, self._error = None, error

    def publish_unchecked(self, stage: str, error: Exception) -> None:
        """Let the other ranks pass *stage*, too, without the report that this one could not publish.

        All ranks compare again after the capture, when they have to act alike on its failures.
        """
        from vllm_graphfix.engine import rank_agreement

        rank, world_size = world()
        if world_size == 1 or self._requires_a_fix():  # a rank that is about to stop must not let others pass
            return
        store = self._store()
        if stage == WARM_UP:
            self.post_capture_group = store, rank, world_size
        rank_agreement.publish_unchecked(store, stage, rank, f"{type(error).__name__}: {error}")

    def publish_stop(self, stage: str, error: Exception) -> None:
        """Stop the other ranks that wait at *stage* for this one's report."""
        from vllm_graphfix.engine import rank_agreement

        rank, world_size = world()
        if world_size > 1:
            rank_agreement.publish_stop(self._store(), stage, rank, f"{type(error).__name__}: {error}")

    def take(self, early: Published | None, *, stops: bool) -> Published | None:
        """Return the published report by which this rank is compared; None if there is none, and no error either."""
        # Since profiling, hosts may have drifted apart by minutes. If a difference is only a warning, the early reports
        # are compared: they are in the store already.
        pending = early if early is not None and not stops else self.pending
        self.pending = None
        if pending is None and self._error is not None:
            raise self._error
        return pending

    def publish_end(self) -> None:
        """Publish that the capture of this rank has ended in an error, for the ranks that wait for its report."""
        from vllm_graphfix.engine import rank_agreement

        report = self.report()
        if self.post_capture_group is not None and report is not None:
            store, rank, _ = self.post_capture_group
            rank_agreement.publish_end(
                store, rank_agreement.publish(store, CAPTURED, rank, report._replace(ended=True))
            )

    def _store(self) -> Any:
        """Return the store of the ranks, whose calls end within the time that this rank waits for the others."""
        from vllm_graphfix.engine import rank_agreement

        decision = self._context.decision
        if decision is None or decision.is_off:
            return common_store(rank_agreement.TIMEOUT_FOR_A_WARNING)
        return common_store(decision.agreement_timeout)

    def report(self) -> Any:
        """Return the report of this rank; None before there is a decision."""
        from vllm_graphfix.engine.own_report import own_report

        return own_report(self._context)
