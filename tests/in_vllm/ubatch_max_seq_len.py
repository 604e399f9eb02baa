"""ubatch-max-seq-len on vLLM's own micro-batches."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from vllm.v1.worker import ubatch_utils

from activities import activity_of
from vllm_graphfix.verify.double.flash_attention import Rows
from vllm_graphfix.verify.double.scenarios.ubatch_max_seq_len import HALVES, LONGEST, REQUESTS

STOCK = ubatch_utils._make_metadata_with_slice.__wrapped__
ACTIVITY = activity_of("ubatch-max-seq-len")


def _batch(lengths: list[int], longest: int) -> Any:
    return replace(Rows(REQUESTS).batch([1] * REQUESTS, lengths, REQUESTS, REQUESTS), max_seq_len=longest)


def test_in_a_capture_nothing_but_the_longest_length_is_another_than_stocks() -> None:
    batch = _batch([1] * REQUESTS, LONGEST)
    for half in HALVES:
        made, stocks = ubatch_utils._make_metadata_with_slice(half, batch), STOCK(half, batch)
        assert (made.max_seq_len, stocks.max_seq_len) == (LONGEST, 1)
        for field in fields(made):
            own, other = getattr(made, field.name), getattr(stocks, field.name)
            same = own.equal(other) if isinstance(own, torch.Tensor) else own == other
            assert same or field.name == "max_seq_len"
    assert ACTIVITY.error is None


def test_in_other_steps_each_micro_batch_has_the_longest_length_of_its_own() -> None:
    before = ACTIVITY.counts
    batch = _batch([9, 23, 5, 0], 23)
    assert [made.max_seq_len for made in ubatch_utils.split_attn_metadata(HALVES, batch)] == [23, 5]
    assert ACTIVITY.counts == before
    assert ACTIVITY.error is None
