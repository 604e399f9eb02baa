"""What the shadow check adds to a step that it does not check, in the same process.

    python benchmarks/shadow_count.py [--rounds N]

Around calls that do nothing, so that the count alone is measured: of a `CUDAGraphWrapper` (V1), of `run_fullgraph` (V2). Target: 1 µs.
"""

from __future__ import annotations

import argparse

from measuring import console, interleaved, machine, table, verdict

from vllm_graphfix.shadow import process, runner_v1, runner_v2
from vllm_graphfix.shadow.rate import NEVER, Action, parse

TARGET = 1.0
"""Microseconds a step."""
RATES = ("1/2000", "0.1%")
CALLS = 200
"""Of a round."""


class Graphs:
    """Stands in for both: a call, and a method, that do nothing."""

    def __call__(self, *args: object) -> None:
        pass

    def run_fullgraph(self, desc: object) -> None:
        pass


def _added(rate: str, rounds: int) -> dict[str, float]:
    """Microseconds a step, by model runner."""
    process.start(parse(rate), Action.REPORT)
    shadow = process.SHADOW
    assert shadow is not None  # noqa: S101 - for mypy
    shadow.schedule.due = NEVER
    stock, counted = Graphs(), runner_v1._checked_class(Graphs, shadow)()
    checked = runner_v2._checked(Graphs.run_fullgraph)
    pairs = {
        "V1": {"stock": stock, "counted": counted},
        "V2": {"stock": lambda: Graphs.run_fullgraph(stock, None), "counted": lambda: checked(stock, None)},
    }
    found = {}
    for runner, pair in pairs.items():
        times = interleaved(pair, calls=CALLS, rounds=rounds)
        found[runner] = times["counted"].minimum - times["stock"].minimum
    return found


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
