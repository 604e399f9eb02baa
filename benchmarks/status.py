"""The time of `vllm-graphfix status` as a whole process, on an unpacked release and on a wheel file.

    python benchmarks/status.py [--processes N] [--wheel FILE]

Without --wheel the wheel of 0.18.1 is fetched (400 MB) and kept in the cache of releases.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measuring import Run, Times, console, environment, machine, run, table, verdict

import fetch_vllm  # isort: skip - measuring has put tools/ on the path

VERSION = "0.18.1"
SMALLEST_WHEEL = 250_000_000
"""Bytes; the directory of a smaller file is faster to read than a real wheel's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a stock wheel file of at least 250 MB")
    options = parser.parse_args()
    tree = fetch_vllm.release(VERSION, keep_wheel=options.wheel is None)
    wheel = options.wheel or fetch_vllm.wheel(VERSION)
    if wheel is None or wheel.stat().st_size < SMALLEST_WHEEL:
        parser.error(f"{wheel} is smaller than 250 MB")
    size = f"{wheel.stat().st_size / 1e6:.0f} MB"
    status = ["-m", "vllm_graphfix", "status", "--vllm"]
    commands: dict[str, tuple[list[str], float | None]] = {
        "python -c pass": (["-c", "pass"], None),
        "python -c 'import typer, rich.table'": (["-c", "import typer, rich.table"], None),
        f"status of an unpacked {VERSION}": ([*status, str(tree)], 0.3),
        f"status --json of an unpacked {VERSION}": ([*status, str(tree), "--json"], 0.3),
        f"status of a wheel file of {size}": ([*status, str(wheel)], 0.6),
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(options.processes + 1):
        for name, (arguments, _) in commands.items():
            once = run(arguments, environment())
            if number:  # the first one writes bytecode and brings the files into memory
                runs[name].append(once)
    made = table(
        f"whole processes, milliseconds; {options.processes} of each, interleaved",
        *("command", "wall min", "wall median", "CPU min", "CPU median", "target"),
    )
    for name, (_, target) in commands.items():
        wall, cpu = Times.of([r.seconds for r in runs[name]]), Times.of([r.cpu_seconds for r in runs[name]])
        judged = verdict(wall.minimum, target, "s") if target else ""
        made.add_row(name, *(f"{value * 1000:.0f}" for value in (*wall, *cpu)), judged)
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)


if __name__ == "__main__":
    main()
