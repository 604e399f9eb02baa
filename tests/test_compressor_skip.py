"""compressor-skip: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours

ON = {"VLLM_GRAPHFIX_COMPRESSOR_SKIP": "on"}


def test_only_what_stock_would_leave_out_of_a_graph_is_written_and_counted() -> None:
    check_behaviours("0.32.0", "compressor_skip", ON)
