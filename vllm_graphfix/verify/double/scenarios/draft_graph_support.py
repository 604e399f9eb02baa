"""draft-graph-support (PR 32936): decodes with one draft token, on a backend that takes them for prompts.

Real: vLLM's `initialize_kv_cache`, which sets up model runner V2's attention backends, its manager of full graphs, and
Triton MLA's metadata builder. Stand-in: the attention layer, which attends according to the metadata.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

install_flashmla_stand_ins()

from vllm.config.compilation import CUDAGraphMode  # noqa: E402 - FlashMLA is looked for when vLLM is imported
from vllm.forward_context import get_forward_context  # noqa: E402
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils, model_runner  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup  # noqa: E402

from vllm_graphfix.verify.double.decoding import (  # noqa: E402
    BLOCK_SIZE,
    DEVICE,
    HIDDEN,
    MAX_LENGTH,
    MAX_REQUESTS,
    ModelStandIn,
    RunnerStandIn,
    Step,
    configuration,
    measure,
)
from vllm_graphfix.verify.double.mla_decode import metadata_builder  # noqa: E402

LAYER = "target.attention"
LENGTHS = ((37,), (5, 42), (17, 3, 29), (18, 4, 30, 9), (6, 43))
"""Tokens of each request, step by step, this step's included; the third step has a padded row."""
_OF_OTHER_PARTS = (
    "BlockTables",
    "check_attention_cp_compatibility",
    "get_kv_connector",
    "init_kv_cache",
    "initialize_mamba_ssu_backend",
)
"""Other calls of `initialize_kv_cache`, which do nothing here."""


def run(*, trigger: bool = True) -> Measurement:
    """Decode with a draft token. Without *trigger*, without one: this backend takes such steps for decodes."""
    tokens = 2 if trigger else 1
    steps = [Step(lengths, tokens) for lengths in LENGTHS]
    numbers = (
        f"hidden states of {tokens} tokens a request over {len(steps)} decode steps of 1 to {MAX_REQUESTS} requests"
    )
    with cpu_cuda_graphs(), _unpinned():
        return measure(
            numbers,
            lambda: _serve(steps, captured=False),
            lambda: _serve(steps, captured=True),
            {"unsupported-graph": 3 if trigger else 0},
        )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` as model runner V2 does, for the shadow check, with a draft and without.

    With a draft, the fix leaves no full graph to replay.
    """
    from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double

    with wrappers_on_the_double(), _unpinned():
        for tokens in (2, 1) if trigger else (1,):
            _serve([Step(lengths, tokens) for lengths in LENGTHS], captured=True, watch=True)


@contextmanager
def _unpinned() -> Iterator[None]:
    """Give builders memory that is not pinned, which needs CUDA, within the block."""
    zeros = torch.zeros

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return zeros(*args, **kwargs)

    with mock.patch.object(torch, "zeros", unpinned):
        yield


def _serve(steps: list[Step], *, captured: bool, watch: bool = False) -> list[torch.Tensor]:
    from vllm_graphfix.verify.double.model_runners import RunnerV2StandIn

    tokens = steps[0].query_tokens
    mode = CUDAGraphMode.FULL_DECODE_ONLY if captured else CUDAGraphMode.NONE
    config = configuration(mode, [tokens, 2 * tokens, 4 * tokens], tokens - 1)
    config.mamba_config = None
    runner, model = RunnerStandIn(config, [LAYER]), _model()
    manager, runner.attn_groups = _initialized(config, tokens)
    if captured and manager.needs_capture():
        arguments = runner.capture_inputs() | {"model": model, "intermediate_tensors": None}
        manager.capture(**supported_kwargs(manager.capture, arguments))
    outputs = []
    for step in steps:
        graph = _graph(manager, step) if captured else None
        if graph is None:
            outputs.append(runner.run_eagerly(model, step))
            continue
        # Before 0.18 the metadata are not padded.
        metadata, slots = runner.prepare(step, getattr(graph, "num_reqs", None))
        if watch:
            batch, inputs = SimpleNamespace(num_tokens=step.num_tokens), runner.model_inputs(graph.num_tokens)
            states = RunnerV2StandIn(manager, model).execute_model(metadata, slots, batch, inputs, graph)
        else:
            states = manager.run_fullgraph(graph)
        outputs.append(states[: step.num_tokens].clone())
    return outputs


def _graph(manager: Any, step: Step) -> Any:
    """Return the model runner's full graph for the step: a descriptor from 0.18 on, a number of tokens before.

    None if it replays no full graph.
    """
    batch = (len(step.lengths), step.num_tokens, step.query_tokens)
    if hasattr(manager, "dispatch"):
        descriptor = manager.dispatch(*batch)
        return descriptor if descriptor.cg_mode == CUDAGraphMode.FULL else None
    mode, size = manager.get_cudagraph_runtime_mode(*batch)
    return size if mode == CUDAGraphMode.FULL else None


def _initialized(config: Any, tokens: int) -> tuple[Any, Any]:
    """Return the manager of graphs and the attention groups that vLLM's own `initialize_kv_cache` sets up.

    Before 0.20 the model runner makes the manager in its constructor, with the configured mode.
    """
    kind = getattr(cudagraph_utils, "ModelCudaGraphManager", cudagraph_utils.CudaGraphManager)
    values = {
        "vllm_config": config,
        "device": DEVICE,
        "cudagraph_mode": config.compilation_config.cudagraph_mode,
        "decode_query_len": tokens,
        "use_aux_hidden_state_outputs": False,
    }
    runner = mock.MagicMock(
        **vars(config),
        vllm_config=config,
        cudagraph_manager=kind(**supported_kwargs(kind, values)),
        decode_query_len=tokens,
        uniform_decode_query_len=tokens,
        max_num_reqs=MAX_REQUESTS,
        device=DEVICE,
        speculator=None,
        is_encoder_decoder=False,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=HIDDEN, dtype=torch.float32)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)])
    layers = {LAYER: SimpleNamespace(get_attn_backend=lambda: TritonMLABackend)}
    there = [name for name in _OF_OTHER_PARTS if hasattr(model_runner, name)]

    def create(group: Any, **_: Any) -> None:
        group.metadata_builders = [_builder(config)]

    with (
        mock.patch.multiple(model_runner, **{name: mock.MagicMock() for name in there}),
        mock.patch.object(attn_utils, "get_layers_from_vllm_config", return_value=layers),
        mock.patch.object(AttentionGroup, "create_metadata_builders", create),
    ):
        model_runner.GPUModelRunner.initialize_kv_cache(runner, caches)
    return runner.cudagraph_manager, runner.attn_groups


def _builder(config: Any) -> Any:
    """Return vLLM's metadata builder of Triton MLA, with what it reads for a batch of prompts."""
    builder = metadata_builder(TritonMLABackend.get_builder_cls())
    common = next(cls for cls in type(builder).__mro__ if cls.__name__ == "MLACommonMetadataBuilder").__module__
    vars(builder).update(
        vllm_config=config,
        model_config=SimpleNamespace(get_head_size=lambda: 576, dtype=torch.float32),
        aot_schedule=False,
        chunked_prefill_workspace_size=MAX_REQUESTS * MAX_LENGTH,
        chunked_prefill_workspace=None,
        q_data_type=torch.float32,
        prefill_metadata_cls=sys.modules[common].MLACommonPrefillMetadata,
        _use_cudnn_prefill=False,
        _use_trtllm_ragged_prefill=False,
    )
    return builder


def _model() -> ModelStandIn:
    model = ModelStandIn([])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        model.layers.append(AttentionStandIn())
    return model


class AttentionStandIn(torch.nn.Module):
    """Stands in for an attention layer and its kernels, on a full random KV cache.

    Its queries are decodes or prompts, according to the metadata. Each token attends to its request's context, and to
    the step's own tokens up to itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (torch.randn(HIDDEN, HIDDEN).double() for _ in range(2))
        self.kv_cache = torch.randn(MAX_REQUESTS * MAX_LENGTH, HIDDEN).double()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return torch.zeros_like(states)
        of_layer = metadata[LAYER]
        if of_layer.prefill is None:
            lengths, table = of_layer.decode.seq_lens, of_layer.decode.block_table
            tokens = len(states) // len(lengths)
            ends, context = torch.arange(1, len(lengths) + 1) * tokens, lengths - tokens
        else:
            ends, table = of_layer.prefill.query_start_loc[1:], of_layer.prefill.block_table
            chunks = of_layer.prefill.chunked_context
            context = None if chunks is None else chunks.cu_seq_lens.diff(dim=1).sum(0)
        return self._attend(states, ends, table, context)

    def _attend(
        self, states: torch.Tensor, ends: torch.Tensor, table: torch.Tensor, context: torch.Tensor | None
    ) -> torch.Tensor:
        rows = torch.arange(len(states))
        request = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        # In double precision, so that the number of padded rows does not change the last bit of the result.
        exact = states.double()
        query, key = exact @ self.query, exact @ self.key
        own = (request[:, None] == request) & (rows[:, None] >= rows)
        scores = [(query @ key.T).masked_fill(~own, -torch.inf)]
        values = [key.expand(len(states), -1, -1)]
        if context is not None:
            positions = torch.arange(MAX_LENGTH)
            slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            cached = self.kv_cache[slots[request].long()]
            there = positions < context[request][:, None]
            scores.append(torch.einsum("th,tph->tp", query, cached).masked_fill(~there, -torch.inf))
            values.append(cached)
        weights = torch.softmax(torch.cat(scores, 1), 1)
        return torch.einsum("tp,tph->th", weights, torch.cat(values, 1)).float()
