"""Tensors that move under graphs: noticed, told, repaired, or their graphs not used."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from table import slow_but_for


@pytest.mark.parametrize("action", ["report", "repair"])
@pytest.mark.parametrize("release", slow_but_for(("0.21.0", "0.33.0"), ("0.14.1", "0.20.0", "0.21.0", "0.25.1", "0.26.0", "0.33.0")))
def test_a_tensor_that_moves_under_graphs_is_told_and_brought_back(release: str, action: str) -> None:
    check_behaviours(release, "addresses", {"VLLM_GRAPHFIX_ADDRESSES": action, "RELEASE": release})
