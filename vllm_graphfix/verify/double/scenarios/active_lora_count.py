"""active-lora-count: a layer with LoRA adapters decodes requests with and without an adapter in one batch.

With `specialize_active_lora` there is a graph for each size and number of adapters. Real: vLLM's dispatch and dummy
adapters of both model runners, its Punica wrapper with its kernels and their metadata. Stand-ins: the kernels' launcher
and block sizes, numbers on the host, and the manager of adapters, which always has the same four.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu
from vllm.lora.request import LoRARequest
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.verify.double import triton_kernels
from vllm_graphfix.verify.double.arguments import cached_request, input_batch, supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import BareGraphs, WrappedModel, wrappers_on_the_double
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement

ADAPTERS = 4
SIZES = [2, 4, 6]
HIDDEN, RANK, LONGEST = 16, 16, 16
CPU = torch.device("cpu")
STEPS = ([0, 1], [1, 0, 2], [1, 2, 3, 0], [4, 3, 0, 2, 1])
"""Adapter of each request, 0 for none, step by step. The third step fits in a graph for four adapters."""
WRONG = 3
"""Steps whose graph lacks a program of its kernels; the fix counts them in eager runs, too."""
LAYER = "model.layers.0.mlp"
MODE = CUDAGraphMode.FULL_DECODE_ONLY


def run(*, trigger: bool = True) -> Measurement:
    """Decode steps of requests with and without an adapter. Without *trigger*, every request has one."""
    eager: list[float] = []
    graphed: list[float] = []
    runners = _runners()
    for kind in runners:
        eager += _serve(kind, CUDAGraphMode.NONE, trigger)
        with cpu_cuda_graphs():
            graphed += _serve(kind, MODE, trigger)
    return Measurement(
        f"outputs of a layer with {ADAPTERS} adapters over {len(STEPS)} steps of 2 to 5 requests",
        tuple(eager),
        tuple(graphed),
        counted={"base-rows-uncounted": 2 * WRONG * len(runners)},
    )


def _runners() -> list[Any]:
    """Return the model runners of this vLLM that have a graph for each number of adapters."""
    kinds: list[Any] = [RunnerV1]
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.lora_utils import get_num_active_loras_for_dispatch  # noqa: F401

        kinds.append(RunnerV2)
    return kinds


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    with wrappers_on_the_double():
        _serve(RunnerV1, MODE, trigger, wrapped=True)


def _serve(kind: Any, mode: CUDAGraphMode, trigger: bool, *, wrapped: bool = False) -> list[float]:
    """Return the outputs of the requests, step by step."""
    random = torch.Generator().manual_seed(0)
    numbers: list[float] = []
    with lora_on_the_cpu():
        layer = LayerWithAdapters(random)
        runner, graphs = kind(layer, mode), _graphs(layer, wrapped=wrapped)
        metadata = {LAYER: AttentionMetadataStandIn()}
        for tokens, adapters in runner.captures() if mode != CUDAGraphMode.NONE else ():
            graphs[adapters].capture(tokens, metadata)
        for step in STEPS:
            rows = step if trigger else [adapter or 1 for adapter in step]
            layer.hidden[: len(rows)] = torch.randn(len(rows), HIDDEN, generator=random)
            dispatched = runner.step(rows)
            if dispatched is None:
                output = layer.forward(len(rows))
            else:
                tokens, adapters = dispatched
                output = graphs[adapters].replay(tokens, metadata, len(rows))
            numbers += output[: len(rows)].flatten().tolist()
    return numbers


class AttentionMetadataStandIn:
    """Stands in for the attention metadata of a step, for the layer has no attention."""


def _graphs(layer: LayerWithAdapters, *, wrapped: bool) -> dict[int, Any]:
    """Return the graphs of *layer* by number of adapters, made when a number is looked up first."""

    def forward(_: Any, tokens: int) -> torch.Tensor:
        return layer.forward(tokens)

    return defaultdict(lambda: WrappedModel({LAYER: layer}, forward, LONGEST) if wrapped else BareGraphs(forward))


class LayerWithAdapters:
    """A linear layer under vLLM's own Punica wrapper."""

    def __init__(self, random: torch.Generator) -> None:
        self.config = SimpleNamespace(max_loras=ADAPTERS, specialize_active_lora=True, max_lora_rank=RANK)
        self.punica: Any = punica_gpu.PunicaWrapperGPU(max(SIZES), max(SIZES), CPU, lora_config=self.config)
        keep_numbers_on_the_host(self.punica)
        self.hidden = torch.zeros(max(SIZES), HIDDEN, dtype=torch.bfloat16)
        half = partial(torch.randn, generator=random, dtype=torch.bfloat16)
        self._weight = half(HIDDEN, HIDDEN)
        self._shrink, self._expand = half(ADAPTERS, 1, RANK, HIDDEN), half(ADAPTERS, 1, HIDDEN, RANK)

    def forward(self, tokens: int) -> torch.Tensor:
        hidden = self.hidden[:tokens]
        output = hidden @ self._weight
        self.punica.add_lora_linear(output, hidden, (self._shrink,), (self._expand,), 1.0, (HIDDEN,))
        return output


def keep_numbers_on_the_host(punica: Any) -> None:
    """Replace the tensors for the host, of one element each, in the metadata of *punica*, vLLM's Punica wrapper."""
    for meta in (punica.token_mapping_meta, punica.prompt_mapping_meta):
        for name, value in list(vars(meta).items()):
            if isinstance(value, torch.Tensor) and name.endswith("_cpu"):
                setattr(meta, name, NumberOnTheHost(value))


class NumberOnTheHost:
    """Stands in for a tensor of one element on the host; all other tensors stand for memory of the device."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.item()

    def item(self) -> Any:
        return self._value

    def __getitem__(self, index: int) -> Any:
        return self._value

    def __setitem__(self, index: int, value: Any) -> None:
        self._value = type(self._value)(value)

    def fill_(self, value: Any) -> None:
        self[0] = value

    def numel(self) -> int:
        return 1


class _AdaptersStandIn:
    """Stands in for the worker's manager of adapters, with four loaded; vLLM's own code passes them to kernels."""

    def __init__(self, layer: LayerWithAdapters) -> None:
        self._manager: Any = object.__new__(LoRAModelManager)
        vars(self._manager).update(
            supports_mm=False,
            supports_tower_connector_lora=False,
            lora_config=layer.config,
            lora_index_to_id=list(range(1, ADAPTERS + 1)),
            vocab_size=8,
            _last_mapping=None,
            _classification_head=None,
            _get_punica_wrapper=lambda prefix: layer.punica,
        )

    def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
        self._manager.set_adapter_mapping(mapping)


class RunnerV1:
    """Model runner V1 with its batch and its choice of graphs and adapters, and nothing else."""

    def __init__(self, layer: LayerWithAdapters, mode: CUDAGraphMode) -> None:
        config = _config(layer, mode)
        self._runner: Any = object.__new__(GPUModelRunner)
        self._dispatcher: Any = CudagraphDispatcher(config)
        self._config = layer.config
        vars(self._runner).update(
            vllm_config=config,
            **{name: getattr(config, name) for name in ("model_config", "compilation_config", "parallel_config")},
            cudagraph_dispatcher=self._dispatcher,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[]),  # other fixes look for recurrent layers in it
            uniform_decode_query_len=1,
            lora_manager=_AdaptersStandIn(layer),
        )
        self._dispatcher.initialize_cudagraph_keys(mode, 1)

    def captures(self) -> Iterator[tuple[int, int]]:
        """Yield tokens and number of adapters of each graph, with vLLM's dummy adapters selected for its capture."""
        for _, descriptors in self._dispatcher.get_capture_descs():
            for each in descriptors:
                counts = np.ones(each.num_reqs, dtype=np.int32)
                with self._runner.maybe_select_dummy_loras(
                    self._config, counts, num_active_loras=each.num_active_loras
                ):
                    yield each.num_tokens, each.num_active_loras

    def step(self, adapters: list[int]) -> tuple[int, int] | None:
        """Return the graph of a step of requests with these *adapters*, after passing them to the kernels' metadata."""
        batch = self._runner.input_batch = input_batch(max(SIZES), LONGEST, max(SIZES), [LONGEST], CPU)
        for row, adapter in enumerate(adapters):
            batch.add_request(cached_request(f"{row}", [0], ([1],), 1, lora_request=_adapter(adapter)))
        counts = np.ones(len(adapters), dtype=np.int32)
        mode, descriptor, *_ = self._runner._determine_batch_execution_and_padding(
            num_tokens=len(adapters),
            num_reqs=len(adapters),
            num_scheduled_tokens_np=counts,
            max_num_scheduled_tokens=1,
            use_cascade_attn=False,
            num_encoder_reqs=0,
        )
        self._runner.set_active_loras(batch, counts)
        return (descriptor.num_tokens, descriptor.num_active_loras) if mode == CUDAGraphMode.FULL else None


class RunnerV2:
    """Model runner V2's calls that choose graphs and adapters, in its order, from 0.24.0 on."""

    def __init__(self, layer: LayerWithAdapters, mode: CUDAGraphMode) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils, lora_utils
        from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

        config = _config(layer, mode)
        self._utils, self._config = lora_utils, layer.config
        cases = lora_utils.get_lora_capture_cases(layer.config, config.compilation_config)
        with cpu_cuda_graphs():  # it reads its pipeline stage from a group of ranks
            self._manager: Any = cudagraph_utils.CudaGraphManager(config, CPU, mode, 1, lora_capture_cases=cases)
        self._manager._graphs_captured = mode != CUDAGraphMode.NONE
        self._runner: Any = LoRAModelRunnerMixin()
        self._runner.lora_manager = _AdaptersStandIn(layer)

    def captures(self) -> Iterator[tuple[int, int]]:
        """Yield tokens and number of adapters of each graph, after V2's own hook has selected dummy adapters."""
        hook = self._utils.create_lora_capture_hook(self._config, self._runner)
        for each in self._manager._capture_descs[CUDAGraphMode.FULL]:
            hook(each.num_active_loras, each.num_reqs, each.num_tokens)
            yield each.num_tokens, each.num_active_loras

    def step(self, adapters: list[int]) -> tuple[int, int] | None:
        """Return the graph of a step of requests with these *adapters*, after passing them to the kernels' metadata."""
        state, names = self._utils.LoraState(max(SIZES)), [f"{row}" for row in range(len(adapters))]
        for row, adapter in enumerate(adapters):
            state.add_request(names[row], row, _adapter(adapter))
        count = self._utils.get_num_active_loras_for_dispatch(self._config, state, names, False)
        values = {
            "num_reqs": len(adapters),
            "num_tokens": len(adapters),
            "uniform_token_count": 1,
            "num_active_loras": count,
            "max_query_len": 1,
        }
        descriptor = self._manager.dispatch(**supported_kwargs(self._manager.dispatch, values))
        rows = np.arange(len(adapters))
        self._runner._set_active_loras(*state.make_lora_inputs(names, rows, np.ones(len(adapters), dtype=np.int32)))
        in_graph = descriptor.cg_mode == CUDAGraphMode.FULL
        return (descriptor.num_tokens, descriptor.num_active_loras) if in_graph else None


def _adapter(number: int) -> LoRARequest | None:
    return LoRARequest(f"adapter {number}", number, "/none") if number else None


def _config(layer: LayerWithAdapters, mode: CUDAGraphMode) -> Any:
    """Return the parts of a VllmConfig that dispatchers and model runners read."""
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        max_cudagraph_capture_size=max(SIZES),
        cudagraph_capture_sizes=list(SIZES),
        cudagraph_specialize_lora=True,
        pass_config=SimpleNamespace(enable_sp=False),
        is_attention_compiled_piecewise=lambda: False,
        compile_sizes=[],
        adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
    )
    parallel = dict.fromkeys(("decode_context_parallel_size", "data_parallel_size", "tensor_parallel_size"), 1)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LONGEST, is_encoder_decoder=False, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_seqs=max(SIZES), max_num_batched_tokens=max(SIZES)),
        parallel_config=SimpleNamespace(**parallel, pipeline_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        compilation_config=compilation,
        lora_config=layer.config,
        speculative_config=None,
        num_speculative_tokens=0,
        use_v2_model_runner=False,
        kv_transfer_config=None,
        additional_config={},
    )


@contextlib.contextmanager
def lora_on_the_cpu() -> Iterator[None]:
    """Run vLLM's own kernels of adapters on the CPU, with small block sizes, within the block."""
    blocks = {"block_m": 16, "block_n": 16, "block_k": 16, "split_k": 1, "group_size_m": 8}
    options = dict.fromkeys(("num_warps", "num_ctas", "num_stages"), 1)
    operators: dict[str, Callable[..., Any]] = {
        "LoRAKernelMeta": LoRAKernelMeta,
        "lora_shrink": lora_shrink_op._lora_shrink,
        "lora_expand": lora_expand_op._lora_expand,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(unpinned())
        stack.enter_context(torch.inference_mode())
        stack.enter_context(mock.patch.object(triton_kernels, "Language", Multiplying))
        stack.enter_context(cpu_triton_kernels(lora_shrink_op, lora_expand_op))
        for module in (lora_shrink_op, lora_expand_op):
            stack.enter_context(mock.patch.object(module, "get_lora_op_configs", return_value=blocks | options))
            if hasattr(module, "supports_pdl"):
                stack.enter_context(mock.patch.object(module, "supports_pdl", return_value=False))
        # The functions behind the operators, so that a graph records their launches. Without Triton these names are
        # missing in the module.
        for name, function in operators.items():
            stack.enter_context(mock.patch.object(punica_gpu, name, function, create=True))
        yield


class Multiplying(triton_kernels.Language):
    """`Language` with the further functions that kernels of adapters use."""

    @staticmethod
    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.float() @ b.float()

    @staticmethod
    def multiple_of(block: torch.Tensor, _: int) -> torch.Tensor:
        return block

    max_contiguous = multiple_of
