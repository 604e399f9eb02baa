"""Two real servers side by side for as long as wanted: loaded, scraped, looked at.

One has the plugin and one is stock.
"""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from server import Server

SAMPLED_EVERY, FLEET_EVERY, CLEANED_EVERY = 5.0, 30.0, 60.0
"""Seconds. Somebody who cleans up removes a record of the plugin's now and then, so that one is written anew."""
CLIENTS = 3
"""The clients of each server: each asks once a second, so at most so many requests are under way."""
WARM_UP = 0.5
"""Share of the time that is not judged: caches of Python, vLLM and malloc fill in it."""


class Sample(NamedTuple):
    """One process at one time; memory in KiB."""

    seconds: float
    server: str
    role: str
    rss: float
    pss: float
    anonymous: float
    """What of RSS is no file and not shared: what a leak is in."""
    descriptors: int
    threads: int


class Folder(NamedTuple):
    """The status folder at one time."""

    seconds: float
    records: int
    record_bytes: int
    others: int
    """Temporary files, and whatever else is no record."""


class Trend(NamedTuple):
    """The trend of one number of one process; over all that was sampled but the warm-up."""

    first: float
    """Median of the first tenth."""
    last: float
    """Median of the last tenth."""
    per_hour: float
    """Theil-Sen."""
    hours: float

    @property
    def growth(self) -> float:
        """Over these hours."""
        return self.per_hour * self.hours


class Endured(NamedTuple):
    samples: list[Sample]
    folders: list[Folder]
    answered: dict[str, int]
    """Requests, by server."""
    scraped: dict[str, int]
    fleet: list[str]
    """What `fleet` called the plugin's engine, each time."""
    cleaned: int
    """Records that were removed."""
    metrics: str
    """The metrics of the plugin's server, at the end."""
    ended: float
    """Seconds of the epoch."""

    def processes(self) -> list[tuple[str, str]]:
        """Server and role of each, that of the plugin first."""
        return list(dict.fromkeys((sample.server, sample.role) for sample in self.samples))

    def trend(self, server: str, role: str, field: str) -> Trend:
        mine = [(s.seconds, getattr(s, field)) for s in self.samples if (s.server, s.role) == (server, role)]
        return trend(mine)


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The trend of a number over seconds, without the warm-up."""
    start = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
    judged = [point for point in points if point[0] >= start]
    tenth = max(1, len(judged) // 10)
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(judged, 2) if t > s]
    return Trend(
        statistics.median(value for _, value in judged[:tenth]),
        statistics.median(value for _, value in judged[-tenth:]),
        3600 * statistics.median(slopes),
        (judged[-1][0] - judged[0][0]) / 3600,
    )


def role_of(title: str) -> str:
    """By what vLLM has its processes call themselves."""
    return {"VLLM::EngineCore": "engine-core", "VLLM::Worker": "worker"}.get(title, "front-end")


def sample(seconds: float, server: str, role: str, process: psutil.Process) -> Sample:
    with process.oneshot():
        memory = process.memory_full_info()
        return Sample(
            seconds,
            server,
            role,
            rss=memory.rss / 1024,
            pss=memory.pss / 1024,
            anonymous=(memory.rss - memory.shared) / 1024,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )


def endure(servers: Mapping[str, Server], seconds: float) -> Endured:
    """Loads *servers*, of which the one named ``plugin`` has it, for so many *seconds*."""
    processes = [
        (name, role_of(title), psutil.Process(pid))
        for name, server in servers.items()
        for pid, title in sorted(server.pids().items())
        if "resource_tracker" not in title
    ]
    plugin, started, stop = servers["plugin"], time.monotonic(), Event()
    records = sorted(path for path in _folder(plugin).iterdir() if _is_maintained(path, plugin))
    samples: list[Sample] = []
    folders: list[Folder] = []
    fleet: list[str] = []
    cleaned = 0
    with ThreadPoolExecutor((CLIENTS + 1) * len(servers)) as pool:
        requests = [
            (name, pool.submit(_every_second, _client(server, number), stop))
            for name, server in servers.items()
            for number in range(CLIENTS)
        ]
        read = [(name, pool.submit(_every_second, server.metrics, stop)) for name, server in servers.items()]
        try:
            while (now := time.monotonic() - started) < seconds:
                samples += [sample(now, *process) for process in processes]
                folders.append(_look(now, _folder(plugin)))
                if now > FLEET_EVERY * len(fleet):
                    fleet.append(plugin.fleet().engine["status"])
                if now > CLEANED_EVERY * (cleaned + 1):
                    records[cleaned % len(records)].unlink(missing_ok=True)
                    cleaned += 1
                for _, future in requests + read:
                    if future.done():
                        future.result()  # an error, and the end
                time.sleep(max(0, SAMPLED_EVERY - (time.monotonic() - started - now)))
        finally:
            stop.set()
    answered, scraped = _summed(requests), _summed(read)
    return Endured(samples, folders, answered, scraped, fleet, cleaned, plugin.metrics(), time.time())


def _summed(calls: list[tuple[str, Future[int]]]) -> dict[str, int]:
    """By server."""
    total: Counter[str] = Counter()
    for name, future in calls:
        total[name] += future.result()
    return dict(total)


def _every_second(call: Callable[[], object], stop: Event) -> int:
    """Call it once a second until *stop*; return the number of calls."""
    calls = 0
    while not stop.is_set():
        began = time.monotonic()
        call()
        calls += 1
        stop.wait(max(0, 1 - (time.monotonic() - began)))
    return calls


def _client(server: Server, number: int) -> Callable[[], object]:
    chosen = random.Random(number)  # noqa: S311 - the same prompts for both servers
    return lambda: server.completions(
        [chosen.randrange(3, 1024) for _ in range(chosen.randint(1, 200))], tokens=chosen.randint(1, 16)
    )


def _folder(server: Server) -> Path:
    (folder,) = server.status_folder.iterdir()
    return folder


def _is_maintained(path: Path, server: Server) -> bool:
    """Return whether its process looks after it: an engine core writes its own once."""
    return int(path.stem.rpartition("-")[2]) not in server.named("VLLM::EngineCore")


def _look(seconds: float, folder: Path) -> Folder:
    sizes: dict[str, int] = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # a temporary file, a moment later
            sizes[path.name] = path.stat().st_size
    records = {name: size for name, size in sizes.items() if name.endswith(".json")}
    return Folder(seconds, len(records), sum(records.values()), len(sizes) - len(records))


def write_csv(path: Path, rows: Iterable[Sample]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(rows)


def print_summary(endured: Endured) -> None:
    """Print the trends of each process, for people and for docs/testing.md."""
    made = Table(title="KiB; first and last tenth after the warm-up, median; slope by Theil-Sen", box=None)
    for column in ("process", "number", "first", "last", "slope/h"):
        made.add_column(column, justify="left" if column in ("process", "number") else "right")
    for server, role in endured.processes():
        for field in Sample._fields[3:]:
            figures = endured.trend(server, role, field)
            made.add_row(f"{server} {role}", field, *(f"{value:.1f}" for value in figures[:3]))
    out = Console(width=120)
    out.print(made)
    last = endured.folders[-1]
    out.print(f"requests {endured.answered}, scrapes {endured.scraped}, fleet {Counter(endured.fleet)}")
    out.print(f"records removed {endured.cleaned}; at the end {last.records} records, {last.record_bytes} bytes")
