"""flashmla-padding on vLLM's own metadata builder and model runner: what planner and kernel are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dense_fp8 import Batch, Planner, builder

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
PADDED = {
    "one padded row": ([1, 1, 1, 0], [60, 127, 200, 0]),
    "one real row": ([1, 0, 0, 0], [60, 0, 0, 0]),
    "all rows padded": ([0, 0, 0], [0, 0, 0]),
    "one row, padded": ([0], [0]),
    "two tokens a request": ([2, 2, 0, 0], [60, 127, 0, 0]),
    "a real row without tokens on this rank": ([1, 1, 1, 0], [0, 64, 0, 0]),
    "the last real row without tokens on this rank": ([1, 1, 0], [5, 0, 0]),
    "no real row has tokens on this rank": ([1, 1, 0], [0, 0, 0]),
    "an old length in the padding": ([1, 0, 0], [9, 77, -3]),
}
UNPADDED = {
    "every row real": ([1, 1, 1], [60, 127, 200]),
    "one row": ([1], [1]),
    "two tokens a request": ([2, 2], [60, 127]),
    "rows without tokens on this rank": ([1, 1, 1], [0, 64, 0]),
}
padded_batches = pytest.mark.parametrize(("scheduled", "lengths"), PADDED.values(), ids=list(PADDED))
unpadded_batches = pytest.mark.parametrize(("scheduled", "lengths"), UNPADDED.values(), ids=list(UNPADDED))


@padded_batches
@pytest.mark.parametrize("full_graphs", [False, True])
def test_padded_rows_have_a_length_and_blocks_that_exist_and_real_rows_their_own(
    planner: Planner, full_graphs: bool, scheduled: list[int], lengths: list[int]
) -> None:
    batch = Batch(scheduled, lengths)
    metadata = builder(full_graphs=full_graphs)._build_decode(**batch.arguments())
    real = len(scheduled) - scheduled.count(0)
    table, before = batch.values
    assert planner.lengths == [metadata.seq_lens.tolist()]
    assert metadata.seq_lens[:real].tolist() == before[:real].tolist()
    assert torch.equal(metadata.block_table[:real], table[:real])
    assert (metadata.seq_lens[real:] >= 1).all()
    assert (metadata.block_table[real:] == 0).all()  # the null block, of which every cache has one


@padded_batches
def test_it_is_done_in_place(scheduled: list[int], lengths: list[int]) -> None:
    batch = Batch(scheduled, lengths)
    metadata = builder()._build_decode(**batch.arguments())
    assert metadata.seq_lens is batch.lengths
    assert metadata.block_table is batch.table


def test_a_view_of_the_runners_buffers_is_written_no_further_than_the_view() -> None:
    """The runner hands slices: what lies behind the batch is not the batch's."""
    batch = Batch([1, 0, 0, 0], [60, 0, 0, 0])
    arguments = batch.arguments()
    for name, end in (("block_table_tensor", 3), ("seq_lens_device", 3), ("query_start_loc_cpu", 4)):
        arguments[name] = arguments[name][:end]
    metadata = builder()._build_decode(**arguments)
    assert metadata.seq_lens.data_ptr() == batch.lengths.data_ptr()
    assert batch.lengths.tolist() == [60, 1, 1, 0]
    assert batch.table[3].unique().tolist() == [-1]


@padded_batches
def test_the_lengths_before_decode_context_parallelism_are_not_written(
    scheduled: list[int], lengths: list[int]
) -> None:
    batch = Batch(scheduled, lengths)
    metadata = builder()._build_decode(**batch.arguments())
    assert metadata.dcp_tot_seq_lens is batch.total_lengths
    assert batch.total_lengths.tolist() == lengths


@unpadded_batches
def test_without_padding_nothing_is_written(scheduled: list[int], lengths: list[int]) -> None:
    batch = Batch(scheduled, lengths)
    builder()._build_decode(**batch.arguments())
    assert not batch.was_written()


def test_an_idle_ranks_dummy_batch_has_lengths_that_exist(planner: Planner) -> None:
    """Its query starts show a token in each row, and its lengths are 0."""
    batch = Batch([1, 1, 1], [0, 7, 0])
    metadata = builder()._build_decode(**batch.arguments() | {"dcp_tot_seq_lens_device": None})
    assert planner.lengths == [[1, 7, 1]]
    assert metadata.seq_lens is batch.lengths


@pytest.mark.parametrize(
    ("scheduled", "lengths"),
    [*PADDED.values(), *UNPADDED.values()],
    ids=[*PADDED, *(f"unpadded: {n}" for n in UNPADDED)],
)
def test_bf16_is_not_written(scheduled: list[int], lengths: list[int]) -> None:
    batch = Batch(scheduled, lengths)
    builder(fp8=False)._build_decode(**batch.arguments())
    assert not batch.was_written()


@pytest.mark.parametrize("keywords", [False, True])
def test_it_is_called_by_position_or_by_name(keywords: bool) -> None:
    batch = Batch([1, 0], [9, 0])
    arguments = batch.arguments()
    own = builder()
    metadata = own._build_decode(**arguments) if keywords else own._build_decode(*arguments.values())
    assert metadata.seq_lens.tolist() == [9, 1]


class Served:
    """One decode graph of vLLM's model runner, and what its kernel finds at the recorded addresses."""

    def __init__(self) -> None:
        self.decode = DenseFP8Decode(captured_requests=MAX_REQUESTS)
        graph, _ = self.decode.graphs.captured[MAX_REQUESTS]
        (kernel,) = (o for o in graph.operations if o.name.endswith("fwd_kvcache_mla_fp8"))
        named = dict(zip((a.name for a in kernel.function._schema.arguments), kernel.arguments, strict=False))
        self.lengths, self.table = named["cache_seqlens"], named["block_table"]


def test_the_captures_dummy_batch_is_stock(planner: Planner) -> None:
    served = Served()
    assert planner.lengths == [[1] * MAX_REQUESTS]
    assert served.lengths.tolist() == [1] * MAX_REQUESTS
    assert (served.table == 0).all()  # as the runner leaves block tables before the first request


def test_the_recorded_kernel_reads_no_padding_that_does_not_exist(planner: Planner) -> None:
    served = Served()
    blocks = served.decode._block_table.get_device_tensor(MAX_REQUESTS)
    for lengths in ([63, 200], [5], [7, 8, 9, 10], [64, 65, 66]):
        requests = len(lengths)
        served.decode.step(lengths)
        padding = MAX_REQUESTS - requests
        assert planner.lengths[-1] == served.lengths.tolist() == [*lengths, *[1] * padding]
        assert (served.table[requests:] == 0).all()
        assert served.table.data_ptr() == blocks.data_ptr()
        real = served.decode._block_table.get_numpy_array()[:requests]
        assert served.table[:requests].tolist() == real.tolist()
