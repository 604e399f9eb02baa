"""`vllm-graphfix fleet --prometheus`, with a real Prometheus that scrapes a double of 2,000 engines of eight ranks.

    python benchmarks/fleet_prometheus.py [--engines 2000] [--servers 3] [--out FILE]

Ten engines are in each planted state, the others in order. Beside them are real servers, vLLM 0.21.0 on a CPU: with the
fixes, observing, and without the plugin. Three times, for text and JSON: the seconds and the memory that the command
takes, each also as a share of its goal, 3 s and 200 MB. Exit code 1 if it is wrong about any engine or misses a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from measuring import PROJECT

sys.path.insert(0, str(PROJECT / "tests" / "support"))  # a folder of scripts, not an installed module

import record_dashboard
from fleet_simulator import NO_PLUGIN, STATES, simulated

SECONDS, MEGABYTES = 3.0, 200.0
TIMES = 3
IN_ORDER = ("fixed", "counting", "stock", "older plugin", "older vLLM")
ANSWERS_NOT = "does not answer"
_EACH = 10
"""Engines in each planted state."""
_SERVERS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("fixed", {"VLLM_GRAPHFIX": "on"}),
    ("counting", {"VLLM_GRAPHFIX": "observe"}),
    (NO_PLUGIN, {"VLLM_PLUGINS": ""}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--servers", type=int, default=len(_SERVERS), help="real ones beside them")
    parser.add_argument("--scrape", type=int, default=60, help="seconds between two scrapes")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "fleet_prometheus.json")
    options = parser.parse_args()
    planted = [state for state in (*STATES, ANSWERS_NOT) for _ in range(_EACH)]
    states = planted + ["fixed"] * (options.engines - len(planted))
    with ExitStack() as stack:
        simulator = stack.enter_context(simulated([state.replace(ANSWERS_NOT, "fixed") for state in states]))
        expected = dict(zip(simulator.urls, states, strict=True)) | stack.enter_context(_served(options.servers))
        running = stack.enter_context(record_dashboard.prometheus([*expected], scrape=options.scrape))
        if not _waited(running, len(expected), options.scrape):
            return 2
        simulator.states[:] = [None if state == ANSWERS_NOT else state for state in states]
        if not _waited(running, len(expected) - _EACH, options.scrape):
            return 2
        series = _count(running, "sum(scrape_samples_scraped)")
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        print(f"{len(expected)} engines, {series} series; load of this machine: {load:.1f} a processor")
        texts = [_measured(running.address) for _ in range(TIMES)]
        jsons = [_measured(running.address, "--json") for _ in range(TIMES)]
        alone = _timed_alone()
    errors = [error for each, _ in jsons for error in _errors(expected, json.loads(each))]
    print("\n".join(errors) or f"right about each of {len(expected)} engines, {len(planted)} of them planted")
    result = {
        "engines": len(expected),
        "real ones": options.servers,
        "series": series,
        "load a processor": round(load, 1),
        "text": [figures for _, figures in texts],
        "JSON": [figures for _, figures in jsons],
        "seconds of explain, which asks nobody": alone,
        "errors": errors,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    measured = [figures for _, figures in texts + jsons]
    met = all(each["seconds"] < SECONDS and each["megabytes"] < MEGABYTES for each in measured)
    return int(bool(errors) or not met)


@contextmanager
def _served(number: int) -> Iterator[dict[str, str]]:
    """Run so many real servers; yield the state of each, by its address."""
    if not number:
        yield {}
        return
    from server import install, serve  # needs vLLM on a CPU, which is 1.4 GB

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        installed = install(Path(folder))
        states = {}
        for state, variables in _SERVERS[:number]:
            place = Path(tempfile.mkdtemp(dir=folder))
            server = stack.enter_context(serve(installed, place, env=variables))
            states[f"http://127.0.0.1:{server.port}/metrics"] = state
        yield states


def _waited(running: record_dashboard.Prometheus, number: int, scrape: int) -> bool:
    """Wait until so many engines answer."""
    started, up = time.monotonic(), -1
    while up != number:
        if time.monotonic() - started > 5 * scrape:
            print(f"{up} engines answer, not {number}", file=sys.stderr)
            return False
        time.sleep(5)
        with suppress(TimeoutError):  # while the first scrapes come in
            up = _count(running, "count(up == 1)")
    return True


def _count(running: record_dashboard.Prometheus, query: str) -> int:
    result = running.get("query", query=query)["result"]
    return int(result[0]["value"][1]) if result else 0


# In a process of its own: what a child of this one takes at most begins with what this one has.
_RUN = """
import json, os, resource, sys
status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *sys.argv[1:]])
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]), file=sys.stderr)
"""


def _measured(address: str, *options: str) -> tuple[str, dict[str, float]]:
    """Run the command; return what it printed, and what it took."""
    command = [sys.executable, "-c", _RUN, "-m", "vllm_graphfix", "fleet", "--prometheus", address, *options]
    started = time.monotonic()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    seconds, text = time.monotonic() - started, done.stdout
    code, processor, megabytes = json.loads(done.stderr.splitlines()[-1])
    print(
        f"fleet {' '.join(options) or '(text)'}: {seconds:.2f} s ({seconds / SECONDS:.2f} of the goal), "
        f"{processor:.2f} s of them on a CPU, {megabytes:.0f} MB ({megabytes / MEGABYTES:.2f} of the goal), "
        f"{len(text) / 1024:.0f} KiB of text, exit code {code}"
    )
    return text, {
        "seconds": round(seconds, 2),
        "seconds on a CPU": round(processor, 2),
        "megabytes": round(megabytes),
        "exit code": code,
    }


def _timed_alone() -> float:
    """Return the seconds of a command that asks nobody: the start of Python and of the command."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "vllm_graphfix", "explain", "capture-state"], stdout=subprocess.DEVNULL, check=True
    )
    seconds = round(time.monotonic() - started, 2)
    print(f"explain, for comparison: {seconds} s")
    return seconds


def _errors(expected: Mapping[str, str], fleet: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in the answer, a line each; *expected* has states by address."""
    statuses = {f"http://{each['engine'].partition('/')[2]}/metrics": each for each in fleet["engines"]}
    errors = [f"{len(statuses)} engines instead of {len(expected)}"] if len(statuses) != len(expected) else []
    mistaken: Counter[str] = Counter()
    for url, state in expected.items():
        right = {ANSWERS_NOT: "starting"}.get(state, "in order" if state in IN_ORDER else "not in order")
        mistaken[state] += url not in statuses or statuses[url]["status"] != right
    errors += [f"{number} engines wrongly judged: {state}" for state, number in mistaken.items() if number]
    unplugged = sum(each["canary"] is None and each["live"] for each in fleet["engines"])
    return errors + ([f"{unplugged} without the plugin"] if unplugged != [*expected.values()].count(NO_PLUGIN) else [])


if __name__ == "__main__":
    sys.exit(main())
