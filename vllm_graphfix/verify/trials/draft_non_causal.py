"""Trial of draft-non-causal."""

from __future__ import annotations

from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched(
        "shadow-v2-dflash-drafter",
        "vllm_graphfix.verify.double.scenarios.draft_non_causal:watched",
        ("FlashInferMetadata",),
    ),
    engine="none",
    shows_in="the CPU double alone: draft tokens",
)
