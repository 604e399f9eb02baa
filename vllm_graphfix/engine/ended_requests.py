"""Calls into vLLM's scheduler for requests that end by a verdict: look-up, eviction of blocks, last outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm_graphfix.engine.verdict import LONGEST_NAME, Verdict, digest


def names_of(scheduler: Any, verdict: Verdict) -> list[str]:
    """Return the names of the requests of *verdict*; digests are searched among all long names of the scheduler."""
    names = [each[1:] for each in verdict.requests if each[0] == "="]
    if digests := {each[1:] for each in verdict.requests if each[0] == "#"}:
        names += [name for name in scheduler.requests if len(name) > LONGEST_NAME and digest(name) in digests]
    return names


def evict(scheduler: Any, requests: Collection[str], blocks: Collection[int]) -> None:
    """Take *blocks*, and all blocks of *requests*, out of the prefix cache."""
    manager = scheduler.kv_cache_manager
    known = len(manager.block_pool.blocks)
    evicted = set(blocks)
    for request in requests:
        if request in scheduler.requests:
            evicted.update(number for group in manager.get_block_ids(request) for number in group)
    manager.evict_blocks({number for number in evicted if 0 < number < known})


def finished_error() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ERROR


def hand_out(outputs: Any, ended: list[tuple[Any, str]]) -> None:
    """Move a last output for each request in *ended* to the *outputs* of a step, by client."""
    if not ended:
        return
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    while ended:
        request, why = ended[0]
        if request.is_finished():  # unless `finish_requests` failed
            last = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=why,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
        del ended[0]
