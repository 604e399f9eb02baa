"""Settles the graphs in which a fix failed while they were captured, alike on every rank.

A captured graph cannot be repaired: it holds stock's defect. So the engine stops if the user requires the fix.
Otherwise the graph is taken out of dispatch; or, if one rank cannot do that, the fix is `failed` on all ranks, and they
serve the graph as stock does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_graphfix.engine import rank_agreement
from vllm_graphfix.log import logger
from vllm_graphfix.text import first_of

if TYPE_CHECKING:
    from vllm_graphfix.engine.graph_dispatch import Dispatch
    from vllm_graphfix.engine.rank_report import RankReport
    from vllm_graphfix.patching.manager import FixManager

_MOST_LISTED = 8


def settle_failures(
    failing: Mapping[int, RankReport], dispatch: Dispatch, manager: FixManager, *, several_ranks: bool
) -> list[str]:
    """Act on the reports of *failing* ranks; return a sentence for each fix for which the engine must stop.

    The result depends only on the reports, which all ranks have read, and on settings that were compared: every rank
    does the same.
    """
    reasons_to_stop = []
    for fix in dict.fromkeys(fix for report in failing.values() for fix in report.failed):
        ranks = [rank for rank, report in failing.items() if fix in report.failed]
        graphs = sorted({name for rank in ranks for of, name in failing[rank].graphs if of == fix}, key=_by_size)
        where = f" on {rank_agreement.with_hosts(ranks, failing)}" if several_ranks else ""
        error, listed = failing[ranks[0]].failed[fix], _listed(graphs)
        why = f"{error.rstrip('.')}{where} while CUDA graphs were captured"
        if manager.required(fix):
            reasons_to_stop.append(f"{fix} failed{where} while CUDA graphs were captured ({listed}): {error}")
        elif "" in graphs or not all(report.can_leave_out for report in failing.values()):
            logger.warning(
                "graphfix: %s failed: %s. The graphs that stock vLLM captures are served, with its defect", fix, why
            )
            manager.settle_capture(fix, f"{why}; the graphs that stock captures are served", failed=True)
        else:
            dispatch.leave_out(graphs)
            logger.warning(
                "graphfix: %s failed: %s. Graphs that are not used for that, on any rank: %s", fix, why, listed
            )
            manager.settle_capture(fix, f"not used, for it failed in them: {listed}; {why}", failed=False)
    return reasons_to_stop


def _by_size(graph: str) -> tuple[str, int]:
    manager_and_mode, _, tokens = graph.rpartition(" ")
    return manager_and_mode, int(tokens or 0)


def _listed(graphs: Sequence[str]) -> str:
    return first_of([name or "one or more that cannot be told" for name in graphs], _MOST_LISTED)
