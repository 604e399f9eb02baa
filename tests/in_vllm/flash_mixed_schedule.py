"""flash-mixed-schedule on vLLM's own metadata builder: which batches are scheduled for the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from activities import activity_of
from vllm_graphfix.fixes.flash_mixed_schedule import SCHEDULES_MADE_FOR_THE_GRAPH
from vllm_graphfix.verify.double.flash_attention import Rows, flash_attention_stand_ins, metadata_builder

REQUESTS, SIZES = 4, (4, 8)
ACTIVITY = activity_of("flash-mixed-schedule")
SCHEDULES = ACTIVITY.counter(SCHEDULES_MADE_FOR_THE_GRAPH)


@pytest.fixture(autouse=True)
def _nothing_fails() -> Iterator[None]:
    ACTIVITY.error = None
    yield
    assert ACTIVITY.error is None


def built(
    queries: list[int],
    tokens: int,
    *,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
    version: int = 3,
    builder: type[FlashAttentionMetadataBuilder] | None = None,
    **inputs: bool,
) -> tuple[int, int | None, int]:
    """The longest query in the metadata, that of the schedule, and how much was counted.

    The batch has so many *tokens*.
    """
    batch = Rows(REQUESTS).batch(queries, queries, REQUESTS, tokens)
    before = SCHEDULES.count
    with flash_attention_stand_ins(version):
        made = metadata_builder(mode, REQUESTS, SIZES)
        if builder is not None:
            made.__class__ = builder
        metadata = made.build(0, batch, **inputs)
    assert batch.max_query_len == max(queries)  # others read it
    assert metadata.query_start_loc is batch.query_start_loc
    schedule = metadata.scheduler_metadata
    return (metadata.max_query_len, None if schedule is None else int(schedule[0]), SCHEDULES.count - before)


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 5, 1], [3, 4]])
def test_a_batch_of_a_graph_has_the_length_of_its_capture(queries: list[int]) -> None:
    assert built([8], 8) == (8, 8, 0)
    assert built(queries, 8) == (8, 8, 1)


@pytest.mark.parametrize(("queries", "length"), [([1, 1, 1], 4), ([1, 1, 1, 2], 8)])
def test_a_batch_that_is_padded_later_has_the_length_of_the_graph_that_it_will_have(
    queries: list[int], length: int
) -> None:
    assert built(queries, sum(queries)) == (length, length, 1)


def test_a_batch_larger_than_every_graph_is_stocks() -> None:
    assert built([3, 6], 9) == (6, 6, 0)


@pytest.mark.parametrize("mode", [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.FULL])
def test_where_no_full_graph_holds_prompts_every_batch_is_stocks(mode: CUDAGraphMode) -> None:
    assert built([1, 5, 1], 8, mode=mode) == (5, 5, 0)


def test_a_mode_that_vllm_has_changed_since_counts() -> None:
    with flash_attention_stand_ins(3):
        builder = metadata_builder(CUDAGraphMode.FULL, REQUESTS, SIZES)
        builder.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        assert builder.build(0, Rows(REQUESTS).batch([1, 1, 1], [1, 1, 1], REQUESTS, 4)).max_query_len == 1


@pytest.mark.parametrize("version", [2, 4])
def test_other_versions_of_flash_attention_are_not_touched(version: int) -> None:
    assert built([1, 5, 1], 8, version=version) == (5, None, 0)


def test_a_draft_without_a_schedule_keeps_its_length() -> None:
    assert built([1, 1, 1], 4, fast_build=True) == (1, None, 0)


def test_a_builder_that_is_derived_from_it_has_the_length_of_its_own_batch() -> None:
    class Halved(FlashAttentionMetadataBuilder):  # type: ignore[misc]
        """A builder like those of vLLM that hand on a batch of their own."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            own = Rows(REQUESTS).batch([1, 2], [1, 2], REQUESTS, 4)
            own.query_start_loc = common_attn_metadata.query_start_loc
            return super().build(common_prefix_len, own, fast_build)

    assert built([1, 5, 1], 8, builder=Halved) == (4, 4, 1)
