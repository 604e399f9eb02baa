"""Judges answers with graphs by two further references: the same engine compiled but without graphs, and that padded.

Eager is not enough alone. torch.compile fuses operations and so rounds differently: eager's answers may differ from
those with graphs by more than eager's own noise, although the graphs are right. And after a tie eager has another
context, and cannot vouch for what follows. The compiled engine without graphs is a witness in both cases. Where a batch
of another size rounds differently, that engine is one with its batches filled to the sizes to which graphs pad theirs.
What is still corrupt is scored in several batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vllm_graphfix.verify.comparison import Answer, Comparison, Judgement, Kind, compare


def arbitrate(comparison: Comparison, graphs: Sequence[Answer], compiled: Sequence[Answer]) -> Comparison:
    """Judge *comparison*, of eager's answers and those with *graphs*, again by the *compiled* ones without graphs.

    A prompt is corrupt where one reference contradicts the answer and the other does not vouch for it. The expected
    tokens are those of the reference that contradicts.
    """
    second = compare(compiled, graphs, comparison.noise)
    pairs = zip(comparison.judgements, second.judgements, strict=True)
    return replace(comparison, judgements=tuple(_judged_by_both(*pair) for pair in pairs))


def exonerate(comparison: Comparison, graphs: Sequence[Answer], padded: Sequence[Answer]) -> Comparison:
    """Judge again, by answers without graphs in batches of the sizes to which *graphs* pad theirs.

    Kernels round differently in a batch of another size, and in a mixture of experts a token may then go to another
    expert. These answers vouch for others and contradict none: prompts were processed beside more requests.
    """
    second = compare(padded, graphs, comparison.noise)
    pairs = zip(comparison.judgements, second.judgements, strict=True)
    return replace(comparison, judgements=tuple(_exonerated(*pair) for pair in pairs))


def rescore(comparison: Comparison, graphs: Sequence[Answer], scored: Sequence[Sequence[Answer]]) -> Comparison:
    """Judge corrupt answers again by what the engine without graphs gives each token of theirs, in several batches.

    *scored* has, by batch, the log-probabilities of the tokens of each of *graphs*. In a mixture of experts a token may
    go to another expert where only a last bit differs, also within one size of batch. Each token has to be one that a
    batch gives, up to rounding: as likely, and no less likely than the best one there.
    """
    batches = list(zip(*scored, strict=True))
    judged = (
        replace(each, kind=Kind.BATCHED, vouched=len(answer.tokens))
        if each.kind is Kind.CORRUPT and _is_given(answer, in_batches, comparison.tolerance)
        else each
        for each, answer, in_batches in zip(comparison.judgements, graphs, batches, strict=True)
    )
    return replace(comparison, judgements=tuple(judged))


def _is_given(answer: Answer, batches: Sequence[Answer], tolerance: float) -> bool:
    def is_given(position: int, token: int, batch: Answer) -> bool:
        if position >= len(batch.top):  # there was no room in the context to score it
            return False
        here, there = answer.top[position].get(token, -math.inf), batch.top[position].get(token, -math.inf)
        return abs(here - there) <= tolerance and max(batch.top[position].values()) - there <= tolerance

    return all(any(is_given(*place, batch) for batch in batches) for place in enumerate(answer.tokens))


def _exonerated(judged: Judgement, padded: Judgement) -> Judgement:
    if padded.kind is Kind.CORRUPT or not _vouches(padded, judged.position):
        return judged
    kind = Kind.PADDED if judged.kind is Kind.CORRUPT else judged.kind
    return replace(judged, kind=kind, vouched=max(judged.vouched, padded.compared))


def _judged_by_both(eager: Judgement, compiled: Judgement) -> Judgement:
    if eager.kind is Kind.CORRUPT and not _vouches(compiled, eager.position):
        return eager
    if compiled.kind is Kind.CORRUPT and not _vouches(eager, compiled.position):
        return compiled
    kind = Kind.COMPILED if eager.kind is Kind.CORRUPT else eager.kind
    return replace(eager, kind=kind, vouched=compiled.compared)


def _vouches(reference: Judgement, position: int | None) -> bool:
    """True if the reference had the same context at *position* and differs there by no more than rounding."""
    if reference.position is None or position is None or position < reference.position:
        return True
    return reference.kind is Kind.TIE and position == reference.position
