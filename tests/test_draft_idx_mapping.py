"""draft-idx-mapping: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours

ON = {"VLLM_GRAPHFIX_DRAFT_IDX_MAPPING": "on"}


@pytest.mark.parametrize("release", ["0.19.1", "0.24.0"])
def test_rows_behind_the_batch_stand_for_a_row_that_nobody_sees(release: str) -> None:
    check_behaviours(release, "draft_idx_mapping", ON, select="" if release == "0.24.0" else "not dflash")
