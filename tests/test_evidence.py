"""A verdict is no better than what it rests on.

Each part of that, changed, is recognised or makes the verdict `unrecognised`.

Never `known_release`, unless all of it is a release's; and upstream's main, from day to day, is judged by what it has.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edited import edited, edited_source, swap
from edits_of_evidence import EDITED, Case, nightlies
from mutants_judged import MISSED, WRONG, diagnosed, judged
from stock import release_root
from table import slow_but_for
from vllm_files import CUDAGRAPHS, FLASHMLA
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source

CASES = [case for family in EDITED for case in family()]
NIGHTLIES = list(nightlies())


def _ids(cases: list[Case]) -> list[str]:
    return [f"{each.mutant.fix}-{each.mutant.base.release}-{each.mutant.name}" for each in cases]


@pytest.mark.parametrize("case", CASES, ids=_ids(CASES))
def test_an_edit_of_what_a_verdict_rests_on_is_seen(case: Case) -> None:
    diagnosis = diagnosed(case.mutant)
    assert diagnosis.verdict in case.right
    assert not diagnosis.known, "no release has all of this"


@pytest.mark.parametrize("case", NIGHTLIES, ids=_ids(NIGHTLIES))
def test_main_is_affected_before_a_merge_and_fixed_after_it(case: Case) -> None:
    assert diagnosed(case.mutant).verdict in case.right


KEYWORDS = [case for case in CASES if "by keyword" in case.mutant.name or "with a keyword" in case.mutant.name]
"""Cases where a wrapper that drops a keyword would change what vLLM does, and no diagnosis would show it."""


@pytest.mark.parametrize("release", slow_but_for(("0.21.0",), ("0.17.1", "0.21.0")))
def test_vllms_own_classes_are_called_with_their_keywords(release: str) -> None:
    some = [case for case in KEYWORDS if case.mutant.base.release == release]
    results = list(judged(((case.mutant, diagnosed(case.mutant)) for case in some), together=True))
    assert len(results) == len(some) > 0
    assert not [str(each) for each in results if each.outcome in {WRONG, MISSED}]


@pytest.mark.slow
def test_vllms_own_classes_agree_with_every_verdict_but_unrecognised() -> None:
    results = judged(((case.mutant, diagnosed(case.mutant)) for case in (*CASES, *NIGHTLIES)), together=True)
    assert not [str(each) for each in results if each.outcome in {WRONG, MISSED}]


@pytest.mark.parametrize(
    "line",
    [
        "CudaGraphManager.capture = with_logs(CudaGraphManager.capture)",
        "setattr(CudaGraphManager, 'capture', with_logs(CudaGraphManager.capture))",
        "if with_logs:\n    class CudaGraphManager: pass",
        "prepare_inputs_to_capture = with_logs(prepare_inputs_to_capture)",
        "from vllm.logs import prepare_inputs_to_capture",
        "for prepare_inputs_to_capture in ways_to_prepare: pass",
    ],
)
def test_what_a_module_binds_again_is_not_what_was_looked_at(line: str) -> None:
    source = edited_source(release_root("0.22.1"), {CUDAGRAPHS: lambda text: f"{text}\n\n{line}\n"})
    diagnosis = manifest.diagnose(BY_NAME["capture-state"], source)
    assert (diagnosis.verdict, diagnosis.known) == (Verdict.UNRECOGNISED, False)


def test_a_decorator_that_runs_the_function_each_time_is_none_to_mind(tmp_path: Path) -> None:
    change = {FLASHMLA: swap(r"^    def _build_decode", "    @torch.no_grad()\n    def _build_decode")}
    source = open_source(edited(release_root("0.18.1"), tmp_path / "vllm", change))
    assert manifest.diagnose(BY_NAME["flashmla-fp8"], source).verdict is Verdict.AFFECTED
