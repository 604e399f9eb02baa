"""Two ranks on one GPU: a stand-in for a machine with two, as a plugin of vLLM (0.21.0 has run so).

Each rank takes device 0. NCCL refuses two ranks of one device on one host, so each says that it is a host of its own
(``NCCL_HOSTID``): what they exchange is NCCL's, in graphs and without, over sockets instead of NVLink. vLLM's own
custom all-reduce works as on two GPUs: its kernels wait for each other on the device. This shows nothing of speed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def install(folder: Path) -> Path:
    """Makes *folder* one to put on the Python path, where vLLM finds this plugin, and returns it."""
    metadata = folder / "graphfix_one_gpu-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: graphfix_one_gpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\none_gpu = graphfix_one_gpu:share\n")
    (folder / "graphfix_one_gpu.py").write_text(Path(__file__).read_text())
    return folder


def share() -> None:
    """Called by vLLM in each of its processes."""
    import torch
    import vllm.distributed
    import vllm.v1.worker.gpu_worker as workers
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import current_platform

    stock_start, stock_group = parallel_state.init_distributed_environment, parallel_state.init_model_parallel_group
    stock_device = workers.Worker.init_device

    def start(world_size: int = -1, rank: int = -1, init_method: str = "env://", *_: Any, **__: Any) -> None:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        stock_start(world_size, rank, init_method, 0, "nccl")

    def group(ranks: Any, local_rank: int, *args: Any, **kwargs: Any) -> Any:
        return stock_group(ranks, 0, *args, **kwargs)

    def init_device(self: Any) -> Any:
        self.local_rank = 0
        return stock_device(self)

    for module in (parallel_state, vllm.distributed, workers):
        if hasattr(module, "init_distributed_environment"):
            module.init_distributed_environment = start
    parallel_state.init_model_parallel_group = group
    workers.Worker.init_device = init_device
    custom_all_reduce._can_p2p = lambda rank, world_size: True
    type(current_platform).is_fully_connected = classmethod(lambda cls, devices: True)
    torch.accelerator.device_count = lambda: 2
