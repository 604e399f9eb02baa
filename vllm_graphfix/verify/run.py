"""Runs a proof on this machine's GPU if there is one that this vLLM can use, else on the CPU double."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_graphfix.fix import Fix
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify import VerifyError
from vllm_graphfix.verify.report import Report

if TYPE_CHECKING:
    from rich.console import Console


def run(
    source: Source,
    fixes: Sequence[Fix],
    device: str | None,
    console: Console,
    *,
    fresh: bool = False,
    parallel: int | None = None,
) -> Report:
    """Prove *fixes* on *source*; *device* is ``gpu``, ``cpu``, or None to choose.

    On a GPU *parallel* engines run at a time, in *fresh* processes or forked from one that has imported vLLM.

    Raises `VerifyError`, `SourceError`.
    """
    from vllm_graphfix.verify.engine.processes import terminated_like_interrupted

    with terminated_like_interrupted():
        return _run(source, fixes, device, console, fresh=fresh, parallel=parallel)


def _run(
    source: Source, fixes: Sequence[Fix], device: str | None, console: Console, *, fresh: bool, parallel: int | None
) -> Report:
    from vllm_graphfix.verify.cpu_proof import run as run_on_double

    if device == "cpu":
        return run_on_double(source, fixes, console)
    why_not = _why_not_runnable(source.folder)
    if why_not is None:
        from vllm_graphfix.verify.engine import device as devices
        from vllm_graphfix.verify.gpu_proof import run as run_on_gpu

        gpu = devices.find()
        if gpu.name is not None:
            return run_on_gpu(source, fixes, gpu, console, fresh=fresh, parallel=parallel)
        why_not = gpu.why_not
    if device == "gpu":
        raise VerifyError(f"cannot verify on a GPU: {why_not}. `--device cpu` uses the CPU double instead")
    return run_on_double(source, fixes, console)


def _why_not_runnable(folder: Path | None) -> str | None:
    """Return the reason why the vLLM in *folder* cannot run on a GPU, or None.

    The names of its compiled kernels differ between releases, so any one counts.
    """
    if folder is None:
        return "the wheel file is not installed"
    if os.pathsep in str(folder):
        return f"{folder} has a {os.pathsep!r} in its name, which PYTHONPATH cannot hold"
    if not any((folder / "vllm").glob("*.so")):
        return f"the vLLM in {folder} has no compiled kernels"
    return None
