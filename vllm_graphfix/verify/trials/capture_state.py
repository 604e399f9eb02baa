"""Trial of capture-state."""

from __future__ import annotations

from vllm_graphfix.verify.engine.cases import MLA
from vllm_graphfix.verify.trial import Trial, Watched

TRIAL = Trial(
    watched=Watched("shadow-v2", "vllm_graphfix.verify.double.scenarios.capture_state:watched", ("FlashMLAMetadata",)),
    case=MLA,
    engine="MLA, FlashMLA, bf16, model runner V2",
    shows_in="tokens, or an illegal memory access",
)
