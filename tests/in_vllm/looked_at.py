"""The claims of docs/looked-at.md on stock vLLM, tested on its own classes, each with its releases."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla import flashmla
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.worker import gpu_model_runner

from any_release import RELEASE, module
from vllm_graphfix.verify.double import flash_attention, idle_runner
from vllm_graphfix.verify.double.arguments import cached_request, input_batch, supported_kwargs
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios import idle_rank, indexer_padding
from vllm_graphfix.verify.double.scenarios import prefill_dispatch as recurrent
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels
from vllm_graphfix.verify.double.unpinned import unpinned

CPU = torch.device("cpu")
LONGEST = 4096


def decodes(tokens: int, lengths: list[int], longest: int) -> CommonAttentionMetadata:
    """A batch of as many requests as there are *lengths*, of *tokens* tokens each."""
    rows, known = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32) * tokens
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": known,
        "_seq_lens_cpu": known.clone(),
        "_num_computed_tokens_cpu": known - tokens,
        "seq_lens_cpu_upper_bound": known.clone(),
        "num_reqs": rows,
        "num_actual_tokens": rows * tokens,
        "max_query_len": tokens,
        "max_seq_len": longest,
        "block_table_tensor": torch.arange(1, 1 + 4 * rows, dtype=torch.int32).view(rows, 4),
        "slot_mapping": torch.arange(rows * tokens),
        "is_prefilling": torch.zeros(rows, dtype=torch.bool),
    }
    return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))


# -- decode context parallelism with drafts (issue 45425)


def sharing_the_context(ranks: int, drafts: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, method="mtp", use_parallel_drafting=lambda: False
        ),
        num_speculative_tokens=drafts,
    )


@pytest.mark.parametrize(("ranks", "threshold"), [(1, 128), (2, 1)])
def test_on_ranks_that_share_the_context_decodes_with_drafts_are_flashmla_prefills(ranks: int, threshold: int) -> None:
    """So that a capture of them ends in an error, where vLLM captures by `build_for_cudagraph_capture`."""
    builder = object.__new__(flashmla.FlashMLAMetadataBuilder)
    builder.vllm_config = sharing_the_context(ranks, 1)
    builder._init_reorder_batch_threshold(128, True, False)
    assert builder.reorder_batch_threshold == threshold
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH, "full graphs of decodes with drafts"
    batch = decodes(2, [9, 23], LONGEST)
    counted = split_decodes_and_prefills(batch, decode_threshold=threshold, require_uniform=True)
    assert counted[:2] == ((2, 0) if ranks == 1 else (0, 2))
    with mock.patch.object(type(builder), "build", return_value="built"):
        if ranks == 1:
            assert builder.build_for_cudagraph_capture(batch) == "built"
        else:
            with pytest.raises(AssertionError):
                builder.build_for_cudagraph_capture(batch)


def test_v2_captures_without_that_check_from_0_17_to_0_20() -> None:
    names = ("gpu.attn_utils", "gpu.model_states.default", "utils")  # the last from 0.32 on
    modules = [loaded for name in names if (loaded := module(f"vllm.v1.worker.{name}"))]
    source = "".join(map(inspect.getsource, modules))
    shared = "dcp_local_seq_lens" in source
    checked = ".build_for_cudagraph_capture(" in source
    assert shared == (RELEASE >= (0, 17)), "V2 knows of ranks that share the context"
    assert checked == (RELEASE >= (0, 21))


def test_flashinfer_on_blackwell_has_full_graphs_of_such_decodes_up_to_0_29() -> None:
    names = ["", ".decode", ".prefill", ".utils", ".autotuner", ".comm"]
    with mock.patch.dict(sys.modules, {f"flashinfer{name}": mock.MagicMock() for name in names}):
        flashinfer = importlib.import_module("vllm.v1.attention.backends.flashinfer")
    cls = flashinfer.FlashInferMetadataBuilder
    config = sharing_the_context(2, 1)
    config.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: 8)
    config.attention_config = SimpleNamespace(use_non_causal=False)
    spec = module("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
    )
    with mock.patch.object(flashinfer, "can_use_trtllm_attention", return_value=True):
        support = cls.get_cudagraph_support(config, spec)
    guarded = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support is (guarded if RELEASE >= (0, 30) else AttentionCGSupport.UNIFORM_BATCH)
    builder = object.__new__(cls)
    builder.vllm_config = config
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    assert builder.reorder_batch_threshold == 1, "and its builder takes them for prefills"
    assert "build_for_cudagraph_capture" not in vars(cls), "which no check keeps out of a capture"


# -- the null block (issues 57156 and 36939, PR 39444)


def test_a_dummy_run_writes_the_null_block_from_0_15_to_0_19() -> None:
    """Model runner V1, outside of full graphs: as before captures, and on a rank without work."""

    class Rank(idle_rank._Rank):
        mode = CUDAGraphMode.NONE

    written: list[int] = []
    with unpinned(), mock.patch.object(idle_runner, "write_slots", lambda _, slots, __: written.extend(slots.tolist())):
        Rank().idle()
    slot = 0 if RELEASE < (0, 20) else -1
    assert written == ([] if RELEASE < (0, 15) else [slot])


# -- lengths of DeepSeek V4's indexer in a capture (issue 51970)


def test_a_capture_of_single_tokens_has_zero_lengths_of_compressed_keys_for_deepgemm() -> None:
    indexer = module("vllm.v1.attention.backends.mla.indexer")
    if not hasattr(indexer, "get_compressed_slot_mapping"):
        assert RELEASE < (0, 20), "DeepSeek V4 is not there"
        return
    if RELEASE >= (0, 28):  # whose builder wants more of a configuration than is made up here
        source = inspect.getsource(indexer.DeepseekV32IndexerMetadataBuilder.build)
        assert "seq_lens // self.compress_ratio" in source
        assert "get_paged_mqa_logits_metadata(\n                    seq_lens,\n" in source
        return
    lengths_read: list[Any] = []
    builder = indexer_padding.builder(0, compress_ratio=4)

    def schedule(lengths: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        lengths_read.append(lengths.flatten().tolist())
        return torch.zeros_like(builder.scheduler_metadata_buffer)

    names: dict[str, Any] = {
        "current_platform": SimpleNamespace(is_cuda=lambda: True, is_device_capability_family=lambda _: False),
        "has_deep_gemm": lambda: True,
        "get_paged_mqa_logits_metadata": schedule,
        "get_compressed_slot_mapping": lambda *_, **__: torch.zeros(4, dtype=torch.int64),
    }
    with mock.patch.multiple(indexer, **names):
        builder.build(0, indexer_padding.Batches(4).batch([1] * 4, [1] * 4))
    assert lengths_read == [[0] * 4]


# -- counts of accepted drafts in rows that move (issue 51571, PRs 51599 and 53919)


def gathered(batch: Any, before: list[str]) -> list[int]:
    """Return the counts that `_prepare_inputs` of model runner V1 makes; *before* is the order of the last step.

    Its own statements, taken out of it.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(gpu_model_runner.GPUModelRunner._prepare_inputs)))
    conditions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.use_async_scheduling and prev_req_id_to_index"
    ]
    (statement,) = [node for node in conditions if "num_accepted_tokens_cpu" in ast.unparse(node)]
    runner = SimpleNamespace(
        use_async_scheduling=True,
        input_batch=batch,
        prev_positions=SimpleNamespace(np=np.array([before.index(name) for name in batch.req_ids])),
        num_accepted_tokens=SimpleNamespace(np=np.zeros(len(batch.req_ids), dtype=np.int64)),
    )
    names = {"self": runner, "np": np, "num_reqs": len(batch.req_ids), "prev_req_id_to_index": {"any": 0}}
    exec(compile(ast.Module([statement], []), "_prepare_inputs", "exec"), names)  # noqa: S102 - vLLM's own code
    counts_of_rows: list[int] = runner.num_accepted_tokens.np.tolist()
    return counts_of_rows


@pytest.mark.parametrize("copy_is_late", [False, True])
def test_counts_of_accepted_drafts_follow_rows_twice_if_the_copy_was_early(copy_is_late: bool) -> None:
    if RELEASE < (0, 19):  # prefix caching of recurrent layers and asynchronous scheduling exclude each other
        assert "prev_positions" not in inspect.getsource(gpu_model_runner.GPUModelRunner._prepare_inputs)
        return
    with unpinned():
        batch = input_batch(4, 32, 64, [16], CPU)
    before = ["prompt", "first", "second"]
    for name in before:
        batch.add_request(cached_request(name, [0] * 4, ([1],), 4))
    counts = np.array([1, 3, 2])
    if not copy_is_late:
        batch.num_accepted_tokens_cpu[:3] = counts  # the copy of the last step, in its order of rows
    batch.swap_states(0, 2)  # decodes come first, as `_may_reorder_batch` sorts them
    assert batch.req_ids == ["second", "first", "prompt"]
    if copy_is_late:
        batch.num_accepted_tokens_cpu[:3] = counts
    of_each = dict(zip(batch.req_ids, gathered(batch, before), strict=True))
    right = {"prompt": 1, "first": 3, "second": 2}
    assert of_each == (right if copy_is_late else right | {"prompt": 2, "second": 1})


# -- n-gram drafts on gated delta nets (issues 39273 and 40875, PRs 40738, 52942 and 56531)


def test_up_to_0_31_a_row_without_drafts_reads_the_first_slot_of_its_state() -> None:
    """A step in which the second request has no drafts; three tokens of each were accepted in the last one."""
    backend = module("vllm.v1.attention.backends.gdn_attn").GDNAttentionBackend
    specs = module("vllm.v1.kv_cache_interface").MambaSpec
    length = 3
    spec = specs(
        block_size=recurrent.MAX_MODEL_LEN,
        shapes=((2,),),
        dtypes=(torch.float32,),
        **supported_kwargs(specs, {"num_speculative_blocks": length - 1}),
    )
    config = recurrent._config(CUDAGraphMode.NONE, length)
    builder = backend.get_builder_cls()(spec, [recurrent.LAYER], config, CPU)
    common = recurrent._common_metadata([length, 1], [9, 9], length, [False, False])
    # What the model runner says of a decode without drafts.
    prepared = inspect.getsource(gpu_model_runner.GPUModelRunner._prepare_inputs)
    counted_as_drafted = "zero_draft_decode_mask" in prepared
    assert counted_as_drafted == (RELEASE >= (0, 32))
    drafts = {
        "num_accepted_tokens": torch.tensor([3, 3], dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.tensor([length - 1, 0 if counted_as_drafted else -1], dtype=torch.int32),
    }
    if RELEASE[:2] == (0, 17):
        with pytest.raises(AssertionError, match="num_spec_decodes"):
            builder.build(0, common, **drafts)
        return
    with unpinned():
        metadata = builder.build(0, common, **drafts)
    slots = common.block_table_tensor.tolist()
    if counted_as_drafted:
        assert metadata.non_spec_state_indices_tensor is None
        assert metadata.spec_state_indices_tensor.tolist() == slots
        assert metadata.num_accepted_tokens.tolist() == [3, 3], "by which the kernel finds the third slot"
    else:
        assert metadata.non_spec_state_indices_tensor.tolist() == [slots[1][0]]
        assert metadata.num_accepted_tokens.tolist() == [3], "that of the other row"


# -- FlashAttention 3 with adaptive verification


def test_from_0_28_a_schedule_for_fewer_drafts_than_the_graphs_is_for_another_kernel() -> None:
    """In a graph of decodes of up to three tokens. What such a kernel does is assumed, as in `flash-mixed-schedule`."""
    verification = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    assert (verification is not None) == (RELEASE >= (0, 28))
    if verification is None:
        return
    runner = inspect.getsource(importlib.import_module("vllm.v1.worker.gpu.model_runner"))
    assert "int(num_scheduled_tokens_upper_bound.max())" in runner, "the longest of the step, not of the graph"
    capture, steps = ([3, 3], [3, 3]), [([2, 1], [9, 14]), ([3, 2], [12, 16])]

    def served(mode: CUDAGraphMode) -> list[float]:
        with flash_attention.flash_attention_stand_ins(3):
            builder = flash_attention.metadata_builder(mode, 2, [6])
            return flash_attention.attend(builder, capture, steps, 2, 6)

    eager = served(CUDAGraphMode.NONE)
    with cpu_cuda_graphs():
        graphed = served(CUDAGraphMode.FULL_DECODE_ONLY)
    wrong = [not np.isclose(one, other) for one, other in zip(eager, graphed, strict=True)]
    first = len(wrong) * 3 // 8  # numbers of the first step, which has three of eight tokens
    assert all(wrong[:first]), "two is not the three that the graph was captured with"
    assert not any(wrong[first:])


# -- draft lengths by batch size (issue 48494, PR 48329)


@pytest.mark.skipif(RELEASE < (0, 25), reason="V2's graphs know of them from 0.25.0 on")
@pytest.mark.parametrize("fewest", [2, 1])
def test_graphs_of_a_drafts_decode_are_for_impossible_lengths_up_to_0_31(fewest: int) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    drafts = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True,
        num_speculative_tokens_per_batch_size=[(1, 4, 3), (5, 8, fewest)],
    )
    config = mock.MagicMock(num_speculative_tokens=3, speculative_config=drafts)
    config.scheduler_config.max_num_seqs = 8
    config.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)

    def graphs(query: int) -> list[tuple[int, int]]:
        with cpu_cuda_graphs():
            manager: Any = CudaGraphManager(config, CPU, CUDAGraphMode.FULL_AND_PIECEWISE, query)
        return [(graph.num_reqs, graph.num_tokens) for graph in manager._capture_descs[CUDAGraphMode.FULL]]

    assert all(0 < requests <= tokens for requests, tokens in graphs(4)), "the target's are right"
    if RELEASE >= (0, 32):
        assert all(0 < requests <= tokens for requests, tokens in graphs(1))
    elif fewest == 2:
        with pytest.raises(ZeroDivisionError):
            graphs(1)
    else:
        assert any(requests <= 0 for requests, _ in graphs(1)), "which InputBatch.make_dummy refuses"


# -- chunked local attention


@pytest.mark.skipif(not (0, 17, 0) <= RELEASE < (0, 20, 0), reason="model runner V2 asks backends from 0.20.0 on")
def test_chunked_local_attention_has_no_graphs_and_new_lengths_and_tables_each_step() -> None:
    from vllm.model_executor.layers.attention import chunked_local_attention as chunked
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    make = chunked.create_chunked_local_attention_backend
    arguments = {"underlying_attn_backend": FlashAttentionBackend, "attention_chunk_size": 4, "block_size": 4}
    builder = make(**supported_kwargs(make, arguments)).get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    lengths = [9, 23]
    batch = decodes(1, lengths, LONGEST)
    batch.block_table_tensor = torch.arange(2 * LONGEST // 4, dtype=torch.int32).view(2, -1)
    made = [chunked.make_local_attention_virtual_batches(4, batch, 4)[0] for _ in range(2)]
    assert [each.seq_lens.tolist() for each in made] == [[(length - 1) % 4 + 1 for length in lengths]] * 2
    places = {each.seq_lens.data_ptr() for each in (batch, *made)}
    assert len(places) == len({each.block_table_tensor.data_ptr() for each in (batch, *made)}) == 3


# -- recurrent states of drafts in a pipeline (issues 55951 and 55506)


def test_up_to_0_31_states_are_saved_by_the_block_tables_of_another_batch() -> None:
    """Requests 3 and 1 were rows 0 and 1 of the batch whose tokens are received; rows may be others' by now."""
    states = module("vllm.v1.worker.mamba_utils")
    kernel = getattr(states, "postprocess_mamba_fused_kernel", None)
    if kernel is None or "HAS_IDX_MAPPING" not in inspect.signature(kernel_body(kernel)).parameters:
        assert RELEASE < (0, 25)
        return
    rows: list[int] = []

    def copied(state: Any, row: Any, *_: Any) -> None:
        rows.append(int(row))

    requests = torch.tensor([3, 1], dtype=torch.int32)
    # Two of three tokens were accepted, and the last one completes a block of four.
    accepted, computed = (torch.full((4,), value, dtype=torch.int32) for value in (2, 8))
    running = torch.full((4,), 5, dtype=torch.int32)
    values = {
        "num_accepted_tokens_ptr": accepted,
        "mamba_state_idx_ptr": running,
        "num_computed_tokens_ptr": computed,
        "num_accepted_tokens_out_ptr": accepted.clone(),
        "idx_mapping_ptr": requests,
        "num_reqs": 2,
    }
    constants = {
        "block_size": 4,
        "COPY_BLOCK_SIZE": 1024,
        "CONV_STATE_DIM_FIRST": False,
        "HAS_IDX_MAPPING": True,
        "PRECOMPUTED_NEW_COMPUTED": True,
    }
    parameters = inspect.signature(kernel_body(kernel)).parameters
    with mock.patch.object(states, "_copy_mamba_state_block", copied), cpu_triton_kernels(states):
        arguments = [values.get(name) for name in parameters if name not in constants and name != "TEMPORAL_TILES"]
        states.postprocess_mamba_fused_kernel[(2, 1, 1)](*arguments, **constants)
    assert rows == ([0, 1] if RELEASE < (0, 32) else [3, 1])


def kernel_body(kernel: Any) -> Any:
    return getattr(kernel, "fn", kernel)


# -- rows of draft tokens that are remembered from another pass


def test_from_0_25_tokens_after_the_first_draft_are_mapped_as_in_the_first_pass() -> None:
    """Three requests of three tokens each; V1's draft loop, by its own statements, goes on with a token of each."""
    if not hasattr(CommonAttentionMetadata, "token_to_req_indices"):
        assert RELEASE < (0, 25)
        return
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    names = ("num_actual_tokens", "max_query_len", "query_start_loc", "query_start_loc_cpu")
    loop = ast.parse(textwrap.dedent(inspect.getsource(SpecDecodeBaseProposer.propose)))
    targets = {f"common_attn_metadata.{name}" for name in names}
    changed: list[ast.stmt] = [
        node for node in ast.walk(loop) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in targets
    ]
    assert len(changed) == len(targets)
    assert "_cache" not in "".join(map(ast.unparse, changed))
    batch, buffer = decodes(3, [9, 23, 5], LONGEST), torch.zeros(9, dtype=torch.int32)
    # As the builders of the first pass leave it; the map itself is a kernel's from 0.30 on.
    batch._token_to_req_indices_cache = buffer[:9].copy_(torch.arange(9) // 3)
    assert batch.token_to_req_indices(buffer).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    proposer = SimpleNamespace(arange=torch.arange(8, dtype=torch.int32), token_arange_np=np.arange(8))
    context = vars(sys.modules[SpecDecodeBaseProposer.__module__]) | {
        "self": proposer,
        "batch_size": 3,
        "common_attn_metadata": batch,
    }
    exec(compile(ast.Module(changed, []), "propose", "exec"), context)  # noqa: S102 - vLLM's own code
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3]
    assert batch.token_to_req_indices(buffer).tolist() == [0, 0, 0], "and not 0, 1, 2"


# -- metadata of micro-batches (PRs 43966, 49542 and 56031)


def test_a_micro_batch_has_no_positions_up_to_0_32_and_does_not_say_which_rows_are_prefilling() -> None:
    slicing = module("vllm.v1.worker.ubatch_utils")
    of_batch = getattr(slicing, "_make_metadata_with_slice", None)
    if of_batch is None:
        of_batch = module("vllm.v1.attention.backends.utils")._make_metadata_with_slice
    batch = decodes(1, [9, 23, 5, 7], LONGEST)
    known = {name for name in ("positions", "is_prefilling") if hasattr(batch, name)}
    assert known == {name for name, since in (("is_prefilling", 19), ("positions", 20)) if (0, since) <= RELEASE}
    if "positions" in known:
        batch.positions = torch.arange(4)
    half = of_batch(slicing.UBatchSlice(slice(0, 2), slice(0, 2)), batch)
    present = {name for name in known if getattr(half, name) is not None}
    assert present == ({"positions"} if RELEASE >= (0, 33) else set())


# -- scales of an fp8 cache after sleep (PRs 45617 and 53508)


def test_up_to_0_28_a_wake_up_sets_scales_of_the_cache_to_one() -> None:
    restore = getattr(gpu_model_runner.GPUModelRunner, "init_fp8_kv_scales", None)
    assert (restore is not None) == (RELEASE < (0, 29))
    if restore is None:
        return
    layer: Any = object.__new__(gpu_model_runner.Attention)
    torch.nn.Module.__init__(layer)
    layer._k_scale, layer._v_scale, layer._k_scale_float = torch.tensor(0.5), torch.tensor(0.25), 0.5
    runner = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        kv_caches=[],
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    restore(runner)
    assert [layer._k_scale.item(), layer._v_scale.item()] == [1.0, 1.0]
    assert layer._k_scale_float == 0.5, "which kernels that take numbers of the host go on with"
