"""What two references say about the answers with graphs: eager, and the same engine without graphs.

Neither is enough alone. torch.compile fuses operations and rounds elsewhere than eager does, so that eager's answers
may leave those with graphs beyond what eager's own noise explains, without any graph's doing; and where the two part at
a tie, eager is no witness for what follows. The same engine without graphs is compiled alike and can say more in both
cases.
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
    """Whether the reference had the same context at *position* and found nothing beyond rounding there."""
    if reference.position is None or position is None or position < reference.position:
        return True
    return reference.kind is Kind.TIE and position == reference.position
