"""Stand-ins in an engine on two hosts, as a plugin of vLLM's: this file alone, copied by `install`.

A CPU has no CUDA graphs. Each rank states that it captures some, so that the gate acts as it does on a GPU. A rank
that reaches a stage is held there for as long as a file of that name exists.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, FAILING = "GRAPHFIX_TWO_HOSTS", "GRAPHFIX_TWO_HOSTS_FAILING"
BEFORE, WHILE, CAPTURING = "before", "while", "capturing"
"""Stages: no report of this rank yet; its report is there and it compares; all ranks agreed, and it captures."""


def install(folder: Path) -> Path:
    """Make *folder* one to put on the Python path, where vLLM finds this plugin, and return it."""
    metadata = folder / "graphfix_two_hosts-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphfix_two_hosts\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ntwo_hosts = graphfix_two_hosts:plant\n")
    (folder / "graphfix_two_hosts.py").write_text(Path(__file__).read_text())
    return folder


def plant() -> None:
    """Replace functions of the package; vLLM calls this in each of its processes."""
    from vllm_graphfix.engine import capture_gate, rank_agreement
    from vllm_graphfix.engine.context import EngineContext

    capture_gate._uses_graphs = lambda worker_or_runner: True
    gate = capture_gate.CaptureGate
    if not hasattr(gate.before_capture, "__wrapped__"):
        gate.before_capture = _held(BEFORE, gate.before_capture)  # type: ignore[method-assign]
        gate.after_capture = _held(CAPTURING, gate.after_capture)  # type: ignore[method-assign]
        rank_agreement.compare = _held(WHILE, rank_agreement.compare)
        if os.environ.get(FAILING) == os.uname().nodename:
            planted = {"mamba-padding": {None: "MemoryError: planted"}}
            EngineContext.failures_in_capture = lambda _: planted  # type: ignore[method-assign,assignment,return-value]


def _held(stage: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def held(*args: Any, **kwargs: Any) -> Any:
        folder, host = Path(os.environ[FOLDER]), os.uname().nodename
        (folder / f"{host} reached {stage}").touch()
        while (folder / f"{host} held {stage}").exists():
            time.sleep(0.05)
        return stock(*args, **kwargs)

    return held
