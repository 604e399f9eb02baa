"""Graphs that an engine discards and captures anew while it serves."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from table import slow_but_for
from vllm_graphfix.settings.environment import BYPASS, METADATA, SHADOW, SHADOW_ACTION

DETECTORS = {SHADOW: "1/1", SHADOW_ACTION: "quarantine", METADATA: "report", BYPASS: "report"}


@pytest.mark.parametrize(
    "release", slow_but_for(("0.28.0", "0.33.0"), ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"))
)
def test_what_watches_graphs_follows_them_to_a_later_capture(release: str) -> None:
    check_behaviours(release, "graphs_released", DETECTORS)
