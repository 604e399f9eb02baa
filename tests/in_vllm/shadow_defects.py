"""The shadow check in the scenarios of `verify` on the CPU double.

Defects are caught where the release has them, and nothing is where it has not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from defects import affected

from vllm_graphfix.fixes import FIXES
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import process
from vllm_graphfix.verify.double import worker
from vllm_graphfix.verify.measurement import Watch
from vllm_graphfix.verify.trial import trial_of

WATCHED = pytest.mark.parametrize("fix", [fix.name for fix in FIXES if trial_of(fix.name).watched])


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    process.start(Rate(), Action.REPORT)


def watched(fix: str, *, trigger: bool) -> Iterator[Watch]:
    """Yield what the check saw, of each kind of graphs; skip the test where this release has none of the code.

    On a release that has the defect the scenario has to run: there an error fails the test. Drafters alone are not
    checked on every release, which `test_shadow.py` holds for each.
    """
    nothing = True
    try:
        for _, seen in worker.shadow_checks([fix], trigger=trigger):
            if (seen.error is not None or not seen.checks) and not affected(fix):
                pytest.skip(f"the scenario replays nothing here: {seen.error or 'no such graph is captured'}")
            nothing = False
            yield seen
    except ImportError as error:
        if affected(fix):
            raise
        pytest.skip(f"the scenario does not run here: {error}")
    if nothing:
        trial = trial_of(fix)
        assert all(each.graphs.endswith(process.DRAFTER) for each in (trial.watched, *trial.watched_further) if each)
        pytest.skip("the check does not look at drafters of this release")


@WATCHED
def test_a_defect_is_caught_at_once_where_there_is_one(fix: str) -> None:
    trial = trial_of(fix)
    metadata: set[tuple[str, ...]] = {
        (name,) for each in (trial.watched, *trial.watched_further) if each for name in each.metadata
    }
    for seen in watched(fix, trigger=True):
        shadow = process.SHADOW
        assert shadow is not None
        assert (seen.error, seen.state, shadow.stopped) == (None, "active", None)
        assert seen.checks > 0
        assert bool(seen.mismatches) == affected(fix)
        assert {each.graph.backends for each in shadow.results.first_mismatches} <= (metadata or {()})
        if seen.mismatches:
            assert (seen.first or 0) <= 3


@WATCHED
def test_without_the_conditions_of_the_defect_nothing_differs(fix: str) -> None:
    for seen in watched(fix, trigger=False):
        assert (bool(seen.checks), seen.mismatches, seen.error, seen.state) == (True, 0, None, "active")


def test_a_fix_that_no_scenario_shows_in_a_replay_says_nothing() -> None:
    assert not list(worker.shadow_checks(["idle-rank"]))


def test_an_error_in_a_scenario_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.verify.double.scenarios import flashmla_fp8

    def fail(*, trigger: bool) -> None:
        raise RuntimeError("planted\nin two lines")

    monkeypatch.setattr(flashmla_fp8, "watched", fail)
    (name, seen), *others = worker.shadow_checks(["flashmla-fp8", "idle-rank"])
    assert (name, seen.checks, seen.error, others) == ("flashmla-fp8", 0, "RuntimeError: planted", [])
