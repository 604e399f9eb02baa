"""workspace-growth (PR 55341): a long prompt outgrows the workspace that a graph has recorded.

An image then takes the old workspace's memory. Four requests decode in a full graph, whose mixture-of-experts layer
uses the shared workspace. A first chunk of sixteen tokens needs a larger one. The embeddings of its prompt's image
wait for the second chunk in the freed memory, while the other requests decode.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs, fill_as_unwritten_
from vllm_graphfix.verify.measurement import Measurement

CAPTURED = 4
"""Requests that decode one token each."""
CHUNK = 16
WIDTH = 64
MEMORY = 1 << 16
CPU = torch.device("cpu")
_ALIGNMENT = 256


def run(*, trigger: bool = True) -> Measurement:
    """Outgrow the workspace. Without *trigger*, the first chunk is no longer than the captured batch."""
    chunk = CHUNK if trigger else CAPTURED
    eager = _serve(chunk, full_graphs=False)
    with cpu_cuda_graphs():
        graphed = _serve(chunk, full_graphs=True)
    numbers = "sums of hidden states: 4 requests over 3 decode steps, and what the image's 4 tokens came to"
    return Measurement(numbers, tuple(eager), tuple(graphed), counted={"recorded-workspace-outgrown": 1})


class DeviceMemoryStandIn:
    """Stands in for a GPU's memory and its allocator: first-fit blocks of one tensor.

    A block is freed with its tensor, as on a GPU: a graph holds addresses, not tensors. New blocks are poisoned.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(MEMORY, dtype=torch.uint8)
        self.taken: dict[int, int] = {}
        """End of each block, by its start."""

    def empty(self, size: tuple[int, ...], dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
        start, length = 0, torch.Size(size).numel() * dtype.itemsize
        for taken, end in sorted(self.taken.items()):
            if start + length <= taken:
                break
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        block = self._bytes[start : start + length].view(dtype).view(size)
        self.taken[start] = start + length
        weakref.finalize(block, self.taken.pop, start)
        return fill_as_unwritten_(block)


class TorchStandIn:
    """Stands in for `torch` in `vllm.v1.worker.workspace`, with an `empty` that takes from *memory*."""

    def __init__(self, memory: DeviceMemoryStandIn) -> None:
        self.empty = memory.empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class MixtureStandIn:
    """Stands in for a mixture-of-experts layer and its kernels, which compute in the shared workspace."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output for *hidden*, (tokens, WIDTH), computed in a workspace of the same size."""
        experts: torch.Tensor
        (experts,) = workspace.current_workspace_manager().get_simultaneous((tuple(hidden.shape), hidden.dtype))
        experts.copy_(hidden)
        experts.mul_(0.5)
        return experts + hidden


class RunnerStandIn(GPUModelRunner):  # type: ignore[misc]
    """Model runner V2 with what its `capture_model` reads; it captures one batch of decodes."""

    def __init__(self, layer: MixtureStandIn, hidden: torch.Tensor) -> None:
        self.layer, self.hidden = layer, hidden
        self.cudagraph_manager = self
        self.model_state = SimpleNamespace(supports_mm_inputs=False, capture_inner_cudagraphs=lambda *_: None)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return None

    def needs_capture(self) -> bool:
        return True

    def capture(self, *_: Any, **__: Any) -> dict[Any, Any]:
        """Capture in place of the manager of graphs: a warm-up, then the forward pass in the graph."""
        self.layer.forward(self.hidden)
        graph = self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.output = self.layer.forward(self.hidden)
        return {}


@contextmanager
def memory_of_a_device() -> Iterator[DeviceMemoryStandIn]:
    """Install vLLM's workspace manager on such memory within the block."""
    memory = DeviceMemoryStandIn()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(workspace, "torch", TorchStandIn(memory)))
        for name, answer in (("empty_cache", None), ("get_memory_info", (1 << 30, 1 << 30))):
            if hasattr(torch.accelerator, name):
                stack.enter_context(mock.patch.object(torch.accelerator, name, lambda *_, answer=answer: answer))
        workspace.init_workspace_manager(CPU)
        stack.callback(workspace.reset_workspace_manager)
        yield memory


@torch.inference_mode()
def _serve(chunk: int, *, full_graphs: bool) -> list[float]:
    values = itertools.count(1)
    layer = MixtureStandIn()
    with memory_of_a_device() as memory:

        def filled(size: tuple[int, ...]) -> torch.Tensor:
            return memory.empty(size).fill_(next(values) / 8)

        layer.forward(torch.zeros(CAPTURED, WIDTH))  # the profiling run takes the workspace
        hidden = filled((CAPTURED, WIDTH))
        runner = RunnerStandIn(layer, hidden)
        if full_graphs:
            runner.capture_model()

        def decode() -> list[float]:
            hidden.fill_(next(values) / 8)
            if runner.graph is not None:
                runner.graph.replay()
                return _sums(runner.output)
            return _sums(layer.forward(hidden))

        numbers = decode()
        layer.forward(torch.ones(chunk, WIDTH))
        image = filled((CAPTURED, WIDTH))
        numbers += decode() + decode()
        return numbers + _sums(layer.forward(image))


def _sums(hidden: torch.Tensor) -> list[float]:
    return [float(number) for number in hidden.sum(dim=1)]
