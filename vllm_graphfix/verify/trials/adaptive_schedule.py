"""Trial of adaptive-schedule."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v2", "vllm_graphfix.verify.double.scenarios.adaptive_schedule:watched", ("FlashAttentionMetadata",)
    ),
    engine="none",
    shows_in="the CPU double, and engines of `benchmarks/adaptive_verification.py` at 9d2cfc5: tokens",
)
