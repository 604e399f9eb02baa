"""A fix that fails while graphs are captured, on stock releases and in real process groups: right, stopped, or stock's, said aloud."""

from __future__ import annotations

import pytest
from behaviours import check_behaviours
from table import slow_but_for

SHAPES = ("0.16.0", "0.17.1", "0.18.1", "0.20.0", "0.21.0")
"""A release of each way in which model runner V2 captures, of those that need the fix."""


@pytest.mark.parametrize("release", slow_but_for(("0.17.1", "0.21.0"), SHAPES))
def test_the_graphs_that_a_fix_failed_in_are_left_out_of_dispatch(release: str) -> None:
    check_behaviours(release, "capture_failures")


@pytest.mark.parametrize("release", slow_but_for(("0.21.0",), SHAPES))
def test_strict_stops_the_engine_before_it_serves_them(release: str) -> None:
    check_behaviours(release, "capture_failures", {"VLLM_GRAPHFIX": "strict"})


@pytest.mark.parametrize(
    "release",
    slow_but_for(
        ("0.33.0",), ("0.14.1", "0.15.0", "0.17.1", "0.18.1", "0.21.0", "0.22.1", "0.25.1", "0.29.0", "0.33.0")
    ),
)
def test_each_release_has_a_way_to_leave_a_graph_out_of_dispatch(release: str) -> None:
    check_behaviours(release, "capture_failures_dispatch")
