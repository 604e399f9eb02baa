"""`vllm-graphfix fleet --prometheus`, with a real Prometheus that scrapes a double of 2,000 engines of eight ranks.

    python benchmarks/fleet_prometheus.py --engines 2000

Ten engines are in each planted state, the others in order. Prints, for text and JSON, the seconds and the memory that
the command takes, each also as a share of its goal: 3 s and 200 MB. Exit code 1 if it is wrong about any engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "tools"), str(PROJECT / "tests" / "support")]

import record_dashboard  # noqa: E402 # from the folders above
from fleet_simulator import NO_PLUGIN, STATES, simulated  # noqa: E402

SECONDS, MEGABYTES = 3.0, 200.0
IN_ORDER = ("fixed", "counting", "stock", "older plugin", "older vLLM")
_EACH = 10
"""Engines in each planted state."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--scrape", type=int, default=60, help="seconds between two scrapes")
    options = parser.parse_args()
    planted = [state for state in STATES for _ in range(_EACH)]
    states = planted + ["fixed"] * (options.engines - len(planted))
    with (
        simulated(states) as simulator,
        record_dashboard.prometheus(simulator.urls, scrape=options.scrape) as prometheus,
    ):
        started = time.monotonic()
        up = 0
        while up < len(states):
            if time.monotonic() - started > 5 * options.scrape:
                print(f"only {up} of {len(states)} engines were scraped", file=sys.stderr)
                return 2
            time.sleep(5)
            with suppress(TimeoutError):  # while the first scrapes come in
                up = _count(prometheus, "count(up == 1)")
        series = _count(prometheus, "sum(scrape_samples_scraped)")
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        print(f"{len(states)} engines of eight ranks, {series} series; load of this machine: {load:.1f} a processor")
        _measured(prometheus.address)
        text = _measured(prometheus.address, "--json")
        _timed_alone(prometheus.address)
    wrong = _errors(states, json.loads(text))
    print("\n".join(wrong) or f"right about each of {len(states)} engines, {len(planted)} of them planted")
    return bool(wrong)


def _count(prometheus: record_dashboard.Prometheus, query: str) -> int:
    result = prometheus.get("query", query=query)["result"]
    return int(result[0]["value"][1]) if result else 0


def _measured(address: str, *options: str) -> str:
    """Run the command, print what it takes, and return what it printed."""
    command = [sys.executable, "-m", "vllm_graphfix", "fleet", "--prometheus", address, *options]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        text = process.stdout.read() if process.stdout is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, megabytes = time.monotonic() - started, usage.ru_maxrss / 1024
    processor = usage.ru_utime + usage.ru_stime
    print(
        f"fleet {' '.join(options) or '(text)'}: {seconds:.2f} s ({seconds / SECONDS:.2f} of the goal), "
        f"{processor:.2f} s of them on a CPU, {megabytes:.0f} MB ({megabytes / MEGABYTES:.2f} of the goal), "
        f"{len(text) / 1024:.0f} KiB of text, exit code {process.returncode}"
    )
    return text


def _timed_alone(address: str) -> None:
    """Print what another command that asks nobody takes on this machine now: the start of Python and of the command."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "vllm_graphfix", "explain", "capture-state"], stdout=subprocess.DEVNULL, check=True
    )
    print(f"explain, for comparison: {time.monotonic() - started:.2f} s")


def _errors(states: list[str], fleet: dict[str, list[dict[str, object]]]) -> list[str]:
    """Return what is wrong in the answer, a line each."""
    engines = {int(str(each["engine"]).rpartition("/")[2]): each for each in fleet["engines"]}
    errors = [f"{len(engines)} engines instead of {len(states)}"] if len(engines) != len(states) else []
    mistaken: Counter[str] = Counter()
    for number, state in enumerate(states):
        expected = "in order" if state in IN_ORDER else "not in order"
        mistaken[state] += number in engines and engines[number]["status"] != expected
    errors += [f"{number} engines wrongly judged: {state}" for state, number in mistaken.items() if number]
    unplugged = sum(each["canary"] is None for each in engines.values())
    return errors + ([f"{unplugged} without the plugin"] if unplugged != states.count(NO_PLUGIN) else [])


if __name__ == "__main__":
    sys.exit(main())
