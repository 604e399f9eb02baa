"""flash-mixed-schedule: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", "0.25.1", "0.33.0"])
def test_schedule_and_kernel_have_the_length_of_the_graph_only_if_it_holds_prompts(
    release: str,
) -> None:
    check_behaviours(release, "flash_mixed_schedule", {"VLLM_GRAPHFIX_FLASH_MIXED_SCHEDULE": "on"})
