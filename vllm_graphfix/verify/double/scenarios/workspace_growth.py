"""workspace-growth (PR 55341): a long prompt outgrows the workspace that a graph has recorded.

An image then takes the memory. Four requests decode in a full graph, whose mixture-of-experts layer works in the shared
workspace. A first chunk of sixteen tokens needs a larger one. What the image of its prompt was encoded to waits for the
second chunk, in memory that has come free; the others decode meanwhile.
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

from vllm_graphfix.verify.double.graph import cpu_cuda_graphs, poison_
from vllm_graphfix.verify.measurement import Measurement

CAPTURED = 4
"""Requests that decode, a token each."""
CHUNK = 16
WIDTH = 64
MEMORY = 1 << 16
CPU = torch.device("cpu")
_ALIGNMENT = 256


def run(*, trigger: bool = True) -> Measurement:
    """Without *trigger*: the first chunk is no longer than the batch that was captured."""
    chunk = CHUNK if trigger else CAPTURED
    eager = _serve(chunk, full_graphs=False)
    with cpu_cuda_graphs():
        graphed = _serve(chunk, full_graphs=True)
    numbers = "sums of hidden states: 4 requests over 3 decode steps, and what the image's 4 tokens came to"
    return Measurement(numbers, tuple(eager), tuple(graphed), counted={"recorded-workspace-outgrown": 1})


class DeviceMemoryStandIn:
    """Stands in for a GPU's memory and its allocator: blocks of one tensor, the first that is large enough.

    A block is free when the tensor that was given for it is gone, as on a GPU: a graph holds addresses, and no tensor.
    Its next owner finds poison.
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
        given = self._bytes[start : start + length].view(dtype).view(size)
        self.taken[start] = start + length
        weakref.finalize(given, self.taken.pop, start)
        return poison_(given)


class TorchStandIn:
    """`torch` as `vllm.v1.worker.workspace` sees it: its `empty` takes from the memory above."""

    def __init__(self, memory: DeviceMemoryStandIn) -> None:
        self.empty = memory.empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class MixtureStandIn:
    """Stands in for a mixture-of-experts layer and its kernels, which compute in the shared workspace."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` is (tokens, WIDTH); the workspace holds as much."""
        experts: torch.Tensor
        (experts,) = workspace.current_workspace_manager().get_simultaneous((tuple(hidden.shape), hidden.dtype))
        experts.copy_(hidden)
        experts.mul_(0.5)
        return experts + hidden


class RunnerStandIn(GPUModelRunner):  # type: ignore[misc]
    """Model runner V2 with no more than what its `capture_model` asks for.

    A batch of decodes is all that it captures.
    """

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
        """The capture of the manager of CUDA graphs: a warm-up, and the pass in the graph."""
        self.layer.forward(self.hidden)
        graph = self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.output = self.layer.forward(self.hidden)
        return {}


@contextmanager
def memory_of_a_device() -> Iterator[DeviceMemoryStandIn]:
    """A workspace manager of vLLM's own on such memory, for the block."""
    memory = DeviceMemoryStandIn()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(workspace, "torch", TorchStandIn(memory)))
        for name, told in (("empty_cache", None), ("get_memory_info", (1 << 30, 1 << 30))):
            if hasattr(torch.accelerator, name):
                stack.enter_context(mock.patch.object(torch.accelerator, name, lambda *_, told=told: told))
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
