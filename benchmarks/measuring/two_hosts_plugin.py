"""Stand-ins in an engine on two hosts, as plugins of vLLM's: this file alone, copied by `install`.

`two_hosts`: a CPU has no CUDA graphs. Each rank states that it captures some, so that the gate acts as it does on a
GPU. A rank that reaches a stage is held there for as long as a file of that name exists.

`two_hosts_backend`: vLLM's CPU backend lacks the collectives by which data-parallel ranks exchange tokens of unequal
number, which are made of those that it has, and a device that Ray deals out; and on Ray it takes hosts for one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, FAILING = "GRAPHFIX_TWO_HOSTS", "GRAPHFIX_TWO_HOSTS_FAILING"
BACKEND = "two_hosts_backend"
BEFORE, WHILE, CAPTURING = "before", "while", "capturing"
"""Stages: no report of this rank yet; its report is there and it compares; all ranks agreed, and it captures."""


def install(folder: Path) -> Path:
    """Make *folder* one to put on the Python path, where vLLM finds this plugin, and return it."""
    metadata = folder / "graphfix_two_hosts-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphfix_two_hosts\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntwo_hosts = graphfix_two_hosts:plant\n"
        f"[vllm.platform_plugins]\n{BACKEND} = graphfix_two_hosts:complete_backend\n"
    )
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
            setattr(EngineContext, "stop_recording_failures", lambda _: planted)  # noqa: B010 - to mypy it is a method


def _held(stage: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def held(*args: Any, **kwargs: Any) -> Any:
        folder, host = Path(os.environ[FOLDER]), os.uname().nodename
        (folder / f"{host} reached {stage}").touch()
        while (folder / f"{host} held {stage}").exists():
            time.sleep(0.05)
        return stock(*args, **kwargs)

    return held


def complete_backend() -> None:
    """Add to vLLM's CPU backend; vLLM calls this before it looks for its platform, and takes None for "not mine"."""
    import wrapt
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"  # a number: `ray start --num-gpus`
    wrapt.register_post_import_hook(_add_collectives, "vllm.distributed.device_communicators.cpu_communicator")


def _add_collectives(module: Any) -> None:
    module.CpuCommunicator.all_gatherv = _all_gatherv
    module.CpuCommunicator.reduce_scatterv = _reduce_scatterv
    # By equal names it takes it that ranks have their memory in common.
    memory = module._CPUSHMDistributed
    name_of = memory.make_group_name
    memory.make_group_name = staticmethod(lambda communicator: f"{name_of(communicator)}-{os.uname().nodename}")


def _all_gatherv(communicator: Any, tensors: list[Any], dim: int = 0, sizes: list[int] | None = None) -> list[Any]:
    from torch import cat, distributed

    if dim != 0:
        raise NotImplementedError("this stand-in handles dim 0 alone")
    gathered = []
    for tensor in tensors:
        parts = [
            tensor.new_empty((size, *tensor.shape[1:])) for size in sizes or [len(tensor)] * communicator.world_size
        ]
        parts[communicator.rank_in_group].copy_(tensor)
        for source, part in zip(communicator.ranks, parts, strict=True):
            distributed.broadcast(part, source, communicator.device_group)
        gathered.append(cat(parts))
    return gathered


def _reduce_scatterv(communicator: Any, tensor: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    from torch import distributed

    if dim != 0:
        raise NotImplementedError("this stand-in handles dim 0 alone")
    total = tensor.clone()
    distributed.all_reduce(total, group=communicator.device_group)
    sizes = sizes or [len(tensor) // communicator.world_size] * communicator.world_size
    return total.split(sizes)[communicator.rank_in_group].contiguous()
