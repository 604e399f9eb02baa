"""encoder-adapters: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.20.0", "0.33.0"])
def test_only_images_with_adapters_leave_the_graphs(release: str) -> None:
    check_behaviours(release, "encoder_adapters", {"VLLM_GRAPHFIX_ENCODER_ADAPTERS": "on"})
