"""The families of the six fixes: what is mutated in which releases, and what upstream might write, by hand."""

from __future__ import annotations

from mutants_of_capture_state import capture_state
from mutants_of_draft_decode_mode import draft_decode_mode
from mutants_of_draft_prefill_state import draft_prefill_state
from mutants_of_flashmla_fp8 import flashmla_fp8
from mutants_of_flashmla_padding import flashmla_padding
from mutants_of_mamba_padding import mamba_padding

FAMILIES = {
    "capture-state": capture_state,
    "draft-prefill-state": draft_prefill_state,
    "draft-decode-mode": draft_decode_mode,
    "mamba-padding": mamba_padding,
    "flashmla-fp8": flashmla_fp8,
    "flashmla-padding": flashmla_padding,
}
