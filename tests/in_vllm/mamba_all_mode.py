"""mamba-all-mode on two of vLLM's own Mamba-2 builders: which batches of the second one have their indices copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from activities import activity_of
from vllm_graphfix.fixes.mamba_all_mode import INDICES_OF_ANOTHER_GROUP

LARGEST, BLOCK, BLOCKS = 4, 4, 8
INDICES = ("block_idx_last_scheduled_token", "block_idx_last_computed_token")
OLD = 5
"""What the buffers hold before."""
ACTIVITY = activity_of("mamba-all-mode")
INDICES_OF_OTHERS = ACTIVITY.counter(INDICES_OF_ANOTHER_GROUP)


def builder(graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, cache_mode: str = "all") -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=BLOCK * BLOCKS, get_mamba_chunk_size=lambda: BLOCK),
        cache_config=SimpleNamespace(enable_prefix_caching=cache_mode == "all", mamba_cache_mode=cache_mode),
        scheduler_config=SimpleNamespace(max_num_seqs=2 * LARGEST),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=LARGEST),
        speculative_config=None,
    )
    spec = MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=(torch.float32,))
    made = Mamba2AttentionMetadataBuilder(spec, ["model.layers.0.mixer"], config, torch.device("cpu"))
    for name in INDICES:
        if hasattr(made, name):
            getattr(made, name).fill_(OLD)
    return made


def batch(lengths: list[int], scheduled: list[int]) -> Any:
    starts = torch.tensor([0, *scheduled]).cumsum(0).int()
    known = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=known,
        _seq_lens_cpu=known.clone(),
        _num_computed_tokens_cpu=known - starts.diff(),
        num_reqs=len(lengths),
        num_actual_tokens=sum(scheduled),
        max_query_len=max(scheduled),
        max_seq_len=max(lengths),
        block_table_tensor=torch.arange(len(lengths) * BLOCKS, dtype=torch.int32).view(-1, BLOCKS),
        slot_mapping=torch.zeros(64, dtype=torch.int64),
    )


def updated(first: Any, second: Any, lengths: list[int], scheduled: list[int]) -> tuple[Any, Any, int]:
    """Return the first builder's metadata, the second one's update of them for its block table, and the count."""
    before = INDICES_OF_OTHERS.count
    common = batch(lengths, scheduled)
    built = first.build(0, common)
    made = second.update_block_table(built, common.block_table_tensor + 100, common.slot_mapping)
    assert ACTIVITY.error is None
    return built, made, INDICES_OF_OTHERS.count - before


def test_decodes_have_their_indices_in_the_second_groups_own_buffers() -> None:
    first, second = builder(), builder()
    built, made, counted = updated(first, second, [6, 9, 17], [1, 1, 1])
    assert second.block_idx_last_scheduled_token.tolist() == [1, 2, 4, OLD]
    assert second.block_idx_last_computed_token.tolist() == [1, 1, 3, OLD]
    assert counted == 1
    for name in INDICES:  # what the graph reads, and as right without one
        assert getattr(made, name).data_ptr() == getattr(second, name).data_ptr()
        assert getattr(made, name).tolist() == getattr(built, name).tolist()


@pytest.mark.parametrize(
    ("lengths", "scheduled", "graphs"),
    [
        ([6, 9, 17], [1, 1, 3], CUDAGraphMode.FULL_AND_PIECEWISE),
        ([6] * (LARGEST + 1), [1] * (LARGEST + 1), CUDAGraphMode.FULL_AND_PIECEWISE),
        ([6, 9, 17], [1, 1, 1], CUDAGraphMode.PIECEWISE),
    ],
    ids=["with a prefill", "more than the largest graph has", "without full graphs"],
)
def test_steps_without_a_full_graph_are_as_on_stock(
    lengths: list[int], scheduled: list[int], graphs: CUDAGraphMode
) -> None:
    first, second = builder(graphs), builder(graphs)
    _, _, counted = updated(first, second, lengths, scheduled)
    assert counted == 0
    for name in INDICES:
        assert getattr(second, name).tolist() == [OLD] * LARGEST


def test_without_a_state_for_each_block_there_is_nothing_to_copy() -> None:
    _, made, counted = updated(builder(cache_mode="none"), builder(cache_mode="none"), [6, 9], [1, 1])
    assert (counted, made.block_idx_last_scheduled_token) == (0, None)


def test_a_groups_own_indices_are_not_copied_onto_themselves() -> None:
    first = builder()
    _, _, counted = updated(first, first, [6, 9], [1, 1])
    assert counted == 0
    assert first.block_idx_last_scheduled_token.tolist() == [1, 2, OLD, OLD]
