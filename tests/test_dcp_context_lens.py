"""dcp-context-lens: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", "0.19.1"])
def test_a_rank_has_its_context_lengths_in_one_place_and_zeros_behind(release: str) -> None:
    check_behaviours(release, "dcp_context_lens", {"VLLM_GRAPHFIX_DCP_CONTEXT_LENS": "on"})
