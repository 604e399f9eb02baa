"""vLLMs that nobody has seen: mutants of real releases are put right, or recognised as unknown.

They are never patched wrongly, and never called fixed where they are not.

vLLM's own classes decide, on the CPU double: what a mutant gives with the plugin has to be what it gives without
graphs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mutants_bases import bases
from mutants_families import enough, family, identity
from mutants_judged import BROKEN, CLAIMED, MISSED, WRONG, Judged, Stage, diagnosed, judged
from mutants_made import Mutant, formatted
from mutants_near import own, patched
from stock import release_root
from table import slow_unless
from trial_rows import wordings_of
from vllm_files import MAMBA, RUNNER
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source

SAMPLED = {
    "0.17.1": ("draft-decode-mode", "flashmla-fp8"),
    "0.21.0": ("capture-state", "draft-prefill-state"),
    "0.33.0": ("prefill-dispatch", "prompt-logprobs"),
}
"""Three releases: a warm process takes as long as twenty mutants. `make test` runs those of both model runners, and
looks at the family of one fix: operators that all fixes share make it, in 10 s."""
LOOKED_AT = "draft-decode-mode"
OF_EACH = 1
WITHOUT_A_REMEDY = {"draft-prefill-state"}
"""No vLLM with the remedy runs in its scenario: the speculator is another one since then."""
# One process of pytest makes the mutants of a fix, which takes seconds, and that is the one that runs the sample. It
# needs no warm process of the release.
GROUPS = {release: pytest.mark.xdist_group(f"mutants of {release}") for release in SAMPLED}
each_fix = pytest.mark.parametrize(
    "fix", [pytest.param(fix, marks=GROUPS["0.17.1"] if fix == LOOKED_AT else pytest.mark.slow) for fix in BY_NAME]
)


@each_fix
def test_a_family_has_mutants_of_many_kinds_and_no_two_are_the_same(fix: str) -> None:
    mutants = family(fix)
    assert len({identity(mutant) for mutant in mutants}) == len({str(mutant) for mutant in mutants}) == len(mutants)
    assert len(mutants) > enough(fix)
    assert len({mutant.kind for mutant in mutants}) >= (60 if wordings_of(fix) else 30)


@each_fix
def test_a_family_is_of_what_is_patched_and_of_what_is_near_it_in_both_directions(fix: str) -> None:
    """Of vLLMs with the defect, and of ones with the remedy."""
    of = {bool(mutant.base.remedy) for mutant in family(fix) if mutant.steps}
    assert of == ({True} if fix in WITHOUT_A_REMEDY else {True, False})
    for base in {mutant.base for mutant in family(fix) if mutant.steps and mutant.base.remedy}:
        steps = {(step.path, step.qualname) for mutant in family(fix) if mutant.base == base for step in mutant.steps}
        assert steps & set(patched(fix, base))
        assert steps - set(own(fix, base))


@each_fix
def test_the_same_trees_written_otherwise_are_the_same_release(fix: str) -> None:
    for base in (where.base for where in bases(fix) if not where.base.changes):
        stock = manifest.diagnose(BY_NAME[fix], open_source(release_root(base.release)))
        for mutant in formatted(fix, base, BY_NAME[fix].inspected_files):
            diagnosis = diagnosed(mutant)
            assert (diagnosis.verdict, diagnosis.shape, diagnosis.known) == (stock.verdict, stock.shape, True), mutant


def test_no_mutant_is_written_into_a_stock_release(tmp_path: Path) -> None:
    """A stage's own files are those that it is told of; what is beside them, and other folders, are links."""
    stage = Stage("0.19.1", tmp_path / "vllm", [RUNNER])
    for path in ("vllm/v1/worker/gpu_input_batch.py", MAMBA):
        with pytest.raises(RuntimeError, match="stock release"):
            stage._put({path: release_root("0.19.1").joinpath(path).read_text()})


@pytest.mark.parametrize(
    "release",
    [
        pytest.param(release, marks=[GROUPS[release], *slow_unless(release, ("0.17.1", "0.21.0"))])
        for release in SAMPLED
    ],
)
def test_a_sample_is_right_or_untouched(release: str) -> None:
    some = [pair for fix in SAMPLED[release] for pair in sampled(fix, release)]
    assert len(some) == OF_EACH * len(SAMPLED[release])
    # What has the defect, said to be in order: the judge has to see that it is not.
    fix = SAMPLED[release][0]
    defective = next(where.base for where in bases(fix) if where.base.release == release and where.base.remedy)
    mistaken = (Mutant(fix, defective), Diagnosis(Verdict.FIXED, "a mistake"))
    *results, last = judged([*some, mistaken], together=True)
    assert not bad(results)
    assert bad([last])


def sampled(fix: str, release: str) -> list[tuple[Mutant, Diagnosis]]:
    """The first that have to be run, by hand and generated in turn."""
    here = family(fix, release)
    pairs = ((mutant, diagnosed(mutant)) for mutant in here[:: max(1, len(here) // (9 * OF_EACH))])
    recognised = (pair for pair in pairs if pair[1].verdict is not Verdict.UNRECOGNISED)
    return list(itertools.islice(recognised, OF_EACH))


@pytest.mark.slow
@pytest.mark.parametrize("fix", BY_NAME)
def test_every_mutant_is_right_or_untouched(fix: str, record_property: Callable[[str, object], None]) -> None:
    results = list(judged((mutant, diagnosed(mutant)) for mutant in family(fix)))
    for (verdict, outcome), number in Counter((each.diagnosis.verdict.value, each.outcome) for each in results).items():
        record_property("counted", ("mutants of vLLM", fix, f"{verdict}: {outcome}", number))
    assert not bad(results)
    assert sum(each.outcome != BROKEN for each in results) >= enough(fix)


def bad(results: Iterable[Judged]) -> list[str]:
    return [str(each) for each in results if each.outcome in (WRONG, MISSED, CLAIMED)]
