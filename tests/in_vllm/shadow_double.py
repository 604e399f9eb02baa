"""What tests of the shadow check share: vLLM's wrappers on the CPU double, and which defects a release has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from vllm.compilation import cuda_graph

import vllm_graphfix
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source import open_source
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs


@contextlib.contextmanager
def wrappers_on_the_double() -> Iterator[None]:
    """Graphs of vLLM's `CUDAGraphWrapper` are the CPU double's."""
    with (
        cpu_cuda_graphs(),
        mock.patch.object(cuda_graph, "weak_ref_tensors", lambda output: output),
        mock.patch.object(cuda_graph, "current_stream", CPUStream),
        torch.inference_mode(),
    ):
        yield


def affected(fix: str) -> bool:
    """What the diagnosis says, which the fix's own tests hold against the releases, where nothing mends it here."""
    found = BY_NAME[fix].diagnose(open_source()).verdict.value == "affected"
    return found and vllm_graphfix.states()[fix].state.value != "active"
