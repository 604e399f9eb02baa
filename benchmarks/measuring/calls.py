"""Calls of one layer: stock, fixed and observed, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from measuring import elsewhere, interleaved
from vllm_graphfix.fix import Activity, Fix, Patch

Function = Callable[..., Any]
Batch = Callable[[Function], Callable[[], object]]
"""The call of a function with the arguments of one batch."""
Row = tuple[object, ...]

REQUESTS, PADDED_REQUESTS = 200, 256
"""The sizes of a batch with padding; one without has as many requests as rows."""
CALLS = {"alone": 200, "real": 20}
COLD = 10
"""One round in so many is cold: reading other memory before each call takes longer than the calls."""


class Calls(NamedTuple):
    """The functions that one row compares."""

    stock: Function
    """For a batch that stock gets wrong: the least that puts it right."""
    fixed: Function
    unobserved: Function
    """Stock on the same batch."""
    observed: Function


def measured(label: str, around: str, calls: Calls, rounds: int, *, target: bool = True) -> Row:
    """The label, `around`, the times of each call with warm caches and with cold ones, and *target*."""
    warm = interleaved(calls._asdict(), calls=CALLS[around], rounds=rounds)
    cold = interleaved(calls._asdict(), calls=1, rounds=max(rounds // COLD, 2), between=elsewhere())
    return label, around, *(times[name] for times in (warm, cold) for name in Calls._fields), target


def arguments(*positional: Any, **keywords: Any) -> Batch:
    """These arguments, for any function."""
    return lambda function: partial(function, *positional, **keywords)


def wrapped(fix: Fix, patch: Patch, stock: Function) -> tuple[Function, Function]:
    """*stock* with *patch* around it that corrects, and with one that only observes."""
    return patch.wrap(stock, Activity(fix.events)), patch.wrap(stock, Activity(fix.events, corrects=False))


def compare(
    fix: Fix, patch: Patch, stocks: Mapping[str, Function] | Function, batches: Mapping[str, Batch], rounds: int
) -> list[Row]:
    """One row for each of *stocks*, by what it is ("alone" if it is one), and for each of *batches*, by label."""
    rows = []
    for around, stock in (stocks if isinstance(stocks, Mapping) else {"alone": stocks}).items():
        fixed, observed = wrapped(fix, patch, stock)
        for label, batch in batches.items():
            rows.append(measured(label, around, Calls(*map(batch, (stock, fixed, stock, observed))), rounds))
    return rows


def decodes(requests: int, **changed: Any) -> Any:
    """A `CommonAttentionMetadata` of `PADDED_REQUESTS` rows: *requests* decodes of 100 tokens, and padding."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32).clamp(max=requests)
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": (torch.arange(PADDED_REQUESTS) < requests).int() * 100,
        "num_reqs": PADDED_REQUESTS,
        "num_actual_tokens": PADDED_REQUESTS,
        "max_query_len": 1,
        "max_seq_len": 100,
        "block_table_tensor": torch.zeros(PADDED_REQUESTS, 1, dtype=torch.int32),
        "slot_mapping": torch.zeros(PADDED_REQUESTS, dtype=torch.int64),
    }
    return CommonAttentionMetadata(**fields | changed)
