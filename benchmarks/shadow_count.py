"""What the shadow check adds to a step that it does not check, in the same process.

    python benchmarks/shadow_count.py [--rounds N]

Around calls that do nothing, so that the count alone is measured: of a `CUDAGraphWrapper` (V1), of `run_fullgraph` (V2). Target: 1 µs.
"""

from __future__ import annotations

import argparse

from measuring import console, interleaved, machine, table, verdict

from vllm_graphfix.shadow import process, runner_v1, runner_v2
from vllm_graphfix.shadow.rate import Action, parse

TARGET = 1.0
"""Microseconds a step."""
RATES = ("1/2000", "0.1%")
CALLS = 200
"""Of a round; fewer in all than either rate has before its first check is due."""


class Graphs:
    """Stands in for both: a call, and a method, that do nothing."""

    def __call__(self, *args: object) -> None:
        pass

    def run_fullgraph(self, desc: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="of calls of each (default: 200)")
    options = parser.parse_args()
    made = table(f"microseconds a step, {options.rounds} rounds", "model runner, rate", "added", "target")
    for rate in RATES:
        process.start(parse(rate), Action.REPORT)
        shadow = process.SHADOW
        assert shadow is not None  # noqa: S101 - for mypy
        shadow.schedule.due = 1 << 60
        stock, counted = Graphs(), runner_v1._checked_class(Graphs, shadow)()
        checked = runner_v2._checked(Graphs.run_fullgraph)
        for runner, one, other in (
            ("V1", stock, counted),
            ("V2", lambda: Graphs.run_fullgraph(stock, None), lambda: checked(stock, None)),
        ):
            times = interleaved({"stock": one, "counted": other}, calls=CALLS, rounds=options.rounds)
            added = times["counted"].minimum - times["stock"].minimum
            made.add_row(f"{runner}, {rate}", f"{added:.2f}", verdict(added, TARGET, "µs"))
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)


if __name__ == "__main__":
    main()
