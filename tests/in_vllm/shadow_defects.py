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
from vllm_graphfix.verify.trial import trial_of

BACKENDS: dict[str, set[tuple[str, ...]]] = {
    "capture-state": {("FlashMLAMetadata",)},
    "draft-prefill-state": {("FlashMLAMetadata",)},
    "mamba-padding": {("Mamba1AttentionMetadata",), ("Mamba2AttentionMetadata",)},
    "flashmla-fp8": {("FlashMLAMetadata",)},
    "prefill-dispatch": {("GDNAttentionMetadata",), ("Mamba2AttentionMetadata",)},
    "c128a-stride": {("DeepseekV4FlashMLAMetadata",)},
    "dcp-context-lens": {("FlashAttentionMetadata",)},
    "draft-idx-mapping": {()},
    "mamba-all-mode": {("Mamba2AttentionMetadata",)},
    "flash-mixed-schedule": {("FlashAttentionMetadata",)},
    "active-lora-count": {("AttentionMetadataStandIn",)},
    "adaptive-schedule": {("FlashAttentionMetadata",)},
    "draft-graph-support": {("MLACommonMetadata",)},
}
"""The kinds of metadata of the graphs that may be wrong, by fix."""
WATCHED = pytest.mark.parametrize("fix", [fix.name for fix in FIXES if trial_of(fix.name).watched])


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    process.start(Rate(), Action.REPORT)


@WATCHED
def test_a_defect_is_caught_at_once_where_there_is_one(fix: str) -> None:
    told = 0
    for _, seen in worker.watched([fix]):
        shadow = process.SHADOW
        assert shadow is not None
        assert (seen.error, seen.state, shadow.stopped) == (None, "active", None)
        assert seen.checks > 0
        assert bool(seen.mismatches) == affected(fix)
        assert {each.graph.backends for each in shadow.results.kept} <= BACKENDS[fix]
        if seen.mismatches:
            assert (seen.first or 0) <= 3
        told += 1
    assert told


@WATCHED
def test_without_what_it_takes_for_the_defect_to_show_nothing_is_found(fix: str) -> None:
    for _, seen in worker.watched([fix], hit=False):
        assert (bool(seen.checks), seen.mismatches, seen.error, seen.state) == (True, 0, None, "active")


def test_a_fix_that_no_scenario_shows_in_a_replay_says_nothing() -> None:
    assert not list(worker.watched(["idle-rank"]))


def test_an_error_in_a_scenario_is_told_and_the_others_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graphfix.verify.double.scenarios import flashmla_fp8

    def fail(*, hit: bool) -> None:
        raise RuntimeError("planted\nin two lines")

    monkeypatch.setattr(flashmla_fp8, "watched", fail)
    (name, seen), *others = worker.watched(["flashmla-fp8", "idle-rank"])
    assert (name, seen.checks, seen.error, others) == ("flashmla-fp8", 0, "RuntimeError: planted", [])
