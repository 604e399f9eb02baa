"""mamba-all-mode: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", pytest.param("0.16.0", marks=pytest.mark.slow)])
def test_indices_are_copied_for_graphs_that_read_them_and_nowhere_else(release: str) -> None:
    check_behaviours(release, "mamba_all_mode", {"VLLM_GRAPHFIX_MAMBA_ALL_MODE": "auto"})
