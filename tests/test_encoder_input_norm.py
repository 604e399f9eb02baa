"""encoder-input-norm: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.28.0", "0.29.0"])
def test_only_images_that_nobody_has_normalised_are_normalised(release: str) -> None:
    check_behaviours(release, "encoder_input_norm", {"VLLM_GRAPHFIX_ENCODER_INPUT_NORM": "on"})
