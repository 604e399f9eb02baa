"""capture-state: what must hold beyond the numbers, on a release of each of the four shapes."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from table import slow_but_for


@pytest.mark.parametrize("release", slow_but_for(("0.17.1", "0.21.0"), ("0.16.0", "0.17.1", "0.18.1", "0.21.0")))
def test_each_pass_of_a_capture_has_a_state_of_its_own(release: str) -> None:
    check_behaviours(release, "capture_state")


def test_without_a_speculator_it_needs_no_companion() -> None:
    check_behaviours("0.21.0", "capture_state", {"VLLM_GRAPHFIX_DRAFT_PREFILL_STATE": "off"}, select="not draft")
