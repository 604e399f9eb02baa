"""c128a-stride: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.27.1", pytest.param("0.27.0", marks=pytest.mark.slow)])
def test_rows_are_as_wide_as_their_buffer_for_graphs_and_for_nothing_else(release: str) -> None:
    check_behaviours(release, "c128a_stride", {"VLLM_GRAPHFIX_C128A_STRIDE": "auto"})
