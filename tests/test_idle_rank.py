"""idle-rank: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", "0.18.1", "0.21.0", "0.30.0", "0.33.0"])
def test_a_step_without_work_names_no_block_and_real_steps_are_as_before(release: str) -> None:
    check_behaviours(release, "idle_rank")
