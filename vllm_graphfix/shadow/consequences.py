"""Acts on mismatches: reports them, ends requests, and puts a graph that was wrong again into quarantine."""

from __future__ import annotations

from collections.abc import Hashable

from vllm_graphfix.log import logger
from vllm_graphfix.settings.shadow_rate import Abort, Action
from vllm_graphfix.shadow.affected_requests import requests_of_rows
from vllm_graphfix.shadow.failures import description
from vllm_graphfix.shadow.judge import Judge
from vllm_graphfix.shadow.verdict import TARGET, GraphHistory, Mismatch

CONFIRMATIONS = 2
"""Mismatches of one graph, each confirmed by a second eager run, that put it into quarantine."""
_MAX_QUARANTINE_FAILURES = 3
"""Steps of a graph in quarantine, one after the other, that cannot run without it, after which it is replayed again."""


class Consequences:
    """The actions of one process on mismatches."""

    def __init__(self, action: Action, abort: Abort | None, judge: Judge) -> None:
        """*abort* ends requests, if that is the action."""
        self._action, self._abort, self._judge = action, abort, judge
        self.cannot_abort: str | None = None
        """Reason for which no request can be ended, though that is the action; None if it can."""
        # Changed in place: wrappers hold this very set.
        self.quarantined: set[Hashable] = set()
        self._warned_of_replay = False

    def record(self, key: Hashable, history: GraphHistory, mismatch: Mismatch) -> None:
        """Count *mismatch* of the graph *key*, log it, and act on it."""
        history.graph = mismatch.graph
        history.mismatches += 1
        self._judge.results.add(mismatch)
        if history.mismatches == 1:
            logger.warning("graphfix: %s", mismatch.sentence())
        elif mismatch.first_layer and not history.first_layer:
            history.first_layer = mismatch.first_layer
            logger.warning(
                "graphfix: %s first goes wrong in %s, or just before it", mismatch.graph.name, history.first_layer
            )
        if self._action is Action.ABORT and mismatch.here:
            try:
                self._end_requests(mismatch)
            except Exception as error:  # the next mismatch may come through
                self._report_only(str(error) if isinstance(error, OSError) else description(error))
        if self._action is Action.QUARANTINE and history.mismatches == CONFIRMATIONS:
            self.quarantined.add(key)
            self._judge.results.quarantined.append(mismatch.graph)
            logger.warning(
                "graphfix: %s is no longer replayed; its steps now run without a graph, more slowly",
                mismatch.graph.name,
            )

    def note_failed_quarantine(self, key: Hashable, history: GraphHistory, reason: str) -> None:
        """Note that a step of the graph *key* could not run without it; after some of these it is replayed again."""
        if not self._warned_of_replay:
            self._warned_of_replay = True
            logger.warning(
                "graphfix: a step whose graph is in quarantine cannot run without it, so it is replayed as on stock: "
                "%s",
                reason,
            )
        history.quarantine_failures += 1
        if history.quarantine_failures == _MAX_QUARANTINE_FAILURES:
            self.quarantined.discard(key)
            self._judge.results.quarantines_ended += 1
            logger.warning(
                "graphfix: %s is replayed again as on stock, although it was found wrong: "
                "%s steps in a row cannot run without it",
                history.graph.name if history.graph else key,
                _MAX_QUARANTINE_FAILURES,
            )

    def _end_requests(self, mismatch: Mismatch) -> None:
        """End those requests of the running step whose rows are wrong."""
        if self._abort is None or not mismatch.graph.name.startswith(TARGET):
            return  # the target model verifies what a drafter proposes
        tolerance = self._judge.tolerance(mismatch.graph, mismatch.noise)
        wrong = [not error <= tolerance for error in mismatch.errors]  # not `>`: NaN is wrong, too
        # If the step failed, or only a state is wrong, it is not known whose: all requests of the step end.
        names = requests_of_rows(wrong if mismatch.failure is None and any(wrong) else ())
        self._abort.deliver(names, (), f"its tokens came of a wrong replay of a CUDA graph ({mismatch.sentence()})")

    def _report_only(self, why: str) -> None:
        if self.cannot_abort is None:
            self.cannot_abort = why
            logger.warning("graphfix: requests of a step that was replayed wrongly are not ended: %s", why)
