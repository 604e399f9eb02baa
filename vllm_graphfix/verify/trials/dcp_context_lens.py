"""Trial of dcp-context-lens."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v1", "vllm_graphfix.verify.double.scenarios.dcp_context_lens:watched", ("FlashAttentionMetadata",)
    ),
    engine="none: it takes two GPUs, on which `compare` has shown the defect and the fix",
    shows_in="attention of one of two ranks, on the CPU double; tokens in `compare`",
)
