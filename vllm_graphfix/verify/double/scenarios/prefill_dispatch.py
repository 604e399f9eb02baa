"""prefill-dispatch (PR 53059): while two requests decode, a prompt arrives with exactly the tokens of a decode.

These are two tokens with one draft token on GDN layers, and one token on Mamba-2 layers; the rest of a longer prompt
has as many. Real: the model runners' choice of graphs, V2's where it has recurrent models, and the layers' builders.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.verify.double.arguments import cached_request, input_batch, supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import (
    BareGraphs,
    ManagedGraphs,
    WrappedGraphs,
    recurrent,
    wrappers_on_the_double,
)
from vllm_graphfix.verify.double.recurrent_layers import STATE_SIZE, GatedDeltaStandIn, SelectiveStateStandIn
from vllm_graphfix.verify.double.unpinned import unpinned
from vllm_graphfix.verify.measurement import Measurement

CAPTURED = 4
"""Requests of the largest graph. Each size has a graph, for some releases also pad such batches wrongly."""
MAX_MODEL_LEN = MAX_TOKENS = 32
LAYER = "model.layers.0.mixer"
CPU = torch.device("cpu")
HYBRIDS_V2 = "vllm.v1.worker.gpu.model_states.mamba_hybrid"

REQUESTS = ("first", "second", "short", "long")


def prompts(length: int, longer: int = 0) -> dict[str, int]:
    """Return the tokens of each prompt if a decode has *length*; the last two have *longer* tokens more."""
    return {"first": 3, "second": 4, "short": length + longer, "long": 5 + length + longer}


def steps(length: int, longer: int = 0) -> list[dict[str, int]]:
    """Return the tokens that the scheduler gives to each request, step by step."""
    both, three, all_four = (dict.fromkeys(REQUESTS[:count], length) for count in (2, 3, 4))
    return [
        {"first": 3, "second": 4},
        both,
        both,
        {**both, "short": length + longer},  # the short prompt, as long as a decode
        three,
        {**three, "long": 5},
        {**three, "long": length + longer},  # the rest of the long prompt, as long as a decode
        *[all_four] * 2,
    ]


def run(*, trigger: bool = True) -> Measurement:
    """Prefill with as many tokens as a decode. Without *trigger*, with one token more."""
    eager: list[float] = []
    graphed: list[float] = []
    taken: list[dict[str, int]] = []
    for serve in served(longer=0 if trigger else 1):
        with unpinned():
            eager += serve(CUDAGraphMode.NONE, taken=taken)
        with unpinned(), cpu_cuda_graphs():
            graphed += serve(CUDAGraphMode.FULL_DECODE_ONLY)
    numbers = "GDN and Mamba-2 layer outputs of 4 requests over 9 steps"
    return Measurement(numbers, tuple(eager), tuple(graphed), counted={"prefill-as-decode": len(taken)})


def watched(*, trigger: bool = True) -> None:
    """Replay model runner V1's graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    _watched(DispatchV1, trigger)


def watched_v2(*, trigger: bool = True) -> bool:
    """Replay model runner V2's graphs of `run` in its manager. False if this vLLM has none of them."""
    return _watched(DispatchV2, trigger)


def _watched(dispatch: type, trigger: bool) -> bool:
    serves = [serve for serve in served(longer=0 if trigger else 1) if dispatch in serve.args]
    for serve in serves:
        with unpinned(), wrappers_on_the_double():
            serve(CUDAGraphMode.FULL_DECODE_ONLY, wrapped=True)
    return bool(serves)


def served(longer: int = 0) -> list[partial[list[float]]]:
    """Return the pairs of layer and model runner of this vLLM that stock serves wrongly with graphs."""
    serves = [partial(_serve, GatedDeltaStandIn, DispatchV1, longer)]
    if "is_prefilling" in CommonAttentionMetadata.__dataclass_fields__:
        # Without it, the builder takes every row of one token for a decode, and eager is as wrong as the graph.
        serves.append(partial(_serve, SelectiveStateStandIn, DispatchV1, longer))
    with contextlib.suppress(ImportError):  # model runner V2 without recurrent models, or one that reads their phase
        importlib.import_module(HYBRIDS_V2)
        from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count  # noqa: F401

        serves.append(partial(_serve, GatedDeltaStandIn, DispatchV2, longer))
    return serves


# -- dispatch


def _attention_groups(layers: KVCacheConfig, backend: Any) -> list[list[Any]]:
    """Return one attention group of *backend* for each group of the KV cache, or none without a backend."""
    return [
        [SimpleNamespace(backend=backend, layer_names=group.layer_names)]
        for group in layers.kv_cache_groups
        if backend is not None
    ]


class DispatchV1:
    """Model runner V1 with its batch and its choice of graphs, and nothing else."""

    def __init__(self, config: Any, layers: KVCacheConfig, longer: int = 0, backend: Any = None) -> None:
        self._length = 1 + config.num_speculative_tokens
        self._prompts = prompts(self._length, longer)
        self.runner: Any = object.__new__(GPUModelRunner)
        self.runner.__dict__.update(
            vllm_config=config,
            **{name: getattr(config, name) for name in ("model_config", "compilation_config", "parallel_config")},
            cudagraph_dispatcher=CudagraphDispatcher(config),
            uniform_decode_query_len=self._length,
            kv_cache_config=layers,
            attn_groups=_attention_groups(layers, backend),
            input_batch=input_batch(CAPTURED, MAX_MODEL_LEN, MAX_TOKENS, [MAX_MODEL_LEN], CPU),
        )
        self.runner.cudagraph_dispatcher.initialize_cudagraph_keys(
            config.compilation_config.cudagraph_mode, self._length
        )

    def __call__(self, scheduled: dict[str, int], computed: dict[str, int]) -> int | None:
        """Return the rows of the graph that the step replays; None if it runs eagerly."""
        batch = self.runner.input_batch
        for name in scheduled:
            if name not in batch.req_id_to_index:
                batch.add_request(cached_request(name, [0] * self._prompts[name], ([1],)))
            row = batch.req_id_to_index[name]
            batch.num_computed_tokens_cpu[row] = computed[name]
            # As after each step's bookkeeping: the prompt, then one token that is known and not computed.
            batch.num_tokens_no_spec[row] = max(computed[name] + 1, self._prompts[name])
        counts = np.array([scheduled[name] for name in batch.req_ids], dtype=np.int32)
        mode, descriptor, *_ = self.runner._determine_batch_execution_and_padding(
            num_tokens=int(counts.sum()),
            num_reqs=len(counts),
            num_scheduled_tokens_np=counts,
            max_num_scheduled_tokens=int(counts.max()),
            use_cascade_attn=False,
            num_encoder_reqs=0,
        )
        return descriptor.num_reqs if mode == CUDAGraphMode.FULL else None


class _DispatchedError(Exception):
    """Ends `execute_model` after the dispatch, before model runner V2 prepares inputs."""


class DispatchV2:
    """Model runner V2 from the beginning of `execute_model` to its dispatch, with NumPy arrays as its states."""

    def __init__(self, config: Any, layers: KVCacheConfig, longer: int = 0, backend: Any = None) -> None:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

        length = 1 + config.num_speculative_tokens
        self._prompts = prompts(length, longer)
        with cpu_cuda_graphs():  # it reads its pipeline stage from a group of ranks
            manager = CudaGraphManager(config, CPU, config.compilation_config.cudagraph_mode, length)
        manager._graphs_captured = True
        self._states = _RequestStatesStandIn()
        self.runner: Any = object.__new__(RunnerV2)
        self.runner.__dict__.update(
            req_states=self._states,
            block_tables=SimpleNamespace(apply_staged_writes=lambda: None),
            kv_block_zeroer=None,
            cudagraph_manager=manager,
            decode_query_len=length,
            kv_cache_config=layers,
            attn_groups=_attention_groups(layers, backend),
            is_encoder_decoder=False,
            lora_config=None,
            dp_size=1,
            dp_rank=0,
            update_pp_decode_requests=lambda: None,
            **dict.fromkeys(("finish_requests", "free_states", "add_requests"), lambda scheduled: None),
            prepare_inputs=self._end,
        )

    @staticmethod
    def _end(scheduled: object, descriptor: Any) -> None:
        raise _DispatchedError(descriptor)

    def __call__(self, scheduled: dict[str, int], computed: dict[str, int]) -> int | None:
        """Return the rows of the full graph that the step replays; None if it replays none."""
        known = [name for name in scheduled if name in self._states.req_id_to_index]
        for name in scheduled:
            if name not in known:
                self._states.add(name, self._prompts[name])
        self._states.look_up(computed)
        try:
            self.runner.execute_model(_scheduler_output(scheduled, known, computed))
        except _DispatchedError as dispatched:
            (descriptor,) = dispatched.args
            return descriptor.num_reqs if descriptor.cg_mode == CUDAGraphMode.FULL else None
        raise AssertionError("model runner V2 has prepared no inputs")


class _RequestStatesStandIn:
    """Stands in for `RequestState`, whose arrays are in memory shared with the GPU."""

    def __init__(self) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        self.prefill_len = SimpleNamespace(np=np.zeros(CAPTURED, dtype=np.int32))
        self.num_computed_tokens_np = np.zeros(CAPTURED, dtype=np.int32)
        self.num_computed_prefill_tokens = np.zeros(CAPTURED, dtype=np.int32)

    def add(self, name: str, prefill: int) -> None:
        slot = self.req_id_to_index[name] = len(self.req_id_to_index)
        self.index_to_req_id[slot] = name
        self.prefill_len.np[slot] = prefill

    def look_up(self, computed: dict[str, int]) -> None:
        """Update the states as 0.21.0 does after each step, and later releases in `update_requests`."""
        for name, slot in self.req_id_to_index.items():
            self.num_computed_prefill_tokens[slot] = min(computed[name], self.prefill_len.np[slot])


def _scheduler_output(scheduled: dict[str, int], known: list[str], computed: dict[str, int]) -> Any:
    """Return the parts of a SchedulerOutput that model runner V2 reads up to its dispatch."""
    cached = SimpleNamespace(
        req_ids=known, num_computed_tokens=[computed[name] for name in known], new_block_ids=[None] * len(known)
    )
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=cached,
        scheduled_encoder_inputs={},
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )


# -- serving


def _serve(
    layer_kind: Any,
    dispatch_kind: Any,
    longer: int,
    mode: CUDAGraphMode,
    *,
    wrapped: bool = False,
    taken: list[dict[str, int]] | None = None,
) -> list[float]:
    """Return the outputs of every token, step by step, one request after the other.

    *wrapped* puts the graphs in vLLM's wrapper or manager. Steps with the shape of a decode in which vLLM's builder
    takes a request for a prefill are appended to *taken*.
    """
    layer, length = recurrent(layer_kind) if wrapped else layer_kind(), layer_kind.length
    config = _config(mode, length)
    spec = MambaSpec(
        block_size=MAX_MODEL_LEN,
        shapes=((STATE_SIZE,),),
        dtypes=(torch.float32,),
        **supported_kwargs(MambaSpec, {"num_speculative_blocks": length - 1}),
    )
    builder = layer.backend.get_builder_cls()(spec, [LAYER], config, CPU)
    groups = KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    graphs: Any = BareGraphs(lambda metadata, _: layer.decode(metadata))
    if wrapped and dispatch_kind is DispatchV1:
        graphs = WrappedGraphs(LAYER, layer, layer.eager, MAX_MODEL_LEN)
    elif wrapped:
        graphs = ManagedGraphs(LAYER, layer, layer.eager, MAX_MODEL_LEN, length)
    dispatch = None
    if mode != CUDAGraphMode.NONE:
        dispatch = dispatch_kind(config, groups, longer, layer.backend)
        for rows in range(CAPTURED, 0, -1):
            captured = builder.build_for_cudagraph_capture(_common_metadata([length] * rows, [0] * rows, length))
            layer.decode(captured)
            graphs.capture(rows * length, captured)
    computed, accepted = dict.fromkeys(REQUESTS, 0), dict.fromkeys(REQUESTS, 1)
    random = torch.Generator().manual_seed(0)
    numbers: list[float] = []
    for scheduled in steps(length, longer):
        counts, tokens = list(scheduled.values()), sum(scheduled.values())
        layer.hidden[:tokens] = torch.randn(tokens, STATE_SIZE, generator=random)
        prefilling = [computed[name] < prompts(length, longer)[name] for name in scheduled]
        in_graph = dispatch(scheduled, computed) if dispatch else None
        common = _common_metadata(counts, [computed[name] for name in scheduled], length, prefilling)
        drafts = _draft_arguments(prefilling, [accepted[name] for name in scheduled], length)
        metadata = builder.build(0, common, **drafts)
        if taken is not None and metadata.num_prefills and set(counts) == {length}:
            taken.append(scheduled)
        if in_graph is not None:
            outputs = graphs.replay(in_graph * length, metadata, tokens)
        else:
            outputs = layer.eager(metadata, tokens)
        numbers += outputs[:tokens].flatten().tolist()
        for (name, count), still in zip(scheduled.items(), prefilling, strict=True):
            # No draft of "second" is accepted, and all drafts of the others.
            accepted[name] = 1 if still or name == "second" else length
            computed[name] += count if still else accepted[name]
    return numbers


def _draft_arguments(prefilling: list[bool], accepted: list[int], length: int) -> dict[str, torch.Tensor]:
    """Return the builders' further arguments if there are drafts; a row without drafts has -1."""
    if length == 1:
        return {}
    drafts = [-1 if still else length - 1 for still in prefilling]
    return {
        "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.tensor(drafts, dtype=torch.int32),
    }


def _common_metadata(counts: list[int], computed: list[int], length: int, prefilling: list[bool] | None = None) -> Any:
    """Return the metadata that the model runner passes to every builder."""
    rows = len(counts)
    blocks = torch.arange(1, 1 + rows * length, dtype=torch.int32).view(rows, length)
    lengths = torch.tensor(np.add(counts, computed), dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": lengths,
        "num_reqs": rows,
        "num_actual_tokens": sum(counts),
        "max_query_len": max(counts),
        "max_seq_len": MAX_MODEL_LEN,
        # A capture has the null block in all rows, as in vLLM.
        "block_table_tensor": blocks if prefilling else torch.zeros_like(blocks),
        "slot_mapping": torch.zeros(MAX_TOKENS, dtype=torch.int64),
        "is_prefilling": torch.tensor(prefilling or [False] * rows),
        "seq_lens_cpu_upper_bound": lengths.clone(),
    }
    return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))


def _config(mode: CUDAGraphMode, length: int) -> Any:
    """Return the parts of a VllmConfig that builders, dispatcher and model runners read."""
    sizes = [rows * length for rows in range(1, CAPTURED + 1)]
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        max_cudagraph_capture_size=max(sizes),
        cudagraph_capture_sizes=sizes,
        pass_config=SimpleNamespace(enable_sp=False),
        is_attention_compiled_piecewise=lambda: False,
        compile_sizes=[],
        adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
    )
    drafts = SimpleNamespace(
        num_speculative_tokens=length - 1,
        parallel_drafting=False,
        uses_dynamic_speculative_decoding=lambda: False,
        use_eagle_block_drop=lambda: False,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN,
            get_mamba_chunk_size=lambda: 8,
            is_encoder_decoder=False,
            dtype=torch.float32,
            hf_text_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none", enable_prefix_caching=False, use_replayssm=False, replayssm_buffer_len=0
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=CAPTURED, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        mamba_config=SimpleNamespace(backend=None),
        kv_transfer_config=None,
        additional_config={},
        lora_config=None,
        compilation_config=compilation,
        speculative_config=drafts if length > 1 else None,
        num_speculative_tokens=length - 1,
        use_v2_model_runner=False,
        pad_for_cudagraph=lambda tokens: next(size for size in sizes if size >= tokens),
    )
