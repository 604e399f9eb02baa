"""draft-stale-views: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.23.0", "0.25.1"])
def test_each_pass_of_the_drafts_capture_has_a_state_of_its_own(release: str) -> None:
    check_behaviours(release, "draft_stale_views", {})
