"""roberta-positions: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours


def test_positions_that_other_code_may_have_put_back_are_not_changed() -> None:
    check_behaviours("0.18.1", "roberta_positions")
