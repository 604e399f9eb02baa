"""What this rank says of itself to the other ranks of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.engine.role import host_name
from vllm_graphfix.fix import State, Verdict
from vllm_graphfix.log import logger

if TYPE_CHECKING:
    from vllm_graphfix.engine.context import EngineContext
    from vllm_graphfix.engine.rank_agreement import RankReport
    from vllm_graphfix.patching.applied_fix import FixState

_TELL_WHY = (State.FAILED, State.CONFLICT, State.INCOMPATIBLE)
"""States that nobody chose."""


def own_report(context: EngineContext) -> RankReport | None:
    """The report of this rank; None before there is a decision.

    Never raises for want of states: a rank without a report would keep the others waiting. It says what failed instead.
    """
    from vllm_graphfix.engine.rank_agreement import RankReport, new_token, one_line

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
            name: one_line(state.reason) for name, state in states.items() if _state_to_compare(state) in _TELL_WHY
        },
        fault=fault,
    )


def report_after_capture(
    context: EngineContext, failed: Mapping[str, str], graphs: Sequence[tuple[str, str]], *, can_leave_out: bool
) -> RankReport | None:
    """The report with what failed in the capture: fixes with their first errors, and pairs of a fix and a graph.

    Of more graphs than a report may have, none is named: then they cannot be left out, and the fix has failed.
    """
    from vllm_graphfix.engine import rank_agreement

    report, named = own_report(context), list(dict.fromkeys(graphs))
    if len(named) > rank_agreement.MOST_GRAPHS:
        named = [(fix, "") for fix in failed]
    return report and report._replace(
        failed={fix: rank_agreement.one_line(why) for fix, why in failed.items()},
        graphs=named,
        can_leave_out=can_leave_out,
    )


def _state_to_compare(found: FixState) -> State:
    """The state that the ranks are compared by.

    A fix that was taken back for want of a companion stays where the companion's code is not imported: on the first
    stages of a pipeline whose last one has the drafter. That concerns how each rank captures its own graphs, and no
    other rank.
    """
    taken_back = (
        found.state is State.INCOMPATIBLE
        and found.diagnosis is not None
        and found.diagnosis.verdict is Verdict.AFFECTED
    )
    return State.WAITING if taken_back else found.state


def _or_else(otherwise: str, make: Callable[[], str]) -> str:
    """What *make* makes, or *otherwise*: nothing that ranks have to agree about."""
    try:
        return make()
    except Exception:
        logger.exception("graphfix: reporting %r to the other ranks instead", otherwise)
        return otherwise
