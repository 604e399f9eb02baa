"""ubatch-max-seq-len: what must hold beyond the numbers."""

from __future__ import annotations

from behaviours import check_behaviours


def test_captures_alone_get_another_length() -> None:
    check_behaviours("0.19.1", "ubatch_max_seq_len", {"VLLM_GRAPHFIX_UBATCH_MAX_SEQ_LEN": "on"})
