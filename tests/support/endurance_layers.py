"""The layers of the fixes that are called in each step or for each batch, around vLLM's own functions.

They are cheap enough, on a CPU too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import activities
from endurance_growth import Case
from vllm_graphfix.fix import Activity, StockFunction
from vllm_graphfix.fixes import BY_NAME

REQUESTS, ROWS = 3, 4
"""The sizes of a batch with padding."""


class _Layers:
    """The layers that one fix puts around stock functions; without *active*, to count alone."""

    def __init__(self, fix: str, shape: str, *, active: bool) -> None:
        activity, offered = activities.layers(BY_NAME[fix], shape, corrects=active)
        self._wraps = {layer.name: layer.wrap for layer in offered}
        self.activities: dict[str, Activity] = {fix: activity}
        """For the case: what the fix does, by its name."""

    def around(self, target: str, stock: StockFunction) -> StockFunction:
        return self._wraps[target](stock)


# -- mamba-padding -----------------------------------------------------------------------------------------------------


def mamba(*, active: bool, stale: bool, padded: bool = True, broken: bool = False) -> Case:
    """Mamba-2's builder.

    *stale*: the last row has the mark of a request that was prefilling, which is right if it is not *padded*.
    """
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64, get_mamba_chunk_size=lambda: 8),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=ROWS),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    spec = MambaSpec(block_size=64, shapes=((2,),), dtypes=(torch.float32,))
    builder = Mamba2AttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    requests = REQUESTS if padded else ROWS
    starts = torch.arange(ROWS + 1, dtype=torch.int32).clamp(max=requests)
    marks = torch.zeros(ROWS, dtype=torch.bool)
    marks[-1] = stale
    metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=(torch.arange(ROWS) < requests).int() * 10,
        num_reqs=ROWS,
        num_actual_tokens=requests,
        max_query_len=1,
        max_seq_len=10,
        block_table_tensor=torch.zeros(ROWS, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        is_prefilling=marks,
    )
    if broken:
        metadata.query_start_loc_cpu = starts.to("meta")  # has no numbers
    name = "_compute_common_metadata"
    stock = getattr(BaseMambaAttentionMetadataBuilder, name)
    if broken or (stale and not active):  # vLLM would make a prefill of it, which needs pinned memory

        def stock(self: Any, common_attn_metadata: Any, *, num_accepted_tokens: Any = None) -> None:
            """Stands in for it."""

    layers = _Layers("mamba-padding", "prefilling-over-padding", active=active)
    around = layers.around(f"{BaseMambaAttentionMetadataBuilder.__name__}.{name}", stock)
    counted = ("padded-row-prefilling",) if stale and padded and not broken else ()
    failing = "mamba-padding" if broken else None
    return Case(lambda: around(builder, metadata), counted, failing, layers.activities)


# -- FlashMLA ----------------------------------------------------------------------------------------------------------


def flashmla(*, active: bool, padded: bool) -> Case:
    """Both fixes on the builder of dense fp8, as in an engine. The planner is a kernel; here it costs nothing."""
    import torch

    from vllm_graphfix.verify.double.flashmla import PLAN_WIDTH, SM_PARTS, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    from vllm.v1.attention.backends.mla import flashmla

    name = "FlashMLAMetadataBuilder._build_decode"
    plan, splits = torch.zeros(SM_PARTS, PLAN_WIDTH, dtype=torch.int32), torch.zeros(ROWS + 1, dtype=torch.int32)
    flashmla.get_mla_metadata_dense_fp8 = lambda *_: (plan, splits)
    builder = object.__new__(flashmla.FlashMLAMetadataBuilder)
    builder.__dict__.update(
        is_fp8_kvcache=True,
        num_q_heads=16,
        cg_buf_tile_scheduler_metadata=torch.zeros_like(plan),
        cg_buf_num_splits=torch.zeros_like(splits),
    )
    around = flashmla.FlashMLAMetadataBuilder._build_decode
    plans = _Layers("flashmla-fp8", "new-plan", active=active)
    padding = _Layers("flashmla-padding", "minus-one", active=active)
    for layers in (plans, padding):
        around = layers.around(name, around)
    requests = REQUESTS if padded else ROWS
    starts = torch.arange(ROWS + 1, dtype=torch.int32).clamp(max=requests)
    arguments = {
        "block_table_tensor": torch.zeros(ROWS, 4, dtype=torch.int32),
        "seq_lens_device": torch.full((ROWS,), 10, dtype=torch.int32),
        "max_seq_len": 10,
        "query_start_loc_cpu": starts,
        "query_start_loc_device": starts,
        "num_decode_tokens": requests,
        "dcp_tot_seq_lens_device": None,
    }
    counted = ("plan-outside-buffers", *(("padded-rows-given",) if padded else ()))
    return Case(lambda: around(builder, **arguments), counted, activities=plans.activities | padding.activities)


# -- FlashAttention 3 --------------------------------------------------------------------------------------------------


def flash(*, active: bool, decodes: bool = True) -> Case:
    """The builder of FlashAttention's metadata with a graph for prompts and decodes.

    Without *decodes*, the batch is a prompt as long as the graph.
    """
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends import flash_attn

    from vllm_graphfix.verify.double.flash_attention import Rows, flash_attention_stand_ins, metadata_builder

    with flash_attention_stand_ins(3):
        builder = metadata_builder(CUDAGraphMode.FULL, ROWS, [ROWS])
    schedule = torch.zeros(1, dtype=torch.int32)
    flash_attn.get_scheduler_metadata = lambda **_: schedule  # a kernel; here it costs nothing
    target = f"{flash_attn.FlashAttentionMetadataBuilder.__name__}.build"
    layers = _Layers("flash-mixed-schedule", "longest-of-the-step", active=active)
    around = layers.around(target, flash_attn.FlashAttentionMetadataBuilder.build)
    queries = [1] * REQUESTS if decodes else [ROWS]
    batch = Rows(ROWS).batch(queries, queries, ROWS, ROWS)
    counted = ("schedules-made-for-the-graph",) if decodes else ()
    return Case(lambda: around(builder, 0, batch), counted, activities=layers.activities)


# -- the sparse indexer ------------------------------------------------------------------------------------------------


def indexer(*, active: bool, padded: bool) -> Case:
    """The builder of the indexer's metadata in a decode batch with a draft token in each row."""
    import torch
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder as Builder

    from vllm_graphfix.verify.double.scenarios.indexer_padding import builder

    layers, own = _Layers("indexer-padding", "view-of-a-row", active=active), builder(1, requests=ROWS)
    around = layers.around(f"{Builder.__name__}._prepare_decode_tensors", Builder._prepare_decode_tensors)
    scheduled = (torch.arange(ROWS) < (REQUESTS if padded else ROWS)).int() * 2
    table, starts = torch.zeros(ROWS, 3, dtype=torch.int32), scheduled.cumsum(0, dtype=torch.int32) - scheduled
    arguments = (scheduled * 5, table, scheduled, scheduled, starts, ROWS, 2 * ROWS, True, 2, 2)
    counted = ("padded-rows-below-zero",) if padded else ()
    return Case(lambda: around(own, *arguments), counted, activities=layers.activities)


# -- Triton MLA --------------------------------------------------------------------------------------------------------


def triton_mla(*, active: bool, padded: bool) -> Case:
    """The builder as in each step; with the fix active, also a layer outside of a graph.

    The kernel is one of its own, and costs nothing.
    """
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    from vllm_graphfix.verify.double.mla_decode import common_metadata
    from vllm_graphfix.verify.double.scenarios import triton_mla_padding as scenario

    decode, layers = scenario.TritonMLADecode(), _Layers("triton-mla-padding", "divides-by-nothing", active=active)
    build = layers.around("MLACommonMetadataBuilder.build", MLACommonMetadataBuilder.build)
    metadata = common_metadata(decode, ROWS)
    requests = REQUESTS if padded else ROWS
    metadata.query_start_loc_cpu.copy_(torch.arange(ROWS + 1).clamp(max=requests))
    lengths = (torch.arange(ROWS) < requests).int()
    output = torch.zeros(ROWS, 2, 4)

    def _decode_softmax_reducev_fwd(
        logits: Any, q: Any, o: Any, lse: Any, v_buffer: Any, b_seq_len: Any, num_kv_splits: Any
    ) -> None: ...

    around = _decode_softmax_reducev_fwd
    if active:
        around = layers.around("_decode_softmax_reducev_fwd", around)

    def call() -> None:
        build(decode.builder, 0, metadata)
        around(None, None, output, None, None, lengths, 4)

    return Case(call, ("empty-rows-given",) if padded else (), activities=layers.activities)


# -- workspace-growth --------------------------------------------------------------------------------------------------


def workspace(*, active: bool, outgrown: bool = False) -> Case:
    """A request that fits, behind a capture that has recorded a workspace: the one in use, or one before it."""
    import torch
    from vllm.v1.worker.workspace import WorkspaceManager

    layers = _Layers("workspace-growth", "one-slot", active=active)
    around = layers.around("WorkspaceManager._ensure_workspace_size", WorkspaceManager._ensure_workspace_size)
    manager = WorkspaceManager(torch.device("cpu"))
    capture = layers.around("GPUModelRunner.capture_model", lambda runner: around(manager, 1024))
    with (
        mock.patch.object(torch.accelerator, "empty_cache"),  # it grows here, and there is no device
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        around(manager, 1024)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            capture(None)
        if outgrown:
            around(manager, 2048)
    return Case(lambda: around(manager, 512), activities=layers.activities)


# -- draft-decode-mode -------------------------------------------------------------------------------------------------


_DRAFTS = "draft-decode-mode"


def drafts(*, active: bool) -> Case:
    """Eagle's speculator of 0.17.x with one token to draft, for which there is no decode."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    manager, layers = _ManagerStandIn(CUDAGraphMode.PIECEWISE), _Layers(_DRAFTS, "one-manager", active=active)
    if active:
        init = layers.around("EagleCudaGraphManager.__init__", _ManagerStandIn.__init__)
        init(manager, CUDAGraphMode.PIECEWISE)
    speculator = object.__new__(EagleSpeculator)
    speculator.__dict__.update(
        cudagraph_manager=manager,
        num_speculative_steps=1,
        idx_mapping=torch.zeros(ROWS, dtype=torch.int32),
        input_buffers=SimpleNamespace(positions=torch.zeros(ROWS), query_start_loc=torch.zeros(ROWS + 1)),
    )
    around = layers.around("EagleSpeculator.generate_draft", EagleSpeculator.generate_draft)
    mode, counted = manager.cudagraph_mode, ("decode-padded-in-piecewise",)
    tokens = REQUESTS if active else ROWS  # without a graph there is no padding
    arguments: tuple[Any, ...] = (speculator, REQUESTS, tokens, {}, None, None, mode)
    return Case(lambda: around(*arguments), counted, activities=layers.activities)


class _ManagerStandIn:
    """The attributes of a manager of CUDA graphs that the fix reads, in 0.17.x."""

    def __init__(self, mode: Any) -> None:
        self.cudagraph_mode, self.cudagraph_sizes, self.pool = mode, {REQUESTS: ROWS}, None


def nightly_prefills(*, active: bool) -> Case:
    """`prepare_eagle_inputs` of the nightlies, by a stand-in, after a prefill of a larger batch.

    No release has the defect.
    """
    import torch

    layers, speculator = _Layers(_DRAFTS, "two-managers-indices", active=active), _SpeculatorStandIn()
    stock = _SpeculatorStandIn.init_cudagraph_manager
    layers.around("EagleSpeculator.init_cudagraph_manager", stock)(speculator)
    around = layers.around("prepare_eagle_inputs", _prepare_eagle_inputs_stand_in)
    small, large, indices = (*map(_BatchStandIn, (REQUESTS, ROWS)), torch.zeros(ROWS, dtype=torch.int64))
    around(indices, large)

    def call(speculator: object = speculator) -> None:  # which nobody else holds
        around(indices, small)

    return Case(call, ("prefill-with-old-indices",), activities=layers.activities)


class _BatchStandIn:
    def __init__(self, num_reqs: int) -> None:
        self.num_reqs = num_reqs


class _SpeculatorStandIn:
    prefill_cudagraph_manager = SimpleNamespace(graphs={"captured": None})

    def init_cudagraph_manager(self) -> None: ...


def _prepare_eagle_inputs_stand_in(last_token_indices: Any, input_batch: Any) -> None: ...


# -- prefill-dispatch --------------------------------------------------------------------------------------------------


def dispatch(*, active: bool, prefills: bool = True, broken: bool = False) -> Case:
    """Model runner V1's own dispatch of a batch with a request that prefills one token, or with none."""
    import numpy as np
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario
    from vllm_graphfix.verify.double.unpinned import unpinned

    groups = [KVCacheGroupSpec(["layer"], MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,)))]
    with unpinned():
        made = scenario.DispatchV1(scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1), KVCacheConfig(8, [], groups))
    batch = made.runner.input_batch
    batch.num_prompt_tokens[:], batch.num_computed_tokens_cpu[:], batch.num_tokens_no_spec[:] = 5, 9, 10
    if prefills:
        batch.num_computed_tokens_cpu[REQUESTS - 1] = 4
    if broken:
        batch.num_prompt_tokens = None
    name = "_determine_batch_execution_and_padding"
    layers = _Layers("prefill-dispatch", "shape-only-v1", active=active)
    around = layers.around(f"GPUModelRunner.{name}", getattr(GPUModelRunner, name))
    arguments = {
        "num_tokens": REQUESTS,
        "num_reqs": REQUESTS,
        "num_scheduled_tokens_np": np.ones(REQUESTS, dtype=np.int32),
        "max_num_scheduled_tokens": 1,
        "use_cascade_attn": False,
    }
    counted = ("prefill-as-decode",) if prefills and not broken else ()
    failing = "prefill-dispatch" if broken else None
    return Case(lambda: around(made.runner, **arguments), counted, failing, layers.activities)


def dispatch_v2(*, active: bool, prefills: bool = True) -> Case:
    """Model runner V2's states and dispatch, of the same batches."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

    groups = [KVCacheGroupSpec(["layer"], MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,)))]
    made = scenario.DispatchV2(scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1), KVCacheConfig(8, [], groups))
    computed = dict.fromkeys(scenario.REQUESTS, 9)
    if prefills:
        computed["short"] = 4
    for name in scenario.REQUESTS:
        made._states.add(name, 5)
    made._states.look_up(computed)
    scheduled = scenario._scheduler_output(dict.fromkeys(scenario.REQUESTS, 1), list(scenario.REQUESTS), computed)
    layers = _Layers("prefill-dispatch", "shape-only-v2", active=active)
    update = layers.around("GPUModelRunner.update_requests", GPUModelRunner.update_requests)
    choose = layers.around("dispatch_cg_and_sync_dp", dispatch_cg_and_sync_dp)
    manager, tokens = made.runner.cudagraph_manager, len(scenario.REQUESTS)

    def call() -> None:
        update(made.runner, scheduled)
        choose(manager, tokens, tokens, 1, 1, 0)

    return Case(call, ("prefill-as-decode",) if prefills else (), activities=layers.activities)


# -- prompt-logprobs ---------------------------------------------------------------------------------------------------


def samples(*, active: bool, scored: bool = True, broken: bool = False) -> Case:
    """`sample_tokens`, by a stand-in, since vLLM's own needs a whole batch.

    The runner has the same state at each call.
    """
    import torch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    state = ExecuteModelState(
        scheduler_output=SimpleNamespace(num_scheduled_tokens={"scored": ROWS}),
        hidden_states=torch.zeros(ROWS, 8),
        **dict.fromkeys(set(ExecuteModelState._fields) - {"scheduler_output", "hidden_states"}),
    )
    runner = SimpleNamespace(
        num_prompt_logprobs={"scored": 1} if scored else {},
        execute_model_state=state,
        speculative_config=SimpleNamespace(disable_padded_drafter_batch=False, use_eagle=lambda: True),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None if broken else ROWS),
    )

    def sample_tokens(self: Any, grammar_output: Any) -> None:
        self.execute_model_state = None

    layers = _Layers("prompt-logprobs", "draft-first", active=active)
    around = layers.around("GPUModelRunner.sample_tokens", sample_tokens)

    def call() -> None:
        runner.execute_model_state = state
        around(runner, None)

    counted = ("prompt-logprobs-after-draft",) if scored and not broken else ()
    return Case(call, counted, "prompt-logprobs" if broken else None, layers.activities)


# -- adaptive-schedule -------------------------------------------------------------------------------------------------


def steps(*, active: bool, shorter: bool = True, broken: bool = False) -> Case:
    """`prepare_inputs`, by a stand-in, since vLLM's own runs kernels, for a graph of decodes of up to three tokens."""
    import numpy as np
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    descriptor: Any = BatchExecutionDescriptor(CUDAGraphMode.FULL, 3 * ROWS, ROWS, max_query_len=3)
    batch = SimpleNamespace(num_scheduled_tokens=np.ones(REQUESTS, dtype=np.int32))
    if broken:
        batch.num_scheduled_tokens = None

    def prepare_inputs(self: Any, scheduler_output: Any, batch_req_state: Any, batch_desc: Any) -> Any:
        batch.max_query_len = None if shorter else 3
        return batch

    layers = _Layers("adaptive-schedule", "longest-of-the-step", active=active)
    around = layers.around("GPUModelRunner.prepare_inputs", prepare_inputs)
    counted = ("schedule-of-a-shorter-step",) if shorter and not broken else ()
    failing = "adaptive-schedule" if broken else None
    return Case(lambda: around(None, None, None, descriptor), counted, failing, layers.activities)
