"""Ranks of a group as processes of one host, in each of several worlds."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST = 120.0
"""Seconds that a rank may take."""
AT_ONCE = 2


def run_worlds(
    worlds: Mapping[str, Sequence[Any]], rank: Callable[[str, int, int, int, Any], tuple[bool, str]]
) -> None:
    """Runs each world's ranks beside each other, and writes ``world: RANK number text`` as each has ended.

    Two worlds at a time: most of what a rank does is to wait.

    *rank* is called in a process of its own with the world's name, the rank's number, how many ranks there are, a free
    port, and what `worlds` gives this rank. It returns whether it goes on to serve, and the text.
    """
    running: list[list[Any]] = []
    for world, ranks in worlds.items():
        if len(running) == AT_ONCE:
            _end(running.pop(0))
        running.append(_start(world, ranks, rank))
    for processes in running:
        _end(processes)


def _start(world: str, ranks: Sequence[Any], rank: Callable[[str, int, int, int, Any], tuple[bool, str]]) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    spoken = [context.Event() for _ in ranks]

    def run(number: int) -> None:
        serves, text = rank(world, number, len(ranks), port, ranks[number])
        os.write(1, f"{world}: RANK {number} {text}\n".encode())  # at once: the other ranks write too
        spoken[number].set()
        if serves:  # it stays, as in an engine: rank 0 holds the store, which the others may still read
            for each in spoken:
                each.wait(LONGEST)
        os._exit(0)

    processes = [context.Process(target=run, args=(number,)) for number in range(len(ranks))]
    for process in processes:
        process.start()
    return processes


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(LONGEST)
        process.kill()
