"""draft-prefill-state: what must hold beyond the numbers, with and without capture-state."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize(
    ("release", "env"),
    [("0.21.0", {}), ("0.21.0", {"VLLM_GRAPHFIX_CAPTURE_STATE": "off"}), ("0.22.1", {})],
    ids=["0.21.0", "0.21.0-alone", "0.22.1"],
)
def test_each_pass_of_the_drafts_capture_has_a_state_of_its_own(release: str, env: dict[str, str]) -> None:
    check_behaviours(release, "draft_prefill_state", env)
