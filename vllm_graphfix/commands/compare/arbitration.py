"""Judges answers with graphs by two references: eager, and the same engine compiled but without graphs.

Neither is enough alone. torch.compile fuses operations and so rounds differently: eager's answers may differ from those
with graphs by more than eager's own noise, although the graphs are right. And after a tie eager has another context,
and cannot vouch for what follows. The compiled engine without graphs is a witness in both cases.
"""

from __future__ import annotations

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
