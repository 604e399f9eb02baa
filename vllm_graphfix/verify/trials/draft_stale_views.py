"""Trial of draft-stale-views."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import GDN_MTP_V2
from vllm_graphfix.verify.trial import Trial

TRIAL = Trial(
    case=GDN_MTP_V2,
    unwatched="what a warm-up computes is thrown away, and replays read what their own step has prepared",
    engine="Qwen3-Next with GDN layers, experts and two MTP drafts, FlashAttention 3, model runner V2",
    shows_in="an error of FlashAttention 3 while the draft's prefill is captured, and no answers",
)
