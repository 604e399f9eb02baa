"""vLLMs that nobody has seen: mutants of real releases are put right, or recognised as unknown.

They are never patched wrongly, and never called fixed where they are not.

vLLM's own classes decide, on the CPU double: what a mutant gives with the plugin has to be what it gives without
graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mutants_elsewhere import FIRST_SIX, bases, diagnosis_of, elsewhere, enough, identity, seen
from mutants_families import Mutant, fingerprint, formatted
from mutants_judged import BROKEN, CLAIMED, MISSED, WRONG, Judged, Stage, diagnosed, judged, judged_elsewhere
from mutants_of_fixes import FAMILIES
from stock import release_root
from vllm_files import MAMBA, RUNNER
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source

ENOUGH = 200
SAMPLED = {
    "0.17.1": ("capture-state", "draft-decode-mode", "flashmla-fp8", "flashmla-padding"),
    "0.21.0": ("capture-state", "draft-prefill-state", "mamba-padding"),
}
"""Two releases, each with a warm process, that have all six defects between them."""
OF_EACH = 4


@pytest.mark.parametrize("fix", FAMILIES)
def test_a_family_has_mutants_of_many_kinds_and_no_two_are_the_same(fix: str) -> None:
    family = FAMILIES[fix]()
    assert len({fingerprint(mutant) for mutant in family}) == len({str(mutant) for mutant in family}) == len(family)
    assert len(family) > ENOUGH
    assert len({mutant.kind for mutant in family}) > 40
    assert len({mutant.base.release for mutant in family}) >= 3


@pytest.mark.parametrize("fix", FAMILIES)
def test_the_same_trees_written_otherwise_are_the_same_release(fix: str) -> None:
    for base in {mutant.base for mutant in FAMILIES[fix]() if not mutant.base.changes}:
        stock = manifest.diagnose(BY_NAME[fix], open_source(release_root(base.release)))
        for mutant in formatted(fix, base, BY_NAME[fix].reads):
            found = diagnosed(mutant)
            assert (found.verdict, found.shape, found.known) == (stock.verdict, stock.shape, True), mutant


def test_no_mutant_is_written_into_a_stock_release(tmp_path: Path) -> None:
    """A stage's own files are those that it is told of; what is beside them, and other folders, are links."""
    stage = Stage("0.19.1", tmp_path / "vllm", [RUNNER])
    for path in ("vllm/v1/worker/gpu_input_batch.py", MAMBA):
        with pytest.raises(RuntimeError, match="stock release"):
            stage._put({path: release_root("0.19.1").joinpath(path).read_text()})


@pytest.mark.parametrize("release", SAMPLED)
def test_a_sample_is_right_or_left_alone(release: str) -> None:
    some = [pair for fix in SAMPLED[release] for pair in sampled(fix, release)]
    assert len(some) == OF_EACH * len(SAMPLED[release])
    assert not bad(judged(some))


def sampled(fix: str, release: str) -> list[tuple[Mutant, Diagnosis]]:
    """The first that have to be run, by hand and generated in turn."""
    here = [mutant for mutant in FAMILIES[fix]() if mutant.base.release == release]
    spread = here[:: max(1, len(here) // (3 * OF_EACH))]
    found = ((mutant, diagnosed(mutant)) for mutant in spread)
    return [pair for pair in found if pair[1].verdict is not Verdict.UNRECOGNISED][:OF_EACH]


@pytest.mark.slow
@pytest.mark.parametrize("fix", FAMILIES)
def test_every_mutant_is_right_or_left_alone(fix: str, record_property: Callable[[str, object], None]) -> None:
    found = list(judged((mutant, diagnosed(mutant)) for mutant in FAMILIES[fix]()))
    for (verdict, outcome), number in Counter((each.found.verdict.value, each.outcome) for each in found).items():
        record_property("counted", ("mutants of vLLM", fix, f"{verdict}: {outcome}", number))
    assert not bad(found)
    assert sum(each.outcome != BROKEN for each in found) >= ENOUGH


def bad(found: Iterable[Judged]) -> list[str]:
    return [str(each) for each in found if each.outcome in (WRONG, MISSED, CLAIMED)]


WITHOUT_A_REMEDY = {"draft-prefill-state"}
"""No vLLM with the remedy runs in its scenario: the speculator is another one since then."""


@pytest.mark.parametrize("fix", BY_NAME)
def test_what_a_fix_does_not_patch_is_mutated_in_both_directions(fix: str) -> None:
    """Functions near those that it patches, and not these; of vLLMs with the defect, and of ones with the remedy."""
    here = [where.base for where in bases(fix) if where.base.name in seen()[fix]]
    assert {bool(base.remedy) for base in here} == ({True} if fix in WITHOUT_A_REMEDY else {True, False})
    first = next(base for base in here if base.remedy)
    patched = {patch.name for patch in BY_NAME[fix].patches(diagnosis_of(fix, first).shape)}
    assert not {name for _, name, _ in seen()[fix][first.name]} & patched


IN_THE_SAMPLE = {"0.33.0": ("prefill-dispatch", "prompt-logprobs", "triton-mla-padding", "compressor-skip")}
"""One release: a warm process takes as long as twenty mutants."""


@pytest.mark.parametrize("release", IN_THE_SAMPLE)
def test_a_sample_of_mutants_elsewhere_is_right_or_left_alone(release: str) -> None:
    some = [pair for fix in IN_THE_SAMPLE[release] for pair in sampled_elsewhere(fix, release)]
    # What the plugin corrects, said to be in order: the judge has to see that it is not.
    mistaken = next(pair for pair in some if pair[1].verdict is Verdict.AFFECTED)[0]
    *found, last = judged_elsewhere([*some, (mistaken, Diagnosis(Verdict.FIXED, "a mistake"))], together=True)
    assert not bad(found)
    assert bad([last])


def sampled_elsewhere(fix: str, release: str) -> list[tuple[Mutant, Diagnosis]]:
    here = elsewhere(fix, release)
    found = ((mutant, diagnosed(mutant)) for mutant in here[:: max(1, len(here) // 4)])
    return [pair for pair in found if pair[1].verdict is not Verdict.UNRECOGNISED][:2]


@pytest.mark.slow
@pytest.mark.parametrize("fix", BY_NAME)
def test_every_mutant_elsewhere_is_right_or_left_alone(
    fix: str, record_property: Callable[[str, object], None]
) -> None:
    family = elsewhere(fix)
    assert len({identity(mutant) for mutant in family}) == len({str(mutant) for mutant in family}) == len(family)
    assert len({mutant.kind for mutant in family}) >= (60 if fix in FIRST_SIX else 30)
    found = list(judged_elsewhere((mutant, diagnosed(mutant)) for mutant in family))
    for (verdict, outcome), number in Counter((each.found.verdict.value, each.outcome) for each in found).items():
        record_property("counted", ("mutants of what verdicts rest on", fix, f"{verdict}: {outcome}", number))
    assert not bad(found)
    assert sum(each.outcome != BROKEN for each in found) >= enough(fix)
