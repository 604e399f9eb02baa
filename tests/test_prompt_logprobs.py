"""prompt-logprobs: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.14.1", "0.18.1", "0.25.1", "0.33.0"])
def test_prompts_are_scored_from_the_targets_output_at_no_cost_to_other_steps(release: str) -> None:
    check_behaviours(release, "prompt_logprobs")
