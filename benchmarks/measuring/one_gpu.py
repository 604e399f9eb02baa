"""Two ranks on one GPU: a stand-in for a machine with two, as a plugin of vLLM (0.21.0 has run so).

NCCL refuses two ranks of one device. Here each rank takes device 0; sums are vLLM's own custom all-reduce, whose
kernels wait for each other on the device as they do on two, and which graphs record; what is no sum, and sums that it
does not take, go through gloo on the host, outside of graphs. Where such a collective of graphs would be NCCL's, this
shows nothing of it; and nothing of speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_DISABLE_PYNCCL": "1",
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
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import base_device_communicator, custom_all_reduce
    from vllm.platforms import current_platform

    stock_start, stock_group = parallel_state.init_distributed_environment, parallel_state.init_model_parallel_group

    def start(world_size: int = -1, rank: int = -1, init_method: str = "env://", *_: Any, **__: Any) -> None:
        stock_start(world_size, rank, init_method, 0, "gloo")

    def group(ranks: Any, local_rank: int, *args: Any, **kwargs: Any) -> Any:
        return stock_group(ranks, 0, *args, **kwargs)

    for module in (parallel_state, vllm.distributed):
        module.init_distributed_environment = start
    parallel_state.init_model_parallel_group = group
    custom_all_reduce._can_p2p = lambda rank, world_size: True
    type(current_platform).is_fully_connected = classmethod(lambda cls, devices: True)
    torch.accelerator.device_count = lambda: 2
    communicator = base_device_communicator.DeviceCommunicatorBase

    def all_gather(self: Any, input_: Any, dim: int = -1) -> Any:
        here = input_.cpu()
        parts = [torch.empty_like(here) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, here, group=self.cpu_group)
        return torch.cat(parts, dim).to(input_.device)

    communicator.all_gather = all_gather
    communicator.gather = lambda self, input_, dst=0, dim=-1: all_gather(self, input_, dim)

    import vllm.v1.worker.gpu_worker as workers

    stock_device = workers.Worker.init_device

    def init_device(self: Any) -> Any:
        self.local_rank = 0
        return stock_device(self)

    workers.Worker.init_device = init_device
    if hasattr(workers, "init_distributed_environment"):
        workers.init_distributed_environment = start
