"""workspace-growth."""

from __future__ import annotations

from typing import Any

from measuring.calls import Calls, Function, call, compared

RELEASE = "0.21.0"


def measure(rounds: int) -> list[tuple[object, ...]]:
    """A request that fits, as all but a few do. Layers ask for it, each once or twice where no graph replays."""
    import torch
    from vllm.v1.worker.workspace import WorkspaceManager

    from vllm_graphfix.fix import Activity
    from vllm_graphfix.fixes.workspace_growth import FIX

    real = WorkspaceManager._ensure_workspace_size
    size, larger = 1024, 2048
    torch.accelerator.empty_cache = lambda: None  # growth calls it, and there is no accelerator

    def does_nothing(self: Any, required_bytes: int) -> Any:
        return self._current_workspaces[0]

    def manager(around: Function, recorded: str) -> Any:
        """In which *around* has seen a capture, if that is what *recorded* says, and perhaps growth behind it."""
        made = WorkspaceManager(torch.device("cpu"))
        real(made, size)
        if recorded:
            capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
            capture.wrap(lambda runner: around(made, size), active)(None)
            torch.cuda.is_current_stream_capturing = capturing
        if recorded == "outgrown":
            real(made, larger)
            around(made, larger)
        return made

    growth, capture = FIX.patches("one-slot")
    active, observing = Activity(FIX.events), Activity(FIX.events, corrects=False)
    found = []
    for name, stock in (("alone", does_nothing), ("real", real)):
        fixed, observed = growth.wrap(stock, active), growth.wrap(stock, observing)
        for label, recorded in (
            ("no capture", ""),
            ("a recorded one", "in use"),
            ("one that was outgrown", "outgrown"),
        ):
            functions = (stock, fixed, stock, observed)
            calls = Calls(*(call(function, manager(function, recorded), size) for function in functions))
            found.append(compared(f"workspace-growth, {label}", name, calls, rounds, target=True))
    return found
