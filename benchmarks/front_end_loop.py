"""How late the event loop of a real API server is, with the plugin beside the records of 2,000 engines, and without.

    python benchmarks/front_end_loop.py [--rounds 5] [--out FILE]

Three servers (`vllm serve` 0.21.0 on a CPU) take turns: without the plugin, with it alone in its status folder, and
with it in a folder with the records of 2,000 engines of eight ranks, which a thread of its front-end lists every 5 s.
In half of the turns /metrics is scraped twice a second, 30 times as often as Prometheus does by default. A callback
every 2 ms notes in each server how late it is called. All figures are of one run: compare them by their ratios. The
first server is measured twice in each round, which shows the noise.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from measuring import PROJECT, Times, console, machine, table
from status_records import of_rank
from vllm_graphfix import records

sys.path.insert(0, str(PROJECT / "tests" / "support"))  # a folder of scripts, not an installed module

from server import Installed, Server, cpu_release, install, serve

ENGINES, RANKS = 2000, 8
WINDOW = 10.0
"""Seconds of a turn: two readings of the records."""
SCRAPE = 0.5
AGAIN = "no plugin, again"
SIDES = ("no plugin", "plugin, alone", f"plugin, beside {ENGINES} engines", AGAIN)
# It runs before all else in each process of a server. Times are those of the system's clock, in pairs: when a callback
# was called, and how late.
PROBE = """
import array, asyncio, os, threading, time
EVERY = 0.002
kept, place = array.array("d"), os.environ["LOOP_PROBE"]
run = asyncio.Runner.run
def probed(self, main, **options):
    loop = self.get_loop()
    def tick(due):
        now = time.monotonic()
        kept.extend((now, now - due))
        loop.call_later(EVERY, tick, time.monotonic() + EVERY)
    def write():
        while not os.path.exists(place + ".wanted"):
            time.sleep(0.2)
        with open(place + ".part", "wb") as file:
            kept[: len(kept) // 2 * 2].tofile(file)
        os.replace(place + ".part", place)
    loop.call_soon(tick, time.monotonic())
    threading.Thread(target=write, daemon=True).start()
    return run(self, main, **options)
asyncio.Runner.run = probed
"""


class Turn(NamedTuple):
    """A stretch of time in which one server was measured."""

    side: str
    scraped: bool
    start: float
    end: float
    scrapes: Sequence[tuple[float, float]]
    """When each began and ended."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "front_end_loop.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "probe").mkdir()
        (folder / "probe" / "sitecustomize.py").write_text(PROBE)
        installed, shared = install(folder), folder / "shared"
        shared.mkdir()
        for number in range(ENGINES):
            for rank in range(RANKS):
                records.write(shared, of_rank(rank)._replace(engine=f"{number:016x}"))
        settings: tuple[dict[str, str], ...] = ({"VLLM_PLUGINS": ""}, {}, {"VLLM_GRAPHFIX_STATUS_DIR": str(shared)})
        servers = {
            side: stack.enter_context(
                serve(installed, _folder(folder, side), env=_probed(folder, side, installed) | env)
            )
            for side, env in zip(SIDES, settings, strict=False)
        }
        time.sleep(WINDOW)
        turns = [
            _turn(side, servers[SIDES[0] if side == AGAIN else side], scraped=scraped)
            for number in range(options.rounds)
            for side in (SIDES if number % 2 else SIDES[::-1])
            for scraped in (False, True)
        ]
        late = {side: _late(folder, side) for side in servers}
    late[AGAIN] = late[SIDES[0]]
    figures = {
        f"{side}{', scraped' if scraped else ''}": _figures(
            [(turn, late[side]) for turn in turns if (turn.side, turn.scraped) == (side, scraped)]
        )
        for scraped in (False, True)
        for side in SIDES
    }
    first = {scraped: figures[f"{SIDES[0]}{', scraped' if scraped else ''}"] for scraped in (False, True)}
    title = f"milliseconds, and ratio to no plugin: least and median of {options.rounds} turns of {WINDOW:.0f} s"
    made = table(title, "event loop of a server", *first[True])
    for side, each in figures.items():
        than = first[side.endswith("scraped")]
        made.add_row(
            side,
            *(
                f"{value.minimum:.2f} ({value.minimum / than[name].minimum:.2f}), "
                f"{value.median:.2f} ({value.median / than[name].median:.2f})"
                for name, value in each.items()
            ),
        )
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)
    milliseconds = {
        side: {name: [round(value, 3) for value in times] for name, times in each.items()}
        for side, each in figures.items()
    }
    result = {"machine": machine(), "milliseconds, least and median": milliseconds}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _folder(folder: Path, side: str) -> Path:
    (folder / side).mkdir()
    return folder / side


def _probed(folder: Path, side: str, installed: Installed) -> dict[str, str]:
    path = (folder / "probe", installed.plugin, cpu_release())
    return {"PYTHONPATH": os.pathsep.join(map(str, path)), "LOOP_PROBE": str(folder / f"{side}.late")}


def _turn(side: str, server: Server, *, scraped: bool) -> Turn:
    start, scrapes = time.monotonic(), []
    while time.monotonic() < start + WINDOW:
        time.sleep(SCRAPE)
        if scraped:
            began = time.monotonic()
            server.metrics()
            scrapes.append((began, time.monotonic()))
    return Turn(side, scraped, start, time.monotonic(), scrapes)


def _late(folder: Path, side: str) -> list[tuple[float, float]]:
    """Return what the probe of a server has noted: when, and how late."""
    place, kept = folder / f"{side}.late", array.array("d")
    Path(f"{place}.wanted").touch()
    while not place.exists():
        time.sleep(0.1)
    kept.frombytes(place.read_bytes())
    return [*zip(kept[::2], kept[1::2], strict=True)]


def _figures(turns: Sequence[tuple[Turn, Sequence[tuple[float, float]]]]) -> dict[str, Times]:
    """Return milliseconds: of the callbacks of each turn, and of the latest one at each scrape."""
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    by_turn = [sorted(each for at, each in late if turn.start < at < turn.end) for turn, late in turns]
    measured = {name: [values[int(share * len(values))] * 1000 for values in by_turn] for name, share in shares.items()}
    measured["a scrape"] = [
        max((each for at, each in late if began < at < ended + 0.01), default=0.0) * 1000
        for turn, late in turns
        for began, ended in turn.scrapes
    ]
    return {name: Times.of(values) for name, values in measured.items() if values}


if __name__ == "__main__":
    sys.exit(main())
