"""The parts of vLLM's model runners that replay full graphs, and that the shadow check wraps.

V1's from 0.15.0 on, V2's from 0.18.0 on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    BatchDescriptor,
    create_forward_context,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase

from vllm_graphfix.shadow.runner_v2 import RUNNER_MODULE
from vllm_graphfix.verify.double.arguments import KERNEL_CONFIG
from vllm_graphfix.verify.double.graph import CPUGraph, CPUStream, Recorder, cpu_cuda_graphs

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def wrappers_on_the_double() -> Iterator[None]:
    """Make all graphs, those of vLLM's `CUDAGraphWrapper` included, the double's within the block."""
    with (
        cpu_cuda_graphs(),
        mock.patch.object(cuda_graph, "weak_ref_tensors", lambda output: output),
        mock.patch.object(cuda_graph, "current_stream", CPUStream),
        torch.inference_mode(),
    ):
        yield


@contextlib.contextmanager
def breakable_graphs() -> Iterator[None]:
    """Make vLLM's breakable graphs the double's, too, within the block."""
    from vllm.compilation import breakable_cudagraph

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", _SegmentStandIn),
        mock.patch.object(breakable_cudagraph, "weak_ref_tensors", lambda output: output),
        mock.patch.object(breakable_cudagraph, "weak_ref_tensor", lambda tensor: tensor),
        mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
    ):
        yield


class _SegmentStandIn(CPUGraph):
    """A graph of the double that records from `capture_begin` to `capture_end`, without a context manager."""

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        super().capture_begin(pool, capture_error_mode)
        self._recording = contextlib.ExitStack()
        self._recording.enter_context(Recorder(self))

    def capture_end(self) -> None:
        self._recording.close()
        super().capture_end()


class BareGraphs:
    """Full graphs of a function without a wrapper of vLLM's, one for each number of padded tokens."""

    def __init__(self, forward: Callable[[Any, int], torch.Tensor]) -> None:
        """*forward* takes attention metadata, and the tokens of the batch, padding included."""
        self._forward = forward
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, padded_tokens: int, metadata: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(metadata, padded_tokens)
        self.captured[padded_tokens] = graph, output

    def replay(self, padded_tokens: int, metadata: Any, tokens: int) -> torch.Tensor:
        """Return the output of a replay, which reads no *metadata*: what the capture recorded has their addresses."""
        graph, output = self.captured[padded_tokens]
        graph.replay()
        return output


class WrappedModel:
    """Full graphs of a model in vLLM's own `CUDAGraphWrapper`, called as model runner V1 calls it."""

    def __init__(
        self, layers: Mapping[str, object], forward: Callable[[Any, int], torch.Tensor], block_size: int
    ) -> None:
        """*forward* takes attention metadata by layer, and the batch's tokens, padding included.

        The shadow check also calls it without a graph.
        """
        self._layers = tuple(layers)
        self._config = _config(dict(layers), block_size)

        def model() -> torch.Tensor:
            context = get_forward_context()
            return forward(context.attn_metadata, context.batch_descriptor.num_tokens)

        self._model = cuda_graph.CUDAGraphWrapper(model, self._config, CUDAGraphMode.FULL)

    def capture(self, padded_tokens: int, metadata: Any) -> None:
        # vLLM's wrapper captures the first step of each size, and replays from then on.
        self.replay(padded_tokens, metadata, padded_tokens)

    def replay(self, padded_tokens: int, metadata: Any, tokens: int) -> torch.Tensor:
        """Replay the graph for *padded_tokens* in a step of *tokens*."""
        slots = torch.zeros(padded_tokens, dtype=torch.int64)
        slots[tokens:] = -1
        context = create_forward_context(
            metadata,
            self._config,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(padded_tokens),
            slot_mapping=dict.fromkeys(self._layers, slots),
        )
        with override_forward_context(context):
            output: torch.Tensor = self._model()
        return output


class WrappedGraphs(WrappedModel):
    """`WrappedModel` of one layer."""

    def __init__(self, name: str, layer: object, forward: Callable[[Any, int], torch.Tensor], block_size: int) -> None:
        """*forward* takes the attention metadata of that layer, not of all."""
        self._name = name
        super().__init__({name: layer}, lambda metadata, tokens: forward(metadata[name], tokens), block_size)

    def replay(self, padded_tokens: int, metadata: Any, tokens: int) -> torch.Tensor:
        return super().replay(padded_tokens, {self._name: metadata}, tokens)


class ManagedGraphs:
    """Full graphs of a model of one layer in vLLM's own `ModelCudaGraphManager`, from 0.21.0 on.

    It is called as model runner V2 calls it.
    """

    def __init__(
        self,
        name: str,
        layer: object,
        forward: Callable[[Any, int], torch.Tensor],
        block_size: int,
        tokens_of_a_request: int,
    ) -> None:
        """*forward* takes the attention metadata of that layer, and the batch's tokens, padding included."""
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        self._name, self._tokens_of_a_request = name, tokens_of_a_request
        self._manager: Any = object.__new__(ModelCudaGraphManager)
        vars(self._manager).update(
            vllm_config=_config({name: layer}, block_size),
            graphs={},
            hidden_states=None,
            is_last_pp_rank=True,
            use_aux_hidden_state_outputs=False,
        )

        def model(padded_tokens: int) -> torch.Tensor:
            return forward(get_forward_context().attn_metadata[name], padded_tokens)[:padded_tokens]

        self._model = model

    def capture(self, padded_tokens: int, metadata: object) -> None:
        """Capture as the manager does, but with *metadata*; the largest graph comes first, for it sizes the output."""
        manager, descriptor = self._manager, self._descriptor(padded_tokens)
        slots = {self._name: torch.zeros(padded_tokens, dtype=torch.int64)}
        graph = manager.graphs[descriptor] = torch.cuda.CUDAGraph()
        with set_forward_context(
            {self._name: metadata}, manager.vllm_config, num_tokens=padded_tokens, slot_mapping=slots
        ):
            if manager.hidden_states is None:
                manager.hidden_states = torch.empty_like(self._model(padded_tokens))
            with torch.cuda.graph(graph):
                manager.hidden_states[:padded_tokens] = self._model(padded_tokens)

    def replay(self, padded_tokens: int, metadata: object, tokens: int) -> torch.Tensor:
        """Replay the graph for *padded_tokens* in a step of *tokens*."""
        batch, descriptor = SimpleNamespace(num_tokens=tokens), self._descriptor(padded_tokens)
        slots = {self._name: torch.zeros(padded_tokens, dtype=torch.int64)}
        inputs: Any = {"padded_tokens": padded_tokens}
        runner = RunnerV2StandIn(self._manager, self._model)
        output: torch.Tensor = runner.execute_model({self._name: metadata}, slots, batch, inputs, descriptor)
        return output

    def _descriptor(self, padded_tokens: int) -> Any:
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL,
            num_tokens=padded_tokens,
            num_reqs=padded_tokens // self._tokens_of_a_request,
            uniform_token_count=self._tokens_of_a_request,
        )


def _config(layers: dict[str, Any], block_size: int) -> Any:
    """Return the parts of a `VllmConfig` that wrappers, managers and forward contexts read."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers,
            fast_moe_cold_start=False,
            static_all_moe_layers=[],
            ir_enable_torch_wrap=False,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, is_moe_model=False, use_sequence_parallel_moe=False),
        cache_config=SimpleNamespace(block_size=block_size),
        kernel_config=KERNEL_CONFIG,
        use_cumem_cudagraph_pool=False,
    )


def recurrent(stand_in: type, states: str = "_states") -> Any:
    """Return a *stand_in* that is a recurrent layer to vLLM, with the attribute *states*, (blocks, …), as its cache."""
    layer = type(stand_in.__name__, (stand_in, MambaBase), dict.fromkeys(MambaBase.__abstractmethods__))()
    layer.kv_cache = (getattr(layer, states),)
    return layer


def _as_function_of_vllm(function: Callable[P, T]) -> Callable[P, T]:
    """Return *function* as one of vLLM's module, by whose name the shadow check finds its caller."""
    plain: Any = function
    return FunctionType(plain.__code__, {"__name__": RUNNER_MODULE}, argdefs=plain.__defaults__)


class RunnerV2StandIn:
    """Stands in for model runner V2, with the local variables that vLLM's has where it replays a graph."""

    def __init__(self, manager: Any, model: Callable[..., Any]) -> None:
        self.cudagraph_manager, self.model = manager, model

    @_as_function_of_vllm
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
