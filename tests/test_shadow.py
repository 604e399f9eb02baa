"""The shadow check on stock releases: model runners and drafters of each shape, right graphs and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from behaviours import check_behaviours
from stock import release_root
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import SHADOW
from vllm_graphfix.shadow.runners import RUNNERS
from vllm_graphfix.source.files import open_source


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)
def test_the_code_of_every_release_from_0_18_on_is_known(runner: Any, release: str) -> None:
    found = runner.diagnose(open_source(release_root(release)))
    first = (0, 19) if runner.name == "shadow-v2-drafter" else (0, 18)
    if tuple(map(int, release.split("."))) >= first:
        assert found.verdict is Verdict.AFFECTED, found.reason
    elif runner.name == "shadow-v2-drafter":
        assert found.verdict is Verdict.ABSENT, found.reason


@pytest.mark.parametrize("release", ["0.18.0", "0.21.0", "0.30.0", "0.33.0"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_model_runner(release: str, runner: str) -> None:
    also = "shadow_layers" if runner == "v1" else None
    check_behaviours(release, f"shadow_{runner}", {SHADOW: "1/1"}, also=also)


def test_faults_of_one_of_two_ranks_whose_graphs_are_in_quarantine() -> None:
    """Shows also what would be served without the wait that keeps their collectives paired.

    Checks take as long again, nearly all of it asleep.
    """
    check_behaviours("0.21.0", "shadow_ranks", {SHADOW: "1/1"}, select="quarantine or sums")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.18.0", "0.21.0", "0.33.0"])
def test_faults_of_one_of_two_ranks(release: str) -> None:
    check_behaviours(release, "shadow_ranks", {SHADOW: "1/1"})


CAPTURES_OFF = {"capture-state": "off", "draft-prefill-state": "off"}


@pytest.mark.parametrize("release", ["0.19.1", "0.20.2", "0.22.1", "0.24.0", "0.28.0", "0.31.0", "0.33.0"])
def test_drafters_of_model_runner_v2(release: str) -> None:
    """A release of each shape, with the fixes that are applied by default."""
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1"})


@pytest.mark.parametrize(
    ("release", "fixes", "behaviours"),
    [
        *((release, {"draft-idx-mapping": "off"}, "sampled") for release in ("0.19.1", "0.20.2", "0.22.1", "0.24.0")),
        *((release, CAPTURES_OFF, "plan") for release in ("0.19.1", "0.20.2", "0.22.1")),
    ],
)
def test_drafts_of_stock_releases_that_are_wrong_are_mismatches(
    release: str, fixes: dict[str, str], behaviours: str
) -> None:
    modes = {variable(fix): mode for fix, mode in fixes.items()}
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1", **modes}, select=behaviours)


@pytest.mark.parametrize("release", ["0.21.0", "0.22.1"])
def test_a_draft_prefill_that_is_mended_is_no_mismatch(release: str) -> None:
    check_behaviours(release, "shadow_defects", select="draft-prefill-state")


@pytest.mark.parametrize(
    ("release", "scenarios"),
    [
        ("0.16.0", "mamba-all-mode"),
        ("0.18.1", "not mamba-padding and not draft-prefill-state and not draft-idx-mapping and not mamba-all-mode"),
        ("0.21.0", "not dcp-context-lens and not mamba-all-mode"),
        ("0.22.1", "not dcp-context-lens and not mamba-all-mode"),
    ],
)
def test_defects_of_stock_releases_are_caught_and_releases_without_them_are_silent(
    release: str, scenarios: str
) -> None:
    """Less scenarios that do not run there, of other releases' code. Model runner V1 is checked from 0.15.0 on."""
    off = {variable(fix): "off" for fix in BY_NAME}
    check_behaviours(release, "shadow_defects", off, select=scenarios)
