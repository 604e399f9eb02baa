"""Trial of hidden-states-padding.

Hidden states of three requests, one of which has the last block of the cache, are written in a graph for eight tokens.
Real: vLLM's drafter with its dispatcher of graphs, its model, and the layer that writes to the cache. It needs no
kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graphfix.verify.trial import Trial

if TYPE_CHECKING:
    from vllm_graphfix.verify.measurement import Measurement

GRAPH_SIZE = 8
LAYER = "cache_only_layers.1"
BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN_SIZE = 7, 4, 2, 3
"""Block 0 is the null block."""
PROMPTS = [24, 25, 26, 27, 20, 21, 22, 23]
"""Slots of two requests, of which the first has the last block. The second's hidden states stay in rows that pad later
steps."""


def run(*, trigger: bool = True) -> Measurement:
    """Write hidden states of padded steps. Without *trigger*, every step fills the graph."""
    from vllm_graphfix.verify.measurement import Measurement

    steps = [PROMPTS, [4, 5, 6], [7, 16]] if trigger else [PROMPTS, [4, 5, 6, 7, 8, 9, 10, 11]]
    return Measurement(
        f"sums of the hidden states in each slot of the cache after {len(steps)} steps",
        tuple(_serve(steps, graphs=False)),
        tuple(_serve(steps, graphs=True)),
        counted={"padding-written": 2},
    )


def _serve(steps: list[list[int]], *, graphs: bool) -> list[float]:
    """Return the sums of each slot of the cache after *steps*, lists of slots, padded if with *graphs*."""
    import torch

    from vllm_graphfix.verify.double.arguments import supported_kwargs

    cache = torch.zeros(BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN_SIZE)
    drafter = proposer(cache, graphs=graphs)
    random = torch.Generator().manual_seed(0)
    for slots in steps:
        arguments = {
            "num_speculative_tokens": 1,
            "sampled_token_ids": torch.zeros(1, 1, dtype=torch.int32),
            "target_hidden_states": [torch.rand(len(slots), HIDDEN_SIZE, generator=random) for _ in range(LAYERS)],
            "common_attn_metadata": _metadata(slots, GRAPH_SIZE if graphs else len(slots)),
            "scheduler_output": None,
        }
        drafter.propose(**supported_kwargs(drafter.propose, arguments))
    sums: list[float] = cache[1:].sum(dim=(2, 3)).flatten().tolist()
    return sums


def proposer(cache: Any, *, graphs: bool) -> Any:
    """Return vLLM's drafter with what `propose` reads; *cache* is (blocks, slots, layers, hidden size)."""
    from types import SimpleNamespace

    import torch
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.models import extract_hidden_states as models
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    layer: Any = object.__new__(models.CacheOnlyAttentionLayer)
    model: Any = object.__new__(models.ExtractHiddenStatesModel)
    for module in (layer, model):
        torch.nn.Module.__init__(module)
    # Up to 0.18 a list, with one cache for each virtual engine.
    layer.kv_cache = [cache] if "virtual_engine" in models.unified_kv_cache_update.__code__.co_names else cache
    layer.layer_name = LAYER
    layer.impl = models.CacheOnlyAttentionImpl(LAYERS, HIDDEN_SIZE, "auto", torch.float32)
    model.target_num_hidden_layers = 1
    model.cache_only_layers = torch.nn.ModuleDict({"1": layer})
    config = _config(layer)
    drafter: Any = object.__new__(ExtractHiddenStatesProposer)
    drafter.num_speculative_tokens, drafter.eplb_state = 1, None
    drafter.vllm_config, drafter.model, drafter.attn_layer_names = config, model, [LAYER]
    drafter.hidden_states = torch.zeros(2 * GRAPH_SIZE, LAYERS, HIDDEN_SIZE)
    drafter._slot_mapping_buffer = torch.zeros(2 * GRAPH_SIZE, dtype=torch.int64)
    drafter.attn_metadata_builder = SimpleNamespace(build_for_drafting=lambda **_: None)
    drafter.cudagraph_dispatcher = CudagraphDispatcher(config)
    drafter.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE)
    return drafter


def _metadata(slots: list[int], padded: int) -> Any:
    """Return attention metadata as of a model runner: *slots*, followed by -1 up to the graph's size *padded*."""
    from types import SimpleNamespace

    import torch

    return SimpleNamespace(slot_mapping=torch.tensor(slots + [-1] * (padded - len(slots))), causal=True)


def _config(layer: Any) -> Any:
    """Return the parts of a `VllmConfig` that the drafter, its dispatcher and a forward context read."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode

    compilation = SimpleNamespace(
        static_forward_context={LAYER: layer},
        fast_moe_cold_start=False,
        static_all_moe_layers=[],
        ir_enable_torch_wrap=False,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        is_attention_compiled_piecewise=lambda: True,
        max_cudagraph_capture_size=GRAPH_SIZE,
        cudagraph_capture_sizes=[GRAPH_SIZE],
        compile_sizes=[],
    )
    return SimpleNamespace(
        compilation_config=compilation,
        parallel_config=SimpleNamespace(data_parallel_size=1, is_moe_model=False, use_sequence_parallel_moe=False),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(set_priority=nullcontext)),
        scheduler_config=SimpleNamespace(max_num_seqs=GRAPH_SIZE),
        speculative_config=SimpleNamespace(num_speculative_tokens=1, enforce_eager=False),
        num_speculative_tokens=1,
        lora_config=None,
    )


TRIAL = Trial(
    unwatched="the check looks at graphs of the target, and a drafter writes this in no graph at all",
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/vectors.py` at 9d2cfc5: the hidden state in the last slot "
    "of the cache's last block",
)
