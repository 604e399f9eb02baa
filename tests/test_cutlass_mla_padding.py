"""cutlass-mla-padding: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours


def test_rows_without_tokens_are_zeros_and_all_else_is_the_output_of_the_kernel() -> None:
    check_behaviours("0.33.0", "cutlass_mla_padding", {"VLLM_GRAPHFIX_CUTLASS_MLA_PADDING": "on"})
