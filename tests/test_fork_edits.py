"""Forks in which a remedy, or the want of it, takes effect elsewhere: no verdict on one is dishonest.

vLLM's own classes say on the CPU double which fork has the defect. The generator, and its seed, are in
`mutants_fork.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest

from mutants_fork import OF_EACH, RIGHT, WRONG, fork_edits
from mutants_judged import CLAIMED, MISSED, Judged, diagnosed, judged
from mutants_judged import WRONG as APPLIED_WRONGLY
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME

AT_ONCE = 6


def test_a_sample_of_forks_is_judged_honestly() -> None:
    some = [mutant for _, mutant in itertools.islice(fork_edits("mamba-padding"), 4)]
    judgements = list(judged(((mutant, diagnosed(mutant)) for mutant in some), together=True, as_stock=True))
    assert {each.stock_is_right for each in judgements} >= {True, False}
    assert not dishonest(judgements)


@pytest.mark.slow
@pytest.mark.parametrize("fix", BY_NAME)
def test_ten_forks_of_each_fix_are_judged_honestly(fix: str, record_property: Callable[[str, object], None]) -> None:
    judgements = list(as_intended(fix))
    for (intent, verdict), number in Counter(
        (each.mutant.kind, each.diagnosis.verdict.value) for each in judgements
    ).items():
        record_property("counted", ("forks", fix, f"{intent}: {verdict}", number))
    assert not dishonest(judgements)
    assert Counter(each.mutant.kind for each in judgements) == {RIGHT: OF_EACH, WRONG: OF_EACH}


def as_intended(fix: str) -> Iterator[Judged]:
    """The first forks that come out as they were made to, `OF_EACH` of both kinds, and all dishonest ones before."""
    missing = {RIGHT: OF_EACH, WRONG: OF_EACH}
    edits = fork_edits(fix)
    while any(missing.values()) and (some := list(itertools.islice(edits, 2 * AT_ONCE))):
        pairs = ((mutant, diagnosed(mutant)) for intent, mutant in some if missing[intent])
        for each in judged(pairs, as_stock=True):
            intended = each.stock_is_right is (each.mutant.kind == RIGHT)
            if intended and missing[each.mutant.kind]:
                missing[each.mutant.kind] -= 1
                yield each
            elif dishonest([each]):
                yield each


def dishonest(judgements: Iterable[Judged]) -> list[str]:
    """Of a fork with the defect that it is an all-clear; of one without that it is known, or is patched with harm."""

    def is_dishonest(each: Judged) -> bool:
        if each.stock_is_right is False and each.diagnosis.verdict in (Verdict.FIXED, Verdict.ABSENT):
            return True
        return each.outcome in (APPLIED_WRONGLY, MISSED, CLAIMED)

    return [str(each) for each in judgements if is_dishonest(each)]
