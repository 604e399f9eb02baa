"""The time that fixes on the path of a decode step add to each call, against stock in the same process.

    python benchmarks/hot_path.py [--rounds N]

"alone" has the fix around a function of the same signature that does nothing, so that only the fix is measured; "real"
around vLLM's own. "observed" is the fix in mode observe, which counts and changes nothing. "cold" is the median of
single calls, before each of which other memory is read, more than the processor's caches hold: in an engine a step of
the model lies between two calls. Tensors are on the CPU: a copy or fill takes another time on a GPU, and the same
Python. Other fixes act while graphs are captured, and are not called afterwards.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import layers
from measuring import Times, console, environment, interleaved, machine, run, table, verdict
from measuring.calls import PADDED_REQUESTS, REQUESTS
from vllm_graphfix.fix import Counter

import fetch_vllm  # isort: skip - measuring has put tools/ on the path

TARGET = 5.0
"""Microseconds of Python a call, or a step for a fix with several calls."""
COUNTER_TARGET = 0.2
"""Microseconds to count one event."""
LAYERS = tuple(sorted(module.name for module in iter_modules(layers.__path__)))


def _of(layer: str) -> Any:
    return import_module(f"layers.{layer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, metavar="N", help="of calls of each function (default: 400)")
    parser.add_argument("--measure", choices=LAYERS, help=argparse.SUPPRESS)  # in the process that has this vLLM
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_of(options.measure).measure(options.rounds)))
        return
    made = table(
        f"microseconds a call, {options.rounds} interleaved rounds; difference of the minima, and of the medians",
        *("fix, batch", "around", "stock min", "with fix min", "fix adds", "by median", "ratio", "target"),
        *("observed adds", "by median", "cold: fix adds", "observed adds"),
    )
    for name in LAYERS:
        env = environment(fetch_vllm.release(_of(name).RELEASE), OMP_NUM_THREADS="1", VLLM_GRAPHFIX="off")
        lines = run([__file__, "--measure", name, "--rounds", str(options.rounds)], env).output.splitlines()
        for batch, around, *times, has_target in json.loads(lines[-1]):
            before, after, unobserved, seen = (Times(*each) for each in times[:4])
            cold_before, cold_after, cold_unobserved, cold_seen = (Times(*each).median for each in times[4:])
            added = after.minimum - before.minimum
            made.add_row(
                batch,
                around,
                f"{before.minimum:.2f}",
                f"{after.minimum:.2f}",
                f"{added:+.2f}",
                f"{after.median - before.median:+.2f}",
                "" if around == "alone" else f"{after.minimum / before.minimum:.3f}",
                verdict(added, TARGET, "µs") if has_target and around == "alone" else "",
                f"{seen.minimum - unobserved.minimum:+.2f}",
                f"{seen.median - unobserved.median:+.2f}",
                f"{cold_after - cold_before:+.1f}",
                f"{cold_seen - cold_unobserved:+.1f}",
            )
        made.add_section()
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)
    counted = _counter(options.rounds)
    out.print(
        (
            f"counting an event: {counted.minimum:.3f} µs, median {counted.median:.3f} "
            f"({verdict(counted.minimum, COUNTER_TARGET, 'µs')})"
        ),
        highlight=False,
    )
    versions = ", ".join(f"{_of(name).RELEASE} ({name})" for name in LAYERS)
    out.print(
        f"{REQUESTS} requests in {PADDED_REQUESTS} rows, or {PADDED_REQUESTS} requests; vLLM {versions}. "
        "For flashmla-fp8, stock is stock plus the two slice copies of the upstream fix; for padded rows of "
        "flashmla-padding, plus two slice fills.",
        highlight=False,
    )


def _counter(rounds: int) -> Times:
    """Return the time of a loop that counts, less that of an empty loop."""
    counter = Counter()

    def counts() -> None:
        for _ in range(1000):
            counter.count += 1

    def loops() -> None:
        for _ in range(1000):
            pass

    times = interleaved({"counts": counts, "loops": loops}, calls=1, rounds=rounds)
    return Times(*(1e-3 * (a - b) for a, b in zip(times["counts"], times["loops"], strict=True)))


if __name__ == "__main__":
    main()
