"""encoder-padding: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours


def test_flash_attention_is_another_for_as_long_as_a_capture_takes() -> None:
    check_behaviours("0.21.0", "encoder_padding", {"VLLM_GRAPHFIX_ENCODER_PADDING": "on"})
