"""workspace-growth: what must hold beyond the numbers, on a release of each of the three shapes."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from table import slow_but_for

ON = {"VLLM_GRAPHFIX_WORKSPACE_GROWTH": "on"}
EVERYWHERE = "not lane and not trial and not capture_state"


@pytest.mark.parametrize("release", ["0.14.1", "0.19.1", "0.22.1", "0.25.0"])
def test_workspaces_that_a_graph_has_recorded_are_retained_and_no_others(release: str) -> None:
    check_behaviours(release, "workspace_growth", ON, select=EVERYWHERE)


def test_each_lane_of_the_workspace_is_one_of_its_own() -> None:
    check_behaviours("0.28.0", "workspace_growth", ON, select="not trial and not capture_state")


def test_what_was_captured_on_trial_is_let_go() -> None:
    check_behaviours("0.29.0", "workspace_growth", ON, select="not capture_state")


@pytest.mark.parametrize("release", slow_but_for(("0.21.0",), ("0.15.0", "0.17.1", "0.18.1", "0.21.0")))
def test_with_capture_state_both_are_right(release: str) -> None:
    """On a release of each of that fix's shapes."""
    both = ON | {"VLLM_GRAPHFIX_CAPTURE_STATE": "on"}
    check_behaviours(release, "workspace_growth", both, select="capture_state")
    check_behaviours(release, "capture_state", both)
