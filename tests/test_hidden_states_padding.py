"""hidden-states-padding: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours


def test_slots_below_zero_are_the_null_blocks_and_others_as_they_are() -> None:
    check_behaviours("0.24.0", "hidden_states_padding")
