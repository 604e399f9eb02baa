"""indexer-padding on vLLM's own builder of the indexer's metadata.

Every way through it, and who reads the lengths afterwards.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mla import indexer

from activities import activity_of, layers
from vllm_graphfix.fixes.indexer_padding import FIX, PADDED_ROWS_BELOW_ZERO
from vllm_graphfix.verify.double.scenarios.indexer_padding import CAPTURED, Batches, builder
from vllm_graphfix.verify.double.triton_kernels import cpu_triton_kernels

KIND = indexer.DeepseekV32IndexerMetadataBuilder
UNWRITTEN = -7
"""What is in the builder's buffer before: a clamp that goes too far would show."""
ACTIVITY = activity_of("indexer-padding")
PADDED_BATCHES = ACTIVITY.counter(PADDED_ROWS_BELOW_ZERO)


def prepared(own: Any, scheduled: list[int], lengths: list[int], **further: Any) -> Any:
    """The indexer's metadata of a decode batch."""
    with cpu_triton_kernels(indexer):
        metadata = own.build(0, Batches(len(scheduled)).batch(scheduled, lengths, **further))
    assert metadata.num_decodes == len(scheduled)
    return metadata.decode


def fresh(draft_tokens: int, **kind: Any) -> Any:
    own = builder(draft_tokens, requests=8, **kind)
    own.decode_seq_lens_buffer.fill_(UNWRITTEN)
    return own


def on_stock(draft_tokens: int, scheduled: list[int], lengths: list[int], **kind: Any) -> tuple[torch.Tensor, Any]:
    """The same lengths without the fix, and the builder that made them."""
    own = fresh(draft_tokens, **kind)
    own._prepare_decode_tensors = KIND._prepare_decode_tensors.__wrapped__.__get__(own)
    return prepared(own, scheduled, lengths).seq_lens, own


# draft tokens, scheduled tokens and lengths of each row
ONE_DRAFT_TOKEN = {
    "one padded row": ([2, 2, 2, 0], [60, 127, 9, 0]),
    "most rows padded": ([2, 0, 0, 0, 0], [2, 0, 0, 0, 0]),
    "no padded row": ([2, 2, 2], [60, 127, 2]),
    "one request": ([2], [2]),
    "a row of length 0 that the host does not know of": ([2, 2, 2], [60, 0, 0]),
    "a draft's decodes": ([1, 1, 0], [60, 127, 0]),
}
one_draft_token = pytest.mark.parametrize(("scheduled", "lengths"), ONE_DRAFT_TOKEN.values(), ids=list(ONE_DRAFT_TOKEN))


@pytest.fixture(autouse=True)
def _nothing_fails() -> Any:
    ACTIVITY.error = None
    yield
    assert ACTIVITY.error is None


@one_draft_token
def test_lengths_of_tokens_are_stocks_or_zero(scheduled: list[int], lengths: list[int]) -> None:
    stock, _ = on_stock(1, scheduled, lengths)
    result = prepared(fresh(1), scheduled, lengths).seq_lens
    assert result.tolist() == [[max(0, n) for n in row] for row in stock.tolist()]
    assert (result.shape, result.stride(), result.dtype) == (stock.shape, stock.stride(), stock.dtype)
    assert (int(stock.min()) < 0) == (0 in lengths and max(scheduled) > 1), "or this would show nothing"


@one_draft_token
def test_it_is_done_in_the_builders_buffer_and_no_further(scheduled: list[int], lengths: list[int]) -> None:
    own = fresh(1)
    stock, other = on_stock(1, scheduled, lengths)
    buffer = own.decode_seq_lens_buffer
    decode = prepared(own, scheduled, lengths)
    assert own.decode_seq_lens_buffer is buffer
    assert decode.seq_lens.data_ptr() == buffer.data_ptr()
    assert (
        (buffer == UNWRITTEN).sum()
        == (other.decode_seq_lens_buffer == UNWRITTEN).sum()
        == buffer.numel() - stock.numel()
    )


@one_draft_token
def test_the_runners_tensors_are_not_written(scheduled: list[int], lengths: list[int]) -> None:
    batches = Batches(len(scheduled))
    batch = batches.batch(scheduled, lengths)
    before = batches.lengths._version, batches.table._version, batches.starts._version
    fresh(1).build(0, batch)
    assert (batches.lengths._version, batches.table._version, batches.starts._version) == before
    assert batches.lengths.tolist() == lengths


@one_draft_token
def test_what_else_is_prepared_is_stocks(scheduled: list[int], lengths: list[int]) -> None:
    own = fresh(1)
    result = prepared(own, scheduled, lengths)
    own._prepare_decode_tensors = KIND._prepare_decode_tensors.__wrapped__.__get__(own)
    stock = prepared(own, scheduled, lengths)
    assert result.requires_padding == stock.requires_padding
    for name in ("block_table", "decode_lens"):
        assert torch.equal(getattr(result, name), getattr(stock, name)), name


@pytest.mark.parametrize("lengths", [[60, 127, 0], [60, -1, 0]], ids=["as the runner pads", "below 0"])
def test_without_draft_tokens_the_runners_lengths_are_handed_on_as_they_are(lengths: list[int]) -> None:
    """Written by nobody, whatever they are."""
    batches = Batches(3)
    batch = batches.batch([1, 1, 0], lengths)
    before = batches.lengths._version
    decode = fresh(0).build(0, batch).decode
    assert decode.seq_lens.data_ptr() == batches.lengths.data_ptr()
    assert (decode.seq_lens.flatten().tolist(), batches.lengths._version) == (lengths, before)


def test_a_drafts_decodes_cost_no_write() -> None:
    """One token in each row: its length is its request's."""
    own, other = fresh(1), fresh(1)
    other._prepare_decode_tensors = KIND._prepare_decode_tensors.__wrapped__.__get__(other)
    for each in (own, other):
        prepared(each, [1, 1, 0], [60, 127, 0])
    assert own.decode_seq_lens_buffer._version == other.decode_seq_lens_buffer._version


def test_several_draft_tokens_on_blackwell() -> None:
    scheduled, lengths = [4, 4, 0], [60, 4, 0]
    stock, _ = on_stock(3, scheduled, lengths, blackwell=True)
    assert stock[2].tolist() == [-3, -2, -1, 0]
    result = prepared(fresh(3, blackwell=True), scheduled, lengths).seq_lens
    assert result.tolist() == [[57, 58, 59, 60], [1, 2, 3, 4], [0] * 4]


def test_fewer_tokens_than_the_model_could_draft() -> None:
    """A batch of short prompts' ends, as long as each other: the view is narrower than the buffer may be."""
    own = fresh(3, blackwell=True)
    result = prepared(own, [2, 2, 0], [60, 127, 0]).seq_lens
    assert result.tolist() == [[59, 60], [126, 127], [0, 0]]
    assert (own.decode_seq_lens_buffer == UNWRITTEN).sum() == own.decode_seq_lens_buffer.numel() - 6


# Elsewhere, several draft tokens are cut into rows of one token each.
FLAT = {
    "padding that the host knows of": ([3, 3, 0], [60, 127, 0]),
    "uniform": ([3, 3], [60, 3]),
    "uniform, a row of length 0 that the host does not know of": ([3, 3], [60, 0]),
    "different": ([3, 1, 2], [60, 1, 2]),
    "different, a row of length 0 that the host does not know of": ([3, 2], [60, 0]),
}


@pytest.mark.parametrize(("scheduled", "lengths"), FLAT.values(), ids=list(FLAT))
def test_several_draft_tokens_on_other_gpus(scheduled: list[int], lengths: list[int]) -> None:
    stock, _ = on_stock(2, scheduled, lengths)
    own = fresh(2)
    result = prepared(own, scheduled, lengths).seq_lens
    assert result.flatten().tolist() == [max(0, n) for n in stock.flatten().tolist()]
    assert result.data_ptr() == own.decode_seq_lens_buffer.data_ptr()
    assert (int(stock.min()) < 0) == (lengths[-1] == 0 and scheduled[-1] > 0), "or this would show nothing"


def test_deep_gemms_schedule_is_made_of_what_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled_from: list[list[list[int]]] = []

    def schedule(lengths: torch.Tensor, block_size: int, parts: int) -> torch.Tensor:
        scheduled_from.append(lengths.tolist())
        return torch.zeros(parts + 1, 2, dtype=torch.int32)

    own = fresh(1)
    monkeypatch.setattr(indexer, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(indexer, "get_paged_mqa_logits_metadata", schedule)
    decode = prepared(own, [2, 2, 0], [60, 127, 0])
    assert scheduled_from == [decode.seq_lens.tolist()] == [[[59, 60], [126, 127], [0, 0]]]


def test_lengths_in_compressed_tokens_are_made_of_what_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths are those of DeepSeek V4: -1 divided by 4 would be -1 again."""
    monkeypatch.setattr(indexer, "get_compressed_slot_mapping", lambda *_, out, **__: out)
    own = fresh(1, compress_ratio=4)
    decode = prepared(own, [2, 2, 0], [60, 129, 0])
    assert decode.seq_lens.tolist() == [[14, 15], [32, 32], [0, 0]]
    assert decode.seq_lens.data_ptr() == own.decode_seq_lens_buffer.data_ptr()


@pytest.mark.skipif(not hasattr(KIND, "_dcp_localize_decode_seq_lens"), reason="from 0.25.0 on")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_share_of_a_context_parallel_rank_is_made_of_what_is_corrected(rank: int) -> None:
    """On stock the last rank's share of -1 tokens is -1."""
    own = fresh(1)
    own.dcp_world_size, own.dcp_rank = 2, rank
    decode = prepared(own, [2, 2, 0], [60, 127, 0], dcp_local_seq_lens=torch.zeros(3, dtype=torch.int32))
    assert decode.seq_lens.tolist() == [[[30, 30], [63, 64], [0, 0]], [[29, 30], [63, 63], [0, 0]]][rank]


def test_the_captures_dummy_batch_is_stock() -> None:
    scheduled = lengths = [2] * CAPTURED
    stock, _ = on_stock(1, scheduled, lengths)
    before = PADDED_BATCHES.count
    assert torch.equal(prepared(fresh(1), scheduled, lengths).seq_lens, stock)
    assert PADDED_BATCHES.count == before


def test_every_batch_is_in_the_buffer_that_was_captured() -> None:
    own = builder(1)
    address = prepared(own, [2] * CAPTURED, [2] * CAPTURED).seq_lens.data_ptr()
    for requests in (3, 1, 4, 2):
        padding = [0] * (CAPTURED - requests)
        decode = prepared(own, [2] * requests + padding, [9] * requests + padding)
        assert decode.seq_lens.data_ptr() == address
        assert decode.seq_lens.tolist() == [[8, 9]] * requests + [[0, 0]] * len(padding)


@pytest.mark.parametrize(
    ("draft_tokens", "scheduled", "lengths", "counted"),
    [
        (1, [2, 2, 0], [60, 127, 0], 1),
        (1, [2, 2], [60, 127], 0),
        (1, [1, 1, 0], [60, 127, 0], 0),
        (0, [1, 1, 0], [60, 127, 0], 0),
        (2, [3, 3, 0], [60, 127, 0], 0),
    ],
    ids=["padded", "not padded", "a draft's decodes", "no draft tokens", "cut into rows of one token"],
)
def test_batches_are_counted_whose_padding_gives_lengths_below_zero_on_stock(
    draft_tokens: int, scheduled: list[int], lengths: list[int], counted: int
) -> None:
    before = PADDED_BATCHES.count
    prepared(fresh(draft_tokens), scheduled, lengths)
    assert PADDED_BATCHES.count - before == counted


def test_a_forks_builder_is_corrected_too() -> None:
    own = fresh(1)
    own.__class__ = type("BuilderOfAFork", (KIND,), {})
    assert prepared(own, [2, 0], [9, 0]).seq_lens.tolist() == [[8, 9], [0, 0]]


ARGUMENTS = (
    "seq_lens",
    "block_table",
    "decode_lens",
    "decode_lens_cpu",
    "query_start_loc",
    "num_decodes",
    "num_decode_tokens",
    "use_native",
    "next_n",
    "max_decode_len",
)


def arguments() -> dict[str, Any]:
    lengths, table, scheduled = (
        torch.tensor(values, dtype=torch.int32) for values in ([9, 0], [[1, 2, 3], [0, 0, 0]], [2, 0])
    )
    starts = torch.tensor([0, 2], dtype=torch.int32)
    return dict(zip(ARGUMENTS, (lengths, table, scheduled, scheduled.clone(), starts, 2, 4, True, 2, 2), strict=True))


@pytest.mark.parametrize("keywords", [False, True])
def test_it_is_called_by_position_or_by_name(keywords: bool) -> None:
    own, inputs = fresh(1), arguments()
    result = own._prepare_decode_tensors(**inputs) if keywords else own._prepare_decode_tensors(*inputs.values())
    assert result[0].tolist() == [[8, 9], [0, 0]]


def test_lengths_that_are_not_in_the_builders_buffer_are_somebody_elses() -> None:
    activity, (layer,) = layers(FIX, "view-of-a-row")
    theirs = torch.tensor([[-1, 0]])
    answer = (theirs, None, None, 2, False)
    assert layer.wrap(lambda *_: answer)(fresh(1), *arguments().values()) is answer
    assert theirs.tolist() == [[-1, 0]]
    assert activity.error is None


def test_an_answer_that_is_unknown_is_handed_on() -> None:
    activity, (layer,) = layers(FIX, "view-of-a-row")
    answer = object()
    assert layer.wrap(lambda *_: answer)(fresh(1), *arguments().values()) is answer
    assert "not subscriptable" in str(activity.error)
