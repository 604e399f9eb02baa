"""flashmla-fp8: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.15.0", "0.18.1"])
def test_the_plan_of_every_batch_is_where_graphs_read_it(release: str) -> None:
    check_behaviours(release, "flashmla_fp8")
