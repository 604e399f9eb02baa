"""As much of vLLM's model runners as the shadow check looks at where a full graph is replayed: V1's of 0.15.0 - 0.33.0, V2's of 0.18.0 on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, create_forward_context, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_graphfix.shadow.runner_v2 import RUNNER_MODULE
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def wrappers_on_the_double() -> Iterator[None]:
    """For the block, graphs of vLLM's `CUDAGraphWrapper` are the double's, as all others."""
    with (
        cpu_cuda_graphs(),
        mock.patch.object(cuda_graph, "weak_ref_tensors", lambda output: output),
        mock.patch.object(cuda_graph, "current_stream", CPUStream),
        torch.inference_mode(),
    ):
        yield


class WrappedGraphs:
    """Full graphs of a model of one layer in vLLM's own `CUDAGraphWrapper`, called as model runner V1 calls it."""

    def __init__(self, name: str, layer: object, forward: Callable[[Any, int], torch.Tensor], block_size: int) -> None:
        """*forward* takes the layer's attention metadata and the tokens of the batch, padding included; without a graph too."""
        self._name = name
        self._config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context={name: layer}, fast_moe_cold_start=False, static_all_moe_layers=[]
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(block_size=block_size),
            use_cumem_cudagraph_pool=False,
        )

        def model() -> torch.Tensor:
            context = get_forward_context()
            return forward(context.attn_metadata[name], context.batch_descriptor.num_tokens)

        self._model = cuda_graph.CUDAGraphWrapper(model, self._config, CUDAGraphMode.FULL)

    def capture(self, padded_tokens: int, metadata: object) -> None:
        self.replay(padded_tokens, metadata, padded_tokens)  # the wrapper captures the first step of each size

    def replay(self, padded_tokens: int, metadata: object, tokens: int) -> torch.Tensor:
        """The graph for *padded_tokens* in a step of *tokens*."""
        slots = torch.zeros(padded_tokens, dtype=torch.int64)
        slots[tokens:] = -1
        context = create_forward_context(
            {self._name: metadata},
            self._config,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(padded_tokens),
            slot_mapping={self._name: slots},
        )
        with override_forward_context(context):
            output: torch.Tensor = self._model()
        return output


def recurrent(stand_in: type, states: str = "_states") -> Any:
    """One of *stand_in*, as a recurrent layer of vLLM's whose cache is its tensor *states*, (blocks, …)."""
    layer = type(stand_in.__name__, (stand_in, MambaBase), dict.fromkeys(MambaBase.__abstractmethods__))()
    layer.kv_cache = (getattr(layer, states),)
    return layer


def _of_vllms_module(function: Callable[P, T]) -> Callable[P, T]:
    """The same code as a function of the module that the check looks for."""
    plain: Any = function
    return FunctionType(plain.__code__, {"__name__": RUNNER_MODULE}, argdefs=plain.__defaults__)


class RunnerV2StandIn:
    """Stands in for model runner V2, with the variables that vLLM's has where it replays a graph."""

    def __init__(self, manager: Any, model: Callable[..., Any]) -> None:
        self.cudagraph_manager, self.model = manager, model

    @_of_vllms_module
    def execute_model(
        self,
        attn_metadata: Any,
        slot_mappings_by_layer: Any,
        input_batch: Any,
        model_inputs: dict[str, torch.Tensor],
        batch_desc: Any,
        dummy_run: bool = False,
    ) -> Any:
        return self.cudagraph_manager.run_fullgraph(batch_desc)
