"""The time that the action `abort` adds to a scheduler's step without a verdict, in the same process.

    python benchmarks/abort_step.py [--rounds N]

The wrappers are around `schedule` and `update_from_output` of a class that does nothing, so that only they are
measured, while the receiving thread listens and a rank in another process is connected. Cold: other memory is read
before each step, more than the processor's caches hold, as vLLM does between two steps. Target: 20 µs, of the median.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from measuring import console, elsewhere, interleaved, machine, table, verdict
from vllm_graphfix.engine.abort import Aborts
from vllm_graphfix.engine.abort_channel import Sender

TARGET = 20.0
"""Microseconds a step."""


class Scheduler:
    """Stands in for vLLM's: a step takes no time."""

    kv_cache_manager = SimpleNamespace(evict_blocks=print)

    def finish_requests(self) -> None:
        pass

    def schedule(self) -> None:
        pass

    def update_from_output(self, scheduler_output: object, model_runner_output: object) -> None:
        pass


class Watched(Scheduler):
    """A scheduler to wrap: with methods of its own, so that `Scheduler` stays as it is."""

    def __init__(self) -> None:
        pass

    def schedule(self) -> None:
        pass

    def update_from_output(self, scheduler_output: object, model_runner_output: object) -> None:
        pass


def rank(engine: str, pid: int, ends: Connection) -> None:
    sender = Sender(engine, pid)
    ends.send(None)
    ends.recv()
    sender.close()


def step_of(scheduler: Any) -> Callable[[], None]:
    def step() -> None:
        scheduler.schedule()
        scheduler.update_from_output(None, None)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="of calls of each (default: 200)")
    options = parser.parse_args()
    aborts = Aborts()
    aborts.begin(os.urandom(8).hex())
    aborts._watch_scheduler(SimpleNamespace(Scheduler=Watched))
    watched = Watched()
    starts = multiprocessing.get_context("spawn")
    here, there = starts.Pipe()
    connected = starts.Process(target=rank, args=(aborts._engine, os.getpid(), there), daemon=True)
    connected.start()
    here.recv()
    steps = {"stock": step_of(Scheduler()), "with abort": step_of(watched)}
    warm = interleaved(steps, calls=200, rounds=options.rounds)
    cold = interleaved(steps, calls=1, rounds=options.rounds, between=elsewhere())
    here.send(None)
    connected.join()
    made = table(f"microseconds a step, {options.rounds} rounds", "", "stock, median", "added, min", "median", "target")
    for name, times in (("warm", warm), ("cold", cold)):
        stock, ours = times["stock"], times["with abort"]
        added = ours.median - stock.median
        least = ours.minimum - stock.minimum
        made.add_row(name, f"{stock.median:.2f}", f"{least:.2f}", f"{added:.2f}", verdict(added, TARGET, "µs"))
    out = console()
    out.print(machine(), highlight=False)
    out.print(made)


if __name__ == "__main__":
    main()
