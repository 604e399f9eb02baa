"""What two references say about the answers with graphs: eager, and the same engine without graphs.

Neither is enough alone. torch.compile fuses operations and rounds elsewhere than eager does, so that eager's answers
may leave those with graphs beyond what eager's own noise explains, without any graph's doing; and where the two part at
a tie, eager is no witness for what follows. The same engine without graphs is compiled alike and can say more in both
cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_graphfix.verify.comparison import Answer, Comparison, Judgement, Kind, compare


@dataclass(frozen=True)
class Findings:
    """All prompts, judged by one or two references."""

    comparison: Comparison
    compared: tuple[int, ...]
    """For each prompt, the number of tokens for which a reference had the same context: those before corruption or a
    tie."""


def by_eager_alone(comparison: Comparison) -> Findings:
    return Findings(comparison, tuple(judgement.compared for judgement in comparison.judgements))


def arbitrate(comparison: Comparison, found: Sequence[Answer], compiled: Sequence[Answer]) -> Findings:
    """*comparison* is of eager and *found*, the answers with graphs; *compiled* are those of the same engine without.

    A prompt is corrupt where one reference contradicts and the other does not vouch. Where that is the second one's
    say, its tokens are the expected ones.
    """
    second = compare(compiled, found, comparison.noise)
    pairs = list(zip(comparison.judgements, second.judgements, strict=True))
    judgements = tuple(_judged_by_both(first, other) for first, other in pairs)
    compared = tuple(
        judged.compared if judged.kind is Kind.CORRUPT else max(one.compared for one in pair)
        for judged, pair in zip(judgements, pairs, strict=True)
    )
    return Findings(replace(comparison, judgements=judgements), compared)


def _judged_by_both(eager: Judgement, compiled: Judgement) -> Judgement:
    if eager.kind is Kind.CORRUPT and not _vouches(compiled, eager.position):
        return eager
    if compiled.kind is Kind.CORRUPT and not _vouches(eager, compiled.position):
        return compiled
    return replace(eager, kind=Kind.COMPILED) if eager.kind is Kind.CORRUPT else eager


def _vouches(reference: Judgement, position: int | None) -> bool:
    """Whether the reference had the same context at *position* and found nothing beyond rounding there."""
    if reference.position is None or position is None or position < reference.position:
        return True
    return reference.kind is Kind.TIE and position == reference.position
