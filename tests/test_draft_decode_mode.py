"""draft-decode-mode: what must hold beyond the numbers, on 0.17.x and on nightlies that lack either half of PR 39773, or both."""

from __future__ import annotations

from pathlib import Path

import pytest
from behaviours import check_behaviours
from nightly import make_nightly
from stock import release_root


def test_the_one_manager_has_full_draft_decodes_or_none() -> None:
    check_behaviours("0.17.1", "draft_decode_mode")


@pytest.mark.parametrize(
    ("without_mode", "without_zero_fill"), [(True, True), (True, False), (False, True)], ids=["both", "mode", "indices"]
)
def test_nightlies_have_full_draft_decodes_or_none_and_no_old_indices(
    tmp_path: Path, without_mode: bool, without_zero_fill: bool
) -> None:
    nightly = make_nightly(
        release_root("0.20.0"),
        tmp_path / "nightly",
        without_mode=without_mode,
        without_zero_fill=without_zero_fill,
    )
    check_behaviours(nightly, "draft_decode_mode")
