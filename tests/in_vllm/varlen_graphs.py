"""Graphs for decodes of varying lengths: what the package assumes of one that vLLM's own manager captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from bypass import LengthsOfRows
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.utils import AttentionGroup

from vllm_graphfix.engine.claims import ClaimCheck
from vllm_graphfix.engine.graph_dispatch import Graph, graph_being_captured
from vllm_graphfix.shadow.forward import _launches
from vllm_graphfix.shadow.lockstep import Shape, shape_of
from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.decoding import MAX_LENGTH, MAX_REQUESTS, RunnerStandIn, configuration
from vllm_graphfix.verify.double.flash_attention import LAYER, flash_attention_stand_ins, metadata_builder
from vllm_graphfix.verify.double.graph import CPUStream, cpu_cuda_graphs
from vllm_graphfix.verify.double.unpinned import unpinned

if TYPE_CHECKING:
    import pytest

DRAFTS = 2
TOKENS = MAX_REQUESTS + 1  # one request has a draft


def test_it_is_a_graph_of_decodes_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph_utils, "current_stream", CPUStream, raising=False)
    mode, config = CUDAGraphMode.FULL_DECODE_ONLY, configuration(CUDAGraphMode.FULL_DECODE_ONLY, [TOKENS], DRAFTS)
    config.use_cumem_cudagraph_pool, config.num_speculative_tokens = False, DRAFTS
    graphs: list[Graph | None] = []
    stock = flash_attn.FlashAttentionMetadataBuilder.build

    def takes_for_prompts(*args: Any, **kwargs: Any) -> Any:
        graphs.append(graph_being_captured())
        metadata = stock(*args, **kwargs)
        metadata.num_prefills = 1
        return metadata

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", takes_for_prompts)
    with cpu_cuda_graphs(), unpinned(), flash_attention_stand_ins(2), torch.inference_mode():
        runner, check = RunnerStandIn(config, [LAYER]), ClaimCheck()
        vars(runner.model_state).update(prompt_embeds_state=None, encoder_cache=None, model_config=config.model_config)
        group = AttentionGroup(flash_attn.FlashAttentionBackend, [LAYER], SimpleNamespace(block_size=4), 0)
        group.metadata_builders = [metadata_builder(mode, MAX_REQUESTS, [TOKENS])]
        runner.block_tables._num_dirty_rows = 0
        runner.attn_groups = [[group]]
        arguments = {"decode_query_len": 1 + DRAFTS, "cudagraph_mode": mode, "varlen_decode": True}
        manager = cudagraph_utils.ModelCudaGraphManager(config, torch.device("cpu"), **arguments)
        check.begin_capture(SimpleNamespace(vllm_config=config, model_runner=runner))
        inputs = runner.capture_inputs() | {"model": LengthsOfRows(), "intermediate_tensors": None}
        manager.capture(**supported_kwargs(manager.capture, inputs))
        check.end_capture()
    (descriptor,) = manager.graphs
    assert (descriptor.uniform_token_count, descriptor.num_reqs, descriptor.num_tokens) == (None, MAX_REQUESTS, TOKENS)
    assert {(each.tokens, each.longest) for each in graphs if each} == {(TOKENS, 1 + DRAFTS)}
    assert [each.graph for each in check.findings()] == [f"FULL {TOKENS}"]
    assert shape_of(descriptor) == Shape(TOKENS, uniform=False)
    longest = {"max_seq_len": MAX_LENGTH, "max_seqlen_k": MAX_LENGTH}
    assert _launches(config, descriptor) == (
        longest,
        longest | {"max_query_len": 1 + DRAFTS, "max_seqlen_q": 1 + DRAFTS},
    )
