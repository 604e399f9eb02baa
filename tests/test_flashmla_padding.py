"""flashmla-padding: what must hold beyond the numbers, with and without flashmla-fp8 around it."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.15.0", "0.19.1"])
def test_planner_and_kernel_get_padding_that_exists(release: str) -> None:
    check_behaviours(release, "flashmla_padding")
