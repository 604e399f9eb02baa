"""adaptive-schedule: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.28.0", "0.33.0"])
def test_a_batch_has_the_longest_length_of_its_graph_where_a_full_graph_has_one(release: str) -> None:
    check_behaviours(release, "adaptive_schedule", {"VLLM_GRAPHFIX_ADAPTIVE_SCHEDULE": "on"})
