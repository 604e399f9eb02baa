"""A fault in one process of an engine of two ranks, as a plugin of vLLM's: this file alone, copied by `install`.

``GRAPHFIX_BENCHMARK_FAULT`` is JSON: `Fault` by its fields. The package itself knows nothing of it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "GRAPHFIX_BENCHMARK_FAULT"
BEAT = 1.0
"""Seconds between two heartbeats, so that what is in records is new."""
ROW = 1
"""The row of a wrong replay that is wrong."""


class Fault(NamedTuple):
    """The fault of one engine; with neither `at` nor `wrong` there is none."""

    folder: str
    """Where `fault-at` gets a line each time, the seconds of the epoch."""
    at: str = ""
    """Functions of the package that raise instead of running, comma-separated: ``records.reporter:write``."""
    error: str = "RuntimeError"
    """An OSError with this name in `errno`, or a class."""
    first: int = 1
    """The first call of that process that raises; …"""
    times: int | None = None
    """… and how many calls do. None: all later ones."""
    rank: int | None = 1
    """None is the process of the scheduler, which is no rank."""
    wrong: int = 0
    """The number of the replay on rank 1 that has one wrong row."""


def install(folder: Path) -> Path:
    """Make *folder* one to put on the Python path, where vLLM finds this plugin, and return it."""
    metadata = folder / "graphfix_rank_fault-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphfix_rank_fault\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nrank_fault = graphfix_rank_fault:plant\n")
    (folder / "graphfix_rank_fault.py").write_text(Path(__file__).read_text())
    return folder


def plant() -> None:
    """Plant the fault of this engine; vLLM calls this in each of its processes that is not forked from another."""
    fault = Fault(**json.loads(os.environ[VARIABLE]))
    import vllm_graphfix

    vllm_graphfix.register()  # where it lies on the path only, there is no entry point to find it by
    from vllm_graphfix.records.reporter import Reporter

    Reporter.keep.__defaults__ = (BEAT,)
    for function in filter(None, fault.at.split(",")):
        _fail(function, fault)
    if fault.wrong:
        _replay_wrongly(fault)


def _here() -> int | None:
    """Return the rank of this process; None where it is none, or not yet."""
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else None


def _note(fault: Fault) -> None:
    with (Path(fault.folder) / "fault-at").open("a") as file:
        file.write(f"{time.time()}\n")


def _fail(function: str, fault: Fault) -> None:
    import builtins
    import errno

    module, _, name = function.partition(":")
    owner: Any = importlib.import_module(f"vllm_graphfix.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    stock, calls = getattr(owner, last), 0
    end = fault.first + fault.times if fault.times is not None else float("inf")

    @functools.wraps(stock)
    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if _here() == fault.rank:
            calls += 1
            if fault.first <= calls < end:
                _note(fault)
                if number := getattr(errno, fault.error, None):
                    raise OSError(number, os.strerror(number))
                raise getattr(builtins, fault.error)("planted")
        return stock(*args, **kwargs)

    setattr(owner, last, failing)


def _replay_wrongly(fault: Fault) -> None:
    """Add to one row of what the model gives out, in each of its graphs, a number that is 0 but in one replay."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    stock_load, stock_replay = Worker.load_model, torch.cuda.CUDAGraph.replay
    added: list[Any] = []
    replays = 0

    def add(_: Any, __: Any, output: Any) -> None:
        if len(output) > ROW:
            output[ROW] += added[0]

    def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        stock_load(worker, *args, **kwargs)
        if _here() == 1:
            model = worker.model_runner.get_model()
            parameter = next(model.parameters())
            added.append(torch.zeros(1, dtype=parameter.dtype, device=parameter.device))
            model.register_forward_hook(add)

    def replay(graph: Any) -> None:
        nonlocal replays
        replays += len(added)
        if added and replays == fault.wrong:
            _note(fault)
            added[0].fill_(9)
            stock_replay(graph)
            added[0].zero_()
        else:
            stock_replay(graph)

    Worker.load_model = load_model
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign,assignment]
