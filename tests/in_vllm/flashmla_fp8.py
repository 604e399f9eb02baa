"""flashmla-fp8 on vLLM's own metadata builder, and its nesting with flashmla-padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dense_fp8 import Batch, Planner, builder
from vllm.v1.attention.backends.mla import flashmla

from activities import layers
from vllm_graphfix.fixes import flashmla_fp8, flashmla_padding
from vllm_graphfix.verify.double.flashmla import SM_PARTS
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.scenarios.flashmla_fp8 import MAX_REQUESTS, DenseFP8Decode


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with cpu_cuda_graphs():
        yield


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    return Planner(monkeypatch)


# scheduled tokens and lengths of each row
BATCHES = {
    "every row real": ([1, 1, 1], [60, 127, 200]),
    "more rows": ([1, 1, 1, 1], [1, 255, 64, 65]),
    "padded": ([1, 1, 0, 0], [70, 9, 0, 0]),
    "one row": ([1], [33]),
    "two tokens a request": ([2, 2, 0], [40, 130, 0]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_metadata_are_slices_of_the_persistent_buffers_with_this_batchs_plan(planner: Planner, name: str) -> None:
    own, batch = builder(), Batch(*BATCHES[name])
    own.cg_buf_tile_scheduler_metadata.fill_(-7)
    own.cg_buf_num_splits.fill_(-7)
    plan = own._build_decode(**batch.arguments()).scheduler_metadata
    ((tiles, splits),) = planner.plans
    for pointed_at, buffer, values in (
        (plan.tile_scheduler_metadata, own.cg_buf_tile_scheduler_metadata, tiles),
        (plan.num_splits, own.cg_buf_num_splits, splits),
    ):
        assert pointed_at.data_ptr() == buffer.data_ptr()
        assert pointed_at.stride() == buffer.stride()
        assert torch.equal(pointed_at, values)
        assert torch.equal(buffer[: len(values)], values)
        assert (buffer[len(values) :] == -7).all()


def test_the_addresses_are_the_same_for_every_batch(planner: Planner) -> None:
    own = builder()
    plans = [own._build_decode(**Batch(*batch).arguments()).scheduler_metadata for batch in BATCHES.values()]
    assert len({plan.tile_scheduler_metadata.data_ptr() for plan in plans}) == 1
    assert len({plan.num_splits.data_ptr() for plan in plans}) == 1
    assert len(planner.plans) == len(BATCHES)


def test_they_are_those_that_the_graph_recorded(planner: Planner) -> None:
    decode = DenseFP8Decode(captured_requests=MAX_REQUESTS)
    graph, _ = decode.graphs.captured[MAX_REQUESTS]
    (kernel,) = (o for o in graph.operations if o.name.endswith("fwd_kvcache_mla_fp8"))
    named = dict(zip((a.name for a in kernel.function._schema.arguments), kernel.arguments, strict=False))
    for lengths in ([63, 200], [1, 2, 3, 4], [250]):
        decode.step(lengths)
        tiles, splits = planner.plans[-1]
        assert torch.equal(named["tile_scheduler_metadata"], tiles)
        assert torch.equal(named["num_splits"], splits)


@pytest.mark.parametrize("buffer", ["cg_buf_tile_scheduler_metadata", "cg_buf_num_splits"])
def test_a_plan_that_does_not_fit_stops_with_both_sizes(buffer: str) -> None:
    own, batch = builder(), Batch(*BATCHES["more rows"])
    needed = {"cg_buf_tile_scheduler_metadata": SM_PARTS, "cg_buf_num_splits": len(batch.lengths) + 1}[buffer]
    setattr(own, buffer, getattr(own, buffer)[: needed - 1])
    with pytest.raises(AssertionError) as raised:
        own._build_decode(**batch.arguments())
    name = buffer.removeprefix("cg_buf_")
    assert f"{name} for this batch has {needed} rows" in str(raised.value)
    assert f"has {needed - 1}:" in str(raised.value)


def test_a_plan_of_the_buffers_size_fits() -> None:
    own, batch = builder(), Batch(*BATCHES["more rows"])
    own.cg_buf_tile_scheduler_metadata = own.cg_buf_tile_scheduler_metadata[:SM_PARTS].clone()
    own.cg_buf_num_splits = own.cg_buf_num_splits[: len(batch.lengths) + 1].clone()
    plan = own._build_decode(**batch.arguments()).scheduler_metadata
    assert plan.tile_scheduler_metadata.shape == own.cg_buf_tile_scheduler_metadata.shape
    assert plan.num_splits.shape == own.cg_buf_num_splits.shape


def test_without_full_graphs_the_planners_tensors_are_returned(planner: Planner) -> None:
    metadata = builder(full_graphs=False)._build_decode(**Batch(*BATCHES["every row real"]).arguments())
    ((tiles, splits),) = planner.plans
    assert metadata.scheduler_metadata.tile_scheduler_metadata is tiles
    assert metadata.scheduler_metadata.num_splits is splits


@pytest.mark.parametrize("full_graphs", [False, True])
def test_bf16_is_stock(planner: Planner, monkeypatch: pytest.MonkeyPatch, full_graphs: bool) -> None:
    lazy = flashmla.FlashMLASchedMeta()
    monkeypatch.setattr(flashmla, "get_mla_metadata", lambda *_, **__: (lazy, None))
    own = builder(full_graphs=full_graphs, fp8=False)
    buffers = [b for b in (own.cg_buf_tile_scheduler_metadata, own.cg_buf_num_splits) if b is not None]
    writes = [b._version for b in buffers]
    metadata = own._build_decode(**Batch(*BATCHES["padded"]).arguments())
    assert metadata.scheduler_metadata is lazy
    assert lazy == flashmla.FlashMLASchedMeta()  # as lazy as it was made
    assert [b._version for b in buffers] == writes
    assert not planner.plans


@pytest.mark.parametrize("keywords", [False, True])
def test_all_but_the_plan_is_what_stock_returns(keywords: bool) -> None:
    arguments = Batch(*BATCHES["every row real"]).arguments()
    own = builder()
    metadata = own._build_decode(**arguments) if keywords else own._build_decode(*arguments.values())
    assert type(metadata) is flashmla.FlashMLADecodeMetadata
    assert metadata.block_table is arguments["block_table_tensor"]
    assert metadata.seq_lens is arguments["seq_lens_device"]
    assert metadata.dcp_tot_seq_lens is arguments["dcp_tot_seq_lens_device"]
    assert type(metadata.scheduler_metadata) is flashmla.FlashMLASchedMeta


def test_both_fixes_give_the_same_in_either_order() -> None:
    stock: Any = flashmla.FlashMLAMetadataBuilder._build_decode
    while hasattr(stock, "__wrapped__"):
        stock = stock.__wrapped__
    (_, (fp8,)), (_, (padding,)) = layers(flashmla_fp8.FIX, "new-plan"), layers(flashmla_padding.FIX, "minus-one")
    for build_decode in (fp8.wrap(padding.wrap(stock)), padding.wrap(fp8.wrap(stock))):
        own, batch = builder(), Batch([1, 1, 0, 0], [70, 9, 0, 0])
        metadata = build_decode(own, **batch.arguments())
        assert metadata.seq_lens.tolist() == [70, 9, 1, 1]
        assert metadata.block_table[2:].unique().tolist() == [0]
        plan = metadata.scheduler_metadata
        tiles, splits = flashmla.get_mla_metadata_dense_fp8(torch.tensor([70, 9, 1, 1], dtype=torch.int32), 2, 1)
        assert plan.tile_scheduler_metadata.data_ptr() == own.cg_buf_tile_scheduler_metadata.data_ptr()
        assert plan.num_splits.data_ptr() == own.cg_buf_num_splits.data_ptr()
        assert torch.equal(plan.tile_scheduler_metadata, tiles)
        assert torch.equal(plan.num_splits, splits)
