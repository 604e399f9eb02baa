"""workspace-growth: a request that fits, as nearly all do. Layers ask for one once or twice where no graph replays."""

from __future__ import annotations

from typing import Any

from measuring.calls import Calls, Function, Row, arguments, measured, wrapped
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes.workspace_growth import FIX

RELEASE = "0.21.0"


def measure(rounds: int) -> list[Row]:
    import torch
    from vllm.v1.worker.workspace import WorkspaceManager

    real = WorkspaceManager._ensure_workspace_size
    size, larger = 1024, 2048
    torch.accelerator.empty_cache = lambda: None  # growth calls it, and there is no accelerator
    growth, capture = FIX.patches("one-slot")

    def do_nothing(self: Any, required_bytes: int) -> Any:
        return self._current_workspaces[0]

    def manager(around: Function, recorded: str) -> Any:
        """A manager after a capture that *around* has seen, if *recorded* says so, and perhaps after later growth."""
        made = WorkspaceManager(torch.device("cpu"))
        real(made, size)
        if recorded:
            capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
            capture.wrap(lambda runner: around(made, size), Activity(FIX.events))(None)
            torch.cuda.is_current_stream_capturing = capturing
        if recorded == "outgrown":
            real(made, larger)
            around(made, larger)
        return made

    rows = []
    for name, stock in (("alone", do_nothing), ("real", real)):
        fixed, observed = wrapped(FIX, growth, stock)
        for label, recorded in (
            ("no capture", ""),
            ("a recorded one", "in use"),
            ("one that was outgrown", "outgrown"),
        ):
            functions = (stock, fixed, stock, observed)
            calls = Calls(*(arguments(manager(function, recorded), size)(function) for function in functions))
            rows.append(measured(f"workspace-growth, {label}", name, calls, rounds))
    return rows
