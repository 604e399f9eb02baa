"""triton-mla-padding: what must hold beyond the numbers."""

from __future__ import annotations

import pytest

from behaviours import check_behaviours


@pytest.mark.parametrize("release", ["0.22.0", "0.27.1", "0.33.0"])
def test_rows_without_tokens_are_zeros_and_all_others_are_the_kernels_output(release: str) -> None:
    check_behaviours(release, "triton_mla_padding", {"VLLM_GRAPHFIX_TRITON_MLA_PADDING": "on"})
