"""indexer-padding: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.20.0", "0.27.1"])
def test_the_indexers_builder_gives_no_length_below_zero_and_the_others_as_they_are(release: str) -> None:
    check_behaviours(release, "indexer_padding")
