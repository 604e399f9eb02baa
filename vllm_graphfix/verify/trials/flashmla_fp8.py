"""Trial of flashmla-fp8."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MLA_FP8
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v1", "vllm_graphfix.verify.double.scenarios.flashmla_fp8:watched", ("FlashMLAMetadata",)),
    case=MLA_FP8,
    engine="MLA, FlashMLA, fp8 KV cache",
    shows_in="tokens",
)
