"""docs/looked-at.md: what is said there of stock releases, shown on them."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours
from stock import ALL_RELEASES
from table import slow_but_for


@pytest.mark.parametrize("release", slow_but_for(("0.18.1", "0.20.0", "0.33.0"), ALL_RELEASES))
def test_stock_does_what_the_page_says(release: str) -> None:
    check_behaviours(release, "looked_at", {"VLLM_GRAPHFIX": "off"}, also=("looked_at_outside",))


@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), ("0.27.0", "0.29.0", "0.33.0")))
def test_compiled_drafts_are_of_the_first_module(release: str) -> None:
    check_behaviours(release, "looked_at_modules", {"VLLM_GRAPHFIX": "off"})
