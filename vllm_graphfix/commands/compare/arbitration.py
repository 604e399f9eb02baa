"""Judges answers with graphs by further references: the engine compiled without graphs, that padded, and scores.

Eager is not enough alone. torch.compile fuses operations and so rounds differently: eager's answers may differ from
those with graphs by more than eager's own noise, although the graphs are right. And after a tie eager has another
context. A reference *vouches* for an answer at a position where it had the same context and differs by no more than
rounding. Where a batch of another size rounds differently, a compiled engine has its batches filled to the sizes to
which graphs pad theirs. What is still corrupt is scored in several batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vllm_graphfix.verify.comparison import Answer, Comparison, Judgement, Kind, compare


def judge_by_compiled(comparison: Comparison, graphs: Sequence[Answer], compiled: Sequence[Answer]) -> Comparison:
    """Judge *comparison*, of eager's answers and those with *graphs*, again by the *compiled* ones without graphs.

    A prompt is corrupt where one reference differs beyond rounding and the other does not vouch for the answer. The
    expected tokens are those of the reference that differs.
    """
    second = compare(compiled, graphs, comparison.noise)
    pairs = zip(comparison.judgements, second.judgements, strict=True)
    return replace(comparison, judgements=tuple(_judged_by_both(*pair) for pair in pairs))


def accept_from_padded(comparison: Comparison, graphs: Sequence[Answer], padded: Sequence[Answer]) -> Comparison:
    """Judge again, by answers without graphs in batches of the sizes to which *graphs* pad theirs.

    Kernels round differently in a batch of another size, and in a mixture of experts a token may then go to another
    expert. These answers vouch and refute none: prompts were processed beside more requests.
    """
    second = compare(padded, graphs, comparison.noise)
    pairs = zip(comparison.judgements, second.judgements, strict=True)
    return replace(comparison, judgements=tuple(_accepted_from_padded(*pair) for pair in pairs))


def accept_from_scores(
    comparison: Comparison, graphs: Sequence[Answer], scored: Sequence[Sequence[Answer]]
) -> Comparison:
    """Judge corrupt answers again by what the engine without graphs gives each token of theirs, in several batches.

    *scored* has, by batch, the log-probabilities of the tokens of each of *graphs*. In a mixture of experts a token may
    go to another expert where only a last bit differs, also within one size of batch. Each token has to be one that a
    batch gives, up to rounding: as likely, and no less likely than the best one there.
    """
    batches = list(zip(*scored, strict=True))
    judged = (
        replace(each, kind=Kind.BATCHED, vouched=len(answer.tokens))
        if each.kind is Kind.CORRUPT and _is_scored(answer, in_batches, comparison.tolerance)
        else each
        for each, answer, in_batches in zip(comparison.judgements, graphs, batches, strict=True)
    )
    return replace(comparison, judgements=tuple(judged))


def _is_scored(answer: Answer, batches: Sequence[Answer], tolerance: float) -> bool:
    def is_near_best(position: int, token: int, batch: Answer) -> bool:
        if position >= len(batch.top):  # there was no room in the context to score it
            return False
        here, there = answer.top[position].get(token, -math.inf), batch.top[position].get(token, -math.inf)
        return abs(here - there) <= tolerance and max(batch.top[position].values()) - there <= tolerance

    return all(any(is_near_best(*place, batch) for batch in batches) for place in enumerate(answer.tokens))


def _accepted_from_padded(judged: Judgement, padded: Judgement) -> Judgement:
    if padded.kind is Kind.CORRUPT or not _vouches(padded, judged.position):
        return judged
    kind = Kind.PADDED if judged.kind is Kind.CORRUPT else judged.kind
    return replace(judged, kind=kind, vouched=max(judged.vouched, padded.tokens_compared))


def _judged_by_both(eager: Judgement, compiled: Judgement) -> Judgement:
    if eager.kind is Kind.CORRUPT and not _vouches(compiled, eager.position):
        return eager
    if compiled.kind is Kind.CORRUPT and not _vouches(eager, compiled.position):
        return compiled
    kind = Kind.COMPILED if eager.kind is Kind.CORRUPT else eager.kind
    return replace(eager, kind=kind, vouched=compiled.tokens_compared)


def _vouches(reference: Judgement, position: int | None) -> bool:
    if reference.position is None or position is None or position < reference.position:
        return True
    return reference.kind is Kind.TIE and position == reference.position
