"""Builds the report of this rank for the other ranks of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.engine.role import host_name
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.log import logger

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext
    from vllm_graphfix.engine.rank_report import RankReport
    from vllm_graphfix.patching.applied_fix import FixState

_WITH_REASON = (State.FAILED, State.CONFLICT, State.INCOMPATIBLE)
"""States that no setting asks for: their reasons are reported."""


def own_report(context: EngineContext) -> RankReport | None:
    """Return the report of this rank; None before there is a decision.

    If the states cannot be determined, the report holds the error instead: a rank without a report would keep the
    others waiting.
    """
    from vllm_graphfix.engine.rank_report import RankReport, new_token, one_line

    decision = context.decision
    if decision is None:
        return None
    states: dict[str, FixState] = {}
    fault = ""
    try:
        states = {name: state for manager in context.managers() for name, state in manager.states().items()}
    except Exception as error:
        logger.exception("graphfix: could not report the states of the fixes to the other ranks")
        fault = one_line(f"{type(error).__name__}: {error}")
    return RankReport(
        host=_or_else("an unknown host", host_name),
        pid=os.getpid(),
        engine=decision.engine,
        graphfix=decision.graphfix,
        vllm=decision.vllm,
        canary=decision.canary,
        master=decision.master.value,
        off=decision.is_off,
        misconfigured=decision.misconfigured,
        modes={name: mode.value for name, mode in decision.modes.items()}
        | {each.name: setting for each in context.components if (setting := each.compared(decision)) is not None},
        states={name: _state_to_compare(state).value for name, state in states.items()},
        token=_or_else(decision.engine, new_token),
        reasons={
            name: one_line(state.reason) for name, state in states.items() if _state_to_compare(state) in _WITH_REASON
        },
        fault=fault,
    )


def report_after_capture(
    context: EngineContext, failed: Mapping[str, str], graphs: Sequence[tuple[str, str]], *, can_leave_out: bool
) -> RankReport | None:
    """Return the report with failures of the capture: fixes with their first errors, and pairs of a fix and a graph.

    If there are more graphs than a report may hold, it names none: they are not left out, and the fix has failed.
    """
    from vllm_graphfix.engine.rank_report import MOST_GRAPHS, one_line

    report, named = own_report(context), list(dict.fromkeys(graphs))
    if len(named) > MOST_GRAPHS:
        named = [(fix, "") for fix in failed]
    return report and report._replace(
        failed={fix: one_line(why) for fix, why in failed.items()},
        graphs=named,
        can_leave_out=can_leave_out,
    )


def _state_to_compare(fix: FixState) -> State:
    """Return the state by which the ranks are compared.

    `waiting` for a fix that was reverted because its companion could not be applied: on ranks that do not import the
    companion's code, such as the first stages of a pipeline whose last stage has the drafter, the fix stays. That
    affects only how each rank captures its own graphs.
    """
    reverted = (
        fix.state is State.INCOMPATIBLE and fix.diagnosis is not None and fix.diagnosis.verdict is Verdict.AFFECTED
    )
    return State.WAITING if reverted else fix.state


def _or_else(otherwise: str, make: Callable[[], str]) -> str:
    """Return the result of *make*, or *otherwise* if it raises; for fields that are not compared."""
    try:
        return make()
    except Exception:
        logger.exception("graphfix: reporting %r to the other ranks instead", otherwise)
        return otherwise
