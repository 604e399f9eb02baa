"""mamba-padding: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.19.1", "0.21.0"])
def test_the_mamba_builders_split_real_rows_by_their_mark_and_no_others(release: str) -> None:
    check_behaviours(release, "mamba_padding", active=["mamba-padding"])
