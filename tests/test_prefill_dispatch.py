"""prefill-dispatch: what must hold beyond the numbers."""

from __future__ import annotations

import pytest
from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", "0.21.0", "0.27.1", "0.33.0"])
def test_a_step_has_a_decode_graph_if_every_row_is_past_its_prefill(release: str) -> None:
    check_behaviours(release, "prefill_dispatch")
