"""active-lora-count: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours

ON = {"VLLM_GRAPHFIX_ACTIVE_LORA_COUNT": "on"}


@pytest.mark.parametrize("release", ["0.16.0", "0.23.0", "0.33.0"])
def test_every_graph_has_a_program_for_whatever_a_batch_of_it_may_have(release: str) -> None:
    check_behaviours(release, "active_lora_count", ON)
