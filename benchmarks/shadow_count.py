"""The time that the shadow check adds to a step that it does not check, in the same process.

    python benchmarks/shadow_count.py [--rounds N]

The wrappers are around calls that do nothing, so that only the count is measured: of a `CUDAGraphWrapper` (V1), of
`run_fullgraph` (V2), and of several more of a drafter (V2). Target: 1 µs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from measuring import console, interleaved, machine, table, verdict
from vllm_graphfix.fix import Activity
from vllm_graphfix.settings.shadow_rate import NEVER, Action, parse
from vllm_graphfix.shadow import drafter_v2, process, runner_v1, runner_v2

Call = Callable[..., Any]
TARGET = 1.0
"""Microseconds a step."""
RATES = ("1/2000", "0.1%")
DRAFTS = (1, 3, 5)
"""Replays of a drafter in a step: one of all decodes, or one for each token."""
CALLS = 200
"""The number of calls of a round."""


class Graphs:
    """Stand-in for a `CUDAGraphWrapper` and a manager: a call and a method that do nothing."""

    def __call__(self, *args: object) -> None:
        pass

    def run_fullgraph(self, desc: object) -> None:
        pass


def _added(rate: str, rounds: int) -> dict[str, float]:
    """Return microseconds a step, by model runner."""
    process.start(parse(rate), Action.REPORT)
    shadow = process.SHADOW
    assert shadow is not None  # noqa: S101 - for mypy
    shadow.schedule.due = NEVER
    stock, counted = Graphs(), runner_v1._checking_class(Graphs, shadow)()
    checked = runner_v2._check_replays(Graphs.run_fullgraph, Activity())
    drafted = drafter_v2._counting_replay(stock.run_fullgraph, drafter_v2._Drafter(None, stock, {}), shadow)

    def step_of(target: Call, draft: Call, drafts: int) -> Callable[[], None]:
        def step() -> None:
            target(stock, None)
            for _ in range(drafts):
                draft(None)

        return step

    pairs: dict[str, dict[str, Callable[[], Any]]] = {
        "V1": {"stock": stock, "counted": counted},
        "V2": {"stock": lambda: Graphs.run_fullgraph(stock, None), "counted": lambda: checked(stock, None)},
        **{
            f"V2 and {drafts} of a drafter": {
                "stock": step_of(Graphs.run_fullgraph, stock.run_fullgraph, drafts),
                "counted": step_of(checked, drafted, drafts),
            }
            for drafts in DRAFTS
        },
    }
    added = {}
    for runner, pair in pairs.items():
        times = interleaved(pair, calls=CALLS, rounds=rounds)
        added[runner] = times["counted"].minimum - times["stock"].minimum
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="of calls of each (default: 200)")
    options = parser.parse_args()
    made = table(f"microseconds a step, {options.rounds} rounds", "model runner, rate", "added", "target")
    for rate in RATES:
        for runner, added in _added(rate, options.rounds).items():
            made.add_row(f"{runner}, {rate}", f"{added:.2f}", verdict(added, TARGET, "µs"))
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)


if __name__ == "__main__":
    main()
